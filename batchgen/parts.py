"""Finished parts read back: for verify, and for whoever wants the images of a run."""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.errors import BatchgenError
from batchgen.filesystem import readable
from batchgen.formats import folder_digest


def part_reader(path: Path) -> Iterator[tuple[str, bytes]]:
    """The images of a part as (file name, bytes), one in memory at a time, a Parquet row group at most.

    Which container it is follows from the path: a folder, `.tar` or `.parquet`. Raises BatchgenError where
    the part is missing or damaged so that it cannot be walked further; what was yielded before holds. Raises
    Interrupted where the disk is lost, which says nothing about the part.
    """
    with _damage_named(path):
        if path.suffix == ".tar":
            yield from _tar_images(path)
        elif path.suffix == ".parquet":
            yield from _parquet_images(path)
        else:
            for file in sorted(path.iterdir()):
                yield file.name, file.read_bytes()


def part_digest(path: Path) -> tuple[int, str]:
    """A part as it lies on the disk: bytes and sha256, as `Part` and the receipt have them. Raises as `part_reader`."""
    with _damage_named(path):
        if not path.is_dir():
            return path.stat().st_size, _file_digest(path)
        files = sorted(path.iterdir())
        num_bytes = sum(file.stat().st_size for file in files)
        return num_bytes, folder_digest((file.name, _file_digest(file)) for file in files)


def _tar_images(path: Path) -> Iterator[tuple[str, bytes]]:
    end = 0
    with path.open("rb") as source, tarfile.open(fileobj=source, mode="r:") as tar:
        for entry in tar:
            end = entry.offset_data + _rounded_up(entry.size, tarfile.BLOCKSIZE)
            file = tar.extractfile(entry)
            if file is not None and not entry.name.endswith(".json"):
                yield entry.name, file.read()
    # tarfile takes a header that it cannot read, and a missing one, for the end.
    num_bytes = _rounded_up(end + 2 * tarfile.BLOCKSIZE, tarfile.RECORDSIZE)
    if path.stat().st_size != num_bytes:
        raise ValueError(f"no further member can be read at byte {end:,}")


def _parquet_images(path: Path) -> Iterator[tuple[str, bytes]]:
    # Opened by Arrow itself, as in plan_reader.
    with pa.OSFile(str(path)) as source, pq.ParquetFile(source) as table:
        for group in range(table.num_row_groups):
            for image in table.read_row_group(group, columns=["image"])["image"]:
                yield image["path"].as_py(), image["bytes"].as_py()


def _rounded_up(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    try:
        with readable(path):
            yield
    except (OSError, tarfile.TarError, EOFError, ValueError) as error:
        raise BatchgenError(f"part {path} is missing or damaged: {error}") from error
