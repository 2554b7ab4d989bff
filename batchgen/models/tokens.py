"""How many tokens of a prompt the text encoder reads, and how many it never sees. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from batchgen.errors import UsageError
from batchgen.models.folder import facts_of, find_model
from batchgen.weights import Model


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Tokens of one text, start and end markers not counted."""

    read: int
    dropped: int


def load_tokenizer(model: Model) -> Any | None:
    """The model's tokenizer; None for a model without text encoder. Raises UsageError as find_model does, and for one
    whose tokens cannot be counted."""
    if model.path == "pattern":
        return None
    import transformers

    folder, name = find_model(model), facts_of(model).tokenizer
    if folder.is_generic:
        raise UsageError(
            f"how many tokens model {model.path!r} reads is known to its pipeline {folder.family} alone, so that none "
            "can be counted; take --on-truncate warn"
        )
    return getattr(transformers, folder.components[name].classes[0]).from_pretrained(folder.path / name)


def count_tokens(tokenizer: Any, texts: Sequence[str], room: int) -> list[TokenCount]:
    """The count of each text, of which `room` tokens are read."""
    if not texts:
        return []
    ids = tokenizer(list(texts), add_special_tokens=False, truncation=False, verbose=False).input_ids
    return [TokenCount(min(len(text), room), max(len(text) - room, 0)) for text in ids]
