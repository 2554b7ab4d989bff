"""Durable files. The one seam between the writer and the file system.

Whatever the disk refuses (full, over quota, read-only, a stale handle) stops the run as resumable and is
never a row's failure.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.errors import Interrupted

if TYPE_CHECKING:
    from typing_extensions import Buffer


@contextmanager
def interrupting(path: Path) -> Iterator[None]:
    """Turn any OSError inside into Interrupted, naming the path and the cause."""
    try:
        yield
    except OSError as error:
        cause = os.strerror(error.errno) if error.errno else str(error)
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        raise Interrupted(
            f"{path} cannot be written: {cause} ({name}); "
            "what was committed is kept: make room or bring the disk back, then run the same command again"
        ) from error


class HashedFile(io.RawIOBase):
    """A new binary file, written front to back, with the sha256 of what was written."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self._digest = hashlib.sha256()
        self._num_bytes = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Buffer) -> int:
        view = memoryview(data)
        self._file.write(view)
        self._digest.update(view)
        self._num_bytes += view.nbytes
        return view.nbytes

    def tell(self) -> int:
        return self._num_bytes

    def hexdigest(self) -> str:
        return self._digest.hexdigest()

    def close(self) -> None:
        """Close without a promise that the bytes are on the disk."""
        self._file.close()
        super().close()

    def close_durably(self) -> None:
        """Close once the bytes are on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()


def write_file(path: Path, data: bytes) -> None:
    """Write a file whose bytes, but not yet its name, are durable."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_table(path: Path, table: pa.Table) -> None:
    """Write a Parquet file, durable with its name. Raises Interrupted if the disk refuses."""
    with interrupting(path):
        file = HashedFile(path)
        try:
            pq.write_table(table, file, compression="zstd")
            file.close_durably()
        finally:
            file.close()
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """Remove a file or a whole folder, if it is there. Raises Interrupted if the disk refuses."""
    with interrupting(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
