"""Text tables: csv (RFC 4180), tsv (no quoting: a quote is an ordinary character) and txt (a prompt a line).

Cells stay the text they are, except in the columns that batchgen knows as numbers.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import pyarrow as pa

from batchgen.errors import UsageError, counted
from batchgen.sources import cells
from batchgen.sources.base import CHARACTERS_PER_CHUNK, Faults, Record, chunks, lines, shorten, without_end

Row: TypeAlias = Record[list[str]]

_AFTER_LONE_RETURN = re.compile(r"(?<=\r)(?!\n)")


@dataclass(slots=True)
class Table:
    """A csv, tsv or txt file."""

    path: Path
    names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        if not self._has_header:
            self.names = ["prompt"]
            return
        header = next(self._records(), None)
        if header is None:
            raise UsageError(f"{self.path} is empty: its first line must name the columns, `prompt` among them")
        self.names = header.values

    def batches(self, renamed: Mapping[str, str], notes: list[str]) -> Iterator[pa.RecordBatch]:
        faults = Faults(str(self.path))
        blank = _BlankLines()
        num_empty = 0
        for chunk in chunks(self._rows(faults, blank)):
            batch = _batch(chunk, [renamed[name] for name in self.names], faults)
            num_empty += _num_empty_negatives(batch)
            yield batch
        faults.raise_if_any()
        notes += blank.notes()
        if num_empty:
            notes.append(
                f'{num_empty} cells of negative_prompt are empty and stay the text "", which is encoded like '
                "any other; for no negative prompt (null) leave the column out or import jsonl"
            )

    @property
    def _has_header(self) -> bool:
        return self.path.suffix.lower() != ".txt"

    def _rows(self, faults: Faults, blank: _BlankLines) -> Iterator[Row]:
        records = self._records(blank)
        if self._has_header:
            next(records)
        for record in records:
            if len(record.values) == len(self.names):
                yield record
            else:
                faults.add(
                    record.line, f"{counted(len(record.values), 'cell')} where the header names {len(self.names)}"
                )

    def _records(self, blank: _BlankLines | None = None) -> Iterator[Row]:
        blank = blank or _BlankLines()
        if self.path.suffix.lower() == ".csv":
            return _csv_records(self.path, blank)
        separator = "\t" if self._has_header else None
        return _split_records(self.path, separator, blank)


@dataclass(slots=True)
class _BlankLines:
    """Lines that are no rows, for the note."""

    count: int = 0
    first: int = 0

    def add(self, line: int) -> None:
        self.first = self.first or line
        self.count += 1

    def notes(self) -> list[str]:
        if not self.count:
            return []
        return [f"blank lines that are no rows: {self.count}, the first of them line {self.first}"]


def _csv_records(path: Path, blank: _BlankLines) -> Iterator[Row]:
    csv.field_size_limit(CHARACTERS_PER_CHUNK)
    reader = csv.reader(_csv_lines(path), strict=True)
    line = 1
    try:
        for row in reader:
            if row:
                yield Record(line, row, sum(map(len, row)))
            else:
                blank.add(line)
            line = reader.line_num + 1
    except csv.Error as error:
        raise UsageError(
            f"{path}: the row that begins at line {line} is not csv ({error}); a cell with a quote, a comma "
            'or a line break must stand in "double quotes", its own quotes doubled'
        ) from None


def _csv_lines(path: Path) -> Iterator[str]:
    for line in lines(path):
        if "\r" in line[:-2]:
            yield from filter(None, _AFTER_LONE_RETURN.split(line))
        else:
            yield line


def _split_records(path: Path, separator: str | None, blank: _BlankLines) -> Iterator[Row]:
    for number, line in enumerate(lines(path), start=1):
        text = without_end(line)
        if not text or (separator is None and text.isspace()):
            blank.add(number)
        else:
            yield Record(number, text.split(separator) if separator else [text], len(text))


def _batch(chunk: list[Row], names: list[str], faults: Faults) -> pa.RecordBatch:
    columns = zip(*(row.values for row in chunk), strict=True)
    arrays = [
        pa.array(_parsed(name, column, chunk, faults), cells.TYPES.get(name, pa.string()))
        for name, column in zip(names, columns, strict=True)
    ]
    return pa.record_batch(arrays, names=names)


def _parsed(name: str, column: tuple[str, ...], chunk: list[Row], faults: Faults) -> Iterable[object]:
    parse = cells.parser(name)
    if parse is None:
        return column
    try:
        return [parse(cell) for cell in column]
    except ValueError:
        values: list[object] = []
    for row, cell in zip(chunk, column, strict=True):
        try:
            values.append(parse(cell))
        except ValueError as error:
            faults.add(row.line, f"column {name} is {shorten(cell)}; {error}")
            values.append(None)
    return values


def _num_empty_negatives(batch: pa.RecordBatch) -> int:
    if "negative_prompt" not in batch.schema.names:
        return 0
    column = batch.column("negative_prompt")
    return int(pa.compute.sum(pa.compute.equal(column, "")).as_py() or 0)
