"""Flow matching (Lipman et al. 2023) by a transformer in latent space: what those families share."""

from __future__ import annotations

from typing import Any

from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from torch import Tensor

from batchgen.models.latent import LatentDiffusion


class FlowMatching(LatentDiffusion):
    """A loaded pipeline on one device; the families add how texts condition it and what its network predicts."""

    def _shift(self, num_patches: int) -> float | None:
        """How far the image's number of patches moves the timesteps towards noise (Esser et al. 2024, section 5.3.2);
        None where the folder's scheduler shifts all sizes alike."""
        config: Any = self.scheduler.config
        if not config.use_dynamic_shifting:
            return None
        return float(
            calculate_shift(
                num_patches, config.base_image_seq_len, config.max_image_seq_len, config.base_shift, config.max_shift
            )
        )

    def _unscaled(self, latents: Tensor) -> Tensor:
        """As LatentDiffusion._unscaled, with the mean of all channels."""
        shift_factor: float = self.vae.config.shift_factor
        return super()._unscaled(latents) + shift_factor

    def _scaled(self, latents: Tensor) -> Tensor:
        """As LatentDiffusion._scaled, likewise."""
        shift_factor: float = self.vae.config.shift_factor
        return super()._scaled(latents - shift_factor)
