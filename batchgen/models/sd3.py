"""The Stable Diffusion 3 and 3.5 family (Esser et al. 2024), a `batchgen.models.family.Family`.

Each function does what diffusers' StableDiffusion3Pipeline does at that point, for a batch whose rows differ in prompt,
seed, guidance scale and timestep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import diffusers
import torch
from diffusers.models.attention import JointTransformerBlock
from torch import Tensor
from torch.nn.functional import pad

from batchgen.models.contents import ModelFolder
from batchgen.models.family import Conditioning, Encoded, Network, Schedule, doubled, guide
from batchgen.models.flow import FlowMatching
from batchgen.models.flow_facts import SD3_T5_LENGTH
from batchgen.models.latent import tokens
from batchgen.models.loading import load_components
from batchgen.records import Group, Row


class StableDiffusion3(FlowMatching):
    """A loaded pipeline on one device, with or without its T5 encoder."""

    def __init__(self, pipeline: Any, device: torch.device) -> None:
        self._clips = (
            (pipeline.tokenizer, pipeline.text_encoder),
            (pipeline.tokenizer_2, pipeline.text_encoder_2),
        )
        t5 = pipeline.text_encoder_3
        encoders = [encoder for _, encoder in self._clips] + ([] if t5 is None else [t5])
        super().__init__(pipeline, pipeline.transformer, encoders, device, (JointTransformerBlock,))
        self.tokenizer = pipeline.tokenizer if t5 is None else pipeline.tokenizer_3

    def texts(self, rows: Sequence[Row], is_guided: bool) -> list[str]:
        """A null negative prompt is this family's ""."""
        negatives = [row.negative_prompt or "" for row in rows] if is_guided else []
        return negatives + [row.prompt for row in rows]

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Each text's embedding `[L, D]`: the CLIP encoders' last but one hidden states side by side, then T5's; and
        the CLIP encoders' pooled embeddings, side by side too, `[P]`."""
        length = self._pipeline.tokenizer_max_length
        outputs = [
            encoder(tokens(tokenizer, texts, self.device, length)[0], output_hidden_states=True)
            for tokenizer, encoder in self._clips
        ]
        clip = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
        t5 = self._encode_t5(texts)
        embeddings = torch.cat([pad(clip, (0, t5.shape[-1] - clip.shape[-1])), t5], dim=-2).to(self.dtype)
        pooled = torch.cat([output.text_embeds for output in outputs], dim=-1).to(self.dtype)
        return list(zip(embeddings, pooled, strict=True))

    def _encode_t5(self, texts: Sequence[str]) -> Tensor:
        """`[B, 256, D]`, zeros where the folder has no T5."""
        encoder = self._pipeline.text_encoder_3
        if encoder is None:
            size = (len(texts), SD3_T5_LENGTH, self._pipeline.transformer.config.joint_attention_dim)
            return torch.zeros(size, dtype=self.dtype, device=self.device)
        ids = tokens(self._pipeline.tokenizer_3, texts, self.device, SD3_T5_LENGTH)[0]
        embeddings: Tensor = encoder(ids)[0]
        return embeddings

    def conditioning(self, rows: Sequence[Row], group: Group, encoded: Mapping[str, Encoded]) -> Conditioning:
        """Inputs: `encoder_hidden_states` `[B or 2B, L, D]` and `pooled_projections` `[B or 2B, P]`."""
        both = [encoded[text] for text in self.texts(rows, group.is_guided)]
        inputs = {
            "encoder_hidden_states": torch.stack([embedding for embedding, _ in both]),
            "pooled_projections": torch.stack([pooled for _, pooled in both]),
        }
        return Conditioning(self._scales([row.guidance_scale for row in rows]), group.is_guided, inputs)

    def schedule(self, width: int, height: int, steps: int) -> Schedule:
        """As Family.schedule."""
        side = self._pipeline.vae_scale_factor * self._pipeline.patch_size
        return Schedule(self._shift((height // side) * (width // side)))

    def predict(self, network: Network, latents: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        """As Family.predict."""
        is_guided = conditioning.is_guided
        prediction = network(
            hidden_states=doubled(latents, is_guided),
            timestep=doubled(timesteps, is_guided),
            return_dict=False,
            **conditioning.inputs,
        )[0]
        return guide(prediction, conditioning)


def load(
    folder: ModelFolder, dtype: torch.dtype, vae_dtype: torch.dtype | None, device: torch.device
) -> StableDiffusion3:
    """Load a checked folder. Raises UsageError as `load_components`."""
    without = {"text_encoder_3": None, "tokenizer_3": None}
    parts = {**without, **load_components(folder, dtype, vae_dtype or dtype)}
    return StableDiffusion3(diffusers.StableDiffusion3Pipeline(**parts), device)
