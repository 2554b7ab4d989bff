"""Model files that are read again while a run is at work: still those that it began with."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from batchgen.errors import UsageError
from batchgen.manifest_files import FileIdentity


class Unchanged:
    """Files as they lie here when this is made, which is before they are first read."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files = {path: FileIdentity.of(path) for path in paths}

    def check(self) -> None:
        """Raises UsageError for a file that is another one by now: rows made with it would be other rows."""
        for path, before in self._files.items():
            if (now := FileIdentity.of(path)) != before:
                what = "is gone" if now is None else "was written anew or replaced"
                raise UsageError(
                    f"{path} {what} while the run was at work, which reads it again; put the file back that the run "
                    "began with, and give the command again"
                )
