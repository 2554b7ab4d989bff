"""Calls that take the same memory for any batch: a smaller batch would not help where they do not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from batchgen.engine.devices import is_memory
from batchgen.generator import NoRoom
from batchgen.wording import first_line

_T = TypeVar("_T")


def with_room(what: str, call: Callable[[], _T], free: Callable[[], object]) -> _T:
    """Call; where memory is short, once more after `free`. Raises NoRoom, which says what does not fit."""
    try:
        return call()
    except RuntimeError as error:
        if not is_memory(error):
            raise
    free()
    try:
        return call()
    except RuntimeError as error:
        if not is_memory(error):
            raise
        raise NoRoom(f"{what} does not fit into memory: {first_line(error)}") from error
