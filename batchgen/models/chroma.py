"""The Chroma family (Rock 2025), a `batchgen.models.family.Family`.

Each function does what diffusers' ChromaPipeline does at that point, for a batch whose rows differ in prompt, seed,
guidance scale and timestep. It is FLUX.1 without pooled texts and distilled guidance, and with a weight for each token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import diffusers
import torch
from diffusers import FluxPipeline
from diffusers.models.transformers.transformer_chroma import ChromaSingleTransformerBlock, ChromaTransformerBlock
from torch import Tensor, nn
from torch.nn.functional import pad

from batchgen.models.contents import ModelFolder
from batchgen.models.family import Conditioning, Encoded, Network, doubled, guide
from batchgen.models.flow import PATCH, FlowMatching
from batchgen.models.flow_facts import FLUX_T5_LENGTH
from batchgen.models.flux import places
from batchgen.models.latent import tokens
from batchgen.models.loading import load_components
from batchgen.records import Group, Row


class NoGuidance(nn.Module):
    """The embedding of the guidance 0 that the network gives itself. It is made once: the network's own would be copied
    to the device at every step, and nothing can be while steps are captured."""

    made: Tensor
    """`[1, C]`."""

    def __init__(self, embedding: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("made", embedding(torch.zeros(1, dtype=torch.int64)).to(device), persistent=False)

    def forward(self, guidance: Tensor) -> Tensor:
        """`[B, C]` for zeros `[B]`, on whichever device those are."""
        return self.made.expand(len(guidance), -1)


class Chroma(FlowMatching):
    """A loaded pipeline on one device."""

    def __init__(self, pipeline: Any, device: torch.device) -> None:
        blocks = (ChromaTransformerBlock, ChromaSingleTransformerBlock)
        super().__init__(pipeline, pipeline.transformer, (pipeline.text_encoder,), device, blocks)
        self.channels = pipeline.transformer.config.in_channels // PATCH**2
        embeddings = pipeline.transformer.time_text_embed
        embeddings.guidance_proj = NoGuidance(embeddings.guidance_proj, device)

    def texts(self, rows: Sequence[Row], is_guided: bool) -> list[str]:
        """A null negative prompt is this family's ""."""
        negatives = [row.negative_prompt or "" for row in rows] if is_guided else []
        return negatives + [row.prompt for row in rows]

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Each text's embedding `[L, D]` and weights `[L]`: 1 for its tokens and one of padding, else 0."""
        (encoder,) = self.encoders
        ids, mask = tokens(self.tokenizer, texts, self.device, FLUX_T5_LENGTH)
        embeddings = encoder(ids, attention_mask=mask)[0].to(self.dtype)
        weights = torch.arange(ids.shape[1], device=self.device) <= mask.sum(1, keepdim=True)
        return list(zip(embeddings, weights.to(self.dtype), strict=True))

    def conditioning(self, rows: Sequence[Row], group: Group, encoded: Mapping[str, Encoded]) -> Conditioning:
        """Inputs: `encoder_hidden_states` `[B or 2B, L, D]`, `weights` `[B or 2B, L]`."""
        both = [encoded[text] for text in self.texts(rows, group.is_guided)]
        inputs = {
            "encoder_hidden_states": torch.stack([embedding for embedding, _ in both]),
            "weights": torch.stack([weights for _, weights in both]),
        }
        return Conditioning(self._scales([row.guidance_scale for row in rows]), group.is_guided, inputs)

    def predict(self, network: Network, latents: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        """As Family.predict; the network is given its sequence of patches, each with its place and the weight 1. The
        product of two tokens' weights is added to what one makes of the other, as in diffusers."""
        is_guided, inputs = conditioning.is_guided, conditioning.inputs
        size, scale, text = latents.shape, self.pixels_per_latent, inputs["encoder_hidden_states"]
        patches = doubled(FluxPipeline._pack_latents(latents, *size), is_guided)
        prediction = network(
            hidden_states=patches,
            timestep=doubled(timesteps, is_guided).to(latents.dtype) / 1000,
            encoder_hidden_states=text,
            txt_ids=latents.new_zeros((text.shape[1], 3)),
            img_ids=places(latents),
            attention_mask=pad(inputs["weights"], (0, patches.shape[1]), value=1.0),
            return_dict=False,
        )[0]
        return guide(FluxPipeline._unpack_latents(prediction, size[2] * scale, size[3] * scale, scale), conditioning)


def load(folder: ModelFolder, dtype: torch.dtype, vae_dtype: torch.dtype | None, device: torch.device) -> Chroma:
    """Load a checked folder. Raises UsageError as `load_components`."""
    return Chroma(diffusers.ChromaPipeline(**load_components(folder, dtype, vae_dtype or dtype)), device)
