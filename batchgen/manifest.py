"""The manifest's files: found, opened, and read in batches under our own column names.

Several files, a folder or a glob are one manifest: the files in sorted order, their rows in file order.
"""

from __future__ import annotations

import bisect
import difflib
import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.carried import holds
from batchgen.columns import as_type, is_text, replaced, without_views
from batchgen.errors import UsageError
from batchgen.manifest_files import FileIdentity, find_files
from batchgen.wording import listed

PARAMETERS = (
    "id",
    "prompt",
    "negative_prompt",
    "width",
    "height",
    "steps",
    "guidance_scale",
    "true_cfg_scale",
    "image",
    "strength",
    "seed",
    "num_images",
    "sampler",
    "lora",
)
"""The columns that batchgen reads; any other is carried into the metadata."""

READ_ROWS = 131_072
READ_BYTES = 64 * 2**20
"""Rows read at a time, at most, and about their bytes in memory."""
PROBED_ROWS = 1_024
_PANDAS_INDEX = re.compile(r"__index_level_\d+__")
BUFFER_BYTES = 2**20
"""Of a column of a row group, read from the disk at a time."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """An opened manifest: nothing of its rows is in memory."""

    files: tuple[Path, ...]
    identities: tuple[FileIdentity | None, ...]
    """Of the files, as they were opened."""
    first_rows: tuple[int, ...]
    """The manifest row at which each file begins."""
    num_rows: int
    schema: pa.Schema
    """Under our names, each column in the type that holds it in all files."""
    sources: Mapping[str, str]
    """Our column name -> the name in the files."""
    index_columns: tuple[str, ...]
    """What pandas has written of row numbers or labels without a name; they are left out."""

    def place(self, row: int) -> tuple[Path, int]:
        """The file and the row in it (from 0) of a manifest row."""
        number = bisect.bisect_right(self.first_rows, row) - 1
        return self.files[number], row - self.first_rows[number]

    def folder(self, row: int) -> Path:
        """The folder of the file that has a manifest row: relative paths in it begin there."""
        return self.place(row)[0].parent

    @property
    def carried(self) -> tuple[str, ...]:
        """The manifest's own columns, in file order."""
        return tuple(name for name in self.schema.names if name not in PARAMETERS)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All rows in order. Carried columns have one type in all batches, ours that of their file: they are read as
        exactly as they were written. Columns that a file lacks are null. Raises UsageError for a damaged file."""
        fields = list(self.schema)
        for path in self.files:
            for batch in self._read(path):
                found = dict(zip(batch.schema.names, batch.columns, strict=True))
                arrays = [
                    self._column(field, found.get(self.sources[field.name]), batch.num_rows, path) for field in fields
                ]
                yield pa.RecordBatch.from_arrays(arrays, names=self.schema.names)

    def _read(self, path: Path) -> Iterator[pa.RecordBatch]:
        num_read = 0
        try:
            file = _opened(path)
            self.check_unchanged()  # Rows were counted in the file that lay here then.
            for batch in _batches(file):
                num_read += batch.num_rows
                yield batch
        except (OSError, pa.ArrowException) as error:
            self.check_unchanged()
            raise UsageError(f"{path} cannot be read beyond row {num_read}: it is damaged ({error})") from None

    def _column(self, field: pa.Field, column: pa.Array | None, num_rows: int, path: Path) -> pa.Array:
        name, kind = field.name, field.type
        if column is None:
            return pa.nulls(num_rows, kind)
        if name in PARAMETERS:
            return column
        try:
            return as_type(column, kind)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise UsageError(
                f"manifest: column {self.sources[name]!r} is {column.type} in {path} and {kind} over all files, which "
                f"does not hold all its values ({error}); write it in one type"
            ) from None

    def content_hash(self) -> str:
        """SHA-256 over the bytes of all files, in order."""
        total = hashlib.sha256()
        for path in self.files:
            with path.open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
        return total.hexdigest()

    def check_unchanged(self) -> None:
        """Raises UsageError if a file is not the one that was opened."""
        for path, before in zip(self.files, self.identities, strict=True):
            if (now := FileIdentity.of(path)) != before:
                what = "is gone" if now is None else f"has {now.num_bytes} bytes now"
                raise UsageError(
                    f"manifest: {path} changed while it was read (it {what}); run the command again once it is whole"
                )


def open_manifest(names: Sequence[str | Path], mapping: Mapping[str, str] | None = None) -> Manifest:
    """Open the files of a manifest and settle its columns; `mapping` is our column name -> the files' name.

    Raises UsageError where a file is no Parquet, no column is `prompt`, a mapped column is missing, or files
    disagree about a column's type.
    """
    files = find_files(names)
    identities = tuple(map(FileIdentity.of, files))
    schemas = [_opened(path).schema_arrow for path in files]
    counts = [_opened(path).metadata.num_rows for path in files]
    columns = list(dict.fromkeys(name for schema in schemas for name in schema.names))
    indices = {name for schema in schemas for name in _pandas_index(schema)} - set((mapping or {}).values())
    index_columns = [name for name in columns if name in indices]
    columns = [name for name in columns if name not in index_columns]
    if cut := [name for name in columns if "\0" in name]:
        raise UsageError(f"manifest: column {cut[0]!r} has a NUL in its name, where readers cut it off; rename it")
    sources = _sources(columns, mapping or {})
    ours: dict[str, list[str]] = {name: [] for name in columns}
    for name, source in sources.items():
        ours[source].append(name)
    fields: dict[str, pa.Field] = {}
    for path, schema in zip(files, schemas, strict=True):
        if (twice := _repeated_name(schema)) is not None:
            raise UsageError(f"{path}: column {twice!r} is there twice; give each column a name of its own")
        for field in (one for one in schema if one.name in ours):
            kept = field.with_type(replaced(field.type, partial(_carriable, path=path, column=field.name)))
            for name in ours[field.name]:
                _merge(fields, kept.with_name(name), path, files)
    return Manifest(
        files=files,
        identities=identities,
        first_rows=tuple(sum(counts[:number]) for number in range(len(counts))),
        num_rows=sum(counts),
        schema=pa.schema([pa.field(field.name, field.type) for field in fields.values()]),
        sources=sources,
        index_columns=tuple(index_columns),
    )


def _pandas_index(schema: pa.Schema) -> Iterator[str]:
    """Columns that pandas wrote of an index without a name, by what it says of them itself."""
    known: Any = (schema.pandas_metadata or {}).get("index_columns", [])
    return (name for name in known if isinstance(name, str) and _PANDAS_INDEX.fullmatch(name))


def _sources(columns: list[str], mapping: Mapping[str, str]) -> dict[str, str]:
    for name, source in mapping.items():
        if source not in columns:
            raise UsageError(
                f"[columns] {name} = {source!r}: the manifest has no such column; it has {listed(columns)}"
            )
        if name in columns and mapping.get(name) != name and name not in mapping.values():
            raise UsageError(
                f"[columns] {name} = {source!r}: the manifest also has a column {name!r}; "
                f"map that one to another name, such as [columns] manifest_{name} = {name!r}"
            )
    taken = set(mapping.values())
    sources = {name: name for name in columns if name not in taken} | dict(mapping)
    if "prompt" not in sources:
        near = difflib.get_close_matches("prompt", [name.lower() for name in columns], n=1, cutoff=0.5)
        guess = next((name for name in columns if near and name.lower() == near[0]), columns[0] if columns else "…")
        found = [f"{name} (taken for another name by [columns])" if name in taken else name for name in columns]
        raise UsageError(
            f"manifest: there is no column 'prompt'; found {listed(found) or 'no columns'}. "
            f"Name the right one with --set columns.prompt={guess!r} or in the job file's [columns]"
        )
    return sources


def _merge(fields: dict[str, pa.Field], field: pa.Field, path: Path, files: tuple[Path, ...]) -> None:
    known = fields.get(field.name)
    if known is None:
        fields[field.name] = field
        return
    if known.type != field.type and is_text(known.type) and is_text(field.type):
        known, field = known.with_type(pa.large_string()), field.with_type(pa.large_string())
    kind = _common(known, field)
    if kind is None:
        raise UsageError(
            f"manifest: column {field.name!r} is {field.type} in {path} but {known.type} in an earlier file "
            f"({files[0]} is the first); files of one manifest agree about their columns"
        )
    fields[field.name] = known.with_type(kind)


def _common(one: pa.Field, other: pa.Field) -> pa.DataType | None:
    """The type that holds the values of both, None if there is none. Arrow would make bytes of texts beside bytes, and
    floats of decimals beside floats: those do not say the same."""
    try:
        kind = pa.unify_schemas([pa.schema([one]), pa.schema([other])], promote_options="permissive").field(0).type
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return None
    kept = (is_text, pa.types.is_decimal)
    is_lost = any(holds(field.type, test) and not holds(kind, test) for field in (one, other) for test in kept)
    return None if is_lost else kind


def _carriable(kind: pa.DataType, path: Path, column: str) -> pa.DataType:
    # Arrow gets rows of list views wrong when it casts them.
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        raise UsageError(f"{path}: column {column!r} holds the Arrow type {kind}, which cannot be carried; write lists")
    return without_views(kind)


def _repeated_name(fields: Iterable[pa.Field]) -> str | None:
    """The first name that two columns have, or two fields of one struct, at whatever depth."""
    names = Counter(field.name for field in fields)
    for field in fields:
        if names[field.name] > 1:
            return str(field.name)
        kind = field.type
        within = _repeated_name([kind.field(number) for number in range(kind.num_fields)])
        if within is not None:
            return f"{field.name}.{within}"
    return None


def _batches(file: pq.ParquetFile) -> Iterator[pa.RecordBatch]:
    """All rows of a file. Raises as reading does, and pa.ArrowInvalid where a row group ends early: some versions of
    pyarrow say nothing of one that is cut short."""
    for group in range(file.num_row_groups):
        left = file.metadata.row_group(group).num_rows
        for batch in file.iter_batches(_rows_at_once(file, group), row_groups=[group]):
            left -= batch.num_rows
            yield batch
        if left:
            raise pa.ArrowInvalid(f"row group {group} lacks {left:,} rows")


def _rows_at_once(file: pq.ParquetFile, group: int) -> int:
    """How many rows of a row group READ_BYTES hold, by its size in the file, and by what its first rows are in memory:
    a text that is repeated stands in the file once."""
    counted = file.metadata.row_group(group)
    if not counted.num_rows:
        return READ_ROWS
    row_bytes: int = counted.total_byte_size // counted.num_rows
    probed = min(PROBED_ROWS, max(1, READ_BYTES // max(1, row_bytes)))
    if counted.num_rows > probed:
        first = next(file.iter_batches(probed, row_groups=[group]), None)
        if first is not None:
            row_bytes = max(row_bytes, first.nbytes // first.num_rows)
    return max(1, min(READ_ROWS, READ_BYTES // max(1, row_bytes)))


def _opened(path: Path) -> pq.ParquetFile:
    # Not mapped into memory: a file that is cut short meanwhile would end the process.
    try:
        return pq.ParquetFile(path, buffer_size=BUFFER_BYTES)
    except pa.ArrowException as error:
        with path.open("rb") as file:
            start = file.read(16)
        raise UsageError(
            f"{path} is not a Parquet file (it begins with {start!r}): {str(error).strip().rstrip('.')}. "
            f"`batchgen import {path} -o manifest.parquet` reads csv, tsv, jsonl and txt"
        ) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
