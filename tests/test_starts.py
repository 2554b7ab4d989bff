"""Which starts count as come to nothing."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from batchgen.balance import Balance, take_balance
from batchgen.errors import BatchgenError
from batchgen.filesystem import FileStat, FileSystem
from batchgen.ledger import Ledger
from batchgen.owners import Owner, this_process
from batchgen.rundir import RunDirectory, open_run
from batchgen.starts import LOOKS, MOST, Starts
from tests import runs
from tests.plans import pattern_job

ELSEWHERE = replace(this_process(), boot_id="another boot", host="elsewhere")
GONE = replace(this_process(), start_time="1")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "out")
    open_run(run, [runs.prompts(tmp_path / "m.parquet", 3)], pattern_job())
    Ledger(run.root, run.files).make_folders()
    return run


def balance(run: RunDirectory) -> Balance:
    return take_balance(run.index(), Ledger(run.root, run.files))


def leave(run: RunDirectory, owner: Owner, settled: int = 0, num: int = MOST) -> list[Path]:
    folder = run.root / "starts"
    folder.mkdir(exist_ok=True)
    paths = [folder / f"{owner.host}-{number}" for number in range(num)]
    for path in paths:
        path.write_text(json.dumps({"owner": asdict(owner), "settled": settled}))
    return paths


def names(run: RunDirectory) -> list[str]:
    return run.files.names(run.root / "starts")


def test_the_count_begins_anew_when_it_was_told(run: RunDirectory) -> None:
    leave(run, GONE)
    with pytest.raises(BatchgenError, match=f"the last {MOST} starts of this run ended before a row was settled"):
        Starts(run).begin(balance(run))
    assert names(run) == []
    Starts(run).begin(balance(run))
    assert len(names(run)) == 1


def test_too_few_starts_are_not_told(run: RunDirectory) -> None:
    leave(run, GONE, num=MOST - 1)
    Starts(run).begin(balance(run))
    assert len(names(run)) == MOST


def test_starts_before_the_last_progress_are_forgotten(run: RunDirectory) -> None:
    leave(run, GONE)
    Starts(run).begin(replace(balance(run), done=1, outstanding=2))
    assert len(names(run)) == 1


@pytest.mark.parametrize("owner", [this_process(), ELSEWHERE], ids=["alive", "elsewhere"])
def test_starts_that_may_be_at_work_do_not_count(run: RunDirectory, owner: Owner) -> None:
    leave(run, owner)
    Starts(run).begin(balance(run))
    assert len(names(run)) == MOST + 1


def test_starts_on_other_hosts_count_once_they_say_that_they_ended(run: RunDirectory) -> None:
    for path in leave(run, ELSEWHERE):
        path.with_name(f"{path.name}.ended").touch()
    with pytest.raises(BatchgenError, match="starts of this run ended"):
        Starts(run).begin(balance(run))


def test_nothing_is_told_while_somebody_is_at_work(run: RunDirectory) -> None:
    leave(run, GONE)
    ledger = Ledger(run.root, run.files, this_process())
    assert ledger.claim(0, 0)
    Starts(run).begin(balance(run))
    assert len(names(run)) == MOST + 1


WORKER = replace(GONE, pid=GONE.pid + 1, launcher_pid=GONE.pid, launcher_start_time=GONE.start_time)


@pytest.mark.parametrize("dead", [GONE, WORKER], ids=["alone", "with its launcher"])
def test_deaths_over_a_shard_do_not_count(run: RunDirectory, dead: Owner) -> None:
    leave(run, GONE)
    assert Ledger(run.root, run.files, dead).claim(0, 0)
    assert Ledger(run.root, run.files, this_process()).abandon(0, 0)
    Starts(run).begin(balance(run))
    assert len(names(run)) == MOST + 1


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"owner": {}, "settled": 0}', b"\xff\x00"])
def test_what_is_torn_is_no_start(run: RunDirectory, content: bytes) -> None:
    leave(run, GONE, num=MOST - 1)
    (run.root / "starts" / "torn").write_bytes(content)
    Starts(run).begin(balance(run))


def test_a_start_that_ends_as_it_should_leaves_nothing(run: RunDirectory) -> None:
    starts = Starts(run)
    starts.begin(balance(run))
    starts.end(is_early=False)
    starts.end(is_early=True)
    assert names(run) == []


def test_a_start_that_ends_early_says_so(run: RunDirectory) -> None:
    starts = Starts(run)
    starts.begin(balance(run))
    with pytest.raises(KeyError), starts.noting():
        raise KeyError
    (mine,) = [name for name in names(run) if not name.endswith(".ended")]
    assert names(run) == [mine, f"{mine}.ended"]


def test_an_end_without_its_start_is_swept_and_none_is_left(run: RunDirectory) -> None:
    """Another forgot the start, after progress, while it came to its end."""
    starts = Starts(run)
    starts.begin(balance(run))
    (mine,) = names(run)
    (run.root / "starts" / mine).unlink()
    starts.end(is_early=True)
    assert names(run) == []
    (run.root / "starts" / "0a0b.ended").touch()
    Starts(run).begin(balance(run))
    assert [name for name in names(run) if name.endswith(".ended")] == []


class Counting(FileSystem):
    """Counts the files that are read or asked after."""

    num: int

    def read(self, path: Path) -> bytes | None:
        self.num += 1
        return super().read(path)

    def stat(self, path: Path) -> FileStat | None:
        self.num += 1
        return super().stat(path)


def test_of_many_starts_few_are_read_and_those_that_ended_first(run: RunDirectory) -> None:
    leave(run, ELSEWHERE, num=300)
    counting = Counting()
    counting.num = 0
    Starts(RunDirectory(run.path, counting)).begin(balance(run))
    assert counting.num < LOOKS + 20
    for number in range(MOST):
        (run.root / "starts" / f"elsewhere-{299 - number}.ended").touch()
    with pytest.raises(BatchgenError, match="starts of this run ended"):
        Starts(run).begin(balance(run))
