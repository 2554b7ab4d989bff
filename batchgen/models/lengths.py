"""How long the text is that a network is told, where that follows the prompt. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Ints = npt.NDArray[np.int64]
_AT_ONCE = 4_096
"""Texts that are tokenized at a time: their tokens take some kilobytes each."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths of one family's texts."""

    allowed: tuple[int, ...]
    """Tokens that the network is told, padding included, ascending: a text takes the first that holds it, and a longer
    one is cut to the last."""
    template: str | None = None
    """What stands around a text, with `{}` for the text; None where that is the tokenizer's template of a chat."""
    skipped: int = 0
    """Tokens at the beginning that the encoder reads and the network is not told."""

    def written(self, tokenizer: Any, text: str) -> str:
        """What the tokenizer is given of a text."""
        if self.template is not None:
            return self.template.format(text)
        chat = [{"role": "user", "content": text}]
        written: str = tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        return written

    def of(self, counts: Ints) -> Ints:
        """The lengths of texts that the network is told so many tokens of."""
        allowed = np.array(self.allowed)
        return allowed[np.searchsorted(allowed[:-1], counts)]

    def measured(self, tokenizer: Any, texts: pa.Array) -> Ints:
        """The length of each text, each distinct one tokenized once; a null one is that of ""."""
        distinct = texts.fill_null("").dictionary_encode()
        known: list[str] = distinct.dictionary.to_pylist()
        counts = np.zeros(len(known), np.int64)
        for start in range(0, len(known), _AT_ONCE):
            written = [self.written(tokenizer, text) for text in known[start : start + _AT_ONCE]]
            # By the tokenizers package itself, on all cores: around it transformers makes lists and masks.
            made = tokenizer.backend_tokenizer.encode_batch_fast(written, add_special_tokens=True)
            counts[start : start + _AT_ONCE] = [len(tokens) for tokens in made]
        lengths: Ints = self.of(counts - self.skipped)[distinct.indices.to_numpy(zero_copy_only=False)]
        return lengths
