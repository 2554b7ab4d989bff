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
_PROBES = ("\ue000", " \n\ue000\n ", "<tool_response>\ue000</tool_response>")
"""Texts that a template which does more than to surround them would change."""


@dataclass(frozen=True, slots=True)
class Around:
    """What a template puts around a text, up to the nearest token of the vocabulary's own on either side, such as
    `<|im_end|>`: those part the text, and what lies beyond them is always as many tokens."""

    before: str
    behind: str
    rest: int
    """Tokens beyond."""


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
    shared: tuple[int, ...] = ()
    """Lengths, ascending, that texts of several are padded to where few have the same: the network can be told to look
    past padding. Empty where it cannot."""

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
        counts, around = np.zeros(len(known), np.int64), self._around(tokenizer)
        for start in range(0, len(known), _AT_ONCE):
            some = known[start : start + _AT_ONCE]
            if around is None:
                found = _counts(tokenizer, [self.written(tokenizer, text) for text in some], is_whole=True)
            else:
                written = [f"{around.before}{text}{around.behind}" for text in some]
                found = around.rest + _counts(tokenizer, written, is_whole=False)
            counts[start : start + _AT_ONCE] = found
        lengths: Ints = self.of(counts - self.skipped)[distinct.indices.to_numpy(zero_copy_only=False)]
        return lengths

    def _around(self, tokenizer: Any) -> Around | None:
        """None where the template does more than to surround a text."""
        first, *others = _PROBES
        before, _, behind = self.written(tokenizer, first).partition(first)
        if any(self.written(tokenizer, probe) != before + probe + behind for probe in others):
            return None
        marks = list(tokenizer.added_tokens_encoder)
        near = before[max((before.rfind(mark) + len(mark) for mark in marks if mark in before), default=0) :]
        next_to = behind[: min((behind.find(mark) for mark in marks if mark in behind), default=len(behind))]
        whole, part = before + first + behind, near + first + next_to
        rest = _counts(tokenizer, [whole], is_whole=True) - _counts(tokenizer, [part], is_whole=False)
        return Around(near, next_to, int(rest[0]))


def _counts(tokenizer: Any, texts: list[str], *, is_whole: bool) -> Ints:
    """Tokens of each text, by the tokenizers package itself, on all cores: transformers makes lists and masks around
    it."""
    made = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=is_whole)
    return np.array([len(tokens) for tokens in made], np.int64)
