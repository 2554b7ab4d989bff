"""Prompts encoded: each distinct text of a shard once, in chunks of one padded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from batchgen.engine.residence import Residence
from batchgen.generator import Dropped
from batchgen.models.family import Encoded, Family

CHUNKS = {"cpu": 8}
LARGE_CHUNK = 32
"""Texts encoded at once, always padded to this, so that a row's bits do not depend on what else was left to do: few on
a CPU, where padding costs as much as texts."""


class Prompts:
    """The encoded texts of the shard at work."""

    def __init__(self, model: Family, residence: Residence) -> None:
        self._model = model
        self._residence = residence
        self._chunk = CHUNKS.get(model.device.type, LARGE_CHUNK)
        self._encoded: dict[str, Encoded] = {}

    def prepare(self, texts: Iterable[str], should_drop: Callable[[], bool]) -> None:
        """Forget all texts but these, and encode those that are new. Raises Dropped between two chunks."""
        wanted = dict.fromkeys(texts)
        self._encoded = {text: self._encoded[text] for text in wanted if text in self._encoded}
        self._encode([text for text in wanted if text not in self._encoded], should_drop)

    def encoded(self, texts: Iterable[str]) -> Mapping[str, Encoded]:
        """The encodings of at least these texts."""
        self._encode([text for text in dict.fromkeys(texts) if text not in self._encoded], lambda: False)
        return self._encoded

    def _encode(self, texts: list[str], should_drop: Callable[[], bool]) -> None:
        if not texts:
            return
        with self._residence.at_work():
            for start in range(0, len(texts), self._chunk):
                if should_drop():
                    raise Dropped
                chunk = texts[start : start + self._chunk]
                padded = chunk + [""] * (self._chunk - len(chunk))
                self._encoded |= zip(chunk, self._model.encode(padded), strict=False)
