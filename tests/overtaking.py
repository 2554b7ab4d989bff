"""A disk at whose n-th step another comes first, or this process dies; of few imports, for processes of their own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from batchgen.filesystem import FileSystem
from batchgen.finalize import finalize
from batchgen.rundir import RunDirectory


class Overtaken(FileSystem):
    """Before its n-th step another one does `overtake`."""

    def __init__(self, step: int, overtake: Callable[[], object]) -> None:
        self.left = step
        self._overtake = overtake

    def __getattribute__(self, name: str) -> Any:
        if hasattr(FileSystem, name) and not name.startswith("__"):
            self.left -= 1
            if self.left == 0:
                self._overtake()
        return super().__getattribute__(name)


def finalize_until(path: Path, step: int) -> None:
    """Die by SIGKILL at the n-th step."""
    finalize(RunDirectory(path, Overtaken(step, lambda: os.kill(os.getpid(), signal.SIGKILL))))
