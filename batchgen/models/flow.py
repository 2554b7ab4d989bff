"""Flow matching (Lipman et al. 2023) by a transformer in latent space: what those families share."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from torch import Tensor

from batchgen.models.family import Schedule
from batchgen.models.latent import LatentDiffusion

PATCH = 2
"""Latents along a side of each patch of the networks' sequences."""


class FlowMatching(LatentDiffusion):
    """A loaded pipeline on one device; the families add how texts condition it and what its network predicts."""

    def schedule(self, width: int, height: int, steps: int) -> Schedule:
        """As Family.schedule."""
        return Schedule(self._shift(self._num_patches(width, height)), is_even=True)

    def _num_patches(self, width: int, height: int) -> int:
        """Of an image in pixels."""
        side = self.pixels_per_latent * PATCH
        return (height // side) * (width // side)

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


def patches(latents: Tensor) -> Tensor:
    """`[B, C, h, w]` to `[B, h/2 * w/2, 4 C]`."""
    batch, channels, height, width = latents.shape
    cut = latents.view(batch, channels, height // PATCH, PATCH, width // PATCH, PATCH)
    return cut.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def from_patches(made: Tensor, height: int, width: int) -> Tensor:
    """The reverse of `patches`, of latents so high and wide."""
    apart = made.reshape(len(made), height // PATCH, width // PATCH, PATCH, PATCH, -1)
    return apart.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


def grid(height: int, width: int, device: torch.device) -> Tensor:
    """Row and column of so many patches, `[h * w, 2]`, made on the device, since a capture can copy nothing there."""
    sides = (torch.arange(side, device=device) for side in (height, width))
    return torch.stack(torch.meshgrid(*sides, indexing="ij"), dim=-1).flatten(0, 1)
