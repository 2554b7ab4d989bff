"""A file system that can be full, read-only or gone: a real one, of a few kilobytes.

Mounting needs root (CI has it). Elsewhere the tests that ask for it fail and say so; what they hold is then held, less
literally, by the tests that refuse through the seam.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


class Mount:
    """A tmpfs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()

    def mount(self, options: str) -> None:
        self._call("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.path))

    def remount(self, options: str) -> None:
        self._call("mount", "-o", f"remount,{options}", str(self.path))

    def vanish(self) -> None:
        """Take it away from under whoever uses it."""
        self._call("umount", "--lazy", str(self.path))

    def bind(self, other: Mount) -> None:
        """Let the same files be seen at another mount point too."""
        self._call("mount", "--bind", str(self.path), str(other.path))

    def end(self) -> None:
        while subprocess.run(["mountpoint", "--quiet", str(self.path)], check=False).returncode == 0:
            self.vanish()

    def _call(self, *words: str) -> None:
        ended = subprocess.run(words, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise OSError(f"{' '.join(words)}: {ended.stderr.strip()} (these tests mount a tmpfs, which needs root)")


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Mount]:
    """A mount point, with nothing mounted yet."""
    one = Mount(tmp_path / "disk")
    try:
        yield one
    finally:
        one.end()
