"""Bad rows of a manifest: the first ones for a person, all of them for `rejected.parquet`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.checks import BadCell
from batchgen.filesystem import FileSystem, resumable
from batchgen.manifest import Manifest

SHOWN = 20
SCHEMA = pa.schema(
    [
        ("file", pa.string()),
        ("row", pa.int64()),
        ("column", pa.string()),
        ("value", pa.string()),
        ("rule", pa.string()),
    ]
)
"""One line per rule that a row breaks; rows count from 0 in their file."""


class Rejections:
    """Collects bad cells; more than the first few wait in a temporary file."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._first: list[BadCell] = []
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as this object
        self._writer = pa.ipc.new_stream(self._file, SCHEMA)
        self.num_cells = 0

    def add(self, cells: list[BadCell]) -> None:
        self.num_cells += len(cells)
        self._first += cells[: SHOWN - len(self._first)]
        places = [self._manifest.place(cell.row) for cell in cells]
        columns = [
            [str(file) for file, _ in places],
            [row for _, row in places],
            [cell.column for cell in cells],
            [cell.value for cell in cells],
            [cell.rule for cell in cells],
        ]
        self._writer.write_table(
            pa.table(
                [pa.array(values, kind) for values, kind in zip(columns, SCHEMA.types, strict=True)], schema=SCHEMA
            )
        )

    def message(self, num_rows: int) -> str:
        """What is wrong, for a person: `num_rows` rows, of which the first are named."""
        lines = [f"{num_rows} of {self._manifest.num_rows} manifest rows cannot be made as asked (rows count from 0):"]
        lines += [self._line(cell) for cell in self._first]
        if self.num_cells > len(self._first):
            lines.append(f"  … and {self.num_cells - len(self._first)} more")
        lines.append("Mend the manifest, or leave such rows out with --on-bad-row skip")
        return "\n".join(lines)

    def _line(self, cell: BadCell) -> str:
        file, row = self._manifest.place(cell.row)
        return f"  {file} row {row}: {cell.column} = {cell.value} {cell.rule}"

    def write(self, path: Path, files: FileSystem) -> None:
        """All bad cells as a durable Parquet file."""
        with resumable(path), path.open("xb") as file:
            with pq.ParquetWriter(file, SCHEMA) as writer:
                for batch in self._batches():
                    writer.write_batch(batch)
            files.sync_file(file)

    def _batches(self) -> Iterator[pa.RecordBatch]:
        self._writer.close()
        self._file.seek(0)
        yield from pa.ipc.open_stream(self._file)
