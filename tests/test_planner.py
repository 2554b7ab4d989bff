"""Batches and shards of random groups against naive recounts and brute force."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.checks import MAX_STEPS
from batchgen.cost import ConservativeModel, PatternModel, Seconds, allowed_sizes
from batchgen.errors import UsageError
from batchgen.limits import Limits
from batchgen.models.facts import PATTERN
from batchgen.planner import SHARD_S, Cut, Grouper, _search, cut, cut_group, order_of_groups
from batchgen.records import Group
from batchgen.schedule import makespan


def group_of(width: int = 512, height: int = 512, is_guided: bool = True, form: str = "x,e", steps: int = 0) -> Group:
    return Group(width, height, is_guided, 77, form, "" if form else "ddim", steps)


@dataclass(frozen=True)
class Table:
    """Costs by size, the same for all groups but for a factor of their width."""

    by_size: dict[int, Seconds]
    is_measured: bool = True
    source: str = "a test"
    asked: list[int] = field(default_factory=list)

    def seconds(self, group: Group, size: int) -> Seconds:
        one, factor = self.by_size[size], group.width / 512
        return Seconds(one.fixed_s * factor, one.evaluation_s * factor)

    def max_batch(self, group: Group) -> int:
        return max(self.by_size)


SECONDS = st.integers(0, 40).map(lambda quarters: quarters / 4)
"""Sums of quarters are exact, so that costs may be compared."""
TABLES = st.dictionaries(st.integers(1, 7), st.builds(Seconds, SECONDS, SECONDS), min_size=1, max_size=4)
RUNS = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=4, unique_by=lambda run: run[0]
).map(sorted)


def arrays(runs: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    values, counts = zip(*runs, strict=True)
    return np.array(values), np.array(counts)


def evaluations_of(runs: Sequence[tuple[int, int]]) -> list[int]:
    return [value for value, count in runs for _ in range(count)]


def price(batches: Sequence[tuple[int, int]], evaluations: list[int], table: dict[int, Seconds]) -> tuple[int, float]:
    """Padded slots and seconds of batches (size, rows) over rows in order."""
    ends = list(itertools.accumulate(rows for _, rows in batches))
    assert ends[-1] == len(evaluations)
    assert all(0 < rows <= size for size, rows in batches)
    padding = sum(size - rows for size, rows in batches)
    return padding, sum(table[size].of(evaluations[end - 1]) for (size, _), end in zip(batches, ends, strict=True))


def best_by_force(evaluations: list[int], table: dict[int, Seconds], may_pad: bool) -> tuple[float, float]:
    """The least of (padding, seconds), or of seconds where padding is free, over every way to cut."""
    best: list[tuple[float, float]] = [(0, 0.0)]
    for end in range(1, len(evaluations) + 1):
        ways = [
            (
                best[end - rows][0] + (0 if may_pad else size - rows),
                best[end - rows][1] + table[size].of(evaluations[end - 1]),
            )
            for size in table
            for rows in range(1, min(size, end) + 1)
        ]
        best.append(min(ways))
    return best[-1]


@given(RUNS, TABLES, st.booleans())
def test_a_cut_is_as_cheap_as_the_cheapest(
    runs: list[tuple[int, int]], table: dict[int, Seconds], may_pad: bool
) -> None:
    sizes, rows = cut_group(*arrays(runs), table, may_pad=may_pad)
    evaluations = evaluations_of(runs)
    padding, seconds = price(list(zip(sizes.tolist(), rows.tolist(), strict=True)), evaluations, table)
    assert (0 if may_pad else padding, seconds) == best_by_force(evaluations, table, may_pad)


LONG_RUNS = st.lists(
    st.tuples(st.integers(1, 9), st.integers(1, 30) | st.integers(100, 400)),
    min_size=1,
    max_size=3,
    unique_by=lambda run: run[0],
).map(sorted)


@given(LONG_RUNS, TABLES, st.booleans())
def test_a_long_run_is_cut_as_well_as_if_it_were_searched(
    runs: list[tuple[int, int]], table: dict[int, Seconds], may_pad: bool
) -> None:
    evaluations, values = evaluations_of(runs), [value for value, _ in runs]
    sizes, rows = cut_group(*arrays(runs), table, may_pad=may_pad)
    found = price(list(zip(sizes.tolist(), rows.tolist(), strict=True)), evaluations, table)
    searched = _search(values, [count for _, count in runs], sorted(table.items()), is_exact=not may_pad)
    wanted = price(searched, evaluations, table)
    assert found[1] == wanted[1]
    assert may_pad or found[0] == wanted[0]


def test_two_large_sizes_without_a_common_part_are_cut_exactly() -> None:
    """961 = 31 × 31 is no sum of a few 31s and otherwise 32s, the size of the better rate."""
    table = {31: Seconds(31.0, 0.0), 32: Seconds(31.5, 0.0)}
    sizes, rows = cut_group(np.array([1]), np.array([961]), table, may_pad=False)
    assert (sizes == rows).all()
    assert sizes.sum() == 961


@pytest.mark.parametrize(
    ("num_rows", "sizes"), [(13, [8, 4, 1]), (1, [1]), (17, [8, 8, 1]), (7, [4, 2, 1]), (64, [8] * 8)]
)
@pytest.mark.parametrize("model", [ConservativeModel(), PatternModel()], ids=lambda model: type(model).__name__)
def test_nothing_is_padded_where_nothing_is_measured(
    num_rows: int, sizes: list[int], model: ConservativeModel | PatternModel
) -> None:
    done = cut([group_of()], [(0, np.array([20]), np.array([num_rows]))], model, Limits(max_batch=8))
    assert sorted(done.batch_size.tolist(), reverse=True) == sizes
    assert (done.batch_rows == done.batch_size).all()


def test_a_batch_is_padded_only_where_that_is_predicted_faster() -> None:
    runs = [(0, np.array([10]), np.array([7]))]
    flat = Table({1: Seconds(0.0, 1.0), 8: Seconds(0.0, 1.0)})
    assert cut([group_of()], runs, flat, Limits(batch_sizes=(1, 8))).batch_size.tolist() == [8]
    steep = Table({1: Seconds(0.0, 1.0), 8: Seconds(0.0, 8.0)})
    assert cut([group_of()], runs, steep, Limits(batch_sizes=(1, 8))).batch_size.tolist() == [1] * 7
    guessed = Table({1: Seconds(0.0, 1.0), 8: Seconds(0.0, 1.0)}, is_measured=False)
    assert cut([group_of()], runs, guessed, Limits(batch_sizes=(1, 8))).batch_size.tolist() == [1] * 7


def test_sizes_without_one_pad_as_little_as_can_be() -> None:
    done = cut([group_of()], [(0, np.array([10]), np.array([13]))], ConservativeModel(), Limits(batch_sizes=(4, 6)))
    assert sorted(done.batch_size.tolist()) == [4, 4, 6]
    assert done.batch_rows.sum() == 13
    assert done.batch_rows[0] == done.batch_size[0] - 1


GROUPS = st.lists(
    st.builds(group_of, st.sampled_from([512, 768, 1024]), st.sampled_from([512, 640]), st.booleans()),
    min_size=1,
    max_size=4,
    unique=True,
)


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[Group], list[list[tuple[int, int]]], Table, Limits]:
    groups = draw(GROUPS)
    groups = [groups[number] for number in order_of_groups(groups)]
    runs = [draw(RUNS) for _ in groups]
    table = Table(draw(TABLES), draw(st.booleans()))
    return groups, runs, table, Limits(tuple(table.by_size), shard_images=draw(st.none() | st.integers(1, 20)))


@given(plans())
def test_a_cut_is_what_a_recount_says(plan: tuple[list[Group], list[list[tuple[int, int]]], Table, Limits]) -> None:
    groups, runs, cost, limits = plan
    done = cut(groups, [(n, *arrays(one)) for n, one in enumerate(runs)], cost, limits)
    evaluations = [value for one in runs for value in evaluations_of(one)]
    group_of_row = [n for n, one in enumerate(runs) for _ in evaluations_of(one)]
    assert done.num_rows == len(evaluations) == done.batch_rows.sum()
    for batch, (start, end) in enumerate(itertools.pairwise(done.batch_start.tolist())):
        rows, size = evaluations[start:end], int(done.batch_size[batch])
        assert size in cost.by_size
        assert set(group_of_row[start:end]) == {int(done.batch_group[batch])}
        takes, loads, priced = (
            makespan(rows, size),
            -(-len(rows) // size),
            cost.seconds(groups[done.batch_group[batch]], size),
        )
        assert done.batch_evaluations[batch] == takes
        assert done.batch_loads[batch] == loads
        assert done.idle_evaluations[batch] == min(len(rows), size) * takes - sum(rows)
        assert done.batch_s[batch] == pytest.approx(priced.fixed_s * loads + priced.evaluation_s * takes)
        padded = done.batch_padding[batch]
        assert padded == max(0, size - len(rows))
        assert cost.is_measured or not padded or 1 not in cost.by_size
    check_shards(done, limits)


def check_shards(done: Cut, limits: Limits) -> None:
    """Shards partition the batches, and no two neighbours would have fitted into one."""
    starts = done.shard_start.tolist()
    assert (starts[0], starts[-1]) == (0, len(done.batch_size))
    assert starts == sorted(set(starts))
    for start, end in itertools.pairwise(starts):
        images, seconds = done.batch_rows[start:end].sum(), done.batch_s[start:end].sum()
        most = limits.shard_images or 1_000
        assert end - start == 1 or (images <= most and seconds <= SHARD_S + 1e-6)


@pytest.mark.parametrize(("num_rows", "num_mixed"), [(208, 0), (200, 1)])
def test_a_run_is_cut_for_several_workers_and_few_shards_have_two_shapes(num_rows: int, num_mixed: int) -> None:
    """Only a rest of less than half a shard is joined by the next group."""
    runs = [(n, np.array([20]), np.array([num_rows])) for n in range(2)]
    done = cut([group_of(1024, 1024), group_of(512, 512)], runs, PatternModel(), Limits(max_batch=4))
    assert 16 <= done.num_shards <= 18
    shapes = [set(done.batch_group[start:end]) for start, end in itertools.pairwise(done.shard_start)]
    assert sum(len(one) > 1 for one in shapes) == num_mixed


def test_slow_batches_are_shards_of_three_minutes() -> None:
    table = Table({1: Seconds(50.0, 0.0)})
    done = cut([group_of()], [(0, np.array([1]), np.array([100]))], table, Limits(batch_sizes=(1,), shard_images=1000))
    assert (np.diff(done.shard_start) <= 3).all()
    assert (np.diff(done.shard_start)[:-1] == 3).all()


def test_a_plan_of_no_rows_has_no_shard() -> None:
    done = cut([], [], PatternModel(), Limits())
    assert (done.num_rows, done.num_shards, done.shard_row_start.tolist()) == (0, 0, [0])


def test_limits_that_leave_no_size_are_refused() -> None:
    with pytest.raises(
        UsageError, match=r"plan.batch_sizes = \[8, 16\] leaves no size within plan.max_batch = 4; allow"
    ):
        cut([group_of()], [(0, np.array([1]), np.array([1]))], PatternModel(), Limits((8, 16), 4))


@given(st.lists(GROUPS.map(lambda groups: groups[0]), unique=True))
def test_the_largest_shape_comes_first_and_guided_before_not(groups: list[Group]) -> None:
    ordered = [groups[number] for number in order_of_groups(groups)]
    keys = [(-one.width * one.height, -one.width, not one.is_guided) for one in ordered]
    assert keys == sorted(keys)
    assert sorted(order_of_groups(groups)) == list(range(len(groups)))
    shuffled = list(groups)
    random.Random(0).shuffle(shuffled)
    assert [shuffled[number] for number in order_of_groups(shuffled)] == ordered


ROWS = st.lists(
    st.tuples(
        st.sampled_from([64, 512, 32_768]),
        st.sampled_from([64, 32_768]),
        st.sampled_from([0.0, 1.0, 1.5]),
        st.integers(0, 3),
        st.sampled_from([1, 2, 20, MAX_STEPS]),
    ),
    min_size=1,
)


@given(ROWS, st.integers(1, 5))
def test_rows_are_grouped_by_shape_guidance_and_form(
    rows: list[tuple[int, int, float, int, int]], read_rows: int
) -> None:
    """`UniPCMultistepScheduler` runs its own update: its sampler and steps belong to the group."""
    samplers = ["ddim", "heun", "dpmpp_2m", "UniPCMultistepScheduler"]
    grouper = Grouper.of(PATTERN, samplers)
    for some in (rows[start : start + read_rows] for start in range(0, len(rows), read_rows)):
        width, height, guidance, sampler, steps = zip(*some, strict=True)
        numbers, evaluations = grouper.assign(
            np.array(width), np.array(height), np.array(guidance) > 1, np.array(sampler, np.int32), np.array(steps)
        )
        for place, (wide, high, scale, name, count) in enumerate(some):
            facts = PATTERN.sampler_facts(samplers[name])
            own = ("UniPCMultistepScheduler", count) if samplers[name] == "UniPCMultistepScheduler" else ("", 0)
            assert grouper.groups[numbers[place]] == Group(wide, high, scale > 1, 0, facts.form, *own)
            assert evaluations[place] == facts.evaluations(count)
    assert len(set(grouper.groups)) == len(grouper.groups)


@pytest.mark.parametrize(
    ("sizes", "max_batch", "shape", "allowed"),
    [
        (None, None, (512, 512), (1, 2, 4, 8, 16, 32)),
        (None, None, (1024, 1024), (1, 2, 4, 8)),
        (None, None, (32_768, 32_768), (1,)),
        (None, 12, (1024, 1024), (1, 2, 4, 8)),
        ((8, 3, 3), None, (512, 512), (3, 8)),
        ((8, 3), 5, (512, 512), (3,)),
    ],
)
def test_allowed_sizes(
    sizes: tuple[int, ...] | None, max_batch: int | None, shape: tuple[int, int], allowed: tuple[int, ...]
) -> None:
    assert allowed_sizes(group_of(*shape), sizes, max_batch, ConservativeModel()) == allowed
