"""Flow matching told by texts whose length follows the prompt: what those families share.

Prompts and negative prompts are two inputs of their own, each of one length in a batch, and a guided step runs the
network on one after the other, as diffusers' pipelines do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from batchgen.models.family import Conditioning, Encoded
from batchgen.models.flow import FlowMatching
from batchgen.models.latent import tokens
from batchgen.models.lengths import Lengths
from batchgen.models.transfer import to_device
from batchgen.records import Group, Row

PROMPT, NEGATIVE = "prompt", "negative"
MASK = "_mask"
"""Behind an input's name: that of its mask."""


class VaryingText(FlowMatching):
    """A loaded pipeline on one device; the families add how tokens are embedded and what their network predicts."""

    lengths: Lengths
    looks_past: bool
    """Whether the network looks past padding that it is told: of texts without any it is told nothing then."""
    embed: Callable[[Tensor, Tensor], Tensor]
    """Embeddings `[B, L, D]` of token numbers and their mask `[B, L]`."""

    def texts(self, rows: Sequence[Row], is_guided: bool) -> list[str]:
        """A null negative prompt is ""."""
        negatives = [row.negative_prompt or "" for row in rows] if is_guided else []
        return negatives + [row.prompt for row in rows]

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Each text's embedding `[L, D]` without padding."""
        written = [self.lengths.written(self.tokenizer, text) for text in texts]
        most = self.lengths.skipped + self.lengths.allowed[-1]
        ids, mask = tokens(self.tokenizer, written, torch.device("cpu"), most)
        embeddings = self.embed(to_device(ids, self.device), to_device(mask, self.device)).to(self.dtype)
        ends = mask.sum(1).tolist()
        # Copies: a slice would hold the memory of all the padding.
        return [
            (embedding[self.lengths.skipped : end].clone(),) for embedding, end in zip(embeddings, ends, strict=True)
        ]

    def conditioning(self, rows: Sequence[Row], group: Group, encoded: Mapping[str, Encoded]) -> Conditioning:
        """Inputs: `prompt` `[B, L, D]` and `prompt_mask` `[B, L]` bool, which is false for padding; of a guided batch
        also `negative` and `negative_mask`, of a length of their own. Where a network `looks_past` padding, no masks of
        a group that has none."""
        texts = self.texts(rows, group.is_guided)
        inputs = self._padded(PROMPT, [encoded[text][0] for text in texts[-len(rows) :]], group)
        if group.is_guided:
            inputs |= self._padded(NEGATIVE, [encoded[text][0] for text in texts[: len(rows)]], group)
        scales = [row.guidance_scale if row.true_cfg_scale is None else row.true_cfg_scale for row in rows]
        return Conditioning(self._scales(scales), group.is_guided, inputs)

    def _padded(self, name: str, embeddings: Sequence[Tensor], group: Group) -> dict[str, Tensor]:
        counts = np.array([len(embedding) for embedding in embeddings])
        found = set(self.lengths.of(counts).tolist())
        if group.is_padded:
            found = {group.text_length if name == PROMPT else group.negative_length}
        assert len(found) == 1, f"rows of one group have texts of one length, not of {sorted(found)}"
        length = found.pop()
        told = {name: torch.stack([pad(embedding, (0, 0, 0, length - len(embedding))) for embedding in embeddings])}
        if group.is_padded or not self.looks_past:
            ends = to_device(torch.from_numpy(counts), self.device)[:, None]
            told[name + MASK] = torch.arange(length, device=self.device) < ends
        return told
