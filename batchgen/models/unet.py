"""Latent diffusion by a UNet: what the Stable Diffusion families up to XL share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor

from batchgen.models.family import Conditioning, Network, doubled, guide
from batchgen.models.latent import LatentDiffusion
from batchgen.models.transfer import to_device
from batchgen.records import Row


class UNetDiffusion(LatentDiffusion):
    """A loaded pipeline on one device; the families add how texts condition it."""

    def __init__(self, pipeline: Any, encoders: Sequence[torch.nn.Module], device: torch.device) -> None:
        super().__init__(pipeline, pipeline.unet, encoders, device, (Transformer2DModel,))

    def predict(self, network: Network, latents: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        """As Family.predict."""
        is_guided = conditioning.is_guided
        arguments = self._arguments(conditioning.inputs)
        prediction = network(
            doubled(latents, is_guided), doubled(timesteps, is_guided), return_dict=False, **arguments
        )[0]
        return guide(prediction, conditioning)

    def _arguments(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """The conditioning's inputs as the network takes them."""
        return inputs

    def _with_guidance(self, rows: Sequence[Row], is_guided: bool, inputs: Mapping[str, Tensor]) -> Conditioning:
        """Conditioning with the rows' guidance scales: to a guidance-distilled network (LCM; Meng et al. 2023) they
        are one more input, `timestep_cond` `[B, E]`."""
        scales = [row.guidance_scale for row in rows]
        size = self._pipeline.unet.config.time_cond_proj_dim
        if size is not None:
            guidance = torch.tensor(scales, dtype=torch.float32)
            embedded = self._pipeline.get_guidance_scale_embedding(guidance - 1, embedding_dim=size)
            inputs = {**inputs, "timestep_cond": to_device(embedded.to(self.dtype), self.device)}
        return Conditioning(self._scales(scales), is_guided, inputs)
