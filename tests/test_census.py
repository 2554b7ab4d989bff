"""File operations per shard: bounded, and as the figures that are kept say."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from tests.simulation import doubles
from tests.simulation.census import FIGURES, take_census


@pytest.mark.parametrize("workers", [1, 8])
def test_changes_to_the_disk_do_not_grow_with_the_workers(workers: int) -> None:
    """Only a run's beginning and end are shared by its shards."""
    with doubles.installed():
        found = take_census(workers, 16 // workers)
    assert found.shards == 16
    assert 25 < found.changes_per_shard < 45


def test_the_figures_are_those_of_this_code() -> None:
    kept = json.loads(FIGURES.read_text(encoding="utf-8"))
    assert [one["workers"] for one in kept] == [1, 1024]
    with doubles.installed():
        assert asdict(take_census(1, kept[0]["shards"])) == kept[0]
