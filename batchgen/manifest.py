"""The manifest's files: found, opened, and read in batches under our own column names.

Several files, a folder or a glob are one manifest: the files in sorted order, their rows in file order.
"""

from __future__ import annotations

import bisect
import difflib
import glob
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.carried import holds
from batchgen.columns import as_type, is_text, replaced, without_views
from batchgen.errors import UsageError
from batchgen.filesystem import resumable

PARAMETERS = (
    "id",
    "prompt",
    "negative_prompt",
    "width",
    "height",
    "steps",
    "guidance_scale",
    "seed",
    "num_images",
    "sampler",
)
"""The columns that batchgen reads; any other is carried into the metadata."""

READ_ROWS = 131_072
"""Rows read at a time."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """An opened manifest: nothing of its rows is in memory."""

    files: tuple[Path, ...]
    first_rows: tuple[int, ...]
    """The manifest row at which each file begins."""
    num_rows: int
    schema: pa.Schema
    """Under our names, each column in the type that holds it in all files."""
    sources: Mapping[str, str]
    """Our column name -> the name in the files."""

    def place(self, row: int) -> tuple[Path, int]:
        """The file and the row in it (from 0) of a manifest row."""
        number = bisect.bisect_right(self.first_rows, row) - 1
        return self.files[number], row - self.first_rows[number]

    @property
    def carried(self) -> tuple[str, ...]:
        """The manifest's own columns, in file order."""
        return tuple(name for name in self.schema.names if name not in PARAMETERS)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All rows in order. Carried columns have one type in all batches, ours that of their file: they are read as
        exactly as they were written. Columns that a file lacks are null. Raises UsageError for a damaged file."""
        for path in self.files:
            for batch in _read(path):
                arrays = [self._column(name, batch, path) for name in self.schema.names]
                yield pa.RecordBatch.from_arrays(arrays, names=self.schema.names)

    def _column(self, name: str, batch: pa.RecordBatch, path: Path) -> pa.Array:
        source, kind = self.sources[name], self.schema.field(name).type
        if source not in batch.schema.names:
            return pa.nulls(batch.num_rows, kind)
        column = batch.column(source)
        if name in PARAMETERS:
            return column
        try:
            return as_type(column, kind)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise UsageError(
                f"manifest: column {source!r} is {column.type} in {path} and {kind} over all files, which does not "
                f"hold all its values ({error}); write it in one type"
            ) from None

    def content_hash(self) -> str:
        """SHA-256 over the bytes of all files, in order."""
        total = hashlib.sha256()
        for path in self.files:
            with path.open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
        return total.hexdigest()


def find_files(names: Sequence[str | Path]) -> tuple[Path, ...]:
    """The Parquet files that paths, folders and globs name, each once. Raises UsageError for a name without any."""
    found: dict[Path, Path] = {}
    for name in names:
        path = Path(name)
        with resumable(path):
            is_name = path.exists()
        matches = [path] if is_name else [Path(file) for file in sorted(glob.glob(str(name), recursive=True))]
        if not matches:
            raise UsageError(
                f"manifest: {name} matches no file; the folder {path.parent} holds {_listing(path.parent)}"
            )
        files = [file for match in matches for file in (_files_in(match) if match.is_dir() else [match])]
        if not files:
            holds = "; ".join(f"{match} holds {_listing(match)}" for match in matches)
            raise UsageError(f"manifest: folder {name} holds no *.parquet file; {holds}")
        for file in files:
            found.setdefault(file.resolve(), file)
    if not found:
        raise UsageError("manifest: no file was named")
    return tuple(found.values())


def _files_in(folder: Path) -> list[Path]:
    if (folder / ".run").is_dir():
        raise UsageError(f"{folder} is a run directory; name the manifest that it was made of, and {folder} with -o")
    return sorted(
        file for file in folder.rglob("*.parquet") if file.is_file() and _is_visible(file.relative_to(folder))
    )


def open_manifest(names: Sequence[str | Path], mapping: Mapping[str, str] | None = None) -> Manifest:
    """Open the files of a manifest and settle its columns; `mapping` is our column name -> the files' name.

    Raises UsageError where a file is no Parquet, no column is `prompt`, a mapped column is missing, or files
    disagree about a column's type.
    """
    files = find_files(names)
    schemas = [_opened(path).schema_arrow for path in files]
    counts = [_opened(path).metadata.num_rows for path in files]
    columns = list(dict.fromkeys(name for schema in schemas for name in schema.names))
    sources = _sources(columns, mapping or {})
    fields: dict[str, pa.Field] = {}
    for path, schema in zip(files, schemas, strict=True):
        if (twice := _repeated_name(schema)) is not None:
            raise UsageError(f"{path}: column {twice!r} is there twice; give each column a name of its own")
        for field in schema:
            kept = field.with_type(replaced(field.type, partial(_carriable, path=path, column=field.name)))
            for name in (name for name, source in sources.items() if source == field.name):
                _merge(fields, kept.with_name(name), path, files)
    return Manifest(
        files=files,
        first_rows=tuple(sum(counts[:number]) for number in range(len(counts))),
        num_rows=sum(counts),
        schema=pa.schema([pa.field(field.name, field.type) for field in fields.values()]),
        sources=sources,
    )


def _sources(columns: list[str], mapping: Mapping[str, str]) -> dict[str, str]:
    for name, source in mapping.items():
        if source not in columns:
            raise UsageError(
                f"[columns] {name} = {source!r}: the manifest has no such column; it has {', '.join(columns)}"
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
            f"manifest: there is no column 'prompt'; found {', '.join(found) or 'no columns'}. "
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
    names = [field.name for field in fields]
    for field in fields:
        if names.count(field.name) > 1:
            return str(field.name)
        kind = field.type
        within = _repeated_name([kind.field(number) for number in range(kind.num_fields)])
        if within is not None:
            return f"{field.name}.{within}"
    return None


def _read(path: Path) -> Iterator[pa.RecordBatch]:
    file, num_read = _opened(path), 0
    try:
        for batch in file.iter_batches(batch_size=READ_ROWS):
            num_read += batch.num_rows
            yield batch
    except (OSError, pa.ArrowException) as error:
        raise UsageError(f"{path} cannot be read beyond row {num_read}: it is damaged ({error})") from None


def _opened(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, memory_map=True)
    except pa.ArrowException as error:
        with path.open("rb") as file:
            start = file.read(16)
        raise UsageError(
            f"{path} is not a Parquet file (it begins with {start!r}): {error}. "
            f"`batchgen import {path} -o manifest.parquet` reads csv, tsv, jsonl and txt"
        ) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error}") from None


def _is_visible(path: Path) -> bool:
    return not any(part.startswith((".", "_")) for part in path.parts)


def _listing(folder: Path) -> str:
    if not folder.is_dir():
        return "nothing: it does not exist"
    names = sorted(entry.name for entry in folder.iterdir())
    shown = ", ".join(names[:10]) or "nothing"
    return shown + (f" and {len(names) - 10} more" if len(names) > 10 else "")
