"""Rows whose id another row has too: found by the ids' digests, named by the ids themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from batchgen.checks import BadCell
from batchgen.columns import Bools, decoded
from batchgen.identity import Digests, repeated
from batchgen.manifest import Manifest


def refuse_duplicates(
    ids: Digests, is_good: Bools, manifest: Manifest, on_bad: Callable[[list[BadCell]], None]
) -> Bools | None:
    """Refuse every row whose id another row has too; which of them are good is returned, None for all."""
    same_high = repeated(ids.high)
    order = same_high[np.lexsort((same_high, ids.low[same_high], ids.high[same_high]))]
    same = (ids.high[order][1:] == ids.high[order][:-1]) & (ids.low[order][1:] == ids.low[order][:-1])
    if not same.any():
        return None
    is_twice = np.append(same, False) | np.append(False, same)
    number = np.cumsum(np.append(True, ~same))[is_twice]
    places, row_of = order[is_twice], np.flatnonzero(is_good)
    first = np.searchsorted(number, number)
    in_order = np.argsort(places)
    for rows, names in _id_texts(manifest, row_of[places[in_order]]):
        cells = []
        for at, name in zip(in_order[rows].tolist(), names, strict=True):
            some = slice(first[at], first[at] + 4)
            others = row_of[places[some][(number[some] == number[at]) & (places[some] != places[at])]]
            cells.append(BadCell(int(row_of[places[at]]), "id", repr(name), _duplicate(others.tolist())))
        on_bad(cells)
    is_good[row_of[places]] = False
    keep = np.ones(len(ids), bool)
    keep[places] = False
    return keep


def _duplicate(others: list[int]) -> str:
    return f"must be unique; manifest row {', '.join(map(str, others[:3]))} has it too"


def _id_texts(manifest: Manifest, rows: npt.NDArray[np.intp]) -> Iterator[tuple[slice, list[str]]]:
    """The ids of some ascending rows, batch by batch: which of the rows, and their ids."""
    first_row = 0
    for batch in manifest.batches():
        start, end = np.searchsorted(rows, [first_row, first_row + batch.num_rows]).tolist()
        column = decoded(batch.column("id"))
        if end > start:
            yield slice(start, end), [str(column[int(row) - first_row].as_py()) for row in rows[start:end]]
        first_row += batch.num_rows
