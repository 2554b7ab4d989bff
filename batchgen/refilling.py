"""A group's rows cut into batches with more rows than lanes, where that is predicted to be faster.

A batch of mixed step counts costs its longest row, so a plain cut of few rows has to choose between small batches and
idle lanes. In a refilled batch a lane whose row has finished takes the next one (`batchgen.schedule`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchgen.cost import Seconds
from batchgen.schedule import makespan

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
MAX_TURNS = 8
"""Rows per lane in a batch: more hardly idle less."""
MAX_BATCH_S = 30.0
"""Predicted seconds of a refilled batch: a signal waits for it or drops it, a kill loses it."""
MAX_IDLE_SHARE = 0.1
"""Of a group's row evaluations, what refilled batches may idle unless the plain ones, padding included, idle more."""
WORTH = 0.99
"""Of the plain cut's seconds, what a refilled one must be able to reach to be looked for: the plain cut of a large
group idles little, and need not be compared row by row."""


@dataclass(frozen=True, slots=True)
class Batches:
    """One group's rows, cut: an entry a batch, in row order."""

    size: Ints
    """The bucket's batch size, which is the number of lanes."""
    rows: Ints
    evaluations: Ints
    """That the batch takes: of its longest row, or of its busiest lane."""
    idle: Ints
    """Row evaluations in which a lane whose row has finished stands still."""
    seconds: Floats

    @property
    def total_s(self) -> float:
        return float(self.seconds.sum())

    def wasted(self, work: int) -> int:
        """Row evaluations beyond those that the rows need, in which lanes stand still or are padding."""
        return int((self.size * self.evaluations).sum()) - work


def cheapest(values: Ints, counts: Ints, table: dict[int, Seconds], plain: Batches, most_images: int) -> Batches:
    """The plain cut, or the refilled one that is predicted to be fastest, if it is faster.

    `values` and `counts` are the run-length form of the rows' evaluations, ascending; `table` has the seconds of the
    allowed sizes. Rows that are equally long are never refilled: there it is padding under another name, which the
    plain cut weighs. A batch has more rows than `most_images` only where two turns of its lanes are more.
    """
    best = plain
    if len(values) == 1:
        return best
    work, num_rows = int(values @ counts), int(counts.sum())
    may_waste = max(plain.wasted(work), work * MAX_IDLE_SHARE / (1 - MAX_IDLE_SHARE))
    least_s = {size: (one.evaluation_s * work + one.fixed_s * num_rows) / size for size, one in table.items()}
    for size in sorted(table, key=lambda size: least_s[size]):
        if least_s[size] >= WORTH * best.total_s:
            break
        most_rows = _most_rows(size, table[size].of(int(values[-1])), most_images)
        if 1 < size < min(num_rows, most_rows):
            found = _refilled(np.repeat(values, counts), size, table[size], -(-num_rows // most_rows))
            if found.total_s < best.total_s and found.wasted(work) <= may_waste:
                best = found
    return best


def _most_rows(size: int, turn_s: float, most_images: int) -> int:
    turns = MAX_TURNS if MAX_TURNS * turn_s <= MAX_BATCH_S else int(MAX_BATCH_S / turn_s)
    return min(turns * size, max(2 * size, most_images))


def _refilled(evaluations: Ints, size: int, costs: Seconds, num_batches: int) -> Batches:
    """Batches of as many rows each, up to one; each row's evaluations are given, in order."""
    edges = np.arange(num_batches + 1) * len(evaluations) // num_batches
    takes = np.array([makespan(one.tolist(), size) for one in np.split(evaluations, edges[1:-1])])
    rows = np.diff(edges)
    return Batches(
        size=np.full(num_batches, size),
        rows=rows,
        evaluations=takes,
        idle=size * takes - np.add.reduceat(evaluations, edges[:-1]),
        seconds=costs.evaluation_s * takes + costs.fixed_s * -(-rows // size),
    )
