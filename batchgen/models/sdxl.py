"""The Stable Diffusion XL family (Podell et al. 2023), a `batchgen.models.family.Family`.

Each function does what diffusers' StableDiffusionXLPipeline does at that point, for a batch whose rows differ
in prompt, seed, guidance scale and timestep. Images carry no invisible watermark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import diffusers
import torch
from torch import Tensor

from batchgen.models.contents import ModelFolder
from batchgen.models.family import Conditioning, Encoded
from batchgen.models.latent import tokens
from batchgen.models.loading import load_components, vae_dtype_of
from batchgen.models.unet import SizedUNetDiffusion, check_conditions
from batchgen.records import Group, Row


class StableDiffusionXL(SizedUNetDiffusion):
    """A loaded pipeline on one device."""

    def __init__(self, pipeline: Any, device: torch.device) -> None:
        super().__init__(pipeline, (pipeline.text_encoder, pipeline.text_encoder_2), device)
        self._zeroes_null: bool = pipeline.config.force_zeros_for_empty_prompt
        self._mean, self._std = (
            None if values is None else torch.tensor(values, device=device)[:, None, None]
            for values in (pipeline.vae.config.latents_mean, pipeline.vae.config.latents_std)
        )

    def texts(self, rows: Sequence[Row], is_guided: bool) -> list[str]:
        """A null negative prompt needs no text where the folder says that it is zeros; elsewhere it is ""."""
        negatives = [self._negative(row) for row in rows] if is_guided else []
        return [text for text in negatives if text is not None] + [row.prompt for row in rows]

    def _negative(self, row: Row) -> str | None:
        """The text to encode; None where its embeddings are zeros instead."""
        if row.negative_prompt is None and self._zeroes_null:
            return None
        return row.negative_prompt or ""

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Each text's embedding `[L, D]`, the last but one hidden states of both encoders side by side, and the second
        encoder's pooled embedding `[P]`."""
        hidden = []
        for tokenizer, encoder in zip((self.tokenizer, self._pipeline.tokenizer_2), self.encoders, strict=True):
            output = encoder(tokens(tokenizer, texts, self.device)[0], output_hidden_states=True)
            hidden.append(output.hidden_states[-2])
        embeddings, pooled = torch.cat(hidden, dim=-1).to(self.dtype), output.text_embeds.to(self.dtype)
        return list(zip(embeddings, pooled, strict=True))

    def conditioning(self, rows: Sequence[Row], group: Group, encoded: Mapping[str, Encoded]) -> Conditioning:
        """Inputs: those of `_told`."""
        positives = [encoded[row.prompt] for row in rows]
        zeros = tuple(torch.zeros_like(one) for one in positives[0])
        texts = [self._negative(row) for row in rows] if group.is_guided else []
        return self._told(
            rows, group.is_guided, [zeros if text is None else encoded[text] for text in texts] + positives
        )

    def _unscaled(self, latents: Tensor) -> Tensor:
        """As LatentDiffusion._unscaled, with the mean and deviation of each channel where the VAE tells them."""
        if self._mean is None or self._std is None:
            return super()._unscaled(latents)
        mean, std = self._mean.to(latents.dtype), self._std.to(latents.dtype)
        return super()._unscaled(latents * std) + mean

    def _scaled(self, latents: Tensor) -> Tensor:
        """As LatentDiffusion._scaled, likewise."""
        if self._mean is None or self._std is None:
            return super()._scaled(latents)
        return super()._scaled(latents - self._mean.to(latents.dtype)) / self._std.to(latents.dtype)


def load(
    folder: ModelFolder, dtype: torch.dtype, vae_dtype: torch.dtype | None, device: torch.device
) -> StableDiffusionXL:
    """Load a checked folder; the VAE's dtype as `vae_dtype_of`. Raises UsageError as `load_components`, and for a
    network that takes other conditions than SDXL's."""
    check_conditions(folder, "SDXL", folder.config("text_encoder_2").get("projection_dim", 512))
    pipeline = diffusers.StableDiffusionXLPipeline(
        **load_components(folder, dtype, vae_dtype_of(folder, dtype, vae_dtype)),
        force_zeros_for_empty_prompt=folder.index.get("force_zeros_for_empty_prompt", True),
        add_watermarker=False,
    )
    return StableDiffusionXL(pipeline, device)
