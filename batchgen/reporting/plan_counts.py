"""What the plan and the receipts say of groups and buckets: images, batches, padding. Texts are not read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.ledger import Ledger, Receipt
from batchgen.plan_index import PlanIndex
from batchgen.plan_reader import PlanReader
from batchgen.records import Group

_COLUMNS = ("group", "batch", "batch_size", "sampler", "steps", "strength")
Evaluations = Callable[[str, int, float | None], int]
"""Model evaluations by sampler, step count and, of a row with an init image, strength; 0 where they are not known."""


@dataclass(slots=True)
class GroupCount:
    """Images of one group."""

    planned: int = 0
    made: int = 0
    failed: int = 0


@dataclass(slots=True)
class BucketCount:
    """What the plan does in one bucket. Rows that a later plan has count there."""

    batches: int = 0
    images: int = 0
    made: int = 0
    padded: int = 0
    """Lanes that no row of their batch fills."""
    evaluations: int = 0
    """Of rows, all plans' together; 0 where a sampler's are not known."""
    lane_evaluations: int = 0
    """Of all lanes, in the same batches."""

    @property
    def at_work(self) -> float | None:
        """The share of the lanes' evaluations that a row's steps have; None where it is not known."""
        return self.evaluations / self.lane_evaluations if self.evaluations and self.lane_evaluations else None


@dataclass(slots=True)
class PlanCounts:
    """All groups by number, all buckets by group and batch size, and the committed receipts, which hold no rows."""

    alike: npt.NDArray[np.int64]
    """The number that each group counts under: a plan that was appended has groups of those before it again."""
    groups: dict[int, GroupCount] = field(default_factory=dict)
    buckets: dict[tuple[int, int], BucketCount] = field(default_factory=dict)
    receipts: list[Receipt] = field(default_factory=list)
    cut: int = 0
    """Images whose prompt lost its end."""

    @property
    def made(self) -> int:
        return sum(one.made for one in self.groups.values())

    @property
    def failed(self) -> int:
        return sum(one.failed for one in self.groups.values())

    @property
    def planned(self) -> int:
        return sum(one.planned for one in self.groups.values())


def count_plan(index: PlanIndex, reader: PlanReader, ledger: Ledger, evaluations: Evaluations | None) -> PlanCounts:
    """Read the plan and the receipts once, a shard at a time; `evaluations` is None where it cannot be told."""
    counts = PlanCounts(_alike(index.groups))
    for shard, num_rows in zip(index.shards, index.shard_rows, strict=True):
        table = reader.shard(shard, _COLUMNS)
        group = counts.alike[table["group"].to_numpy()]
        here = index.rows(shard)
        is_here = np.zeros(num_rows, bool)
        is_here[sorted(here)] = True
        state = ledger.state(shard, num_rows)
        ok = frozenset(row for one in state.committed for row in one.ok) & here
        failed = frozenset(row for one in state.committed for row in one.failed) & here
        counts.cut += len(frozenset(row for one in state.committed for row in one.cut) & here)
        _count_groups(counts, group, is_here, _mask(ok, num_rows), _mask(failed, num_rows))
        _count_buckets(counts, table, group, is_here, _mask(ok, num_rows), evaluations)
        # Whose rows all count elsewhere is of no interest; nobody else's rows are held.
        counts.receipts += [
            replace(one, ok=(), failed=(), cut=())
            for one in state.committed
            if not here.isdisjoint(one.ok + one.failed)
        ]
    for work in index.buckets:
        if bucket := counts.buckets.get((int(counts.alike[work.group]), work.size)):
            bucket.lane_evaluations += work.size * work.evaluations
    return counts


def _alike(groups: Sequence[Group]) -> npt.NDArray[np.int64]:
    """The first number of each group."""
    numbers: dict[Group, int] = {}
    return np.array([numbers.setdefault(group, number) for number, group in enumerate(groups)], np.int64)


def planned_columns(
    counts: PlanCounts, reader: PlanReader, shard: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Group, by the number that it counts under, and batch size of each row of a shard."""
    table = reader.shard(shard, ("group", "batch_size"))
    return counts.alike[table["group"].to_numpy()], table["batch_size"].to_numpy().astype(np.int64)


Flags = npt.NDArray[np.bool_]


def _mask(rows: frozenset[int], num_rows: int) -> Flags:
    mask = np.zeros(num_rows, bool)
    mask[sorted(rows)] = True
    return mask


def _count_groups(counts: PlanCounts, group: npt.NDArray[np.int64], here: Flags, ok: Flags, failed: Flags) -> None:
    for number in np.unique(group).tolist():
        is_it = group == number
        one = counts.groups.setdefault(number, GroupCount())
        one.planned += int((is_it & here).sum())
        one.made += int((is_it & ok).sum())
        one.failed += int((is_it & failed).sum())


def _count_buckets(
    counts: PlanCounts,
    table: pa.Table,
    group: npt.NDArray[np.int64],
    here: Flags,
    ok: Flags,
    evaluations: Evaluations | None,
) -> None:
    batch = table["batch"].to_numpy()
    starts = np.flatnonzero(np.append(True, batch[1:] != batch[:-1]))
    rows, left = np.diff(np.append(starts, len(batch))), np.add.reduceat(here.astype(np.int64), starts)
    made = np.add.reduceat(ok.astype(np.int64), starts)
    num = np.add.reduceat(_evaluations_of(table, evaluations), starts)
    group, size = group[starts], table["batch_size"].to_numpy()[starts]
    for key in _distinct(group, size):
        is_it = (group == key[0]) & (size == key[1])
        one = counts.buckets.setdefault(key, BucketCount())
        one.batches += int((is_it & (left > 0)).sum())
        one.images += int(left[is_it].sum())
        one.made += int(made[is_it].sum())
        one.padded += int(np.maximum(0, size - rows)[is_it & (left > 0)].sum())
        one.evaluations += int(num[is_it].sum())


def _distinct(group: npt.NDArray[np.int64], size: npt.NDArray[np.int32]) -> Iterator[tuple[int, int]]:
    return ((int(one), int(other)) for one, other in np.unique(np.stack([group, size], 1), axis=0))


def _evaluations_of(table: pa.Table, evaluations: Evaluations | None) -> npt.NDArray[np.int64]:
    """Of each row, 0 where they are not known."""
    if evaluations is None:
        return np.zeros(len(table), np.int64)
    rows = list(zip(*(table[name].to_pylist() for name in ("sampler", "steps", "strength")), strict=True))
    known = {row: evaluations(*row) for row in set(rows)}
    return np.array([known[row] for row in rows], np.int64)
