"""The PixArt families, alpha and Sigma (Chen et al. 2023 and 2024), a `batchgen.models.family.Family`.

Each function does what diffusers' PixArtAlphaPipeline and PixArtSigmaPipeline do at that point with
`clean_caption=False` and `use_resolution_binning=False`, for a batch whose rows differ in prompt, seed, guidance scale
and timestep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import diffusers
import torch
from diffusers.models.attention import BasicTransformerBlock
from torch import Tensor

from batchgen.models.contents import ModelFolder
from batchgen.models.dit import DiffusionTransformer
from batchgen.models.dit_facts import ALPHA_LENGTH, SIGMA_LENGTH, plain
from batchgen.models.family import Encoded, Family
from batchgen.models.loading import load_components
from batchgen.models.transfer import to_device
from batchgen.records import Row

_TOLD_SIZES = ("resolution", "aspect_ratio")
_TELLING_SIDE = 128
"""Of the latents that a network was trained on which PixArtAlphaPipeline tells the sizes."""


class PixArt(DiffusionTransformer):
    """A loaded pipeline on one device, which reads so many tokens of a text."""

    def __init__(self, pipeline: Any, device: torch.device, length: int) -> None:
        super().__init__(pipeline, pipeline.transformer, (pipeline.text_encoder,), device, (BasicTransformerBlock,))
        is_alpha = isinstance(pipeline, diffusers.PixArtAlphaPipeline)
        self._tells_sizes = is_alpha and self.sample_side == _TELLING_SIDE
        self._length = length

    def _prompt(self, text: str) -> str:
        return plain(text)

    def _negative(self, text: str) -> str:
        return plain(text)

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Each text's T5 embedding `[L, D]` and mask `[L]`."""
        return list(zip(*self._encoded(self.encoders[0], self.tokenizer, texts, self._length), strict=True))

    def _sizes(self, rows: Sequence[Row]) -> Mapping[str, Tensor]:
        """`resolution` `[B, 2]`, height and width in pixels, and `aspect_ratio` `[B, 1]`, one over the other."""
        if not self._tells_sizes:
            return {}
        sizes = [(row.height, row.width) for row in rows], [(row.height / row.width,) for row in rows]
        made = (to_device(torch.tensor(size, dtype=self.dtype), self.device) for size in sizes)
        return dict(zip(_TOLD_SIZES, made, strict=True))

    def _arguments(self, inputs: Mapping[str, Tensor], latents: Tensor) -> Mapping[str, Any]:
        added = {name: inputs.get(name) for name in _TOLD_SIZES}
        return {name: inputs[name] for name in self.encodings} | {"added_cond_kwargs": added}


def load_alpha(folder: ModelFolder, dtype: torch.dtype, vae_dtype: torch.dtype | None, device: torch.device) -> Family:
    """Load a checked folder. Raises UsageError as `load_components`."""
    return _load(diffusers.PixArtAlphaPipeline, ALPHA_LENGTH, folder, dtype, vae_dtype, device)


def load_sigma(folder: ModelFolder, dtype: torch.dtype, vae_dtype: torch.dtype | None, device: torch.device) -> Family:
    """As `load_alpha`."""
    return _load(diffusers.PixArtSigmaPipeline, SIGMA_LENGTH, folder, dtype, vae_dtype, device)


def _load(
    pipeline: Callable[..., Any],
    length: int,
    folder: ModelFolder,
    dtype: torch.dtype,
    vae_dtype: torch.dtype | None,
    device: torch.device,
) -> Family:
    return PixArt(pipeline(**load_components(folder, dtype, vae_dtype or dtype)), device, length)
