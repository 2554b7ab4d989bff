"""A machine that dies at the n-th change to its disk."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

CHANGES = ("link", "unlink", "fsync", "rename", "replace", "utime", "mkdir")
"""Every call of `os` by which the run directory changes, or by which a change becomes durable."""


class Crash(BaseException):
    """The process is gone; no handler for errors may run on."""


@dataclass
class Machine:
    """Counts changes and dies at one of them, before or after it is made; every later one dies as well."""

    dies_at: int | None = None
    is_after: bool = False
    num_changes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def change(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                number, self.num_changes = self.num_changes, self.num_changes + 1
            if self.dies_at is None or number < self.dies_at:
                return make(*arguments, **options)
            if number == self.dies_at and self.is_after:
                make(*arguments, **options)
            raise Crash

        return changed


@contextmanager
def machine(dies_at: int | None = None, *, is_after: bool = False) -> Iterator[Machine]:
    """Changes to the disk within the block are those of a machine that dies."""
    one = Machine(dies_at, is_after)
    with pytest.MonkeyPatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, one.change(getattr(os, name)))
        yield one
