"""Finished parts read back: for verify, and for whoever wants the images of a run."""

from __future__ import annotations

import hashlib
import stat
import tarfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.errors import BatchgenError
from batchgen.filesystem import readable
from batchgen.formats import folder_digest

_DAMAGE = (OSError, EOFError, ValueError, tarfile.TarError, pa.ArrowException)
"""What comes of reading bytes that are no part."""
_IMAGE = {"bytes": pa.types.is_binary, "path": pa.types.is_string}
"""Fields of a Parquet part's column of images."""


def part_reader(path: Path, members: Collection[str] | None = None) -> Iterator[tuple[str, bytes]]:
    """The images of a part as (file name, bytes), one in memory at a time, a Parquet row group at most. Of these file
    names alone, if some are given: what is not asked for is hardly read.

    Which container it is follows from the path: a folder, `.tar` or `.parquet`. What is no file (a folder, a link, a
    pipe) holds no image. Raises BatchgenError where the part is missing or damaged so that it cannot be walked further;
    what was yielded before holds. Raises Interrupted where the disk is lost, which says nothing about the part.
    """
    with _damage_named(path):
        if path.suffix:
            _require_file(path)
        if path.suffix == ".tar":
            yield from _tar_images(path, members)
        elif path.suffix == ".parquet":
            yield from _parquet_images(path, members)
        else:
            for file in _files(path):
                if members is None or file.name in members:
                    yield file.name, file.read_bytes()


def part_digest(path: Path) -> tuple[int, str]:
    """A part as it lies on the disk: bytes and sha256, as `Part` and the receipt have them. Raises as `part_reader`."""
    with _damage_named(path):
        if path.suffix:
            _require_file(path)
            return path.stat().st_size, _file_digest(path)
        files = _files(path)
        num_bytes = sum(file.stat().st_size for file in files)
        return num_bytes, folder_digest((file.name, _file_digest(file)) for file in files)


def others(folder: Path) -> list[str]:
    """The names in a part's folder that are not those of files. Raises as `part_reader`."""
    with _damage_named(folder):
        return sorted(one.name for one in folder.iterdir() if not _is_file(one))


def _files(folder: Path) -> list[Path]:
    return sorted(one for one in folder.iterdir() if _is_file(one))


def _tar_images(path: Path, members: Collection[str] | None) -> Iterator[tuple[str, bytes]]:
    end, size = 0, path.stat().st_size
    with path.open("rb") as source, tarfile.open(fileobj=source, mode="r:") as tar:
        for entry in tar:
            is_file = entry.type == tarfile.REGTYPE and not entry.issparse()
            end = entry.offset_data + _rounded_up(entry.size, tarfile.BLOCKSIZE)
            if not is_file or entry.name.endswith(".json"):
                continue
            if end > size:
                raise ValueError(f"member {entry.name!r} has {entry.size:,} bytes by its header, more than there are")
            if members is not None and entry.name not in members:
                continue
            file = tar.extractfile(entry)
            assert file is not None
            yield entry.name, file.read()
    # tarfile takes a header that it cannot read, and a missing one, for the end.
    num_bytes = _rounded_up(end + 2 * tarfile.BLOCKSIZE, tarfile.RECORDSIZE)
    if size != num_bytes:
        raise ValueError(f"no further member can be read at byte {end:,}")


def _parquet_images(path: Path, members: Collection[str] | None) -> Iterator[tuple[str, bytes]]:
    # Opened by Arrow itself, as in plan_reader.
    with pa.OSFile(str(path)) as source, pq.ParquetFile(source) as table:
        _require_images(table.schema_arrow)
        for group in range(table.num_row_groups):
            if members is not None and not _names_in(table, group) & set(members):
                continue
            for number, image in enumerate(table.read_row_group(group, columns=["image"])["image"]):
                name, data = (image[field].as_py() if image.is_valid else None for field in ("path", "bytes"))
                if name is None or data is None:
                    raise ValueError(f"row {number} of row group {group} has no image")
                if members is None or name in members:
                    yield name, data


def _names_in(table: pq.ParquetFile, group: int) -> set[str]:
    """The images' file names in a row group, read without their bytes."""
    column = table.read_row_group(group, columns=["image.path"])["image"]
    return {image["path"].as_py() for image in column if image.is_valid}


def _require_images(schema: pa.Schema) -> None:
    place = schema.get_field_index("image")  # -1 for several, too
    kind = schema.field(place).type if place >= 0 else pa.null()
    fields = {field.name: field.type for field in kind} if pa.types.is_struct(kind) else {}
    if fields.keys() != _IMAGE.keys() or kind.num_fields != len(_IMAGE):
        raise ValueError("it has no column of images")
    for name, is_kind in _IMAGE.items():
        if not is_kind(fields[name]):
            raise ValueError(f"the images' {name} are of type {fields[name]}")


def _require_file(path: Path) -> None:
    if not _is_file(path):
        raise ValueError("it is no file")


def _is_file(path: Path) -> bool:
    """Whether a name is that of a file itself: a link may lead anywhere, and a pipe is never read to its end."""
    return stat.S_ISREG(path.lstat().st_mode)


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
    except _DAMAGE as error:
        raise BatchgenError(f"part {path} is missing or damaged: {error}") from error
