"""Latent diffusion by a UNet: what the Stable Diffusion families up to XL, and Kolors, share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from torch import Tensor

from batchgen.errors import UsageError
from batchgen.models.contents import ModelFolder
from batchgen.models.family import Conditioning, Encoded, Network, doubled, guide
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


class SizedUNetDiffusion(UNetDiffusion):
    """By a network that is also told a pooled embedding of the text, and sizes (Podell et al. 2023, section 2.2)."""

    def _told(self, rows: Sequence[Row], is_guided: bool, both: Sequence[Encoded]) -> Conditioning:
        """Of the texts' embeddings `[L, D]` and pooled embeddings `[P]`, those of the negative prompts first. Inputs:
        `encoder_hidden_states` `[B or 2B, L, D]`, `text_embeds` `[B or 2B, P]`, `time_ids` `[B or 2B, 6]` (height and
        width before cropping, crop top and left, height and width), and what `_with_guidance` adds."""
        sizes = [(row.height, row.width, 0, 0, row.height, row.width) for row in rows]
        inputs = {
            "encoder_hidden_states": torch.stack([embedding for embedding, _ in both]),
            "text_embeds": torch.stack([pooled for _, pooled in both]),
            "time_ids": doubled(to_device(torch.tensor(sizes, dtype=self.dtype), self.device), is_guided),
        }
        return self._with_guidance(rows, is_guided, inputs)

    def _arguments(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """As UNetDiffusion._arguments: pooled embedding and sizes go by the name of added conditions."""
        added = {name: inputs[name] for name in ("text_embeds", "time_ids")}
        return {name: one for name, one in inputs.items() if name not in added} | {"added_cond_kwargs": added}


def check_conditions(folder: ModelFolder, family: str, pooled: int) -> None:
    """Raises UsageError for a network that takes other conditions than six sizes and a pooled embedding of so many
    values."""
    unet = folder.config("unet")
    found, wanted = unet.get("projection_class_embeddings_input_dim"), 6 * (unet.get("addition_time_embed_dim") or 0)
    wanted += pooled
    if unet.get("addition_embed_type") != "text_time" or found != wanted:
        raise UsageError(
            f"model folder {folder.path}: unet/config.json has addition_embed_type {unet.get('addition_embed_type')!r} "
            f"with {found} inputs; {family}'s is 'text_time' with {wanted}, for six sizes and a text embedding of "
            f"{pooled}"
        )
