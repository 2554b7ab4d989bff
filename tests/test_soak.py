"""Real workers killed at every step; and that what is looked at afterwards can be found wrong."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from batchgen.bench import siege as siege_module
from batchgen.bench.aftermath import Loss, compare, loss
from batchgen.bench.siege import Siege, Targets
from batchgen.bench.soak import write_manifest
from batchgen.bench.victims import Log, Made, Order, Victim
from batchgen.rundir import RunDirectory
from tests import runs


def soak(folder: Path, kills: int, *options: object) -> tuple[runs.Ended, dict[str, object]]:
    report = folder / "soak.json"
    words = ("bench", "soak", "--kills", kills, "--json", report, "--folder", folder / "work", *options)
    ended = runs.batchgen(*words)
    return ended, json.loads(report.read_text())


def check(ended: runs.Ended, report: dict[str, object], kills: int) -> None:
    assert ended.code == 0, ended.err
    assert report["problems"] == []
    assert (report["rows_lost"], report["rows_doubled"], report["rows_differing"]) == (0, 0, 0)
    assert isinstance(report["kills"], int)
    assert report["kills"] >= kills


def test_fifteen_kills(tmp_path: Path) -> None:
    ended, report = soak(tmp_path, 15, "--rows", 40, "--workers", "2", "--formats", "files", "--seed", 5)
    check(ended, report, 15)
    assert ended.out.startswith("at least 15 kills; a run directory that is begun is ended")
    assert re.search(r"run-1-files: one worker after another is to die, at \d+ places, until", ended.out)
    assert "10 kills so far\n20 kills so far" in ended.out
    steps = report["steps"]
    assert isinstance(steps, dict)
    assert {"link .run/claims/N", "link .run/receipts/N", "rename data/N", "rename _SUCCESS"} <= steps["files"].keys()
    assert sum(map(sum, steps["files"].values())) > 0


@pytest.mark.slow
def test_two_hundred_kills(tmp_path: Path) -> None:
    check(*soak(tmp_path, 200), 200)


@pytest.mark.slow
def test_a_soak_finds_a_planted_fault(tmp_path: Path) -> None:
    code = (
        "from batchgen.bench import victims\n"
        "victims._processes.set_forkserver_preload(['batchgen.runner', 'tests.planted'])\n"
        "from batchgen.cli import main\n"
        "main()"
    )
    report = tmp_path / "soak.json"
    words = ["bench", "soak", "--kills", "260", "--formats", "parquet", "--json", str(report)]
    command = [sys.executable, "-c", code, *words, "--folder", str(tmp_path / "work")]
    ended = subprocess.run(command, cwd=runs.ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 1, ended.stderr
    assert json.loads(report.read_text())["rows_doubled"] > 0
    assert "doubled=" in ended.stdout


@pytest.mark.parametrize("options", [["--workers", "3-1"], ["--workers", "some"], ["--formats", "files,zip"]])
def test_options_that_are_none(tmp_path: Path, options: list[str]) -> None:
    ended = runs.batchgen("bench", "soak", *options)
    assert ended.code == 2
    assert options[1] in ended.err


def victim(folder: Path, order: Order | None) -> Victim:
    source = runs.prompts(folder / "m.parquet", 3)
    words = ("run", str(source), "-o", str(folder / "out"), "--model", "pattern")
    return Victim(words, folder / "out", folder / "worker", order)


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("step", ["link .run/claims/N", "link .run/receipts/N", "rename data/N", "rename _SUCCESS"])
def test_a_worker_dies_at_its_step(tmp_path: Path, step: str, *, is_after: bool) -> None:
    one = victim(tmp_path, Order(signal.SIGKILL, step, is_after=is_after))
    wait(lambda: one.exit_code is not None)
    assert one.exit_code == -9, one.errors()
    assert one.log().steps[-1] == step
    place = step.split()[1].replace("N", "0000?-0")
    assert len(list((tmp_path / "out").glob(place))) == is_after


def test_a_worker_stops_and_goes_on(tmp_path: Path) -> None:
    one = victim(tmp_path, Order(signal.SIGSTOP, "link .run/receipts/N"))
    wait(lambda: one.is_stopped)
    assert one.exit_code is None
    one.send(signal.SIGCONT)
    wait(lambda: one.exit_code is not None)
    assert one.exit_code == 0, one.errors()
    log = one.log()
    assert {name for _, name in log.closed} == {path.name for path in tmp_path.glob("out/.run/receipts/*")}
    assert sorted(row for made in log.made for row in made.ids) == ["row-0", "row-1", "row-2"]


def test_the_manifest_can_be_made_and_is_the_same_for_a_seed(tmp_path: Path) -> None:
    one, two = (write_manifest(tmp_path / f"{name}.parquet", 40, Random(7)) for name in "ab")
    assert pq.read_table(one).equals(pq.read_table(two))
    planned = runs.batchgen("plan", one, "--model", "pattern", "--set", "model.variant=faults", "--json")
    assert json.loads(planned.out)["images"] == 40


def test_every_step_is_aimed_at_from_both_sides() -> None:
    steps = ["mkdir a", "link b", "fsync c", "link b"]
    targets = Targets(steps)
    wanted = [(step, is_after) for step in ("mkdir a", "link b", "fsync c") for is_after in (False, True)]
    assert [(one.step, one.is_after) for one in targets.left()] == wanted
    random = Random(0)
    drawn = [targets.draw(random) for _ in range(300)]
    assert {(one.step, one.is_after) for one in drawn if one.step} == set(wanted)
    assert {one.signal for one in drawn} == {signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP}
    targets.hits["mkdir a", False] += 1
    assert (len(targets.left()), targets.table()["mkdir a"]) == (5, [1, 0])
    targets.misses["mkdir a", True] += 2
    assert len(targets.left()) == 4
    targets.learn(["fsync c", "unlink d"])
    assert [one.step for one in targets.left()][-2:] == ["unlink d"] * 2


# What a soak must notice


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    folder = tmp_path_factory.mktemp("truth")
    assert runs.run(runs.prompts(folder / "m.parquet", 6), folder / "out", "--format", "parquet").code == 0
    return RunDirectory(folder / "out")


def edited(truth: RunDirectory, path: Path, edit: Callable[[pa.Table], pa.Table]) -> RunDirectory:
    """A copy of the run with another metadata.parquet."""
    shutil.copytree(truth.path, path)
    table = pq.read_table(path / "metadata.parquet")
    pq.write_table(edit(table), path / "metadata.parquet")
    return RunDirectory(path)


def replaced(table: pa.Table, column: str, value: object) -> pa.Table:
    first = pc.equal(table["id"], "row-0")
    values = pc.if_else(first, pa.scalar(value, table.schema.field(column).type), table[column])
    return table.set_column(table.schema.get_field_index(column), table.schema.field(column), values)


def test_a_run_equals_itself(truth: RunDirectory) -> None:
    after = compare(truth, truth)
    assert (after.lost, after.doubled, after.differing, after.problems) == (0, 0, 0, ())


@pytest.mark.parametrize(
    ("edit", "counts"),
    [
        (lambda table: table.slice(1), (1, 0, 0)),
        (lambda table: pa.concat_tables([table, table.slice(2, 1)]), (0, 1, 0)),
        (lambda table: replaced(table, "pixel_sha256", "0" * 64), (0, 0, 1)),
        (lambda table: replaced(table, "steps", 7), (0, 0, 0)),
    ],
)
def test_rows_that_are_not_as_without_kills(
    tmp_path: Path, truth: RunDirectory, edit: Callable[[pa.Table], pa.Table], counts: tuple[int, ...]
) -> None:
    after = compare(edited(truth, tmp_path / "out", edit), truth)
    assert (after.lost, after.doubled, after.differing) == counts
    assert any("metadata.parquet differs" in problem for problem in after.problems)


def test_columns_that_kills_may_change(tmp_path: Path, truth: RunDirectory) -> None:
    run = edited(truth, tmp_path / "out", lambda table: replaced(replaced(table, "seconds", 9.0), "retries", 1))
    problems = compare(run, truth).problems
    assert [problem for problem in problems if "differs" in problem] == []


@pytest.mark.parametrize("place", ["data/foreign.parquet", "foreign.txt"])
def test_foreign_files(tmp_path: Path, truth: RunDirectory, place: str) -> None:
    run = edited(truth, tmp_path / "out", lambda table: table)
    (run.path / place).write_bytes(b"foreign")
    assert any("foreign" in problem for problem in compare(run, truth).problems)


SHARD = {"a": 0, "b": 0, "c": 0, "d": 0, "e": 1}


def log(*ids: str) -> Log:
    """Each batch is one row, and a second."""
    return Log(made=[Made((one,), float(place), place + 1.0) for place, one in enumerate(ids)])


def test_what_a_kill_cost() -> None:
    assert loss(log("a", "b"), frozenset("ab"), SHARD) == Loss(0, 0, 0.0)
    assert loss(log("a", "b", "c"), frozenset("a"), SHARD) == Loss(2, 2, 0.0)
    assert loss(log("a", "b", "c", "d", "e"), frozenset("a"), SHARD) == Loss(4, 4, 2.0)


def test_rows_that_were_taken_away_are_no_cost_of_the_kill() -> None:
    taken = log("a", "b", "e")
    taken.closed = [(2, "00000-0")]
    assert loss(taken, frozenset(), SHARD) == Loss(1, 1, 0.0)


@pytest.mark.parametrize("ends", ["sweep", "go"])
def test_no_worker_outlives_a_siege_that_is_broken_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """By Ctrl-C, say, while workers are awaited."""
    source = runs.manifest(tmp_path / "m.parquet", [{"id": "a", "prompt": "fault: slow 600"}])
    words = [str(source), "-o", str(tmp_path / "out"), "--model", "pattern", "--set", "model.variant=faults"]
    siege = Siege(
        RunDirectory(tmp_path / "out"), words, Targets(["link nowhere"]), Random(0), 2, tmp_path, lambda: None
    )

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(siege_module.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        siege.sweep() if ends == "sweep" else siege.go(5)
    monkeypatch.undo()
    assert siege._victims
    deadline = time.monotonic() + 60
    while any(one.exit_code is None for one in siege._victims):
        assert time.monotonic() < deadline
        time.sleep(0.01)
