"""Batches with more rows than lanes against recounts, and where they are not worth it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen import refilling
from batchgen.bench.workload import Workload
from batchgen.cost import ConservativeModel, PatternModel, Seconds
from batchgen.limits import Limits
from batchgen.models.facts import PATTERN
from batchgen.planner import Cut, Grouper, cut, order_of_groups, plain_batches
from batchgen.refilling import MAX_BATCH_S, MAX_IDLE_SHARE, MAX_TURNS, Batches, cheapest
from batchgen.schedule import makespan
from tests.runs import ROOT
from tests.test_planner import Table, arrays, evaluations_of, group_of

README = ROOT / "README.md"
SIZES = (1, 2, 4, 8)
LAUNCHED = Table({size: Seconds(0.02 * size, max(0.025, 0.006 * size)) for size in SIZES})
"""Costs as of a network of 25 ms at least and 6 ms a row."""
RUNS = st.lists(
    st.tuples(st.integers(1, 60), st.integers(1, 9)), min_size=1, max_size=12, unique_by=lambda run: run[0]
).map(sorted)
COSTS = st.dictionaries(
    st.integers(1, 9),
    st.builds(Seconds, st.floats(0, 1), st.sampled_from([0, 0.01, 0.025, 0.05, 0.1, 0.4])),
    min_size=1,
    max_size=4,
)


def both(runs: Sequence[tuple[int, int]], table: dict[int, Seconds], most: int, may_pad: bool) -> tuple[Batches, ...]:
    """The plain batches of a group, and those that are taken."""
    plain = plain_batches(*arrays(runs), table, may_pad=may_pad)
    return plain, cheapest(*arrays(runs), table, plain, most)


@given(RUNS, COSTS, st.integers(1, 60), st.booleans())
def test_refilled_batches_are_what_a_recount_says(
    runs: list[tuple[int, int]], table: dict[int, Seconds], most: int, may_pad: bool
) -> None:
    plain, found = both(runs, table, most, may_pad)
    evaluations, work = evaluations_of(runs), sum(evaluations_of(runs))
    assert found.rows.sum() == len(evaluations)
    ends = np.cumsum(found.rows).tolist()
    for n, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        rows, size = evaluations[start:end], int(found.size[n])
        assert found.evaluations[n] == makespan(rows, size)
        assert found.idle[n] == min(len(rows), size) * found.evaluations[n] - sum(rows)
        loads = -(-len(rows) // size)
        assert found.seconds[n] == pytest.approx(
            loads * table[size].fixed_s + found.evaluations[n] * table[size].evaluation_s
        )
    if found is plain:
        assert (found.rows <= found.size).all()
        return
    assert found.total_s < plain.total_s
    assert len({*found.size.tolist()}) == 1
    assert (found.rows >= found.size).all(), "nothing is padded"
    assert found.rows.max() - found.rows.min() <= 1
    assert found.idle.sum() <= max(plain.wasted(work), MAX_IDLE_SHARE * (work + found.idle.sum()) + 1e-6)
    size = int(found.size[0])
    assert found.rows.max() <= min(MAX_TURNS * size, max(2 * size, most))
    assert table[size].of(max(evaluations)) * found.rows.max() / size <= MAX_BATCH_S + 1e-6


@given(st.integers(1, 60), st.integers(1, 60), COSTS, st.booleans())
def test_rows_that_are_equally_long_are_cut_as_ever(
    value: int, num: int, table: dict[int, Seconds], may_pad: bool
) -> None:
    plain, found = both([(value, num)], table, 1_000, may_pad)
    assert found is plain


def test_rows_of_20_to_50_steps_share_lanes() -> None:
    """25 rows, at 6 ms a row of a batch and 25 ms at least."""
    runs = [(20 + 30 * row // 24, 1) for row in range(25)]
    plain, found = both(runs, LAUNCHED.by_size, 100, False)
    assert (found.size.tolist(), found.rows.tolist(), found.evaluations.tolist()) == ([8], [25], [110])
    assert found.total_s < 0.9 * plain.total_s


def test_samplers_that_run_their_own_update_are_never_refilled() -> None:
    """Their groups have one step count; not even evaluations that differ would change it."""
    runs = [(0, *arrays([(20 + row, 1) for row in range(25)]))]
    own = cut([group_of(form="", steps=20)], runs, LAUNCHED, Limits(SIZES, shard_images=100))
    assert (own.batch_rows <= own.batch_size).all()
    other = cut([group_of()], runs, LAUNCHED, Limits(SIZES, shard_images=100))
    assert (other.batch_rows > other.batch_size).all()


def test_batches_that_take_long_have_fewer_turns() -> None:
    """30 s at most: of 7 s a turn four, of 20 s none."""
    runs = [(20 + row % 31, 1) for row in range(31)]
    for turn_s, most in ((7, 4 * 8), (20, 0)):
        table = {8: Seconds(0.0, turn_s / 50), 1: Seconds(0.0, turn_s / 50)}
        _, found = both(sorted(runs), table, 1_000, False)
        assert found.rows.max() <= (most or 8)
        assert (found.rows.max() > 8) == bool(most)


def test_a_large_group_that_idles_little_is_not_looked_at_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(evaluations: object, lanes: int) -> int:
        raise AssertionError

    monkeypatch.setattr(refilling, "makespan", never)
    runs = [(0, *arrays([(value, 40_000) for value in range(20, 51)]))]
    for cost in (ConservativeModel(), PatternModel()):
        assert cut([group_of()], runs, cost, Limits()).num_rows == 31 * 40_000


def mixed_workload(num_rows: int) -> Cut:
    """The bench's own rows, cut as where nothing was measured."""
    rows = Workload(num_rows, "mixed", 512, 2, 20, 7.5, "ddim").wanted()
    grouper = Grouper.of(PATTERN, ["ddim"])
    of_row, evaluations = grouper.assign(
        np.array([row.width for row in rows]),
        np.array([row.height for row in rows]),
        np.array([row.guidance_scale > 1 for row in rows]),
        np.zeros(num_rows, np.int32),
        np.array([row.steps for row in rows]),
    )
    order = order_of_groups(grouper.groups)
    runs = [(n, *np.unique(evaluations[of_row == number], return_counts=True)) for n, number in enumerate(order)]
    return cut([grouper.groups[number] for number in order], runs, ConservativeModel(), Limits())


def test_the_mixed_workload_of_the_bench_idles_little() -> None:
    """1,000 rows of 40 sizes: nothing is padded, and what the README tells of idle ones."""
    done = mixed_workload(1_000)
    assert done.num_rows == 1_000
    assert done.batch_padding.sum() == 0
    share = done.idle_evaluations.sum() / (done.batch_size * done.batch_evaluations).sum()
    told = re.search(
        r"(\d+) batches in 4 or 8 lanes with\s+(.+?) % of the row evaluations\s+idle", README.read_text("utf-8")
    )
    assert told is not None
    assert (len(done.batch_size), f"{100 * share:.1f}") == (int(told[1]), told[2])
    assert set(done.batch_size.tolist()) == {4, 8}
    assert done.num_shards >= 16
    assert done.batch_s.max() <= MAX_BATCH_S
