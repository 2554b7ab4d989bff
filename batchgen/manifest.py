"""The manifest's files: found, opened, and read in batches under our own column names.

Several files, a folder or a glob are one manifest: the files in sorted order, their rows in file order.
"""

from __future__ import annotations

import bisect
import difflib
import glob
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.errors import UsageError

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
    """Under our names, dictionaries of columns of all files."""
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
        """All rows in order, in batches of one schema; columns that a file lacks are null."""
        for path in self.files:
            file = _opened(path)
            present = set(file.schema_arrow.names)
            wanted = [source for source in self.sources.values() if source in present]
            for batch in file.iter_batches(batch_size=READ_ROWS, columns=wanted):
                yield self._unified(batch)

    def _unified(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        arrays = []
        for name, kind in zip(self.schema.names, self.schema.types, strict=True):
            source = self.sources[name]
            if source in batch.schema.names:
                column = batch.column(source)
                arrays.append(column if column.type == kind else column.cast(kind))
            else:
                arrays.append(pa.nulls(batch.num_rows, kind))
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)

    def content_hash(self) -> str:
        """SHA-256 over the bytes of all files, in order."""
        total = hashlib.sha256()
        for path in self.files:
            with path.open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
        return total.hexdigest()


def find_files(names: Sequence[str | Path]) -> tuple[Path, ...]:
    """The Parquet files that paths, folders and globs name, each once. Raises UsageError for a name without any."""
    found: list[Path] = []
    for name in names:
        path = Path(name)
        if path.is_dir():
            files = sorted(file for file in path.rglob("*.parquet") if _is_visible(file.relative_to(path)))
            missing = f"folder {path} holds no *.parquet file; it holds {_listing(path)}"
        elif path.exists():
            files, missing = [path], ""
        else:
            files = [Path(file) for file in sorted(glob.glob(str(name), recursive=True))]
            missing = f"{name} matches no file; the folder {path.parent} holds {_listing(path.parent)}"
        if not files:
            raise UsageError(f"manifest: {missing}")
        found.extend(file for file in files if file not in found)
    if not found:
        raise UsageError("manifest: no file was named")
    return tuple(found)


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
    ours = {source: name for name, source in sources.items()}
    fields: dict[str, pa.Field] = {}
    for path, schema in zip(files, schemas, strict=True):
        for field in schema:
            if schema.names.count(field.name) > 1:
                raise UsageError(f"{path}: column {field.name!r} is there twice; give each column a name of its own")
            if field.name in ours:
                _merge(fields, field.with_name(ours[field.name]), path, files)
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
        raise UsageError(
            f"manifest: there is no column 'prompt'; found {', '.join(columns) or 'no columns'}. "
            f"Name the right one with --set columns.prompt={guess!r} or in the job file's [columns]"
        )
    return sources


def _merge(fields: dict[str, pa.Field], field: pa.Field, path: Path, files: tuple[Path, ...]) -> None:
    known = fields.get(field.name)
    if known is None:
        fields[field.name] = field
        return
    try:
        unified = pa.unify_schemas([pa.schema([known]), pa.schema([field])], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        raise UsageError(
            f"manifest: column {field.name!r} is {field.type} in {path} but {known.type} in an earlier file "
            f"({files[0]} is the first); files of one manifest agree about their columns"
        ) from None
    fields[field.name] = unified.field(0)


def _opened(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path, memory_map=True)
    except (pa.ArrowInvalid, pa.ArrowException) as error:
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
