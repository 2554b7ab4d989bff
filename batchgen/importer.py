"""`batchgen import`: a csv, tsv, jsonl or txt file, or a data set, becomes one Parquet manifest.

Rows stream through in chunks, so memory does not grow with their number. `expansion` says what a row of the source
may become, `product` makes it.
"""

from __future__ import annotations

import difflib
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.errors import UsageError
from batchgen.expansion import Expansion, recipe
from batchgen.filesystem import FileSystem, resumable
from batchgen.product import Product
from batchgen.sources.base import Nothing, Source
from batchgen.sources.hub import HubTable
from batchgen.sources.jsonlines import JsonLines
from batchgen.sources.tables import Table
from batchgen.wording import listed

_READERS: Mapping[str, Callable[[Path], Source]] = {
    ".csv": Table,
    ".tsv": Table,
    ".txt": Table,
    ".jsonl": JsonLines,
}
_ALLOWED = f"{', '.join(_READERS)}, a data set's folder, or its name on the Hugging Face hub"
_TABLE_SUFFIXES = frozenset([".parquet", ".json", ".xls", ".xlsx", ".ods", ".arrow", ".feather", ".gz", ".zip", ".zst"])
"""Files of tables that are not read: a name that ends so is none of a data set on the hub."""
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
_SEPARATORS = {
    ";": "semicolons between its cells, save it with commas",
    "|": "bars between its cells, save it with commas",
    "\t": "tabs between its cells, name it NAME.tsv",
    ",": "commas between its cells, name it NAME.csv",
}
_ALSO_PROMPTS = ("caption", "text", "description")


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import wrote."""

    rows: int
    columns: tuple[str, ...]
    notes: tuple[str, ...]
    """Sentences on what a person should know: blank lines, columns that are not carried, …"""


def import_rows(
    source: str | None,
    out: Path,
    *,
    columns: Mapping[str, str] | None = None,
    split: str | None = None,
    overwrite: bool = False,
    expansion: Expansion = Expansion(),  # noqa: B008
) -> Imported:
    """Write the rows of `source`, and what an expansion makes of each, to the Parquet file `out`, whole or not at all.

    `columns` maps the manifest's name of a column to the source's; every other column keeps its name. `split`
    is for data sets. Without a source, the expansion alone makes rows. Raises UsageError for what cannot be taken,
    Interrupted if the disk fails.
    """
    _check_out(out, overwrite)
    table = Nothing() if source is None else _open(source, split, (columns or {}).get("image"))
    _check_sourceless(source, columns, split)
    renamed = _renamed(table.names, dict(columns or {}), source, not expansion.makes_prompts) if source else {}
    notes: list[str] = []
    batches = table.batches(renamed, notes)
    if expansion or source is None:
        product = Product(recipe(expansion, list(renamed.values()), source), source or "the grid")
        product.read(lambda: table.batches(renamed, []))
        batches = product.rows(batches)
    folder = expansion.image_folder
    if source is not None and Path(source).is_file() and "image" in renamed.values():
        folder = Path(source).parent
    if folder is not None:
        batches = _anchored(batches, folder, out.parent, notes)
    with _in_place(out) as temporary:
        rows, names = _write(batches, temporary, source)
    return Imported(rows, names, tuple(notes))


def _anchored(
    batches: Iterator[pa.RecordBatch], folder: Path, target: Path, notes: list[str]
) -> Iterator[pa.RecordBatch]:
    """The rows with paths of init images that hold in the manifest too, wherever it lies: relative ones begin in
    `folder`, and are whole where the manifest is written to another."""
    is_elsewhere, num = folder.resolve() != target.resolve(), 0
    for batch in batches:
        names = batch.column("image").to_pylist() if is_elsewhere else []
        whole = [name if name is None or "://" in name else str((folder / name).absolute()) for name in names]
        num += sum(one != name for one, name in zip(whole, names, strict=True))
        yield (
            batch.set_column(batch.schema.get_field_index("image"), "image", pa.array(whole, pa.string()))
            if names
            else batch
        )
    if num:
        notes.append(f"paths in column image are whole now, and begin in {folder.resolve()}: {num}")


def _check_sourceless(source: str | None, columns: Mapping[str, str] | None, split: str | None) -> None:
    option = "--column" if columns else "--split" if split is not None else ""
    if source is None and option:
        raise UsageError(f"{option} is for a SOURCE, and there is none; name a file or a data set")


def _check_out(out: Path, overwrite: bool) -> None:
    if out.suffix.lower() != ".parquet":
        raise UsageError(f"-o {out}: the manifest to write must be named NAME.parquet")
    if not out.parent.is_dir():
        raise UsageError(f"-o {out}: there is no folder {out.parent}; make it first")
    if out.is_dir() or (out.exists() and not overwrite):
        raise UsageError(f"-o {out} exists already; name another file, or add --overwrite to replace it")


def _open(source: str, split: str | None, image: str | None) -> Source:
    path = Path(source)
    if path.is_file():
        return _open_file(path, split)
    if path.is_dir() or not _looks_like_file(source):
        return HubTable(source, split, image)
    raise UsageError(f"there is no file {source}; import takes {_ALLOWED}")


def _open_file(path: Path, split: str | None) -> Source:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        raise UsageError(f"{path} is Parquet already: give it to `batchgen run` as it is (a job file maps columns)")
    if suffix not in _READERS:
        raise UsageError(f"{path}: files of this kind are not taken; import takes {_ALLOWED}")
    if split is not None:
        raise UsageError(f"--split {split}: only a data set has splits, {path} is a file")
    return _READERS[suffix](path)


def _looks_like_file(source: str) -> bool:
    suffix = Path(source).suffix.lower()
    is_table = suffix in _READERS or suffix in _TABLE_SUFFIXES
    return is_table or source.startswith(".") or _HUB_NAME.fullmatch(source) is None


def _renamed(names: list[str], columns: dict[str, str], source: str, needs_prompt: bool) -> dict[str, str]:
    """The manifest's name of each of the source's columns."""
    if not names:
        raise UsageError(f"{source} has no rows")
    _refuse_twins(names, f"{source} names columns twice")
    for ours, theirs in columns.items():
        if theirs not in names:
            raise UsageError(f"--column {ours}={theirs}: {source} has no column {theirs!r}; {_found(names)}")
    _refuse_twins(list(columns.values()), f"{source}: --column takes a column twice")
    theirs_to_ours = {theirs: ours for ours, theirs in columns.items()}
    renamed = {name: theirs_to_ours.get(name, name) for name in names}
    if needs_prompt and "prompt" not in renamed.values():
        _refuse_separator(names, source)
        raise UsageError(f"{source} has no column prompt; {_found(names)}. Add --column prompt={_nearest(names)}")
    if "" in renamed.values():
        raise UsageError(f"{source}: a column has no name; give it one with --column index= (any name will do)")
    _refuse_twins(
        list(renamed.values()),
        f"{source}: after --column two columns have one name; rename the other one too",
    )
    return renamed


def _refuse_twins(names: list[str], sentence: str) -> None:
    twins = sorted({name for name in names if names.count(name) > 1})
    if twins:
        raise UsageError(f"{sentence}: {', '.join(map(repr, twins))}")


def _refuse_separator(names: list[str], source: str) -> None:
    """Say of a table that is cut at another letter what it looks like: one column, named as all of them together."""
    mend = next((mend for letter, mend in _SEPARATORS.items() if letter in names[0]), None)
    if len(names) == 1 and mend is not None:
        raise UsageError(f"{source}: one column {names[0]!r} was found; if it has {mend}")


def _found(names: list[str]) -> str:
    return f"its columns are {listed(list(map(repr, names[:30])), len(names))}"


def _nearest(names: list[str]) -> str:
    """The column that most likely holds the prompts, as an option's value; NAME if there is no such."""
    folded = {name.strip().casefold(): name for name in reversed(names)}
    for wanted in ("prompt", *_ALSO_PROMPTS):
        near = difflib.get_close_matches(wanted, folded, n=1, cutoff=0.8)
        near = near or [name for name in folded if name.startswith(wanted)]
        if near:
            name = folded[near[0]]
            return name if name.isidentifier() else repr(name)
    return "NAME"


@contextmanager
def _in_place(out: Path) -> Iterator[Path]:
    """A temporary path beside `out` that takes its place, durably, if the block succeeds, and goes if not."""
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(8)}.tmp")
    files = FileSystem()
    try:
        with resumable(out):
            yield temporary
            with temporary.open("rb") as file:
                files.sync_file(file)
            os.replace(temporary, out)
            files.sync_folder(out.parent)
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error}") from None
    finally:
        with suppress(OSError):  # Of a disk that is lost or read-only, which was said already.
            temporary.unlink(missing_ok=True)


def _write(batches: Iterator[pa.RecordBatch], path: Path, source: str | None) -> tuple[int, tuple[str, ...]]:
    """The number of rows, and the names of their columns."""
    first = next(batches, None)
    if first is None:
        raise UsageError(f"{source} has no rows")
    rows = int(first.num_rows)
    with pq.ParquetWriter(path, first.schema, compression="zstd") as writer:
        writer.write_batch(first)
        for batch in batches:
            writer.write_batch(batch)
            rows += batch.num_rows
    return rows, tuple(first.schema.names)
