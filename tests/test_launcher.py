"""Several worker processes under one command: real ones, stopped, killed and left alone."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from batchgen import children, launched
from batchgen.errors import UsageError
from batchgen.job import load_job
from batchgen.launcher import gpu_seats, seats_of
from batchgen.ledger import Ledger, Receipt
from batchgen.owners import start_time
from batchgen.progress import Display, Now
from batchgen.rundir import RunDirectory, open_run
from batchgen.runner import run_job
from batchgen.stopping import Stop
from batchgen.timeleft import TimeLeft
from tests import runs, tiny
from tests.terminals import on_a_terminal
from tests.test_appending import failing

FAULTS = ("--set", "model.variant=faults")
ONE_BY_ONE = ("--set", "plan.batch_sizes=[1]", "--set", "plan.shard_images=1")
HALVES = ("--set", "plan.batch_sizes=[1]", "--set", "plan.shard_images=5")
DONE = "{0} rows = {0} done + 0 failed + 0 rejected + 0 outstanding"


def holders(out: Path) -> dict[str, int]:
    """Process ids of the open claims, by shard and epoch."""
    if not (out / ".run/plan/0.json").exists():
        return {}
    run = RunDirectory(out)
    states = list(Ledger(run.root, run.files).states(run.index().shards))
    return {f"{one.shard}-{one.epoch}": one.claim.owner.pid for one in states if one.claim}


def receipts(out: Path) -> list[Receipt]:
    run = RunDirectory(out)
    return [one for state in Ledger(run.root, run.files).states(run.index().shards) for one in state.receipts]


def check_all(out: Path, ended: runs.Ended, num: int) -> None:
    assert (ended.code, ended.closing_line) == (0, DONE.format(num)), ended
    assert sorted(line["id"] for line in runs.check_images(out)) == sorted(f"row-{n}" for n in range(num))
    assert (out / "_SUCCESS").exists()


def test_a_worker_that_stands_still_holds_nobody_up(tmp_path: Path) -> None:
    """The second one works on meanwhile; in the end both have made rows."""
    out = tmp_path / "out"
    process = runs.start(runs.slow(tmp_path / "m.parquet", 12, 0.05), out, *ONE_BY_ONE, *FAULTS, "--workers", 2)
    runs.until(lambda: holders(out), process)
    first = next(iter(holders(out).values()))
    os.kill(first, signal.SIGSTOP)
    runs.until(lambda: {one.by.pid for one in receipts(out)} - {first}, process)
    os.kill(first, signal.SIGCONT)
    check_all(out, process.wait(runs.PATIENCE_S), 12)
    by = {one.by.pid for one in receipts(out)}
    assert first in by
    assert len(by) == 2
    assert process.pid not in by


def test_a_worker_killed_by_a_signal_without_a_name_is_replaced(tmp_path: Path) -> None:
    """Real-time signals have none."""
    out = tmp_path / "out"
    process = runs.start(runs.slow(tmp_path / "m.parquet", 12, 0.05), out, *ONE_BY_ONE, *FAULTS, "--workers", 2)
    runs.until(lambda: holders(out), process)
    first = next(iter(holders(out).values()))
    os.kill(first, signal.SIGRTMIN + 6)
    ended = process.wait(runs.PATIENCE_S)
    check_all(out, ended, 12)
    assert f"its process {first} was killed by signal {signal.SIGRTMIN + 6}; another takes its place" in ended.err


def test_a_killed_worker_is_said_and_its_shard_taken_over(tmp_path: Path) -> None:
    """One of three, in the middle of a shard; the heartbeat's age says nothing yet."""
    out = tmp_path / "out"
    process = runs.start(runs.slow(tmp_path / "m.parquet", 12, 0.05), out, *ONE_BY_ONE, *FAULTS, "--workers", 3)
    runs.until(lambda: holders(out), process)
    shard, first = next(iter(holders(out).items()))
    os.kill(first, signal.SIGSTOP)
    runs.until(lambda: {one.by.pid for one in receipts(out)} - {first}, process)
    held = holders(out).get(shard) == first
    os.kill(first, signal.SIGKILL)
    ended = process.wait(runs.PATIENCE_S)
    check_all(out, ended, 12)
    assert re.search(rf"worker \d: its process {first} was killed by SIGKILL; another takes its place", ended.err)
    assert not held or re.search(rf"shard \d+-0 is taken over: its process {first} on .* is gone", ended.err)


def test_workers_of_a_run_directory_that_is_moved_away_end_and_are_not_replaced(tmp_path: Path) -> None:
    source, out, moved = runs.slow(tmp_path / "m.parquet", 12, 0.05), tmp_path / "out", tmp_path / "moved"
    process = runs.start(source, out, *ONE_BY_ONE, *FAULTS, "--workers", 2)
    runs.until(lambda: holders(out), process)
    out.rename(moved)
    ended = process.wait(runs.PATIENCE_S)
    assert ended.code == 75, ended
    assert "the run directory is not there any more" in ended.err
    assert "Traceback" not in ended.err
    assert "another takes its place" not in ended.err
    check_all(moved, runs.run(source, moved, *ONE_BY_ONE, *FAULTS), 12)


@pytest.mark.parametrize("waits", [(), ("--no-wait",)])
def test_a_frozen_worker_does_not_keep_the_run_from_its_end(tmp_path: Path, waits: tuple[str, ...]) -> None:
    """The other one takes over its shard and ends; nothing is left to wait for."""
    source, out = runs.slow(tmp_path / "m.parquet", 12, 0.5), tmp_path / "out"
    options = (*ONE_BY_ONE, *FAULTS, *waits, "--workers", 2, "--grace", "5.5", "--set", "run.stale_after_s=2")
    process = runs.start(source, out, *options, puts={"batchgen.launcher:END_S": 1.0})
    runs.until(lambda: holders(out), process)
    first = next(iter(holders(out).values()))
    os.kill(first, signal.SIGSTOP)
    ended = process.wait(runs.PATIENCE_S)
    check_all(out, ended, 12)
    assert f"its process {first} is killed 6 s after it was told to stop" in ended.err
    assert not start_time(first)


@pytest.mark.parametrize("signals", [1, 2])
def test_a_process_that_cannot_be_killed_does_not_hold_the_command_up(tmp_path: Path, signals: int) -> None:
    source, out = runs.slow(tmp_path / "m.parquet", 10, 3600), tmp_path / "out"
    times = {"batchgen.launcher:END_S": 0.5, "batchgen.launcher:AT_ONCE_S": 0.5, "batchgen.launcher:KILL_S": 0.5}
    grace = ("--grace", "5.5" if signals == 1 else "3600")
    options = (*HALVES, *FAULTS, *grace, "--workers", 2)
    process = runs.start(source, out, *options, puts={"batchgen.launcher:Child": runs.Unkillable, **times})  # type: ignore[dict-item]
    runs.until(lambda: len(holders(out)) == 2, process)
    pids = sorted(holders(out).values())
    for number in pids:
        os.kill(number, signal.SIGSTOP)
    try:
        process.signal(signal.SIGTERM)
        if signals == 2:
            time.sleep(2.2)
            process.signal(signal.SIGTERM)
        ended = process.wait(runs.PATIENCE_S)
        assert all(map(start_time, pids))
    finally:
        for number in pids:
            os.kill(number, signal.SIGKILL)
    assert ended.code == 75, ended
    assert "10 rows = 0 done" in ended.closing_line
    for number in pids:
        assert f"its process {number} has not ended" in ended.err
    assert "Traceback" not in ended.err


def test_a_worker_that_dies_over_a_retried_row_is_replaced(tmp_path: Path) -> None:
    """Rows that a later plan has taken over are settled by no receipt of the earlier one."""
    rows = [{"id": f"row-{n}", "prompt": "fault: exit" if n == 3 else "a fox"} for n in range(8)]
    source, out = runs.manifest(tmp_path / "m.parquet", rows), tmp_path / "out"
    job = load_job(None, ["model.path=pattern", "model.variant=faults", "run.max_deaths=1"])
    assert run_job([source], out, job, failing("row-3")).exit_code == 3
    assert runs.batchgen("retry", out, "--plan-only").code == 0
    ended = runs.run(source, out, *FAULTS, "--set", "run.max_deaths=1", "--workers", 1)
    assert (ended.code, ended.closing_line) == (3, "8 rows = 7 done + 1 failed + 0 rejected + 0 outstanding"), ended
    assert ended.err.count("another takes its place") == 2


@pytest.mark.parametrize("workers", [1, 2])
def test_case_27_a_row_that_ends_every_process(tmp_path: Path, workers: int) -> None:
    """One command comes to the end to which one worker comes by being started again and again."""
    rows = [{"id": f"row-{n}", "prompt": "fault: exit" if n == 3 else "a fox"} for n in range(8)]
    source, out = runs.manifest(tmp_path / "m.parquet", rows), tmp_path / "out"
    options = (*FAULTS, "--set", "run.max_deaths=1", "--workers", workers)
    ended = runs.run(source, out, *options)
    assert (ended.code, ended.closing_line) == (3, "8 rows = 7 done + 1 failed + 0 rejected + 0 outstanding"), ended
    assert [line["id"] for line in runs.check_images(out)] == [f"row-{n}" for n in range(8) if n != 3]
    assert ended.err.count("was killed by SIGKILL") == 2


def test_a_signal_drains_all(tmp_path: Path) -> None:
    """Rows of ten minutes are dropped within the grace, by both; the command ends after them and says 75."""
    source, out = runs.slow(tmp_path / "m.parquet", 10, 600), tmp_path / "out"
    process = runs.start(source, out, *HALVES, *FAULTS, "--workers", 2, "--grace", "5.5")
    runs.until(lambda: len(holders(out)) == 2, process)
    pids = set(holders(out).values())
    assert len(pids) == 2
    process.signal(signal.SIGTERM)
    ended = process.wait(runs.PATIENCE_S)
    assert not any(map(start_time, pids))
    assert (ended.code, ended.closing_line.split(" + ", 1)[0]) == (75, "10 rows = 0 done"), ended
    assert "stopped by SIGTERM" in ended.err
    assert [one.kind for one in receipts(out)] == ["released"] * 2


def test_a_second_signal_to_the_whole_group_stops_all_at_once(tmp_path: Path) -> None:
    """As a terminal sends it: to the command and to its workers, which hear of it from the command as well."""
    source, out = runs.slow(tmp_path / "m.parquet", 10, 3600), tmp_path / "out"
    options = (*HALVES, *FAULTS, "--workers", 2, "--grace", "3600")
    process = runs.start(source, out, *options, own_group=True)
    runs.until(lambda: len(holders(out)) == 2, process)
    pids = set(holders(out).values())
    # Before a part a worker has nothing to finish.
    runs.until(lambda: len(list(out.glob(".run/work/*"))) == 2, process)
    time.sleep(1.0)
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(2.2)
    assert process.is_running
    os.killpg(process.pid, signal.SIGINT)
    ended = process.wait(runs.PATIENCE_S)
    assert not any(map(start_time, pids))
    assert (ended.code, ended.closing_line) == (75, "10 rows = 0 done + 0 failed + 0 rejected + 10 outstanding"), ended
    assert "stopped at once by a second signal (the first was SIGINT)" in ended.err
    assert "Traceback" not in ended.err
    assert [one.kind for one in receipts(out)] == ["released"] * 2


def test_workers_end_with_their_launcher(tmp_path: Path) -> None:
    source, out = runs.slow(tmp_path / "m.parquet", 10, 600), tmp_path / "out"
    process = runs.start(source, out, *HALVES, *FAULTS, "--workers", 2, "--grace", "5.5")
    runs.until(lambda: len(holders(out)) == 2, process)
    pids = set(holders(out).values())
    process.signal(signal.SIGKILL)
    assert process.wait(runs.PATIENCE_S).code == -signal.SIGKILL
    runs.until(lambda: not any(map(start_time, pids)))
    assert [one.kind for one in receipts(out)] == ["released"] * 2


def test_a_full_disk_is_resumable(tmp_path: Path) -> None:
    source = runs.prompts(tmp_path / "m.parquet", 8, width=640, height=640)
    small = ("--set", "plan.max_batch=4", "--set", "plan.shard_images=4")
    ended = runs.start(source, tmp_path / "out", *small, "--workers", 2, limit_file_bytes=9_000).wait(runs.PATIENCE_S)
    assert ended.code == 75, ended
    assert ended.err.count("the file would exceed the size limit") == 2
    assert "ended with code 75; no other takes its place; no worker left" in ended.err
    assert not list((tmp_path / "out/.run/starts").iterdir())
    check_all(tmp_path / "out", runs.run(source, tmp_path / "out", *small, "--workers", 1), 8)


def test_a_device_that_is_not_there_is_a_users_mistake(tmp_path: Path) -> None:
    source, out = runs.prompts(tmp_path / "m.parquet", 2), tmp_path / "out"
    ended = runs.run(source, out, "--workers", 1, "--set", "engine.device=cuda:7", model="demo")
    assert (ended.code, ended.closing_line) == (2, "2 rows = 0 done + 0 failed + 0 rejected + 2 outstanding"), ended
    assert "worker 1: engine.device = 'cuda:7' is not there" in ended.err


@pytest.mark.parametrize(
    ("shard_images", "heir"), [(1, "no other takes its place; 1 other worker left"), (2, "worker 2 is started instead")]
)
def test_a_crash_of_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_images: int, heir: str
) -> None:
    """They are replaced as often as a row is forgiven, and no more. With one shard there is one worker at a time."""
    crash = "from batchgen import worker; worker.Worker.work = lambda self: 1 / 0; main()"
    monkeypatch.setattr(children, "_BOOT", children._BOOT.replace("main()", crash))
    source, out = runs.prompts(tmp_path / "m.parquet", 2), tmp_path / "out"
    ended = runs.run(
        source,
        out,
        "--set",
        "run.max_deaths=1",
        *ONE_BY_ONE[:2],
        "--set",
        f"plan.shard_images={shard_images}",
        "--workers",
        2,
    )
    assert (ended.code, ended.closing_line) == (1, "2 rows = 0 done + 0 failed + 0 rejected + 2 outstanding"), ended
    assert ended.err.count("ZeroDivisionError: division by zero") == 4
    assert ended.err.count("another takes its place") == 2
    assert f"ended with code 1; {heir}" in ended.err
    assert "ended with code 1; no other takes its place, after 3 in a row without a commit; no worker left" in ended.err
    assert len(list((out / ".run/starts").glob("*.ended"))) == 1


def test_pixels_are_those_of_one_process_and_the_launcher_needs_no_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    source, model = runs.prompts(tmp_path / "m.parquet", 6), tiny.folder("sd1")
    options = ("--set", "plan.batch_sizes=[2]", "--set", "plan.shard_images=2", "--set", "sampling.steps=2")
    one, two = tmp_path / "one", tmp_path / "two"
    assert runs.run(source, one, *options, model=model).code == 0
    words = ["batchgen", "run", source, "-o", two, "--model", model, *options, "--workers", 2]
    code = (
        "import atexit, sys\n"
        f"sys.argv = {list(map(str, words))!r}\n"
        "atexit.register(lambda: print('TORCH', 'torch' in sys.modules))\n"
        "from batchgen.cli import main\nmain()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280, check=False)
    assert ended.stdout.splitlines() == [DONE.format(6), "TORCH False"], ended.stderr
    assert runs.pixels(two) == runs.pixels(one)
    assert len({one.by.pid for one in receipts(two)}) <= 2


def test_one_bar_for_all_on_a_terminal(tmp_path: Path) -> None:
    source, out = runs.slow(tmp_path / "m.parquet", 12, 0.05), tmp_path / "out"
    words = ["run", source, "-o", out, "--model", "pattern", *ONE_BY_ONE, *FAULTS, "--workers", 2]
    text = on_a_terminal("-m", "batchgen", *words)
    assert "12/12" in text
    assert "Traceback" not in text
    assert "worker 1: making 64x64, batch 1, guided, x,e" in text
    assert re.search(r"12/12 images, in \d\d:\d\d, 0 failed, 0 captures", text)
    assert not re.search(r"\b(1[3-9]|[2-9]\d)/12", text)


def test_no_more_workers_than_shards_are_started(tmp_path: Path) -> None:
    source, out = runs.prompts(tmp_path / "m.parquet", 8), tmp_path / "out"
    ended = runs.run(source, out, "--set", "plan.max_batch=4", "--set", "plan.shard_images=4", "--workers", 5)
    check_all(out, ended, 8)
    assert "2 of 5 workers started" in ended.err
    assert "worker 3" not in ended.err
    assert len(receipts(out)) == 2


def test_lines_say_for_how_many_they_speak() -> None:
    stream = io.StringIO()
    with Display(10, 2, 1, stream) as display:
        for number in range(3):
            display.show(Now(), f"worker {number}")
        assert display.line().startswith("3/10 images, as far as these 3 workers know; ")


def test_seats_of_workers() -> None:
    assert seats_of(None, None, load_job()) == ()
    assert [seat.name for seat in seats_of(None, 2, load_job())] == ["worker 1", "worker 2"]


def test_seats_of_gpus() -> None:
    seats = gpu_seats(("0", "2", "MIG-1f"), load_job())
    assert [seat.name for seat in seats] == ["GPU 0", "GPU 2", "MIG-1f"]
    assert [seat.environment for seat in seats] == [{"CUDA_VISIBLE_DEVICES": name} for name in ("0", "2", "MIG-1f")]
    assert {seat.device for seat in seats} == {"cuda:0"}


@pytest.mark.parametrize(
    ("gpus", "workers", "device", "message"),
    [
        ("all", 2, None, "leave one out"),
        ("all", None, "cuda:1", "engine.device = 'cuda:1'; leave one out"),
    ],
)
def test_what_does_not_go_together(
    monkeypatch: pytest.MonkeyPatch, gpus: str, workers: int | None, device: str | None, message: str
) -> None:
    monkeypatch.setattr("batchgen.launcher.visible_gpus", lambda: ("0", "1"))
    with pytest.raises(UsageError, match=message):
        seats_of(gpus, workers, load_job(None, [f"engine.device={device}"] if device else []))


def test_a_worker_that_starts_late_does_not_take_another_model(tmp_path: Path) -> None:
    """As one in a dead one's place may, hours after the run began: the model's files are those of the plan."""
    model, out = tiny.save(tmp_path / "model"), tmp_path / "out"
    job = load_job(None, [f"model.path={model}", "engine.device=cpu"])
    open_run(RunDirectory(out), [runs.prompts(tmp_path / "m.parquet", 1, width=64, height=64)], job)
    weights = Path("unet") / "diffusion_pytorch_model.safetensors"
    (tiny.save(tmp_path / "other", seed=2) / weights).replace(model / weights)
    said: list[str] = []
    reporter = launched.Reporter(io.StringIO())
    reporter.say = said.append  # type: ignore[method-assign]
    order = launched.Order(out, job, left=1.0, num_others=0, may_wait=True, time_left=TimeLeft())
    assert launched._work(order, Stop(), reporter) == 2
    assert f"model.file:{weights}: " in said[0]
