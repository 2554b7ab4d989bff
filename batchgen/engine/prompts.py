"""Prompts encoded: each distinct text of a shard once, in chunks of one padded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from batchgen.engine.loras import Loras
from batchgen.engine.residence import Residence
from batchgen.generator import Dropped
from batchgen.models.family import Encoded, Family

CHUNKS = {"cpu": 8}
LARGE_CHUNK = 32
"""Texts encoded at once, always padded to this, so that a row's bits do not depend on what else was left to do: few on
a CPU, where padding costs as much as texts."""


Text = tuple[str, str]
"""A LoRA set of the text encoders, "" for none, and a text: the same text is another one by another set."""


class Prompts:
    """The encoded texts of the shard at work, by LoRA set."""

    def __init__(self, model: Family, loras: Loras, residence: Residence) -> None:
        self._model = model
        self._loras = loras
        self._residence = residence
        self._chunk = CHUNKS.get(model.device.type, LARGE_CHUNK)
        self._encoded: dict[Text, Encoded] = {}

    def prepare(self, texts: Mapping[str, Iterable[str]], should_drop: Callable[[], bool]) -> None:
        """Forget all texts but these, which are given by the rows' LoRA sets, and encode those that are new. Raises
        Dropped between two chunks."""
        wanted = dict.fromkeys((self._loras.of_texts(lora), text) for lora, some in texts.items() for text in some)
        self._encoded = {text: self._encoded[text] for text in wanted if text in self._encoded}
        for lora in dict.fromkeys(lora for lora, _ in wanted):
            self._encode(lora, [text for one, text in wanted if one == lora], should_drop)

    def encoded(self, lora: str, texts: Iterable[str]) -> Mapping[str, Encoded]:
        """The encodings of at least these texts by a LoRA set."""
        lora = self._loras.of_texts(lora)
        self._encode(lora, list(dict.fromkeys(texts)), lambda: False)
        return {text: encoded for (one, text), encoded in self._encoded.items() if one == lora}

    def _encode(self, lora: str, texts: list[str], should_drop: Callable[[], bool]) -> None:
        texts = [text for text in texts if (lora, text) not in self._encoded]
        if not texts:
            return
        # Any other set that leaves the text encoders alone would do as well as none.
        if lora != self._loras.of_texts(self._loras.now):
            self._loras.use(lora)
        with self._residence.at_work():
            for start in range(0, len(texts), self._chunk):
                if should_drop():
                    raise Dropped
                chunk = texts[start : start + self._chunk]
                padded = chunk + [""] * (self._chunk - len(chunk))
                made = zip(chunk, self._model.encode(padded), strict=False)
                self._encoded |= {(lora, text): encoded for text, encoded in made}
