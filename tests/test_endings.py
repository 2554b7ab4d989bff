"""Case 31 and the kills: every ending has its exit code and its balance line, and the same command goes on."""

from __future__ import annotations

import errno
import re
import signal
import time
from pathlib import Path

import pytest

from batchgen.filesystem import FileSystem, resumable
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


def slow(path: Path, num: int, seconds: float = 0.1) -> Path:
    return runs.manifest(path, [{"id": f"row-{n}", "prompt": f"fault: slow {seconds}"} for n in range(num)])


def wait_for_receipts(out: Path, process: runs.Process, num: int) -> None:
    deadline = time.monotonic() + 30
    while process.is_running and time.monotonic() < deadline:
        if len(list(out.glob(".run/receipts/*"))) >= num:
            return
        time.sleep(0.01)


def test_complete(tmp_path: Path) -> None:
    ended = runs.run(runs.prompts(tmp_path / "m.parquet", 5), tmp_path / "out")
    assert (ended.code, balance(ended)) == (0, (5, 5, 0, 0, 0))


@pytest.mark.parametrize("num_bad", [1, 3])
def test_failed_rows(tmp_path: Path, num_bad: int) -> None:
    rows = [{"id": str(n), "prompt": "fault: nan" if n < num_bad else "a fox"} for n in range(3)]
    ended = runs.run(runs.manifest(tmp_path / "m.parquet", rows), tmp_path / "out", *FAULTS)
    assert (ended.code, balance(ended)) == (3, (3, 3 - num_bad, num_bad, 0, 0))


def test_rejected_rows(tmp_path: Path) -> None:
    source = runs.manifest(tmp_path / "m.parquet", {"prompt": ["a fox", None], "width": [64, 64]})
    ended = runs.run(source, tmp_path / "out", "--on-bad-row", "skip")
    assert (ended.code, balance(ended)) == (3, (2, 1, 0, 1, 0))


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


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2])
def test_signal_drains_and_the_run_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    source, out = slow(tmp_path / "m.parquet", 12), tmp_path / "out"
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
    source, out = slow(tmp_path / "m.parquet", 3, 3600), tmp_path / "out"
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
    source, out = slow(tmp_path / "m.parquet", 2, 3600), tmp_path / "out"
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
