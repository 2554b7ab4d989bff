"""Groups, batches and shards, as pure functions over arrays: one entry per row at most, no Python object per row.

Rows of a group are sorted by model evaluations (ascending) before they are cut, so that a plain batch's cost is that
of its last row and rows that finish early idle little. Where it is predicted to be faster, a group is cut into refilled
batches instead, which have more rows than lanes (`batchgen.refilling`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from batchgen.cost import Cost, Seconds
from batchgen.limits import Limits
from batchgen.models.facts import OWN_UPDATE, Facts
from batchgen.records import Group
from batchgen.refilling import Batches, cheapest

Ints = npt.NDArray[np.int64]
SHARD_S = 180.0
"""Predicted seconds that a shard may take."""
MAX_SHARD_IMAGES = 1_000
MIN_SHARDS = 16
"""A run is cut into about this many shards, if its batches allow, so that several workers find work."""
_PADDED_ROW_S = 1e9
"""Price of a padded slot where costs are not measured: exact sizes always win."""


@dataclass(slots=True)
class Grouper:
    """Numbers the groups that rows fall into, in the order met."""

    facts: Facts
    samplers: list[str]
    """Names by number; may grow while rows are read."""
    loras: list[str]
    """Names of LoRA sets by number; the first is "", none."""
    groups: list[Group]
    _numbers: dict[Group, int]

    @classmethod
    def of(cls, facts: Facts, samplers: list[str], loras: Sequence[str] = ("",)) -> Grouper:
        return cls(facts, samplers, list(loras), [], {})

    def assign(
        self,
        width: Ints,
        height: Ints,
        is_guided: npt.NDArray[np.bool_],
        sampler: npt.NDArray[np.int32],
        steps: Ints,
        *,
        lengths: Sequence[Ints] | None = None,
        skipped: Ints | None = None,
        lora: npt.NDArray[np.int32] | None = None,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Group number and model evaluations of each row. `lengths` are those of the prompts and of what weighs against
        them, where they follow the texts. `skipped` are the steps that its init image stands for, -1 where it has none;
        None: no row has one. Without `lora`, none has a set."""
        shape = (width << 17) | (height << 1) | is_guided
        if lengths is not None:
            shape |= (lengths[0] << 34) | (np.where(is_guided, lengths[1], 0) << 48)
        first = np.zeros_like(steps) if skipped is None else skipped + 1
        schedule = (sampler.astype(np.int64) << 32) | (steps << 16) | first
        if lora is not None:
            schedule |= lora.astype(np.int64) << 48
        shapes, of_shape = np.unique(shape, return_inverse=True)
        schedules, of_schedule = np.unique(schedule, return_inverse=True)
        pairs, of_pair = np.unique(of_shape * len(schedules) + of_schedule, return_inverse=True)
        numbers = [
            self._number(int(shapes[pair // len(schedules)]), int(schedules[pair % len(schedules)])) for pair in pairs
        ]
        evaluations = [self._evaluations(int(one)) for one in schedules]
        return np.array(numbers, np.int32)[of_pair], np.array(evaluations, np.int32)[of_schedule]

    def _number(self, shape: int, schedule: int) -> int:
        name, steps, skipped = self._of_schedule(schedule)
        form = self.facts.sampler_facts(name).form
        own = (name, steps, skipped) if form == OWN_UPDATE else ("", 0, None)
        has_lengths = self.facts.lengths is not None
        group = Group(
            width=(shape >> 17) & 0x1FFFF,
            height=(shape >> 1) & 0xFFFF,
            is_guided=bool(shape & 1),
            text_length=(shape >> 34) & 0x3FFF if has_lengths else self.facts.text_length,
            form=form,
            sampler=own[0],
            steps=own[1],
            negative_length=shape >> 48 if has_lengths else None,
            skipped=own[2],
            lora=self.loras[schedule >> 48],
        )
        if group not in self._numbers:
            self._numbers[group] = len(self.groups)
            self.groups.append(group)
        return self._numbers[group]

    def _evaluations(self, schedule: int) -> int:
        name, steps, skipped = self._of_schedule(schedule)
        return self.facts.sampler_facts(name).evaluations_after(steps, skipped or 0)

    def _of_schedule(self, schedule: int) -> tuple[str, int, int | None]:
        """Sampler, steps, and steps skipped."""
        first = schedule & 0xFFFF
        return self.samplers[(schedule >> 32) & 0xFFFF], (schedule >> 16) & 0xFFFF, first - 1 if first else None


@dataclass(frozen=True, slots=True)
class Cut:
    """The rows in plan order, cut. Batch `b` holds the rows `batch_start[b]:batch_start[b + 1]`, shard `s` the
    batches `shard_start[s]:shard_start[s + 1]`."""

    batch_start: Ints
    batch_size: Ints
    """The bucket's batch size. A batch with fewer rows is padded; one with more is refilled."""
    batch_group: Ints
    batch_s: npt.NDArray[np.float64]
    batch_evaluations: Ints
    """That the batch takes: of its longest row, or of the busiest lane of a refilled one."""
    idle_evaluations: Ints
    """Row evaluations per batch in which the lane of a finished row stands still."""
    shard_start: Ints

    @property
    def num_rows(self) -> int:
        return int(self.batch_start[-1])

    @property
    def num_shards(self) -> int:
        return len(self.shard_start) - 1

    @property
    def shard_s(self) -> npt.NDArray[np.float64]:
        """Predicted seconds of each shard."""
        seconds: npt.NDArray[np.float64] = np.diff(np.append(0.0, np.cumsum(self.batch_s))[self.shard_start])
        return seconds

    @property
    def batch_rows(self) -> Ints:
        return np.diff(self.batch_start)

    @property
    def batch_padding(self) -> Ints:
        """Lanes per batch that no row is in."""
        padding: Ints = np.maximum(0, self.batch_size - self.batch_rows)
        return padding

    @property
    def batch_loads(self) -> Ints:
        """Rows of each batch over its size, rounded up."""
        return -(-self.batch_rows // self.batch_size)

    @property
    def shard_row_start(self) -> Ints:
        """The row at which each shard begins, and the end."""
        return self.batch_start[self.shard_start]


def order_of_groups(groups: Sequence[Group]) -> list[int]:
    """Group numbers, largest shape first, then guided before not, then the longest texts, then by name: the order of
    the plan."""
    return sorted(
        range(len(groups)),
        key=lambda number: (
            -groups[number].width * groups[number].height,
            -groups[number].width,
            not groups[number].is_guided,
            -groups[number].text_length,
            -(groups[number].negative_length or 0),
            groups[number].is_padded,
            groups[number].form,
            groups[number].sampler,
            groups[number].steps,
            -1 if groups[number].skipped is None else groups[number].skipped,
            groups[number].lora,
        ),
    )


def cut(groups: Sequence[Group], runs: Sequence[tuple[int, Ints, Ints]], cost: Cost, limits: Limits) -> Cut:
    """Cut all groups into batches and shards.

    `runs` gives, per group in plan order, its number and the run-length form of its rows' evaluations: ascending
    values, and how many rows have each.
    """
    num_rows = sum(int(counts.sum()) for _, _, counts in runs)
    most_images = limits.shard_images or min(MAX_SHARD_IMAGES, -(-num_rows // MIN_SHARDS))
    parts: list[Batches] = []
    for number, values, counts in runs:
        table = {size: cost.seconds(groups[number], size) for size in limits.sizes(groups[number], cost)}
        plain = plain_batches(values, counts, table, may_pad=cost.is_measured)
        is_own = groups[number].form == OWN_UPDATE
        parts.append(plain if is_own else cheapest(values, counts, table, plain, most_images))
    rows = _joined([one.rows for one in parts])
    batch_s = np.concatenate([one.seconds for one in parts]) if parts else np.zeros(0)
    batch_group = _joined([np.full(len(one.rows), run[0]) for one, run in zip(parts, runs, strict=True)])
    batch_size = _joined([one.size for one in parts])
    return Cut(
        batch_start=np.append(0, np.cumsum(rows)),
        batch_size=batch_size,
        batch_group=batch_group,
        batch_s=batch_s,
        batch_evaluations=_joined([one.evaluations for one in parts]),
        idle_evaluations=_joined([one.idle for one in parts]),
        shard_start=cut_shards(rows, batch_s, batch_group, int(batch_size.max(initial=1)), limits.shard_images),
    )


def plain_batches(values: Ints, counts: Ints, table: dict[int, Seconds], *, may_pad: bool) -> Batches:
    """One group's cheapest cut into batches with no more rows than their size."""
    sizes, rows = cut_group(values, counts, table, may_pad=may_pad)
    last, sums = _last_and_sum(values, counts, np.cumsum(rows))
    seconds = [table[size].of(most) for size, most in zip(sizes.tolist(), last.tolist(), strict=True)]
    return Batches(size=sizes, rows=rows, evaluations=last, idle=last * rows - sums, seconds=np.array(seconds, float))


def _last_and_sum(values: Ints, counts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Evaluations of each batch's last row, and the sum over its rows, from the run-length form."""
    run_ends = np.cumsum(counts)
    before = np.append(0, np.cumsum(values * counts))
    run = np.searchsorted(run_ends, ends - 1, side="right")
    up_to = before[run] + (ends - (run_ends[run] - counts[run])) * values[run]
    return values[run], np.diff(np.append(0, up_to))


def _joined(parts: list[Ints]) -> Ints:
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)


def cut_group(values: Ints, counts: Ints, table: dict[int, Seconds], *, may_pad: bool) -> tuple[Ints, Ints]:
    """Batch sizes of one group, and the rows in each, in row order.

    Dynamic programming over rows: best[i] = min over sizes s of best[max(0, i - s)] + seconds(s, evaluations of
    row i - 1). Dropping a row from a cut never costs more, so a batch that is not the first is always full. Of a
    long run of rows with equal evaluations only the ends are searched; its middle is filled with the size of the
    best rate, which an optimal cut of a long run uses anyway (`_num_others`).
    """
    sizes = sorted(table)
    trimmed, middles = [], []
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        best = min(sizes, key=lambda size: (table[size].of(value) / size, -size))
        margin = 2 * sizes[-1] + _num_others(sizes, best)
        fill = max(0, count - margin) // best
        trimmed.append(count - fill * best)
        middles.append((best, fill))
    batches = _search(values.tolist(), trimmed, [(size, table[size]) for size in sizes], is_exact=not may_pad)
    return _with_middles(batches, trimmed, middles)


def _num_others(sizes: list[int], best: int) -> int:
    """How many rows of a run an optimal cut need put into batches of another size than the one of the best rate.

    Of any `best` batches some have sizes that add up to a multiple of it (pigeonhole on the partial sums), and are
    better or as well replaced by batches of that size; where each size divides the next, any `best` rows have.
    """
    is_chain = all(big % small == 0 for small, big in pairwise(sizes))
    return best if is_chain else best * sizes[-1]


def _search(
    values: list[int], counts: list[int], table: list[tuple[int, Seconds]], *, is_exact: bool
) -> list[tuple[int, int]]:
    """The cheapest batches as (size, rows), in row order."""
    best, choice = [0.0], [0]
    for value, count in zip(values, counts, strict=True):
        priced = [(size, seconds.of(value)) for size, seconds in table]
        for _ in range(count):
            i = len(best)
            least, chosen = float("inf"), 0
            for size, seconds in priced:
                if size <= i:
                    total = best[i - size] + seconds
                else:
                    total = seconds + (_PADDED_ROW_S * (size - i) if is_exact else 0.0)
                if total <= least:
                    least, chosen = total, size
            best.append(least)
            choice.append(chosen)
    batches = []
    i = len(best) - 1
    while i > 0:
        batches.append((choice[i], min(choice[i], i)))
        i -= choice[i]
    return batches[::-1]


def _with_middles(
    batches: list[tuple[int, int]], counts: list[int], middles: list[tuple[int, int]]
) -> tuple[Ints, Ints]:
    """The batches with each run's middle put back at the first boundary inside the run."""
    run_starts = accumulate([0, *counts[:-1]])
    pending = [(start, size, fill) for start, (size, fill) in zip(run_starts, middles, strict=True) if fill]
    pieces: list[tuple[int, int, int]] = []
    at = 0
    for size, rows in [*batches, (0, 0)]:
        while pending and pending[0][0] <= at:
            _, best, fill = pending.pop(0)
            pieces.append((best, best, fill))
        pieces.append((size, rows, 1 if size else 0))
        at += rows
    sizes, taken, times = np.array(pieces, np.int64).T
    return np.repeat(sizes, times), np.repeat(taken, times)


def cut_shards(
    rows: Ints, batch_s: npt.NDArray[np.float64], group: Ints, largest_batch: int, shard_images: int | None
) -> Ints:
    """The batch at which each shard begins, and the end.

    A shard takes batches until it would exceed its images or SHARD_S; past half of either it ends with its
    group, so that few shards need the graphs of two shapes.
    """
    most = shard_images or int(np.clip(-(-rows.sum() // MIN_SHARDS), largest_batch, MAX_SHARD_IMAGES))
    starts, images, seconds = [0], 0, 0.0
    previous = group[0] if len(group) else 0
    for batch, (count, cost, one) in enumerate(zip(rows.tolist(), batch_s.tolist(), group.tolist(), strict=True)):
        is_full = images + count > most or seconds + cost > SHARD_S
        is_half = images * 2 >= most or seconds * 2 >= SHARD_S
        if images and (is_full or (is_half and one != previous)):
            starts.append(batch)
            images, seconds = 0, 0.0
        images, seconds, previous = images + count, seconds + cost, one
    return np.array([*starts, len(rows)] if len(rows) else [0], np.int64)
