"""The Kolors family (Kolors team 2024), a `batchgen.models.family.Family`.

Each function does what diffusers' KolorsPipeline does at that point, for a batch whose rows differ in prompt, seed,
guidance scale and timestep. It is SDXL's network, told of texts by ChatGLM3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import diffusers
import torch

from batchgen.models.contents import ModelFolder
from batchgen.models.family import Conditioning, Encoded
from batchgen.models.loading import load_components, vae_dtype_of
from batchgen.models.transfer import to_device
from batchgen.models.unet import SizedUNetDiffusion, check_conditions
from batchgen.models.unet_facts import KOLORS_LENGTH
from batchgen.records import Group, Row


class Kolors(SizedUNetDiffusion):
    """A loaded pipeline on one device."""

    def __init__(self, pipeline: Any, device: torch.device) -> None:
        super().__init__(pipeline, (pipeline.text_encoder,), device)

    def texts(self, rows: Sequence[Row], is_guided: bool) -> list[str]:
        """A null negative prompt is this family's ""."""
        negatives = [row.negative_prompt or "" for row in rows] if is_guided else []
        return negatives + [row.prompt for row in rows]

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Each text's embedding `[L, D]`, the last but one hidden states, and the last hidden state of its last token
        `[D]`. Texts are padded in front, where positions are all 0."""
        encoder: Any = self.encoders[0]
        made = self.tokenizer(
            list(texts), padding="max_length", max_length=KOLORS_LENGTH, truncation=True, return_tensors="pt"
        )
        ids, mask, positions = (to_device(made[name], self.device) for name in self.tokenizer.model_input_names)
        # Its own choice of kernels would be by the mask, and so by what shares the chunk.
        seen = encoder.get_masks(ids, None, padding_mask=mask)
        _, states = encoder(
            ids,
            position_ids=positions,
            full_attention_mask=seen,
            use_cache=False,
            output_hidden_states=True,
            return_dict=False,
        )
        embeddings, pooled = states[-2].transpose(0, 1).to(self.dtype), states[-1][-1].to(self.dtype)
        # Copies: a slice would hold the memory of all the chunk's.
        return [(embedding.clone(), one.clone()) for embedding, one in zip(embeddings, pooled, strict=True)]

    def conditioning(self, rows: Sequence[Row], group: Group, encoded: Mapping[str, Encoded]) -> Conditioning:
        """Inputs: those of `_told`."""
        return self._told(rows, group.is_guided, [encoded[text] for text in self.texts(rows, group.is_guided)])


def load(folder: ModelFolder, dtype: torch.dtype, vae_dtype: torch.dtype | None, device: torch.device) -> Kolors:
    """Load a checked folder; the VAE's dtype as `vae_dtype_of`. Raises UsageError as `load_components`, and for a
    network that takes other conditions than Kolors'."""
    check_conditions(folder, "Kolors", folder.config("text_encoder").get("hidden_size", 4096))
    parts = load_components(folder, dtype, vae_dtype_of(folder, dtype, vae_dtype))
    return Kolors(diffusers.KolorsPipeline(**parts), device)
