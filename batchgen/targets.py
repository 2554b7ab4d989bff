"""Files that a command writes where it was told to, outside of any run's bookkeeping."""

from __future__ import annotations

from pathlib import Path

from batchgen.errors import UsageError
from batchgen.filesystem import resumable


def check_target(path: Path, ending: str) -> None:
    """Raises UsageError for a name that promises another kind of file than is written."""
    if path.suffix.lower() not in ("", ending):
        raise UsageError(f"-o {path}: what is written is a {ending} file; name it NAME{ending}")


def write_target(path: Path, content: bytes) -> None:
    """Write the file. Raises UsageError where it cannot be, Interrupted where the disk is full or lost."""
    try:
        with resumable(path):
            path.write_bytes(content)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}; name another place with -o") from None
