"""Case 31 and the kills: every ending has its exit code and its balance line, and the same command goes on."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batchgen.filesystem import FileSystem, resumable
from batchgen.generator import DeviceLost
from batchgen.starts import MOST
from batchgen.stopping import SIGNALS
from batchgen.worker import Worker
from tests import runs

FAULTS = ("--set", "model.variant=faults")
SMALL = ("--set", "plan.batch_sizes=[1, 2]", "--set", "plan.shard_images=4", "--set", "run.commit_every_s=0.2")
BALANCE = re.compile(r"(\d+) rows = (\d+) done \+ (\d+) failed \+ (\d+) rejected \+ (\d+) outstanding$")


def balance(ended: runs.Ended) -> tuple[int, ...]:
    """rows, done, failed, rejected, outstanding of the closing line; they add up."""
    found = BALANCE.match(ended.closing_line)
    assert found, ended
    rows, *parts = map(int, found.groups())
    assert rows == sum(parts)
    return rows, *parts


def wait_for_receipts(out: Path, process: runs.Process, num: int) -> None:
    deadline = time.monotonic() + 30
    while process.is_running and time.monotonic() < deadline:
        if len(list(out.glob(".run/receipts/*"))) >= num:
            return
        time.sleep(0.01)


NOTHING_MADE = "2 rows = 0 done + 0 failed + 0 rejected + 2 outstanding"


def lose_device(*arguments: object) -> None:
    raise DeviceLost("the device's context is gone")


def have_bug(*arguments: object) -> None:
    raise ZeroDivisionError("a bug")


@pytest.mark.parametrize(
    ("code", "prompt", "setting", "puts", "closing_line"),
    [
        (0, "a fox", "", {}, "2 rows = 2 done + 0 failed + 0 rejected + 0 outstanding"),
        (3, "fault: nan", "", {}, "2 rows = 1 done + 1 failed + 0 rejected + 0 outstanding"),
        (2, "a fox", "plan.max_batsh=2", {}, ""),
        (1, "a fox", "", {"batchgen.runner:Worker": have_bug}, NOTHING_MADE),
        (1, "a fox", "", {"batchgen.worker:Epoch": lose_device}, NOTHING_MADE),
    ],
    ids=["made", "failed", "usage", "bug", "device"],
)  # fmt: skip
def test_what_a_process_ends_with(
    tmp_path: Path, code: int, prompt: str, setting: str, puts: dict[str, Any], closing_line: str
) -> None:
    rows = [{"id": "a", "prompt": prompt}, {"id": "b", "prompt": "a goose"}]
    source, words = runs.manifest(tmp_path / "m.parquet", rows), ["--set", setting] if setting else []
    ended = runs.start(source, tmp_path / "out", *FAULTS, *words, puts=puts).wait()
    assert (ended.code, ended.closing_line) == (code, closing_line), ended
    assert ("Traceback" in ended.err) == (puts.get("batchgen.runner:Worker") is not None)


def test_complete(tmp_path: Path) -> None:
    ended = runs.run(runs.prompts(tmp_path / "m.parquet", 5), tmp_path / "out")
    assert (ended.code, balance(ended)) == (0, (5, 5, 0, 0, 0))


@pytest.mark.parametrize("num_bad", [1, 3])
def test_failed_rows(tmp_path: Path, num_bad: int) -> None:
    rows = [{"id": str(n), "prompt": "fault: nan" if n < num_bad else "a fox"} for n in range(3)]
    ended = runs.run(runs.manifest(tmp_path / "m.parquet", rows), tmp_path / "out", *FAULTS)
    assert (ended.code, balance(ended)) == (3, (3, 3 - num_bad, num_bad, 0, 0))
    out = tmp_path / "out"
    assert (
        f"{num_bad} row{'s' * (num_bad > 1)} failed; {out}/failures.parquet says why, and batchgen retry {out}"
        in ended.err
    )
    assert "rejected" not in ended.err.split("failures.parquet")[1]


def test_a_retry_of_nothing_says_so(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert runs.run(runs.prompts(tmp_path / "m.parquet", 2), out).code == 0
    ended = runs.batchgen("retry", out)
    assert (ended.code, balance(ended)) == (0, (2, 2, 0, 0, 0))
    assert f"no row of {out} has failed: there is nothing to try again" in ended.err
    assert not (out / ".run/plan/1.json").exists()


def test_a_retry_makes_no_rows_that_were_never_tried(tmp_path: Path) -> None:
    source, out = runs.slow(tmp_path / "m.parquet", 12), tmp_path / "out"
    process = runs.start(source, out, *SMALL, *FAULTS)
    wait_for_receipts(out, process, 1)
    process.signal(signal.SIGTERM)
    runs.until(lambda: "SIGTERM: the batch at work is finished if the grace allows" in process.errors())
    stopped = process.wait()
    ended = runs.batchgen("retry", out)
    assert (ended.code, balance(ended)) == (75, balance(stopped))
    assert "the command that began the run makes the rows that are outstanding" in ended.err


def test_rejected_rows(tmp_path: Path) -> None:
    source = runs.manifest(tmp_path / "m.parquet", {"prompt": ["a fox", None], "width": [64, 64]})
    ended = runs.run(source, tmp_path / "out", "--on-bad-row", "skip")
    assert (ended.code, balance(ended)) == (3, (2, 1, 0, 1, 0))
    assert f"1 row rejected; {tmp_path}/out/rejected.parquet says why" in ended.err


def test_bad_job_and_bad_manifest(tmp_path: Path) -> None:
    source = runs.prompts(tmp_path / "m.parquet", 2)
    assert runs.run(source, tmp_path / "out", "--set", "plan.max_batsh=2").code == 2
    assert runs.run(tmp_path / "none.parquet", tmp_path / "out").code == 2
    assert not (tmp_path / "out").exists()


def test_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(self: Worker) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Worker, "work", work)
    ended = runs.run(runs.prompts(tmp_path / "m.parquet", 2), tmp_path / "out")
    assert (ended.code, balance(ended)) == (1, (2, 0, 0, 0, 2))
    assert "ZeroDivisionError: a bug" in ended.err


@pytest.mark.parametrize("output", runs.FORMATS)
def test_full_disk(tmp_path: Path, output: str) -> None:
    """A real limit on the size of files: no half file under a final name, no row failed, and it goes on."""
    source = runs.prompts(tmp_path / "m.parquet", 6, width=640, height=640)
    options = ("--format", output, *SMALL)
    ended = runs.start(source, tmp_path / "out", *options, limit_file_bytes=9_000).wait()
    assert ended.code == 75, ended
    assert balance(ended)[2] == 0
    assert "Traceback" not in ended.err
    assert runs.run(source, tmp_path / "out", *options).code == 0
    assert len(runs.check_images(tmp_path / "out")) == 6


def test_full_disk_at_the_fifth_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 22 through the seam: what was committed before is kept and not made again."""
    source, out = runs.prompts(tmp_path / "m.parquet", 8), tmp_path / "out"
    write, num = FileSystem.write, 0

    def fills_up(self: FileSystem, path: Path, content: bytes) -> None:
        nonlocal num
        num += path.suffix == ".png"
        with resumable(path):
            if num >= 5:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            write(self, path, content)

    one_by_one = ("--set", "plan.batch_sizes=[1]", "--set", "plan.shard_images=1", "--set", "output.encoders=1")
    with monkeypatch.context() as patch:
        patch.setattr(FileSystem, "write", fills_up)
        ended = runs.run(source, out, *one_by_one)
    assert ended.code == 75
    assert "the disk is full" in ended.err
    done = balance(ended)[1]
    assert 0 < done < 8
    before = {path: path.stat().st_mtime_ns for path in out.glob("data/*/*.png")}
    assert len(before) == done
    assert runs.run(source, out, *one_by_one).code == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(runs.check_images(out)) == 8


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_signal_drains_and_the_run_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    source, out = runs.slow(tmp_path / "m.parquet", 12), tmp_path / "out"
    process = runs.start(source, out, *SMALL, *FAULTS)
    wait_for_receipts(out, process, 1)
    process.signal(number)
    process.signal(signal.SIGCONT)
    process.signal(number)
    ended = process.wait()
    assert ended.code == 75, ended
    assert 0 < balance(ended)[1] < 12
    assert f"stopped by {number.name}" in ended.err
    assert runs.run(source, out, *SMALL, *FAULTS).code == 0
    assert len(runs.check_images(out)) == 12


def test_second_signal_stops_at_once(tmp_path: Path) -> None:
    """Neither the rows of an hour each nor the grace of an hour are waited for."""
    source, out = runs.slow(tmp_path / "m.parquet", 3, 3600), tmp_path / "out"
    process = runs.start(source, out, *FAULTS, "--set", "plan.batch_sizes=[1]", "--grace", "3600")
    while not list(out.glob(".run/work/*")):
        assert process.is_running
        time.sleep(0.01)
    time.sleep(0.5)
    process.signal(signal.SIGTERM)
    time.sleep(2.2)
    process.signal(signal.SIGTERM)
    ended = process.wait()
    assert (ended.code, balance(ended)) == (75, (3, 0, 0, 0, 3))
    assert "stopped at once by a second signal (the first was SIGTERM)" in ended.err


def wait_until_asleep(process: runs.Process) -> None:
    runs.until(lambda: "asleep" in process.errors(), process)


LOADING = "batchgen.models.pattern:PatternGenerator"


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("batchgen.planned:survey", ""),
        (LOADING, "3 rows = 0 done + 0 failed + 0 rejected + 3 outstanding"),
        ("batchgen.runner:finalize", "3 rows = 3 done + 0 failed + 0 rejected + 0 outstanding"),
    ],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_obeyed_at_once_where_no_row_is_made(
    tmp_path: Path, place: str, said: str, number: signal.Signals
) -> None:
    """While the manifest is read, a model loads, or the tables are written."""
    source, out = runs.prompts(tmp_path / "m.parquet", 3), tmp_path / "out"
    process = runs.start(source, out, puts={place: runs.sleep})
    wait_until_asleep(process)
    process.signal(number)
    ended = process.wait()
    assert (ended.code, ended.closing_line) == (75, said), ended
    assert f"stopped by {number.name}, while no row was being made; the same command goes on" in ended.err
    assert ("nothing is planned yet" in ended.err) == (not said)
    assert runs.run(source, out).code == 0
    assert len(runs.check_images(out)) == 3


def hidden(pid: int) -> set[signal.Signals]:
    """The signals that a process has blocked."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(re.search(r"SigBlk:\s*(\w+)", status)[1], 16)  # type: ignore[index]
    return {number for number in SIGNALS if mask >> (number - 1) & 1}


class Program:
    """`python -m batchgen ARGS`, from its first instruction on."""

    def __init__(self, *args: object) -> None:
        words = [sys.executable, "-m", "batchgen", *map(str, args)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, cwd=runs.ROOT)

    def until(self, is_so: Callable[[], object]) -> None:
        deadline = time.monotonic() + 120
        while not is_so():
            assert self.process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def end(self) -> runs.Ended:
        out, err = self.process.communicate(timeout=120)
        return runs.Ended(self.process.returncode, out, err)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_the_program_is_loaded_stops_the_run(tmp_path: Path, number: signal.Signals) -> None:
    """From the first moment that it has one, and twice within a second."""
    source, out = runs.prompts(tmp_path / "m.parquet", 3), tmp_path / "out"
    program = Program("run", source, "-o", out, "--model", "pattern")
    program.until(lambda: hidden(program.process.pid))
    program.process.send_signal(number)
    program.process.send_signal(number)
    ended = program.end()
    assert (ended.code, ended.out) == (75, ""), ended
    assert f"stopped by {number.name}, while no row was being made; the same command goes on" in ended.err
    assert not out.exists()


def test_a_signal_at_any_time_of_the_start(tmp_path: Path) -> None:
    """Wherever it comes in the two seconds or so until rows are made."""
    source, out = runs.slow(tmp_path / "m.parquet", 500), tmp_path / "out"
    for number in range(8):
        program = Program("run", source, "-o", out, "--model", "pattern", *SMALL, *FAULTS)
        program.until(lambda program=program: hidden(program.process.pid))  # type: ignore[misc]
        time.sleep(0.25 * number)
        program.process.send_signal(signal.SIGTERM)
        ended = program.end()
        assert ended.code == 75, ended
        assert "stopped by SIGTERM" in ended.err


@pytest.mark.parametrize("workers", [(), ("--workers", 1)])
def test_no_signal_stays_blocked_where_rows_are_made(tmp_path: Path, workers: tuple[object, ...]) -> None:
    """Not in the process, nor in those that it starts."""
    source, out = runs.slow(tmp_path / "m.parquet", 3, 600), tmp_path / "out"
    program = Program("run", source, "-o", out, "--model", "pattern", *FAULTS, *workers, "--grace", "5.1")
    try:
        program.until(lambda: list(out.glob(".run/claims/*-?")))
        pid = program.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        assert len(children) == bool(workers)
        # For a moment they are wherever a thread is started.
        program.until(lambda: not any(hidden(int(one)) for one in (pid, *children)))
    finally:
        program.process.send_signal(signal.SIGTERM)
    assert program.end().code == 75


@pytest.mark.parametrize("command", ["verify", "retry", "finalize", "plan", "status"])
def test_other_commands_hear_a_signal_at_once(tmp_path: Path, command: str) -> None:
    """They have nothing to finish."""
    source, out = runs.prompts(tmp_path / "m.parquet", 2), tmp_path / "out"
    assert runs.run(source, out).code == 0
    words = ["plan", source, "--model", "pattern"] if command == "plan" else [command, out]
    place = "batchgen.planned:survey" if command == "plan" else "batchgen.rundir:load_index"
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)):
        process = runs.Process(*words, puts={place: runs.sleep})
        wait_until_asleep(process)
        process.signal(number)
        assert process.wait().code == code


def sleep_and_turn_the_signal_into_an_error(*arguments: object, **options: object) -> None:
    """As C code does that asks only whether there was an error."""
    try:
        runs.sleep()
    except BaseException:
        raise AttributeError("partially initialized module") from None


def test_a_signal_that_a_library_makes_an_error_of_is_no_crash(tmp_path: Path) -> None:
    source, out = runs.prompts(tmp_path / "m.parquet", 3), tmp_path / "out"
    process = runs.start(source, out, puts={LOADING: sleep_and_turn_the_signal_into_an_error})
    wait_until_asleep(process)
    process.signal(signal.SIGTERM)
    ended = process.wait()
    assert (ended.code, balance(ended)) == (75, (3, 0, 0, 0, 3)), ended
    assert "Traceback" not in ended.err


def test_a_hangup_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    """As under nohup."""
    source, out = runs.slow(tmp_path / "m.parquet", 6), tmp_path / "out"
    process = runs.start(source, out, *SMALL, *FAULTS, ignores=signal.SIGHUP)
    wait_for_receipts(out, process, 1)
    process.signal(signal.SIGHUP)
    ended = process.wait()
    assert (ended.code, balance(ended)) == (0, (6, 6, 0, 0, 0))


@pytest.mark.slow
def test_a_drain_ends_within_thirty_seconds(tmp_path: Path) -> None:
    source, out = runs.slow(tmp_path / "m.parquet", 2, 3600), tmp_path / "out"
    process = runs.start(source, out, *FAULTS)
    while not list(out.glob(".run/work/*")):
        assert process.is_running
        time.sleep(0.01)
    process.signal(signal.SIGTERM)
    assert process.wait(30).code == 75


@pytest.mark.parametrize("streams", ["2>&1 | true", ">&- 2>&-", ">/dev/full 2>&1", ">/dev/full 2>&-"])
def test_streams_that_nobody_reads_change_nothing(tmp_path: Path, streams: str) -> None:
    """A pipe whose reader has gone, closed streams, a log on a full disk."""
    source, out = runs.prompts(tmp_path / "m.parquet", 4), tmp_path / "out"
    command = shlex.join([sys.executable, "-m", "batchgen", "run", str(source), "-o", str(out), "--model", "pattern"])
    script = f"{{ {command}; echo $? >{tmp_path}/code; }} {streams}"
    subprocess.run(["bash", "-c", script], check=False, timeout=120, cwd=runs.ROOT)
    assert (tmp_path / "code").read_text() == "0\n"
    assert len(runs.check_images(out)) == 4


def test_a_terminal_that_closes_costs_nothing(tmp_path: Path) -> None:
    """Its hangup is a stop signal, and that nothing can be printed any more does not keep the rows from the disk."""
    source, out = runs.slow(tmp_path / "m.parquet", 200), tmp_path / "out"
    pid, terminal = pty.fork()
    if pid == 0:
        words = ["run", str(source), "-o", str(out), "--model", "pattern", *SMALL, *FAULTS]
        os.chdir(runs.ROOT)
        os.execv(sys.executable, [sys.executable, "-m", "batchgen", *words])
    deadline = time.monotonic() + 120
    while len(list(out.glob(".run/receipts/*"))) < 2:
        assert time.monotonic() < deadline
        if select.select([terminal], [], [], 0.05)[0]:
            os.read(terminal, 65536)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 75
    status = json.loads(runs.batchgen("status", out, "--json").out)
    assert 0 < status["done"] < 200
    assert not list(out.glob(".run/work/*.png"))


def test_starts_that_come_to_nothing_are_told_and_not_repeated(tmp_path: Path) -> None:
    """What a queue starts again and again is killed while its model loads; then it is mended."""
    source, out = runs.prompts(tmp_path / "m.parquet", 3), tmp_path / "out"
    for _ in range(MOST):
        process = runs.start(source, out, puts={LOADING: runs.sleep})
        wait_until_asleep(process)
        process.signal(signal.SIGKILL)
        assert process.wait().code == -9
    ended = runs.start(source, out, puts={LOADING: runs.sleep}).wait()
    assert (ended.code, balance(ended)) == (1, (3, 0, 0, 0, 3))
    assert f"the last {MOST} starts of this run ended before a row was settled" in ended.err
    assert "Traceback" not in ended.err
    assert runs.run(source, out).code == 0


def test_starts_that_are_stopped_before_a_commit_come_to_nothing_too(tmp_path: Path) -> None:
    """A time limit that one batch outlasts: each start gives its shard back."""
    source, out = runs.slow(tmp_path / "m.parquet", 2, 3600), tmp_path / "out"
    options = (*FAULTS, "--grace", "5.01")
    for number in range(MOST):
        process = runs.start(source, out, *options)
        deadline = time.monotonic() + 60
        while len(list(out.glob(".run/claims/*-?"))) <= number or not list(out.glob(".run/work/*")):
            assert process.is_running, process.errors()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.signal(signal.SIGTERM)
        assert process.wait().code == 75
    assert runs.run(source, out, *options).code == 1


@pytest.mark.parametrize("command", ["verify", "finalize"])
def test_ctrl_c_in_a_command_other_than_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    source, out = runs.prompts(tmp_path / "m.parquet", 2), tmp_path / "out"
    assert runs.run(source, out).code == 0

    def interrupted(self: FileSystem, path: Path) -> list[str]:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("the signal was not heard")

    monkeypatch.setattr(FileSystem, "names", interrupted)
    assert runs.batchgen(command, out).code == 130


def test_what_verify_and_finalize_end_with_when_a_file_is_gone(tmp_path: Path) -> None:
    """As the README says: faults are 3, tables that cannot be written 1, and to `run` the row is done."""
    source, out = runs.prompts(tmp_path / "m.parquet", 2), tmp_path / "out"
    assert runs.run(source, out).code == runs.batchgen("verify", out).code == 0
    next(out.glob("data/*/*.png")).unlink()
    assert runs.batchgen("verify", out).code == 3
    assert runs.batchgen("finalize", out).code == 1
    ended = runs.run(source, out)
    assert (ended.code, balance(ended)) == (0, (2, 2, 0, 0, 0))


def test_grace_drops_the_batch_that_cannot_end(tmp_path: Path) -> None:
    source, out = runs.slow(tmp_path / "m.parquet", 2, 3600), tmp_path / "out"
    process = runs.start(source, out, *FAULTS, "--set", "plan.batch_sizes=[1]", "--grace", "6")
    while not list(out.glob(".run/work/*")):
        assert process.is_running
        time.sleep(0.01)
    time.sleep(0.5)
    process.signal(signal.SIGTERM)
    ended = process.wait()
    assert (ended.code, balance(ended)) == (75, (2, 0, 0, 0, 2))
    assert "dropped" in ended.err


@pytest.mark.parametrize("output", runs.FORMATS)
def test_killed_at_any_moment(tmp_path: Path, output: str) -> None:
    """SIGKILL again and again, then the same command: an undisturbed run's rows and pixels, each once."""
    source = runs.prompts(tmp_path / "m.parquet", 60, width=320, height=320)
    # Twelve kills may hit one shard more often than a row is forgiven.
    options = (*SMALL, "--format", output, "--set", "run.max_deaths=100")
    assert runs.run(source, tmp_path / "calm", *options).code == 0
    out, num_kills = tmp_path / "rough", 0
    for kill in range(12):
        process = runs.start(source, out, *options)
        wait_for_receipts(out, process, 1 + kill)
        time.sleep(0.003 * kill)
        if process.is_running:
            process.signal(signal.SIGKILL)
            num_kills += 1
        process.wait()
    assert num_kills > 0
    assert runs.run(source, out, *options).code == 0
    assert runs.pixels(out) == runs.pixels(tmp_path / "calm")
    runs.check_images(out)
    assert runs.batchgen("verify", out).code == 0


def test_a_card_of_another_name_is_written_again(tmp_path: Path) -> None:
    """Left by a finalizer that was killed between card and marker, after the directory was renamed: of equal length."""
    source, out = runs.prompts(tmp_path / "m.parquet", 3), tmp_path / "moved"
    assert runs.run(source, tmp_path / "first").code == 0
    (tmp_path / "first").rename(out)
    card = out / "README.md"
    card.write_text(card.read_text().replace("# first", "# moved"))
    assert runs.batchgen("verify", out).code == 3
    assert runs.run(source, out).code == 0
    assert "# moved" in card.read_text()
    assert runs.batchgen("verify", out).code == 0
