"""The commit protocol under every trouble that a simulated cluster can make, and proof that the search can fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from batchgen.runner import run_job
from tests.plans import folder, pattern_job, write
from tests.simulation import doubles
from tests.simulation.__main__ import planted, read
from tests.simulation.append_plants import PLANTS
from tests.simulation.drawing import draw
from tests.simulation.files import TOP
from tests.simulation.schedule import Run, search, try_seed
from tests.simulation.storage import Storage

NUM_SCHEDULES = 2_000
CALLS = ("link", "unlink", "fsync", "rename", "mkdir")
SIMULATED = {"link": "link", "remove": "unlink", "sync": "fsync", "sync_folder": "fsync", "rename": "rename"}
PASSING = re.compile(r"\.arrow|^\.")
"""Files by which a table is put in order, and what lies outside the run directory."""
TOKEN = re.compile(r"(?<=[.-])[0-9a-f]{4,16}(\.[0-9a-f]{8}-\d+-\d*)?(?=\.tmp|\.link|/|$)")


@pytest.fixture
def world() -> Iterator[None]:
    with doubles.installed():
        yield


def test_no_schedule_breaks_a_promise(world: None) -> None:
    broken = search(0, NUM_SCHEDULES)
    assert broken is None, f"{broken.broken}: python -m tests.simulation --replay {broken.seed}"


def test_every_trouble_comes(world: None) -> None:
    outcomes = [try_seed(seed) for seed in range(200)]
    assert {kind for one in outcomes for kind in one.troubles} == {
        *("kill", "crash", "pause", "stall", "signal", "error", "lost", "full")
    }


@pytest.mark.parametrize("name", PLANTS)
def test_a_search_finds_a_planted_fault(name: str) -> None:
    """From the seed that a search from 0 on came to when the figures were recorded; later ones if steps have moved."""
    with planted(name):
        outcome = search(read()["planted"][name]["seed"], NUM_SCHEDULES)  # type: ignore[index]
    assert outcome
    assert not outcome.is_mistaken, outcome.broken


def test_a_seed_says_everything(world: None) -> None:
    here = try_seed(11, traced=True)
    assert here == try_seed(11, traced=True)
    assert here.trace != try_seed(12, traced=True).trace
    command = [sys.executable, "-m", "tests.simulation", "--replay", "11"]
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert shown.stdout.splitlines()[1:-1] == list(here.trace)


def left_by_the_dead(output_format: str) -> list[str]:
    """Files of the epoch that a worker is about to begin."""
    return ["00000-0.rows.parquet", *(["00000-0.tar"] if output_format == "webdataset" else [])]


def real_changes(output_format: str) -> list[str]:
    """The changes that an undisturbed worker makes to a real disk, where a dead one left files."""
    changes: list[str] = []

    def listened(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **options: Any) -> Any:
            place = arguments[1 if name in ("link", "rename") else 0]
            text = os.readlink(f"/proc/self/fd/{place}") if isinstance(place, int) else os.fspath(place)
            changes.append(f"{name} {os.path.relpath(text, path)}")
            return call(*arguments, **options)

        return made

    with folder() as path, pytest.MonkeyPatch.context() as patch:
        manifest = write(path / "manifest", {"id": ["a", "b"], "prompt": ["x", "y"]})
        job = pattern_job(*("output.encoders=1", f"output.format={output_format}", "plan.batch_sizes=[2]"))
        (path / "run/.run/work").mkdir(parents=True)
        for name in left_by_the_dead(output_format):
            (path / "run/.run/work" / name).write_bytes(b"left")
        for name in CALLS:
            patch.setattr(os, name, listened(name, getattr(os, name)))
        run_job(manifest, path / "run", job)
    return changes


def simulated_changes(output_format: str) -> list[str]:
    schedule = replace(
        draw(Random(0)),
        num_workers=1,
        shard_rows=(2,),
        batch_size=2,
        batch_s=0.0,
        odd_shard=-1,
        output_format=output_format,
        num_finalizers=0,
        is_planned=False,
        troubles=(),
    )
    with doubles.installed():
        run = Run(0, traced=True, schedule=schedule)
        run.storage.create_all(TOP / "run/.run/work")
        for name in left_by_the_dead(output_format):
            run.storage.create(TOP / "run/.run/work" / name, 0.0, 0)
        run.go()
    steps = [line.split()[4:] for line in run.trace or []]
    own = steps[: next(number for number, words in enumerate(steps) if "**" in words)]
    return [f"{SIMULATED.get(call, call)} {place}" for call, place in own if SIMULATED.get(call, call) in CALLS]


@pytest.mark.parametrize("output_format", ["files", "webdataset"])
def test_what_is_stood_in_for_changes_a_real_disk_in_the_same_order(output_format: str) -> None:
    def plain(changes: list[str]) -> list[str]:
        named = [TOKEN.sub("TOKEN", one) for one in changes if not PASSING.search(one.split()[1])]
        return [re.sub(r"[^/]+\.png", "PNG", one) for one in named]

    assert plain(simulated_changes(output_format)) == plain(real_changes(output_format))


# The simulated disk itself


def disk_with(*names: str) -> Storage:
    storage = Storage()
    for name in names:
        file = storage.create(TOP / name, 0.0, 0)
        file.content = name.encode()
    return storage


def after_crashes(storage_of: Callable[[], Storage]) -> set[tuple[tuple[str, bytes], ...]]:
    """What may be left of it."""
    found = set()
    for seed in range(200):
        storage = storage_of()
        storage.lose(Random(seed), None)
        found.add(tuple(sorted((name, file.content) for name, file in storage.top.names.items())))  # type: ignore[union-attr]
    return found


def test_a_crash_takes_what_was_not_synced() -> None:
    def unsynced() -> Storage:
        return disk_with("a")

    def synced() -> Storage:
        storage = disk_with("a")
        file = storage.file(TOP / "a")
        file.synced = file.content
        storage.sync_folder(storage.top)
        return storage

    assert after_crashes(unsynced) == {(), (("a", b""),), (("a", b"a"),), (("a", b"\0"),)}
    assert after_crashes(synced) == {(("a", b"a"),)}


def test_a_crash_undoes_a_rename_wholly_or_not_at_all() -> None:
    def renamed() -> Storage:
        storage = disk_with("old", "new")
        for name in ("old", "new"):
            file = storage.file(TOP / name)
            file.synced = file.content
        storage.sync_folder(storage.top)
        storage.rename(TOP / "old", TOP / "new")
        return storage

    assert after_crashes(renamed) == {(("new", b"old"),), (("new", b"new"), ("old", b"old"))}
