"""Standard output and error that nobody may be reading: a run must not end because its terminal, its pipe or the disk
that its log lies on has."""

from __future__ import annotations

import io
import os
import select
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from typing_extensions import Buffer


PATIENCE_S = 1.0
"""With a reader that takes nothing; then what it was told is lost."""


class _Lasting(io.FileIO):
    """A file descriptor whose errors of writing are nobody's concern: what it is told is for people."""

    def write(self, data: Buffer, /) -> int:
        num_bytes = memoryview(data).nbytes
        try:
            written: int | None = super().write(data)
            # A pipe that another process has made non-blocking, and whose reader is late.
            if written is None and select.select([], [self], [], PATIENCE_S)[1]:
                written = super().write(data)
        except OSError:
            return num_bytes
        return num_bytes if written is None else written


def outlast() -> None:
    """Have the process go on, and end with the same code, when it cannot write to its standard streams any more."""
    sys.stdout, sys.stderr = _lasting(sys.stdout), _lasting(sys.stderr)


def is_gone(stream: TextIO) -> bool:
    """Whether whoever read a pipe or a terminal has left it: nobody will see what is still written."""
    try:
        number = stream.fileno()
    except OSError:
        return False
    watched = select.poll()
    watched.register(number, 0)  # Which asks for nothing but errors and hang-ups.
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in watched.poll(0))


def _lasting(stream: TextIO | None) -> TextIO:
    if stream is None:  # Closed when the process began.
        return open(os.devnull, "w", encoding="utf-8")
    try:
        number = stream.fileno()
    except OSError:
        return stream  # One in memory.
    raw = io.BufferedWriter(_Lasting(number, "w", closefd=False))
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, line_buffering=True)
