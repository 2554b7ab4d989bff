"""The FLUX.1 family (Black Forest Labs 2024), a `batchgen.models.family.Family`.

Each function does what diffusers' FluxPipeline does at that point, for a batch whose rows differ in prompt, seed,
distilled guidance, true guidance and timestep. Of dev, the guidance scale is an input of the network; schnell has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import diffusers
import torch
from diffusers import FluxPipeline
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock, FluxTransformerBlock
from torch import Tensor
from torch.nn.functional import pad

from batchgen.models.contents import ModelFolder
from batchgen.models.family import Conditioning, Encoded, Network, doubled, guide
from batchgen.models.flow import PATCH, FlowMatching, grid
from batchgen.models.flow_facts import FLUX_T5_LENGTH
from batchgen.models.latent import tokens
from batchgen.models.loading import load_components
from batchgen.records import Group, Row


class Flux(FlowMatching):
    """A loaded pipeline on one device."""

    def __init__(self, pipeline: Any, device: torch.device) -> None:
        encoders = (pipeline.text_encoder, pipeline.text_encoder_2)
        blocks = (FluxTransformerBlock, FluxSingleTransformerBlock)
        super().__init__(pipeline, pipeline.transformer, encoders, device, blocks)
        self.tokenizer = pipeline.tokenizer_2
        self.channels = pipeline.transformer.config.in_channels // PATCH**2

    def texts(self, rows: Sequence[Row], is_guided: bool) -> list[str]:
        """A guided row has a negative prompt."""
        negatives = [row.negative_prompt or "" for row in rows] if is_guided else []
        return negatives + [row.prompt for row in rows]

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Each text's T5 embedding `[L, D]` and pooled CLIP embedding `[P]`."""
        clip, t5 = self.encoders
        embeddings = t5(tokens(self.tokenizer, texts, self.device, FLUX_T5_LENGTH)[0])[0]
        pooled = clip(tokens(self._pipeline.tokenizer, texts, self.device)[0]).pooler_output
        return list(zip(embeddings.to(self.dtype), pooled.to(self.dtype), strict=True))

    def conditioning(self, rows: Sequence[Row], group: Group, encoded: Mapping[str, Encoded]) -> Conditioning:
        """Inputs: `encoder_hidden_states` `[B or 2B, L, D]`, `pooled_projections` `[B or 2B, P]`, and of a distilled
        network `guidance` `[B or 2B]`, each row's guidance scale."""
        both = [encoded[text] for text in self.texts(rows, group.is_guided)]
        inputs = {
            "encoder_hidden_states": torch.stack([embedding for embedding, _ in both]),
            "pooled_projections": torch.stack([pooled for _, pooled in both]),
        }
        if self._pipeline.transformer.config.guidance_embeds:
            inputs["guidance"] = doubled(self._scales([row.guidance_scale for row in rows]), group.is_guided)
        return Conditioning(self._scales([row.true_cfg_scale or 1.0 for row in rows]), group.is_guided, inputs)

    def predict(self, network: Network, latents: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        """As Family.predict; the network is given its sequence of patches, each with its place."""
        is_guided, text = conditioning.is_guided, conditioning.inputs["encoder_hidden_states"]
        size, scale = latents.shape, self._pipeline.vae_scale_factor
        prediction = network(
            hidden_states=doubled(FluxPipeline._pack_latents(latents, *size), is_guided),
            timestep=doubled(timesteps, is_guided).to(latents.dtype) / 1000,
            txt_ids=latents.new_zeros((text.shape[1], 3)),
            img_ids=places(latents),
            return_dict=False,
            **conditioning.inputs,
        )[0]
        return guide(FluxPipeline._unpack_latents(prediction, size[2] * scale, size[3] * scale, scale), conditioning)


def places(latents: Tensor) -> Tensor:
    """Of each patch of latents `[B, C, h, w]`: 0, its row and its column, `[h/2 * w/2, 3]`."""
    height, width = (side // PATCH for side in latents.shape[2:])
    return pad(grid(height, width, latents.device), (1, 0)).to(latents.dtype)


def load(folder: ModelFolder, dtype: torch.dtype, vae_dtype: torch.dtype | None, device: torch.device) -> Flux:
    """Load a checked folder. Raises UsageError as `load_components`."""
    return Flux(diffusers.FluxPipeline(**load_components(folder, dtype, vae_dtype or dtype)), device)
