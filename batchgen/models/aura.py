"""The AuraFlow family (fal 2024), a `batchgen.models.family.Family`.

Each function does what diffusers' AuraFlowPipeline does at that point, for a batch whose rows differ in prompt, seed,
guidance scale and timestep.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import diffusers
import torch
from diffusers.models.transformers.auraflow_transformer_2d import (
    AuraFlowJointTransformerBlock,
    AuraFlowSingleTransformerBlock,
)
from torch import Tensor

from batchgen.models.contents import ModelFolder
from batchgen.models.dit import DiffusionTransformer
from batchgen.models.dit_facts import AURA_LENGTH
from batchgen.models.family import Encoded
from batchgen.models.loading import load_components, vae_dtype_of


class AuraFlow(DiffusionTransformer):
    """A loaded pipeline on one device."""

    encodings = ("encoder_hidden_states",)

    def __init__(self, pipeline: Any, device: torch.device) -> None:
        blocks = (AuraFlowJointTransformerBlock, AuraFlowSingleTransformerBlock)
        super().__init__(pipeline, pipeline.transformer, (pipeline.text_encoder,), device, blocks)

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Each text's embedding `[L, D]`, zeros where it is padded."""
        embeddings, mask = self._encoded(self.encoders[0], self.tokenizer, texts, AURA_LENGTH)
        return [(one,) for one in embeddings * mask[..., None]]

    def _told(self, timesteps: Tensor) -> Tensor:
        return (timesteps / 1000).to(self.dtype)


def load(folder: ModelFolder, dtype: torch.dtype, vae_dtype: torch.dtype | None, device: torch.device) -> AuraFlow:
    """Load a checked folder; the VAE's dtype as `vae_dtype_of`. Raises UsageError as `load_components`."""
    parts = load_components(folder, dtype, vae_dtype_of(folder, dtype, vae_dtype))
    return AuraFlow(diffusers.AuraFlowPipeline(**parts), device)
