"""The manifest's `image` column: which rows begin from a picture, and what each picture was when they were planned.

A picture is known by the hash of its file's bytes, not by its path: one that was changed is another one, wherever it
lies, and one that was moved is the same. Paths stay paths; bytes that the manifest holds are kept beside the plan,
since they are read in another order than they come in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.columns import Bools, decoded, is_given, is_text, texts
from batchgen.filesystem import FileSystem
from batchgen.pictures import READERS, BadInitImage, Seen, look, look_at_bytes
from batchgen.wording import shorten

_BYTES = (
    *(pa.types.is_binary, pa.types.is_large_binary),
    *(pa.types.is_binary_view, pa.types.is_fixed_size_binary),
)
KINDS = "a path, the bytes of an image file, or {bytes, path}"
_AT_ONCE = 1_024
"""Files that wait for the reading threads."""
_URLS = ("http://", "https://")
PACK = "init-images.bin"
"""Under a plan's folder: image files that the manifest holds itself, one behind the other."""
COLUMNS = pa.schema(
    [
        ("init_image", pa.large_string()),
        ("init_sha256", pa.string()),
        ("init_file", pa.large_string()),
        ("init_offset", pa.int64()),
        ("init_bytes", pa.int64()),
    ]
)
"""What a plan holds of a row's picture: its path as the manifest has it, its hash, and where its bytes lie: a path,
which is absolute or under `.run/plan/`, and there the place, or null where they are the whole file."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a row's picture cannot be taken."""

    place: int
    """Of the row in its batch."""
    value: str
    rule: str


@dataclass(frozen=True, slots=True)
class Looked:
    """What a batch's pictures are; an entry per row, which says nothing where there is no picture or a bad one."""

    given: Bools
    sha256: npt.NDArray[np.uint8]
    """`[n, 32]`."""
    width: npt.NDArray[np.int32]
    height: npt.NDArray[np.int32]

    def hashes(self) -> pa.Array:
        """The hashes as a binary column, null where there is no picture."""
        return pa.array([one.tobytes() for one in self.sha256], pa.binary(), mask=~self.given)


@dataclass(frozen=True, slots=True)
class _Cells:
    """A batch of the column, taken apart."""

    names: list[str | None]
    contents: pa.Array
    """Binary, null where the path says it all."""


@dataclass(slots=True)
class InitImages:
    """Looks at pictures, each row's once for a manifest that is read twice: 41 bytes a row are remembered."""

    folder_of: Callable[[int], Path] = lambda row: Path()
    """The folder that the paths of a manifest row are relative to."""
    _looked: dict[int, Looked] = field(default_factory=dict)
    """By first row."""

    def look(self, column: pa.Array, first_row: int) -> tuple[Looked, list[Fault]]:
        """A batch's pictures, and what is wrong with them when they are first looked at. Raises Interrupted where the
        disk is lost."""
        if (known := self._looked.get(first_row)) is not None and len(known.given) == len(column):
            return known, []
        cells = _taken_apart(column)
        if cells is None:
            given = is_given(column)
            rule = f"must be {KINDS}; the column's type is {column.type}"
            faults = [Fault(place, shown(column[place]), rule) for place in np.flatnonzero(given).tolist()]
            looked = _empty(given)
        else:
            looked, faults = self._found(cells, self.folder_of(first_row))
        self._looked[first_row] = looked
        return looked, faults

    def _found(self, cells: _Cells, folder: Path) -> tuple[Looked, list[Fault]]:
        has_bytes = is_given(cells.contents)
        given = has_bytes | np.array([name is not None for name in cells.names], bool)
        looked, faults = _empty(given), list[Fault]()
        by_name = dict[str, list[int]]()
        for place in np.flatnonzero(given & ~has_bytes).tolist():
            by_name.setdefault(cells.names[place] or "", []).append(place)
        found = _seen_files(folder, list(by_name))
        for name, places in by_name.items():
            _note(next(found), places, name, looked, faults)
        for place in np.flatnonzero(has_bytes).tolist():
            content = cells.contents[place].as_py()
            name = cells.names[place] or f"{len(content):,} bytes"
            _note(_seen(partial(look_at_bytes, content)), [place], name, looked, faults)
        return looked, sorted(faults, key=lambda one: one.place)

    def planned(
        self, column: pa.Array, first_row: int, places: npt.NDArray[np.intp], pack: Pack | None, is_kept: Bools
    ) -> dict[str, pa.Array]:
        """The `COLUMNS` of some good rows of a batch. Bytes go into the pack, but for those that are kept already."""
        looked, cells = self.look(column, first_row)[0], _taken_apart(column)
        rows, folder = [], self.folder_of(first_row)
        for place, is_packed in zip(places.tolist(), is_kept.tolist(), strict=True):
            if cells is None or not looked.given[place]:
                rows.append(dict.fromkeys(COLUMNS.names))
                continue
            name, digest, content = cells.names[place], looked.sha256[place].tobytes(), cells.contents[place]
            where: tuple[str | None, int | None, int | None] = (None, None, None)
            if not content.is_valid:
                where = (_path(folder, name or ""), None, None)
            elif pack is not None and not is_packed:
                where = pack.add(digest, content.as_buffer())
            rows.append(dict(zip(COLUMNS.names, (name, digest.hex(), *where), strict=True)))
        made = pa.Table.from_pylist(rows, COLUMNS).combine_chunks()
        return {one: made[one].combine_chunks() for one in COLUMNS.names}


class Pack:
    """Writes `PACK` of a plan's folder, if there are bytes to write. Rows side by side that share a picture share its
    bytes."""

    def __init__(self, folder: Path, files: FileSystem) -> None:
        self._path, self._files = folder / PACK, files
        self._file: BinaryIO | None = None
        self._last: dict[bytes, tuple[int, int]] = {}
        self._size = 0

    def add(self, digest: bytes, content: pa.Buffer) -> tuple[str, int, int]:
        """Where the content lies: the path under `.run/plan/`, the offset and the length."""
        if digest not in self._last:
            if self._file is None:
                self._file = self._path.open("xb")
            self._file.write(content)
            if len(self._last) >= _AT_ONCE:
                self._last.clear()
            self._last[digest] = self._size, content.size
            self._size += content.size
        return f"{self._path.parent.name}/{PACK}", *self._last[digest]

    def close(self) -> None:
        """Make what was written durable."""
        if self._file is not None:
            with self._file:
                self._files.sync_file(self._file)


@contextmanager
def packing(folder: Path, files: FileSystem) -> Iterator[Pack]:
    """A pack that is durable at the end of the block."""
    pack = Pack(folder, files)
    try:
        yield pack
    finally:
        pack.close()


def shown(cell: pa.Scalar) -> str:
    """A cell of the column for a person: bytes by their number."""
    if not cell.is_valid:
        return "None"
    if pa.types.is_struct(cell.type):
        path = cell["path"] if "path" in cell.type.names else None
        return shown(path if path is not None and path.is_valid else cell["bytes"])
    return f"{cell.as_buffer().size:,} bytes" if _is_bytes(cell.type) else shorten(repr(cell.as_py()))


def _taken_apart(column: pa.Array) -> _Cells | None:
    """None for a type that pictures do not come in. Text that is no UTF-8 is the empty path, which no file has."""
    column = decoded(column)
    kind = column.type
    nothing = pa.nulls(len(column), pa.large_binary())
    if pa.types.is_null(kind):
        return _Cells([None] * len(column), nothing)
    if is_text(kind):
        names, is_bad = texts(column)
        return _Cells(["" if bad else one for one, bad in zip(names.to_pylist(), is_bad, strict=True)], nothing)
    if _is_bytes(kind):
        return _Cells([None] * len(column), column.cast(pa.large_binary()))
    if pa.types.is_struct(kind) and sorted(kind.names) == ["bytes", "path"]:
        parts = dict(zip(kind.names, column.flatten(), strict=True))  # Where the struct is null, so are they.
        content, path = parts["bytes"], _taken_apart(parts["path"])
        if path is not None and (_is_bytes(content.type) or pa.types.is_null(content.type)):
            return _Cells(path.names, content.cast(pa.large_binary()))
    return None


def _is_bytes(kind: pa.DataType) -> bool:
    return any(is_kind(kind) for is_kind in _BYTES)


def _empty(given: Bools) -> Looked:
    num = len(given)
    return Looked(given, np.zeros((num, 32), np.uint8), np.zeros(num, np.int32), np.zeros(num, np.int32))


def _path(folder: Path, name: str) -> str:
    """As it stands but whole: to take ".." away would lead elsewhere where it follows a link."""
    return str((folder / name).absolute())


def _seen_files(folder: Path, names: Sequence[str]) -> Iterator[Seen | str]:
    """What lies at each path, or what is wrong with it."""
    with ThreadPoolExecutor(READERS) as pool:
        for start in range(0, len(names), _AT_ONCE):
            yield from pool.map(lambda name: _seen_file(folder, name), names[start : start + _AT_ONCE])


def _seen_file(folder: Path, name: str) -> Seen | str:
    if not name:
        return "must be a path, as UTF-8 text"
    if name.startswith(_URLS):
        return "is a URL, and no run makes a network call; fetch it and give its path"
    return _seen(lambda: look(Path(_path(folder, name))))


def _seen(call: Callable[[], Seen]) -> Seen | str:
    try:
        return call()
    except BadInitImage as error:
        return str(error)


def _note(found: Seen | str, places: Iterable[int], value: str, looked: Looked, faults: list[Fault]) -> None:
    """Write down what was found of the picture of some rows."""
    for place in places:
        if isinstance(found, str):
            faults.append(Fault(place, shorten(repr(value)), found))
        else:
            looked.sha256[place] = np.frombuffer(found.sha256, np.uint8)
            looked.width[place], looked.height[place] = found.width, found.height
