"""Diffusion transformers (Peebles and Xie 2023) that attend to a text of fixed length: what those families share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from batchgen.models.family import Conditioning, Encoded, Network, doubled, guide
from batchgen.models.latent import LatentDiffusion, tokens
from batchgen.records import Group, Row


class DiffusionTransformer(LatentDiffusion):
    """A loaded pipeline on one device; the families add how a text is encoded and what else the network is told."""

    encodings: tuple[str, ...] = ("encoder_hidden_states", "encoder_attention_mask")
    """The network's names for what `encode` makes of a text."""

    def texts(self, rows: Sequence[Row], is_guided: bool) -> list[str]:
        """A null negative prompt is these families' ""."""
        negatives = [self._negative(row.negative_prompt or "") for row in rows] if is_guided else []
        return negatives + [self._prompt(row.prompt) for row in rows]

    def _prompt(self, text: str) -> str:
        """What the tokenizer is given of a prompt."""
        return text

    def _negative(self, text: str) -> str:
        """Likewise of a negative prompt."""
        return text

    def conditioning(self, rows: Sequence[Row], group: Group, encoded: Mapping[str, Encoded]) -> Conditioning:
        """Inputs: each of `encodings` `[B or 2B, …]`, and those of `_sizes`."""
        both = zip(*(encoded[text] for text in self.texts(rows, group.is_guided)), strict=True)
        inputs = {name: torch.stack(ones) for name, ones in zip(self.encodings, both, strict=True)}
        inputs |= {name: doubled(one, group.is_guided) for name, one in self._sizes(rows).items()}
        return Conditioning(self._scales([row.guidance_scale for row in rows]), group.is_guided, inputs)

    def _sizes(self, rows: Sequence[Row]) -> Mapping[str, Tensor]:
        """What the network is told of the images' sizes, `[B, …]`; of most, nothing."""
        return {}

    def predict(self, network: Network, latents: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        """As Family.predict; what the network predicts of the noise's variance is left."""
        is_guided = conditioning.is_guided
        prediction = network(
            hidden_states=doubled(latents, is_guided).to(self.dtype),
            timestep=doubled(self._told(timesteps), is_guided),
            return_dict=False,
            **self._arguments(conditioning.inputs, latents),
        )[0]
        return guide(prediction[:, : self.channels].to(latents.dtype), conditioning)

    def _told(self, timesteps: Tensor) -> Tensor:
        """Timesteps `[B]` as the network takes them."""
        return timesteps

    def _arguments(self, inputs: Mapping[str, Tensor], latents: Tensor) -> Mapping[str, Any]:
        """The conditioning's inputs as the network takes them, and what follows from the shape of the latents."""
        return inputs

    def _encoded(
        self, encoder: Any, tokenizer: Any, texts: Sequence[str], length: int, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Embeddings `[B, L, D]` by an encoder that sees no padding, and the mask `[B, L]`, 1 for a token. It is no
        boolean, so that a capture can be checked with other values in it."""
        ids, mask = tokens(tokenizer, texts, self.device, length)
        return encoder(ids, attention_mask=mask, **options)[0].to(self.dtype), mask.to(self.dtype)
