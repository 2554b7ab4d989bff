"""How many tokens of a prompt the text encoder reads, and how many it never sees. Needs no torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa

from batchgen.errors import UsageError
from batchgen.models.facts import Facts
from batchgen.models.folder import facts_of, find_model
from batchgen.models.lengths import Ints
from batchgen.models.packages import check_packages
from batchgen.weights import Model

LengthsOf = Callable[[pa.Array], Ints]
"""The length of each text in the network, padding included."""


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Tokens of one text, start and end markers not counted."""

    read: int
    dropped: int


def load_tokenizer(model: Model) -> Any | None:
    """The model's tokenizer; None for a model without text encoder. Raises UsageError as find_model does, for one whose
    tokens cannot be counted, and where a package is lacking but transformers itself, which is an ImportError."""
    if model.path == "pattern":
        return None
    folder, name = find_model(model), facts_of(model).tokenizer
    if folder.is_generic:
        raise UsageError(
            f"how many tokens model {model.path!r} reads is known to its pipeline {folder.family} alone, so that none "
            "can be counted; take --on-truncate warn"
        )
    check_packages(folder)
    component = folder.components[name]
    library = importlib.import_module(component.module)
    return getattr(library, component.classes[0]).from_pretrained(folder.path / name)


def count_tokens(tokenizer: Any, texts: Sequence[str], facts: Facts, *, are_negative: bool = False) -> list[TokenCount]:
    """The count of each prompt or negative prompt, of which `facts.prompt_tokens` are read."""
    if not texts:
        return []
    reads = (are_negative and facts.reads_negative) or facts.reads
    given = [reads(text) for text in ("", *texts)]
    before, *lengths = map(len, tokenizer(given, add_special_tokens=False, truncation=False, verbose=False).input_ids)
    room = facts.prompt_tokens - (before if facts.is_added_within else 0)
    return [TokenCount(min(length - before, room), max(length - before - room, 0)) for length in lengths]


def lengths_of(model: Model, facts: Facts) -> LengthsOf | None:
    """What measures the model's texts; None where their length does not follow the prompt. Raises UsageError where
    there is no transformers package."""
    if facts.lengths is None:
        return None
    try:
        tokenizer = load_tokenizer(model)
    except ImportError as error:
        raise UsageError(
            f"model {model.path!r} is planned by each prompt's tokens, which transformers counts; that is not here: "
            f"{error}"
        ) from None
    assert tokenizer is not None
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return partial(facts.lengths.measured, tokenizer)
