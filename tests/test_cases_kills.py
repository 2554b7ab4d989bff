"""Real workers killed or held up between two steps of the protocol, while something else goes on."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchgen.bench.victims import Order, Victim
from batchgen.ledger import ABANDONED, Ledger
from batchgen.rundir import RunDirectory
from tests import runs

NUM_ROWS = 4
PLACES = {"files": "rename data/N", "webdataset": "link data/N.tar", "parquet": "link data/N.parquet"}
"""The moment of publication."""
COMMIT = "link .run/receipts/N"
DONE = f"{NUM_ROWS} rows = {NUM_ROWS} done + 0 failed + 0 rejected + 0 outstanding"


class Scene:
    """A run directory of one shard, and workers on it."""

    def __init__(self, folder: Path, output_format: str = "webdataset", stale_after_s: float = 600.0) -> None:
        self.folder = folder
        self.out = folder / "out"
        source = runs.prompts(folder / "m.parquet", NUM_ROWS)
        keys = ("plan.shard_images=4", "plan.batch_sizes=[4]", f"run.stale_after_s={stale_after_s}")
        options = ["--model", "pattern", "--format", output_format, *(word for key in keys for word in ("--set", key))]
        self.words = ["run", str(source), "-o", str(self.out), *options]
        self.victims: list[Victim] = []

    def worker(self, number: signal.Signals | None = None, step: str = "", *, is_after: bool = False) -> Victim:
        order = None if number is None else Order(number, step, is_after=is_after)
        self.victims.append(Victim(self.words, self.out, self.folder / f"worker-{len(self.victims)}", order))
        return self.victims[-1]

    def held_up(self, step: str) -> Victim:
        one = self.worker(signal.SIGSTOP, step)
        wait(lambda: one.is_stopped, one)
        return one

    def partial(self) -> list[str]:
        """Ids in the tables of what there is so far."""
        ended = runs.batchgen("finalize", self.out, "--partial")
        assert ended.code == 0, ended.err
        ids: list[str] = pq.read_table(self.out / "metadata.partial.parquet")["id"].to_pylist()
        return ids

    def check(self) -> None:
        """Every row is there once, and nothing else."""
        assert runs.batchgen("status", self.out).out.splitlines()[0] == DONE
        assert len(runs.check_images(self.out)) == NUM_ROWS
        assert runs.batchgen("verify", self.out).code == 0

    def receipts(self) -> list[str]:
        run = RunDirectory(self.out)
        return [one.kind for one in Ledger(run.root, run.files).state(0).receipts]


def wait(condition: Callable[[], bool], one: Victim) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, one.errors()
        time.sleep(0.01)


def ended(one: Victim) -> int:
    wait(lambda: one.exit_code is not None, one)
    assert one.exit_code is not None
    return one.exit_code


@pytest.mark.parametrize("output_format", runs.FORMATS)
def test_a_crash_after_the_receipt_and_before_publication(tmp_path: Path, output_format: str) -> None:
    """The rows are settled: tables of what there is publish them, and nobody makes them again."""
    scene = Scene(tmp_path, output_format)
    assert ended(scene.worker(signal.SIGKILL, COMMIT, is_after=True)) == -9
    assert list(scene.out.glob("data/*")) == []
    assert len(scene.partial()) == NUM_ROWS
    one = scene.worker()
    assert ended(one) == 0
    assert one.log().made == []
    scene.check()


@pytest.mark.parametrize("output_format", runs.FORMATS)
def test_an_owner_paused_between_part_and_receipt_beside_a_partial_finalize(tmp_path: Path, output_format: str) -> None:
    scene = Scene(tmp_path, output_format)
    one = scene.held_up(COMMIT)
    assert scene.partial() == []
    one.send(signal.SIGCONT)
    assert ended(one) == 0
    scene.check()


@pytest.mark.parametrize("output_format", runs.FORMATS)
def test_an_owner_that_wakes_when_its_rows_were_made_by_another(tmp_path: Path, output_format: str) -> None:
    scene = Scene(tmp_path, output_format, stale_after_s=0.5)
    one = scene.held_up(COMMIT)
    assert ended(scene.worker()) == 0
    scene.check()
    before = {path: path.stat().st_mtime_ns for path in scene.out.glob("data/**/*")}
    one.send(signal.SIGCONT)
    assert ended(one) == 0
    assert "its part is thrown away" in one.errors()
    assert {path: path.stat().st_mtime_ns for path in scene.out.glob("data/**/*")} == before
    assert not [path for path in scene.out.glob(".run/work/*") if not path.name.endswith(".rows.parquet")]
    scene.check()


@pytest.mark.parametrize("output_format", runs.FORMATS)
def test_finalize_beside_a_worker_that_publishes(tmp_path: Path, output_format: str) -> None:
    scene = Scene(tmp_path, output_format)
    one = scene.held_up(PLACES[output_format])
    assert runs.batchgen("finalize", scene.out).code == 0
    scene.check()
    one.send(signal.SIGCONT)
    assert ended(one) == 0, one.errors()
    scene.check()


def test_two_workers_that_abandon_the_same_epoch(tmp_path: Path) -> None:
    """Both have seen the dead owner's claim before either says so."""
    scene = Scene(tmp_path)
    assert ended(scene.worker(signal.SIGKILL, COMMIT)) == -9
    two = [scene.held_up(COMMIT) for _ in range(2)]
    assert scene.receipts() == []
    for one in two:
        one.send(signal.SIGCONT)
    assert [ended(one) for one in two] == [0, 0]
    assert scene.receipts() == [ABANDONED, "committed"]
    assert sum(len(made.ids) for one in two for made in one.log().made) == NUM_ROWS
    scene.check()


def test_a_worker_that_dies_while_it_finalizes_leaves_the_rest_to_the_next(tmp_path: Path) -> None:
    """At every change that finalizing makes to what people read."""
    for number, name in enumerate(("metadata.parquet", "failures.parquet", "README.md", "_SUCCESS")):
        folder = tmp_path / str(number)
        folder.mkdir()
        scene = Scene(folder)
        assert ended(scene.worker(signal.SIGKILL, f"rename {name}")) == -9
        assert not json.loads(runs.batchgen("status", scene.out, "--json").out)["is_finalized"]
        assert ended(scene.worker()) == 0
        scene.check()
