"""File operations of a run, counted: the product's own code as many workers, on the simulated disk, without troubles.

    python -m tests.simulation.census --workers 1024 --shards-each 2
    python -m tests.simulation.census --record      1 and 1,024 workers, into tests/figures/file-operations.json

An operation is one that the file system's server is asked for where nothing is cached: a lookup that finds nothing
counts, and a file that is written counts as create, write and sync; a listing counts once however long it is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from batchgen import ledger
from tests.simulation import doubles
from tests.simulation.drawing import Schedule
from tests.simulation.schedule import Run
from tests.simulation.world import CHANGES, ProcessDied

FIGURES = Path(__file__).parent.parent / "figures" / "file-operations.json"
SHARD_S = 60.0
"""What a worker needs for a shard."""
BATCHES = 4
"""Of a shard."""
PEAK_S = 10.0


@dataclass(frozen=True, slots=True)
class Census:
    """What the file system was asked for in a run of shards of a minute each."""

    workers: int
    shards: int
    output_format: str
    rows_per_shard: int
    simulated_s: float
    per_shard: dict[str, float]
    """Operations by kind, over the number of shards."""
    total_per_shard: float
    changes_per_shard: float
    """Those among them that change the disk."""
    mean_per_s: float
    """Over the whole run."""
    peak_per_s: float
    """In the busiest ten seconds."""


class Counted(Run):
    """A run whose steps take no time and are counted; threads wake in the order of their clocks."""

    def __init__(self, num_workers: int, num_shards: int, output_format: str) -> None:
        schedule = Schedule(
            num_workers=num_workers,
            num_hosts=num_workers,
            shard_rows=(BATCHES,) * num_shards,
            batch_size=1,
            batch_s=3 * SHARD_S / BATCHES,
            commit_every_s=120.0,
            stale_after_s=600.0,
            max_deaths=3,
            output_format=output_format,
            lag_s=0.0,
            restlessness=0.0,
            oversleep_s=2.0,
            odd_shard=-1,
            num_restarts=0,
            num_finalizers=0,
            is_planned=True,
            has_jobs=False,
            may_wait=True,
            troubles=(),
        )
        super().__init__(0, schedule=schedule)
        self.num_starts = [0] * num_workers
        self.counts: Counter[str] = Counter()
        self.by_time: Counter[int] = Counter()

    def step(self, call: str, place: Any) -> None:
        if self.me.process.is_dead:
            raise ProcessDied
        self.counts[call] += 1
        self.by_time[int(self.now_s / PEAK_S)] += 1

    def on_link(self, target: Any) -> None:
        pass

    def _finish(self) -> None:
        assert all(one.ended == "normally" for one in self.processes)


def take_census(num_workers: int, shards_each: int, output_format: str = "webdataset") -> Census:
    """Run it, within `doubles.installed()`."""
    num_shards = num_workers * shards_each
    run = Counted(num_workers, num_shards, output_format)
    start_s = run.now_s
    run.go()
    simulated_s = run.now_s - start_s
    total, changes = run.counts.total(), sum(run.counts[call] for call in CHANGES)
    return Census(
        workers=num_workers,
        shards=num_shards,
        output_format=output_format,
        rows_per_shard=BATCHES,
        simulated_s=round(simulated_s, 1),
        per_shard={call: round(number / num_shards, 2) for call, number in run.counts.most_common()},
        total_per_shard=round(total / num_shards, 1),
        changes_per_shard=round(changes / num_shards, 1),
        mean_per_s=round(total / simulated_s, 1),
        peak_per_s=round(max(run.by_time.values()) / PEAK_S, 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.census", description=__doc__)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--shards-each", type=int, default=2)
    parser.add_argument("--format", choices=["webdataset", "files"], default="webdataset")
    parser.add_argument("--record", action="store_true", help=f"write {FIGURES.name}")
    asked = parser.parse_args()
    sys.setrecursionlimit(100_000)  # A thread starts at the depth of the one that gives way to it.
    with doubles.installed() as patch:
        patch.setattr(ledger, "_receipt", lru_cache(None)(ledger._receipt))
        patch.setattr(ledger, "_claim", lru_cache(None)(ledger._claim))
        kinds = [(1, 16), (1024, 2)] if asked.record else [(asked.workers, asked.shards_each)]
        found = [take_census(num, each, asked.format) for num, each in kinds]
    content = json.dumps([asdict(one) for one in found], indent=2)
    print(content)
    if asked.record:
        FIGURES.write_text(content + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
