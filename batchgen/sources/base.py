"""What the kinds of source share: records with their line, chunks of bounded memory, the list of faults."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import pyarrow as pa

from batchgen.errors import UsageError

ROWS_PER_CHUNK = 65_536
CHARACTERS_PER_CHUNK = 64 << 20
SHOWN_FAULTS = 20

Values = TypeVar("Values")


class Source(Protocol):
    """A table to import, readable from its beginning as often as asked."""

    names: list[str]
    """Its columns, as it names them."""

    def batches(self, renamed: Mapping[str, str], notes: list[str]) -> Iterator[pa.RecordBatch]:
        """All rows under the manifest's names, at most ROWS_PER_CHUNK in a batch, all of one schema.

        `renamed` gives the manifest's name of every column that is carried. What a person should know goes to
        `notes` by the end. Raises UsageError with the place of each fault.
        """
        ...


@dataclass(slots=True)
class Nothing:
    """No source: one row without columns, for a grid or a template to multiply."""

    names: list[str] = field(default_factory=list)

    def batches(self, renamed: Mapping[str, str], notes: list[str]) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_struct_array(pa.array([{}], pa.struct([])))


@dataclass(frozen=True, slots=True)
class Record(Generic[Values]):
    """One row of a text file."""

    line: int
    """Where it begins, from 1."""
    values: Values
    size: int
    """Characters, about: what bounds a chunk's memory."""


@dataclass(slots=True)
class Faults:
    """Wrong values, counted; the first few are told."""

    where: str
    count: int = 0
    told: list[str] = field(default_factory=list)

    def add(self, line: int, text: str) -> None:
        self.count += 1
        if self.count <= SHOWN_FAULTS:
            self.told.append(f"line {line}: {text}")

    def raise_if_any(self) -> None:
        """Raises UsageError that lists the first faults and counts all."""
        if not self.count:
            return
        more = f"\n  … and {self.count - len(self.told)} more" if self.count > len(self.told) else ""
        noun = "fault" if self.count == 1 else "faults"
        listed = "\n  ".join(self.told)
        raise UsageError(f"{self.where} has {self.count} {noun}:\n  {listed}{more}\nNothing was written.")


def chunks(records: Iterable[Record[Values]]) -> Iterator[list[Record[Values]]]:
    """Records in lists that are bounded in rows and in characters."""
    chunk: list[Record[Values]] = []
    size = 0
    for record in records:
        chunk.append(record)
        size += record.size
        if len(chunk) == ROWS_PER_CHUNK or size >= CHARACTERS_PER_CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def lines(path: Path) -> Iterator[str]:
    r"""The file's lines with their ends, cut at "\n" alone, without a byte order mark.

    Raises UsageError if the file cannot be read, or with line and byte offset where it is not UTF-8.
    """
    offset = 0
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                text = _decoded(raw, path, number, offset)
                yield text.removeprefix("\ufeff") if number == 1 else text
                offset += len(raw)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error}") from None


def shorten(value: object) -> str:
    """A value as an error message shows it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _decoded(raw: bytes, path: Path, number: int, offset: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}, line {number}: byte {raw[error.start]:#04x} at offset {offset + error.start} is not "
            "UTF-8; save the file as UTF-8 first"
        ) from None


def without_end(line: str) -> str:
    r"""The line less its "\n" or "\r\n"."""
    return line.removesuffix("\n").removesuffix("\r") if line.endswith("\n") else line
