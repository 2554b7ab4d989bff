"""What parts need of the disk beside `filesystem`: files hashed as they are written, and tables.

All errors of the disk leave as `filesystem.resumable` names them: they stop the run and are never a row's
failure.
"""

from __future__ import annotations

import hashlib
import io
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.filesystem import FileSystem, resumable

if TYPE_CHECKING:
    from typing_extensions import Buffer

FILES = FileSystem()


class HashedFile(io.RawIOBase):
    """A new binary file, written front to back, with the sha256 of what was written. Raises FileExistsError, also where
    the name is that of a link, which would lead elsewhere."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")
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


def write_table(path: Path, table: pa.Table) -> str:
    """Write a Parquet file, durable with its name, in the place of what has it; its sha256."""
    with resumable(path):
        if os.path.lexists(path):
            path.unlink()
        file = HashedFile(path)
        try:
            pq.write_table(table, file, compression="zstd")
            file.close_durably()
        except BaseException:
            with suppress(OSError):  # Closing writes what is still buffered.
                file.close()
            FILES.remove(path)
            raise
        FILES.sync_folder(path.parent)
    return file.hexdigest()
