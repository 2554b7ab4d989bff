"""Search many schedules, or show one: `python -m tests.simulation --schedules 1000000 --processes 2`."""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import platform
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from tqdm import tqdm

from batchgen.version import VERSION
from tests.simulation import doubles
from tests.simulation.append_plants import PLANTS
from tests.simulation.schedule import Outcome, Run, search, try_seed

SEARCHES = Path(__file__).with_name("searches.json")
PER_TASK = 100


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="the first one; each schedule has the next")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--plant", choices=PLANTS, help="a fault to plant first")
    parser.add_argument("--replay", type=int, metavar="SEED", help="show every step of one schedule")
    parser.add_argument("--plants", action="store_true", help="search for each planted fault")
    parser.add_argument("--record", action="store_true", help=f"write the figures to {SEARCHES.name}")
    asked = parser.parse_args()
    if asked.replay is not None:
        return replay(asked.replay, asked.plant)
    if asked.plants:
        return find_plants(asked.seed, asked.schedules, is_recorded=asked.record)
    return find(asked)


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    with doubles.installed() as patch:
        if name is not None:
            PLANTS[name](patch)
        yield


def replay(seed: int, plant: str | None) -> int:
    with planted(plant):
        print(Run(seed).schedule)
        outcome = try_seed(seed, traced=True)
    print("\n".join(outcome.trace))
    print(f"seed {seed}: {outcome.broken or 'every promise was kept'}")
    return bool(outcome.broken)


def find_plants(seed: int, num: int, *, is_recorded: bool) -> int:
    missed, record = 0, {}
    for name in PLANTS:
        with planted(name):
            outcome = search(seed, num)
        if outcome and outcome.is_mistaken:
            raise SystemExit(f"{name}: the plant does not fit the product any more: {outcome.broken}")
        missed += outcome is None
        print(f"{name}: " + (f"seed {outcome.seed}, {outcome.broken}" if outcome else f"not in {num} schedules"))
        if outcome is not None:
            record[name] = {"seed": outcome.seed, "schedules": outcome.seed - seed + 1, "found": outcome.broken}
    if is_recorded:
        write({**read(), "planted": record})
    return missed


def find(asked: argparse.Namespace) -> int:
    """Search on several processes until a promise is broken or all is searched."""
    firsts = range(asked.seed, asked.seed + asked.schedules, PER_TASK)
    tasks = [(first, min(PER_TASK, asked.seed + asked.schedules - first), asked.plant) for first in firsts]
    troubles: Counter[str] = Counter()
    num, steps, started = 0, 0, time.monotonic()
    broken: list[Outcome] = []
    with multiprocessing.Pool(asked.processes) as pool, tqdm(total=asked.schedules, unit="schedule") as bar:
        for outcomes in pool.imap_unordered(run_task, tasks):
            for one in outcomes:
                num, steps = num + 1, steps + one.steps
                troubles.update(one.troubles)
            bar.update(len(outcomes))
            broken += [one for one in outcomes if one.broken]
            if broken:
                break
    seconds = time.monotonic() - started
    print(f"{num:,} schedules, {steps:,} steps, {sum(troubles.values()):,} troubles: {num / seconds:,.0f} schedules/s")
    for one in broken:
        print(f"seed {one.seed}: {one.broken}\n  python -m tests.simulation --replay {one.seed}", file=sys.stderr)
    if asked.record and not broken:
        search_record = {
            "first_seed": asked.seed,
            "schedules": num,
            "steps": steps,
            "troubles": dict(sorted(troubles.items())),
            "seconds": round(seconds),
            "processes": asked.processes,
            "versions": {"batchgen": VERSION, "python": platform.python_version(), "greenlet": version("greenlet")},
        }
        write({**read(), "searches": [*read()["searches"], search_record]})
    return bool(broken)


def run_task(task: tuple[int, int, str | None]) -> list[Outcome]:
    first, num, plant = task
    gc.set_threshold(20_000)
    with planted(plant):
        return [try_seed(seed) for seed in range(first, first + num)]


def read() -> dict[str, object]:
    found: dict[str, object] = json.loads(SEARCHES.read_text()) if SEARCHES.exists() else {"searches": []}
    return found


def write(record: dict[str, object]) -> None:
    SEARCHES.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
