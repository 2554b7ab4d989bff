"""Turns in lanes against a recount, the known bounds and brute force."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from batchgen.schedule import makespan, turns

EVALUATIONS = st.lists(st.integers(1, 60), min_size=1, max_size=60)
LANES = st.integers(1, 12)


@given(EVALUATIONS, LANES)
def test_every_row_has_one_turn_and_no_two_share_a_lane(evaluations: list[int], lanes: int) -> None:
    found = turns(evaluations, lanes)
    assert sorted(turn.row for turn in found) == list(range(len(evaluations)))
    assert all(turn.end - turn.start == evaluations[turn.row] for turn in found)
    for lane in range(lanes):
        mine = [turn for turn in found if turn.lane == lane]
        assert [turn.start for turn in mine] == [0, *(turn.end for turn in mine)][: len(mine)], "one after the other"
    assert {turn.lane for turn in found} <= set(range(lanes))


@given(EVALUATIONS, LANES)
def test_the_makespan_is_the_last_end_and_within_its_bounds(evaluations: list[int], lanes: int) -> None:
    found = makespan(evaluations, lanes)
    assert found == max(turn.end for turn in turns(evaluations, lanes))
    assert found >= max(evaluations)
    assert found >= -(-sum(evaluations) // lanes)
    assert lanes * found <= sum(evaluations) + (lanes - 1) * max(evaluations), "Graham's bound of any list"
    if len(evaluations) <= lanes:
        assert found == max(evaluations)


@given(EVALUATIONS, LANES)
def test_turns_are_in_the_order_in_which_they_begin(evaluations: list[int], lanes: int) -> None:
    found = turns(evaluations, lanes)
    assert [(turn.start, turn.lane) for turn in found] == sorted((turn.start, turn.lane) for turn in found)
    assert [turn.lane for turn in found[:lanes]] == list(range(min(lanes, len(found)))), "all lanes begin at once"
    assert all(turn.start for turn in found[lanes:])


@given(st.lists(st.integers(1, 12), min_size=1, max_size=7), st.integers(1, 3))
def test_no_schedule_is_shorter_by_more_than_a_quarter(evaluations: list[int], lanes: int) -> None:
    """4/3 - 1/(3 lanes) of the best."""

    def busiest(of_row: tuple[int, ...]) -> int:
        return max(sum(one for one, lane in zip(evaluations, of_row, strict=True) if lane == n) for n in range(lanes))

    best = min(map(busiest, itertools.product(range(lanes), repeat=len(evaluations))))
    assert best <= makespan(evaluations, lanes) <= (4 / 3 - 1 / (3 * lanes)) * best + 1e-9


def test_rows_that_are_equally_long_keep_their_order() -> None:
    assert [(turn.row, turn.lane) for turn in turns([5, 7, 5, 7], 2)] == [(1, 0), (3, 1), (0, 0), (2, 1)]


def test_25_rows_of_20_to_50_steps_idle_little_on_8_lanes() -> None:
    """Longest first alone would take 122 evaluations, for 866 row evaluations."""
    assert makespan([20 + 30 * row // 24 for row in range(25)], 8) == 110
