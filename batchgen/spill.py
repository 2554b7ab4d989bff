"""A stream of tables brought into another order with bounded memory: one distribution pass over the disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

MAX_PARTS = 256
PART_ROWS = 100_000
PART_BYTES = 64 * 2**20
_RANK = "\0rank"


class Reorder:
    """Rows are added with their final ranks (0, 1, …, each once) and come out in rank order, a part at a time.

    Each part of the rank space has its own file under `folder`; only one part is in memory at once.
    """

    def __init__(self, folder: Path, schema: pa.Schema, bounds: npt.NDArray[np.int64]) -> None:
        """`bounds` are the ranks at which parts begin, and the end."""
        self._bounds = bounds
        self._files = [folder / f"{number:04d}.arrow" for number in range(len(bounds) - 1)]
        self._schema = schema.append(pa.field(_RANK, pa.uint32()))
        self._writers = [pa.ipc.new_stream(str(file), self._schema) for file in self._files]

    def add(self, table: pa.Table, ranks: npt.NDArray[np.uint32]) -> None:
        """Hand over rows whose ranks are as many and in the same order."""
        order = np.argsort(ranks, kind="stable")
        ranked = table.append_column(_RANK, pa.array(ranks)).take(order).combine_chunks()
        edges = np.searchsorted(ranks[order], self._bounds)
        for writer, start, end in zip(self._writers, edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            if end > start:
                writer.write_table(ranked.slice(start, end - start))

    def parts(self) -> Iterator[pa.Table]:
        """The rows in rank order. Call once, after the last `add`."""
        for writer in self._writers:
            writer.close()
        for file in self._files:
            # Not mapped into memory: a disk that is lost meanwhile would end the process.
            with pa.OSFile(str(file)) as source:
                table = pa.ipc.open_stream(source).read_all()
                order = np.argsort(table[_RANK].to_numpy(), kind="stable")
                yield table.drop_columns([_RANK]).take(order).combine_chunks()
            file.unlink()


def part_bounds(edges: npt.NDArray[np.int64], num_bytes: int = 0) -> npt.NDArray[np.int64]:
    """Bounds of parts of about PART_ROWS rows and PART_BYTES bytes of `num_bytes` in all, at most MAX_PARTS of them,
    each at one of the ascending `edges` (of which the last is the number of rows)."""
    num_rows = int(edges[-1])
    num_parts = max(1, min(MAX_PARTS, max(-(-num_rows // PART_ROWS), -(-num_bytes // PART_BYTES))))
    wanted = np.linspace(0, num_rows, num_parts + 1)
    return np.unique(edges[np.searchsorted(edges, wanted)])
