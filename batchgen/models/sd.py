"""The Stable Diffusion 1.x/2.x family, a `batchgen.models.family.Family`.

Each function does what diffusers' StableDiffusionPipeline does at that point, for a batch whose rows differ
in prompt, seed, guidance scale and timestep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import diffusers
import torch

from batchgen.models.contents import ModelFolder
from batchgen.models.family import Conditioning, Encoded
from batchgen.models.latent import tokens
from batchgen.models.loading import load_components
from batchgen.models.safety import SafetyChecker
from batchgen.models.unet import UNetDiffusion
from batchgen.records import Group, Row


class StableDiffusion(UNetDiffusion):
    """A loaded pipeline on one device."""

    def __init__(self, pipeline: Any, device: torch.device) -> None:
        super().__init__(pipeline, (pipeline.text_encoder,), device)
        if pipeline.safety_checker is not None:
            self.checker = SafetyChecker(pipeline.safety_checker, pipeline.feature_extractor)

    def texts(self, rows: Sequence[Row], is_guided: bool) -> list[str]:
        """A null negative prompt is this family's "": diffusers encodes the empty string for it."""
        negatives = [row.negative_prompt or "" for row in rows] if is_guided else []
        return negatives + [row.prompt for row in rows]

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Each text's embedding `[L, D]`."""
        encoder = self._pipeline.text_encoder
        ids, mask = tokens(self.tokenizer, texts, self.device)
        is_masked = getattr(encoder.config, "use_attention_mask", False)
        embeddings = encoder(ids, attention_mask=mask if is_masked else None)[0].to(self.dtype)
        return [(embedding,) for embedding in embeddings]

    def conditioning(self, rows: Sequence[Row], group: Group, encoded: Mapping[str, Encoded]) -> Conditioning:
        """Inputs: `encoder_hidden_states` `[B or 2B, L, D]`, and what `_with_guidance` adds."""
        embeddings = torch.stack([encoded[text][0] for text in self.texts(rows, group.is_guided)])
        return self._with_guidance(rows, group.is_guided, {"encoder_hidden_states": embeddings})


def load(
    folder: ModelFolder, dtype: torch.dtype, vae_dtype: torch.dtype | None, device: torch.device
) -> StableDiffusion:
    """Load a checked folder, its safety checker only if the folder was asked for with it. Raises UsageError as
    `load_components` and SafetyChecker."""
    without = {"safety_checker": None, "feature_extractor": None}
    pipeline = diffusers.StableDiffusionPipeline(
        **{**without, **load_components(folder, dtype, vae_dtype or dtype)}, requires_safety_checker=folder.has_checker
    )
    return StableDiffusion(pipeline, device)
