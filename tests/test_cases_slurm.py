"""Cases 20 and 28 to 30: what a worker does inside a Slurm job, and with its signals."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from batchgen.generator import Pending
from batchgen.job import load_job
from batchgen.making import Maker
from batchgen.models.pattern import PatternGenerator
from batchgen.records import Batch
from batchgen.rundir import RunDirectory, open_run
from batchgen.runner import Terms, run_job
from batchgen.slurm import task
from batchgen.slurm.environment import Task, this_task
from batchgen.timeleft import OUT_OF_TIME, TimeLeft
from tests import runs, tiny
from tests.slurm.fakes import Fakes

ONE_BY_ONE = ("--set", "plan.batch_sizes=[1]", "--set", "plan.shard_images=1")
FAULTS = ("--set", "model.variant=faults")
IN_ARRAY = {"SLURM_JOB_ID": "19", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3"}


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    """Inside task 3 of array 17."""
    fakes = Fakes(tmp_path / "bin", monkeypatch)
    for name, value in IN_ARRAY.items():
        monkeypatch.setenv(name, value)
    return fakes


def test_case_20_nothing_is_derived_from_the_count(
    slurm: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resubmission of the tasks 3 and 7, of which the second has nothing left to do."""
    source = runs.prompts(tmp_path / "m.parquet", 10)
    for name, value in {"TASK_COUNT": 2, "TASK_MIN": 3, "TASK_MAX": 7, "TASK_STEP": 1}.items():
        monkeypatch.setenv(f"SLURM_ARRAY_{name}", str(value))
    for index in ("3", "7"):
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", index)
        assert runs.run(source, tmp_path / "out", *ONE_BY_ONE, "--no-wait").code == 0
    assert [line["id"] for line in runs.check_images(tmp_path / "out")] == [f"row-{n}" for n in range(10)]


@pytest.mark.parametrize(("grace", "num"), [("3600", 1), ("5.0001", 0)])
def test_case_28_a_signal_in_the_middle_of_denoising(
    tmp_path: Path, grace: str, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is finished if the grace lets it, else dropped; in the end all pixels are those of a quiet run."""
    source, out, model = runs.prompts(tmp_path / "m.parquet", 2, steps=6), tmp_path / "out", tiny.folder("sd1")
    options = (*ONE_BY_ONE, "--set", "engine.device=cpu", "--set", "sampling.sampler=ddim")
    asked, should_drop = 0, Maker.should_drop

    def interrupting(self: Maker, batch: Batch, started: float) -> Callable[[], bool]:
        inner = should_drop(self, batch, started)

        def between_evaluations() -> bool:
            nonlocal asked
            asked += 1
            if asked == 4:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.01)
            return inner()

        return between_evaluations

    with monkeypatch.context() as patch:
        patch.setattr(Maker, "should_drop", interrupting)
        ended = runs.run(source, out, *options, "--grace", grace, model=model)
    assert ended.code == 75, ended
    assert ended.closing_line == f"2 rows = {num} done + 0 failed + 0 rejected + {2 - num} outstanding"
    assert ("dropped" in ended.err) == (num == 0)
    assert runs.run(source, out, *options, model=model).code == 0
    assert runs.run(source, tmp_path / "quiet", *options, model=model).code == 0
    assert runs.pixels(out) == runs.pixels(tmp_path / "quiet")
    assert len(runs.check_images(out, is_pattern=False)) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_case_29_a_signal_to_the_whole_group_twice(tmp_path: Path, number: signal.Signals) -> None:
    """With SIGCONT around and between: one drain, nothing is dropped."""
    source, out = runs.slow(tmp_path / "m.parquet", 4, 3), tmp_path / "out"
    process = runs.start(source, out, *ONE_BY_ONE, *FAULTS, own_group=True)
    runs.until(lambda: list(out.glob(".run/receipts/*")), process)
    for one in (signal.SIGCONT, number, signal.SIGCONT, number, signal.SIGCONT):
        os.killpg(process.pid, one)
        time.sleep(0.1)
    ended = process.wait()
    assert ended.code == 75, ended
    assert f"stopped by {number.name}; the same command goes on" in ended.err
    assert "at once" not in ended.err
    assert "dropped" not in ended.err
    assert runs.run(source, out, *ONE_BY_ONE, *FAULTS).code == 0
    assert len(runs.check_images(out)) == 4


def warned(tmp_path: Path, *words: object, number: signal.Signals = signal.SIGUSR1) -> runs.Ended:
    """A worker that gets a signal at work, with `--requeue`."""
    source, out = runs.slow(tmp_path / "m.parquet", 40, 0.2), tmp_path / "out"
    process = runs.start(source, out, *ONE_BY_ONE, *FAULTS, "--requeue", *words)
    runs.until(lambda: list(out.glob(".run/receipts/*")), process)
    process.signal(number)
    return process.wait()


def test_case_30_an_array_task_is_requeued_by_its_own_name_once(slurm: Fakes, tmp_path: Path) -> None:
    """The SIGTERM that Slurm sends for it changes nothing."""
    slurm.answer("scontrol", "kill -TERM $PPID")
    ended = warned(tmp_path)
    assert ended.code == 75, ended
    assert slurm.calls("scontrol") == ["requeue 17_3"]
    assert ended.err.splitlines()[-1] == "job 17_3 is in the queue again"
    assert ended.closing_line.startswith("40 rows = ")


def test_case_30_refused(slurm: Fakes, tmp_path: Path) -> None:
    slurm.refuse("scontrol", "Requested operation is presently disabled")
    ended = warned(tmp_path)
    assert (ended.code, slurm.calls("scontrol")) == (75, ["requeue 17_3"])
    assert "could not be put into the queue again (scontrol refuses: Requested operation is presently" in ended.err


def test_case_30_without_scontrol(slurm: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm.lack("scontrol", monkeypatch)
    ended = warned(tmp_path)
    assert ended.code == 75
    assert "job 17_3 could not be put into the queue again (there is no scontrol here" in ended.err


@pytest.mark.parametrize(
    ("number", "state", "is_requeued"),
    [
        (signal.SIGTERM, "RUNNING", True),
        (signal.SIGTERM, "COMPLETING", False),
        (signal.SIGTERM, "", False),
        (signal.SIGUSR2, "RUNNING", False),
        (signal.SIGINT, "RUNNING", False),
    ],
)
def test_only_who_has_to_make_room_goes_back_into_the_queue(
    slurm: Fakes, tmp_path: Path, number: signal.Signals, state: str, is_requeued: bool
) -> None:
    """A preempted job is running still when it gets SIGTERM; a cancelled one is not, and must not rise again."""
    slurm.answer("squeue", f'case "$*" in *%L) echo 1:00:00;; *) echo {state};; esac')
    assert warned(tmp_path, number=number).code == 75
    assert slurm.calls("scontrol") == (["requeue 17_3"] if is_requeued else [])


def test_a_task_whose_time_ends_while_its_model_loads_is_requeued(slurm: Fakes, tmp_path: Path) -> None:
    source, out = runs.prompts(tmp_path / "m.parquet", 3), tmp_path / "out"
    process = runs.start(source, out, "--requeue", puts={"batchgen.models.pattern:PatternGenerator": runs.sleep})
    deadline = time.monotonic() + 60
    while "asleep" not in process.errors():
        assert process.is_running, process.errors()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.signal(signal.SIGUSR1)
    ended = process.wait()
    assert (ended.code, slurm.calls("scontrol")) == (75, ["requeue 17_3"]), ended


def test_a_finished_run_is_not_requeued(slurm: Fakes, tmp_path: Path) -> None:
    assert runs.run(runs.prompts(tmp_path / "m.parquet", 3), tmp_path / "out", "--requeue").code == 0
    assert slurm.calls("scontrol") == []


def test_requeue_where_it_cannot_be(tmp_path: Path, slurm: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    source = runs.prompts(tmp_path / "m.parquet", 3)
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    ended = runs.run(source, tmp_path / "out", "--requeue")
    assert (ended.code, "would end 4 processes of job 17_3" in ended.err) == (2, True)
    for name in IN_ARRAY:
        monkeypatch.delenv(name)
    ended = runs.run(source, tmp_path / "out", "--requeue")
    assert (ended.code, "there is no SLURM_JOB_ID here" in ended.err) == (2, True)


def test_time_left(slurm: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    assert task.time_left_s(this_task(), said.append) == 3600
    assert slurm.calls("squeue") == ["-h -j 17_3 -o %L"]
    known = this_task({**IN_ARRAY, "SLURM_JOB_END_TIME": str(int(time.time()) + 100)})
    assert 90 < (task.time_left_s(known, said.append) or 0) <= 100
    assert task.time_left_s(Task("", 0, 1, None), said.append) is None
    assert len(slurm.calls("squeue")) == 1
    assert said == []
    slurm.lack("squeue", monkeypatch)
    assert task.time_left_s(this_task(), said.append) is None
    (line,) = said
    assert line.startswith("the time left of job 17_3 is not known (there is no squeue here; ")


def made_in(
    tmp_path: Path, limit_s: float | None, monkeypatch: pytest.MonkeyPatch, *, may_wait: bool
) -> tuple[int, str]:
    """How many rows of six one worker makes that has so much time, at ten seconds a row; and what stopped it."""
    now = 0.0
    submit = PatternGenerator.submit

    def slowly(self: PatternGenerator, batch: Batch, should_drop: Callable[[], bool]) -> Pending:
        nonlocal now
        now += 10
        return submit(self, batch, should_drop)

    job = load_job(None, ["model.path=pattern", "plan.batch_sizes=[1]", "plan.shard_images=1"])
    source, left = runs.prompts(tmp_path / "m.parquet", 6), TimeLeft(limit_s, lambda: now)
    with monkeypatch.context() as patch:
        patch.setattr(PatternGenerator, "submit", slowly)
        ending = run_job([source], tmp_path / "out", job, Terms(may_wait, time_left=left))
    assert ending.exit_code == (75 if ending.balance.outstanding else 0)
    return ending.balance.done, ending.stopped_by


@pytest.mark.parametrize(("limit_s", "num"), [(None, 6), (1000.0, 6), (35.0, 3), (29.0, 2), (5.0, 1), (-5.0, 1)])
def test_a_worker_takes_no_shard_that_it_cannot_finish(
    tmp_path: Path, limit_s: float | None, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But its first, which must be tried for anything to be known; and it does not wait then."""
    for may_wait in (True, False):
        folder = tmp_path / str(may_wait)
        folder.mkdir()
        assert made_in(folder, limit_s, monkeypatch, may_wait=may_wait) == (num, "" if num == 6 else OUT_OF_TIME)


def test_costs_are_the_plans(tmp_path: Path) -> None:
    """After a small shard a large one is known to be too long, and another small one is not."""
    path = runs.manifest(
        tmp_path / "m.parquet", [{"prompt": "a", "width": size, "height": size} for size in (64, 64, 512, 1024)]
    )
    job = load_job(None, ["model.path=pattern", "plan.batch_sizes=[1]", "plan.shard_images=1"])
    index = open_run(RunDirectory(tmp_path / "out"), [path], job)
    assert len(index.shard_s) == 4
    assert index.shard_s == tuple(sorted(index.shard_s, reverse=True))
    assert index.shard_s[0] > 3 * index.shard_s[1] > 9 * index.shard_s[2] > 0
    left = TimeLeft(100.0, lambda: 80.0)
    left.learn(index.shard_s[3], 10.0)
    assert left.fits(index.shard_s[2])
    assert not left.fits(index.shard_s[1])
