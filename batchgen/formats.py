"""The containers of a part: a folder of files, a webdataset tar, a Parquet file that `datasets` reads."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen import disk
from batchgen.carried import as_text, as_texts, is_readable
from batchgen.metadata import CARRIED, carried_fields, made_rows, metadata_schema, parameters, row_table
from batchgen.records import Row, Written

_MAX_GROUP_ROWS = 100
_MAX_GROUP_BYTES = 32 * 2**20
_NOT_IN_SAMPLES = frozenset({"file_name", "index", "retries", "seconds"})
"""Left out of a tar's samples: what names the place of the sample, and what differs from run to run."""
_INTEGERS = frozenset({"tokens", "tokens_dropped"})
"""The nullable numbers among a sample's keys."""


@dataclass(frozen=True, slots=True)
class Member:
    """One encoded image on its way into a container."""

    row: Row
    file: str
    """File name without a folder: "red-apple.png"."""
    data: bytes
    written: Written


class Container(Protocol):
    """A part being written.

    `stage` is called by several threads at once and in any order, then `append` by one thread at a time in
    the order of the images. Both let OSError through.
    """

    suffix: ClassVar[str]

    def stage(self, member: Member) -> None: ...

    def append(self, member: Member) -> None: ...

    def close(self) -> tuple[int, str]:
        """Make all of it durable; its bytes, and the sha256 of the whole."""

    def abort(self) -> None:
        """Let go of what is open, whatever state it is in."""


class Folder:
    """One file per image."""

    suffix: ClassVar[str] = ""

    def __init__(self, path: Path, shard: pa.Table, model: str) -> None:
        path.mkdir()
        self._path = path
        self._digests: list[tuple[str, str]] = []
        self._num_bytes = 0

    def stage(self, member: Member) -> None:
        disk.FILES.write(self._path / member.file, member.data)

    def append(self, member: Member) -> None:
        self._digests.append((member.file, member.written.sha256))
        self._num_bytes += member.written.bytes

    def close(self) -> tuple[int, str]:
        disk.FILES.sync_folder(self._path)
        return self._num_bytes, folder_digest(self._digests)

    def abort(self) -> None:
        pass


class Tar:
    """A webdataset shard: per image `NAME.png` and `NAME.json`, the same bytes whenever the images are."""

    suffix: ClassVar[str] = ".tar"

    def __init__(self, path: Path, shard: pa.Table, model: str) -> None:
        self._file = disk.HashedFile(path)
        self._tar = tarfile.TarFile(fileobj=self._file, mode="w")
        self._shard = shard
        self._model = model
        self._carried = {field.name: as_texts(shard[CARRIED + field.name]) for field in carried_fields(shard.schema)}

    def stage(self, member: Member) -> None:
        pass

    def append(self, member: Member) -> None:
        name = Path(member.file)
        sample = json.dumps(self._sample(member), ensure_ascii=False)
        self._add(name.name, member.data)
        self._add(name.with_suffix(".json").name, sample.encode())

    def close(self) -> tuple[int, str]:
        self._tar.close()
        self._file.close_durably()
        return self._file.tell(), self._file.hexdigest()

    def abort(self) -> None:
        self._file.close()

    def _add(self, name: str, data: bytes) -> None:
        entry = tarfile.TarInfo(name)
        entry.size = len(data)
        self._tar.addfile(entry, io.BytesIO(data))

    def _sample(self, member: Member) -> dict[str, Any]:
        index = member.row.index
        asked = {name: self._shard[name][index].as_py() for name in ("asked_width", "asked_height")}
        made = {name: value for name, value in asdict(member.written).items() if name not in _NOT_IN_SAMPLES}
        carried = {name: texts[index] for name, texts in self._carried.items()}
        return without_nulls(parameters(member.row, self._model) | asked | made | carried)


class Parquet:
    """Images as a `datasets` Image column, every metadata column beside them."""

    suffix: ClassVar[str] = ".parquet"

    def __init__(self, path: Path, shard: pa.Table, model: str) -> None:
        self._file = disk.HashedFile(path)
        self._shard = shard
        self._model = model
        self._schema = parquet_schema(carried_fields(shard.schema))
        self._writer = pq.ParquetWriter(
            self._file, self._schema, compression="none", use_dictionary=False, write_statistics=False
        )
        self._group: list[Member] = []

    def stage(self, member: Member) -> None:
        pass

    def append(self, member: Member) -> None:
        self._group.append(member)
        num_bytes = sum(member.written.bytes for member in self._group)
        if len(self._group) == _MAX_GROUP_ROWS or num_bytes >= _MAX_GROUP_BYTES:
            self._write_group()

    def close(self) -> tuple[int, str]:
        if self._group:
            self._write_group()
        self._writer.close()
        self._file.close_durably()
        return self._file.tell(), self._file.hexdigest()

    def abort(self) -> None:
        self._file.close()
        # Its destructor would write the footer.
        self._writer.is_open = False

    def _write_group(self) -> None:
        rows = made_rows(row_table(self._shard, self._model, [member.written for member in self._group], []))
        images = [{"bytes": member.data, "path": member.file} for member in self._group]
        self._group = []
        columns = [pa.array(images, self._schema.field("image").type)]
        columns += [column if is_readable(column.type) else as_text(column) for column in rows.columns]
        self._writer.write_table(pa.table(columns, schema=self._schema))


CONTAINERS: Mapping[str, type[Folder] | type[Tar] | type[Parquet]] = {
    "files": Folder,
    "webdataset": Tar,
    "parquet": Parquet,
}
"""By `[output] format`."""


def parquet_schema(carried: Iterable[pa.Field]) -> pa.Schema:
    """A Parquet part's columns. `datasets` knows the image column by the schema's own metadata."""
    image = pa.field("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    rest = [
        field if is_readable(field.type) else pa.field(field.name, pa.string()) for field in metadata_schema(carried)
    ]
    features = {"info": {"features": {"image": {"_type": "Image"}}}}
    return pa.schema([image, *rest], metadata={"huggingface": json.dumps(features)})


def without_nulls(sample: dict[str, Any]) -> dict[str, Any]:
    """One set of keys and types for all samples: a null becomes "" or 0, and `nulls` lists its name."""
    nulls = [name for name, value in sample.items() if value is None]
    fillers = {name: 0 if name in _INTEGERS else "" for name in nulls}
    return sample | fillers | {"nulls": json.dumps(nulls, ensure_ascii=False)}


def folder_digest(digests: Iterable[tuple[str, str]]) -> str:
    """sha256 of what `sha256sum` prints for (file name, sha256) pairs, sorted by name."""
    lines = "".join(f"{sha256}  {name}\n" for name, sha256 in sorted(digests))
    return hashlib.sha256(lines.encode()).hexdigest()
