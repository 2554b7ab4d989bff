"""Bad rows of a manifest: the first ones for a person, all of them for `rejected.parquet`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.checks import BadCell
from batchgen.filesystem import FileSystem, resumable
from batchgen.manifest import Manifest
from batchgen.wording import counted, with_more

SHOWN = 20
_CELLS = pa.schema([("manifest_row", pa.int64()), ("fault", pa.string())])


class Rejections:
    """Collects bad cells; more than the first few wait in a temporary file."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._first: list[BadCell] = []
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as this object
        self._writer = pa.ipc.new_stream(self._file, _CELLS)
        self.num_cells = 0

    def add(self, cells: list[BadCell]) -> None:
        self.num_cells += len(cells)
        self._first += cells[: SHOWN - len(self._first)]
        rows = [cell.row for cell in cells]
        faults = [f"{cell.column} = {cell.value} {cell.rule}" for cell in cells]
        with resumable(Path(tempfile.gettempdir())):
            self._writer.write_table(pa.table([pa.array(rows, pa.int64()), pa.array(faults)], schema=_CELLS))

    def message(self, num_rows: int, *, is_skipped: bool = False) -> str:
        """What is wrong, for a person: `num_rows` rows, of which the first are named."""
        every = counted(self._manifest.num_rows, "manifest row")
        lines = [f"{num_rows:,} of {every} cannot be made as asked (rows count from 0):"]
        first = sorted(self._first, key=lambda cell: cell.row)
        lines += with_more([self._line(cell) for cell in first], self.num_cells)
        if is_skipped:
            lines.append("They are left out; a run keeps them all, with their faults, in rejected.parquet")
        else:
            lines.append("Mend the manifest, or leave such rows out with --on-bad-row skip")
        return "\n".join(lines)

    def _line(self, cell: BadCell) -> str:
        file, row = self._manifest.place(cell.row)
        return f"  {file} row {row}: {cell.column} = {cell.value} {cell.rule}"

    def write(self, path: Path, files: FileSystem) -> None:
        """The bad rows with all their columns, their place and their faults, as a durable Parquet file."""
        faults = self._by_row()
        with resumable(path), path.open("xb") as file:
            with pq.ParquetWriter(file, _rejected_schema(self._manifest.schema)) as writer:
                for table in self._rows(faults, writer.schema):
                    writer.write_table(table)
            files.sync_file(file)

    def _by_row(self) -> pa.Table:
        """One line per bad manifest row, ascending, with a list of its faults."""
        self._writer.close()
        self._file.seek(0)
        cells = pa.ipc.open_stream(self._file).read_all()
        grouped = cells.group_by("manifest_row", use_threads=False).aggregate([("fault", "list")])
        return grouped.sort_by("manifest_row")

    def _rows(self, faults: pa.Table, schema: pa.Schema) -> Iterator[pa.Table]:
        bad = faults["manifest_row"].to_numpy()
        first_row = 0
        for batch in self._manifest.batches():
            start, end = np.searchsorted(bad, [first_row, first_row + batch.num_rows])
            rows = bad[start:end]
            places = [self._manifest.place(row) for row in rows.tolist()]
            own = [
                pa.array([str(file) for file, _ in places], pa.string()),
                pa.array([row for _, row in places], pa.int64()),
                faults["fault_list"].slice(start, end - start).combine_chunks(),
            ]
            if len(rows):
                # By slices: not every type can be taken by index.
                kept = pa.Table.from_batches([batch.slice(row, 1) for row in (rows - first_row).tolist()])
                yield pa.table([*own, *kept.columns], schema=schema)
            first_row += batch.num_rows


def _rejected_schema(manifest: pa.Schema) -> pa.Schema:
    """Place and faults before the manifest's own columns; a manifest that has such names keeps them."""
    own = [("file", pa.string()), ("row", pa.int64()), ("faults", pa.list_(pa.string()))]
    return pa.schema([*(pa.field(_free(name, manifest.names), kind) for name, kind in own), *manifest])


def _free(name: str, taken: list[str]) -> str:
    return _free(f"rejected_{name}", taken) if name in taken else name
