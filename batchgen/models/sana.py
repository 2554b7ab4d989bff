"""The Sana family (Xie et al. 2024), a `batchgen.models.family.Family`.

Each function does what diffusers' SanaPipeline does at that point with `use_resolution_binning=False`, for a batch
whose rows differ in prompt, seed, guidance scale and timestep. Latents are kept in float32, whatever the network's
dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import diffusers
import torch
from diffusers.models.autoencoders.autoencoder_dc import EfficientViTBlock, ResBlock
from diffusers.models.transformers.sana_transformer import SanaTransformerBlock
from torch import Tensor

from batchgen.models.contents import ModelFolder
from batchgen.models.dit import DiffusionTransformer
from batchgen.models.dit_facts import SANA_LENGTH, plain, sana_instruction, with_instruction
from batchgen.models.family import Encoded
from batchgen.models.loading import load_components


class Sana(DiffusionTransformer):
    """A loaded pipeline on one device."""

    def __init__(self, pipeline: Any, device: torch.device) -> None:
        blocks = (SanaTransformerBlock, ResBlock, EfficientViTBlock)
        super().__init__(pipeline, pipeline.transformer, (pipeline.text_encoder,), device, blocks)
        self.tokenizer.padding_side = "right"
        self._noise_dtype = torch.float32
        self._longest = len(self.tokenizer.encode(sana_instruction())) + SANA_LENGTH - 2

    def _prompt(self, text: str) -> str:
        return with_instruction(text)

    def _negative(self, text: str) -> str:
        """No negative prompt is taken for one with instructions: those begin with a capital."""
        return plain(text)

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Each text's Gemma embedding `[L, D]` and mask `[L]`: of a prompt, the first token and the last ones, which
        are behind the instructions; of a negative prompt, the first ones."""
        embeddings, mask = self._encoded(self.encoders[0], self.tokenizer, texts, self._longest, use_cache=False)
        instruction = sana_instruction()
        return [
            tuple(_ends(one) if text.startswith(instruction) else one[:SANA_LENGTH] for one in (embedding, seen))
            for text, embedding, seen in zip(texts, embeddings, mask, strict=True)
        ]

    def _told(self, timesteps: Tensor) -> Tensor:
        scale: float = self._pipeline.transformer.config.timestep_scale
        return timesteps * scale


def _ends(one: Tensor) -> Tensor:
    return torch.cat([one[:1], one[1 - SANA_LENGTH :]])


def load(folder: ModelFolder, dtype: torch.dtype, vae_dtype: torch.dtype | None, device: torch.device) -> Sana:
    """Load a checked folder. Raises UsageError as `load_components`."""
    return Sana(diffusers.SanaPipeline(**load_components(folder, dtype, vae_dtype or dtype)), device)
