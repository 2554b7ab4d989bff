"""What may happen to the bytes of an image, and to its name."""

from __future__ import annotations

import os
from pathlib import Path

OTHERS = ("folder", "pipe", "link", "dangling link")
"""What may have a name that a file should have."""


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def emptied(data: bytes) -> bytes:
    return b""


def flipped(data: bytes) -> bytes:
    return data[:60] + bytes([data[60] ^ 1]) + data[61:]


def make_other(path: Path, kind: str) -> None:
    """Something that is no file, of a kind in `OTHERS`; what is in the folder is a user's."""
    if kind == "folder":
        path.mkdir()
        (path / "mine").write_text("mine")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(__file__ if kind == "link" else "nowhere")
