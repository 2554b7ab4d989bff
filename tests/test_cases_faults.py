"""Faults that the protocol was made for, one by one, with the real program."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchgen import epoch
from batchgen.appending import append_rows, failed
from batchgen.balance import take_balance
from batchgen.errors import Interrupted
from batchgen.filesystem import FileSystem, resumable
from batchgen.finalize import finalize
from batchgen.ledger import ABANDONED, RELEASED, Ledger, Receipt
from batchgen.owners import this_process
from batchgen.report import status_text
from batchgen.rundir import RunDirectory
from batchgen.verify import verify
from tests import runs
from tests.plans import frozen

SMALL = ("--set", "plan.batch_sizes=[2]", "--set", "plan.shard_images=4")
DONE = "8 rows = 8 done + 0 failed + 0 rejected + 0 outstanding"


@pytest.mark.parametrize("output", runs.FORMATS)
def test_a_crash_after_the_receipt_and_before_publication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    source, out = runs.prompts(tmp_path / "m.parquet", 8), tmp_path / "out"

    def dies(run: RunDirectory, receipt: Receipt) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(epoch, "publish", dies)
        assert runs.run(source, out, *SMALL, "--format", output).code == 130
    assert list((out / "data").iterdir()) == []
    assert runs.batchgen("status", out).out.startswith("8 rows = 4 done")
    assert runs.run(source, out, *SMALL, "--format", output).closing_line == DONE
    assert len(runs.check_images(out)) == 8
    run = RunDirectory(out)
    assert [len(state.committed) for state in Ledger(run.root, run.files).states(run.index().shards)] == [1, 1]


@pytest.mark.parametrize("output", runs.FORMATS)
def test_an_owner_paused_between_part_and_receipt_while_the_run_is_finalized_partially(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    """What is finished and not committed is in no table, and is not swept."""
    source, out = runs.prompts(tmp_path / "m.parquet", 8), tmp_path / "out"
    commit, seen = Ledger.commit, list[int]()

    def paused(self: Ledger, receipt: Receipt) -> bool:
        finalize(RunDirectory(out), is_partial=True)
        seen.append(pq.read_table(out / "metadata.partial.parquet").num_rows)
        return commit(self, receipt)

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "commit", paused)
        assert runs.run(source, out, *SMALL, "--format", output).closing_line == DONE
    assert seen == [0, 4]
    assert len(runs.check_images(out)) == 8
    assert not (out / "metadata.partial.parquet").exists()
    assert verify(RunDirectory(out)).faults == ()


@pytest.mark.parametrize("code", [errno.EEXIST, errno.EIO, errno.ESTALE, errno.ETIMEDOUT], ids=errno.errorcode.get)
def test_every_reply_of_link_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    source, out = runs.prompts(tmp_path / "m.parquet", 8), tmp_path / "out"
    link = FileSystem.link

    def lost(self: FileSystem, one: Path, two: Path) -> None:
        link(self, one, two)
        if two.parent.name in ("claims", "receipts", "plan"):
            raise OSError(code, "reply lost", str(two))

    monkeypatch.setattr(FileSystem, "link", lost)
    assert runs.run(source, out, *SMALL).closing_line == DONE
    run = RunDirectory(out)
    assert [len(state.receipts) for state in Ledger(run.root, run.files).states(run.index().shards)] == [1, 1]


def test_two_workers_abandon_the_same_epoch(tmp_path: Path) -> None:
    one = frozen(tmp_path, {"prompt": ["a", "b"]})
    ledgers = [one.ledger() for _ in range(3)]
    assert ledgers[0].claim(0, 0)
    assert [ledger.abandon(0, 0) for ledger in ledgers[1:]] == [True, False]
    assert not ledgers[0].commit(Receipt("committed", 0, 0, this_process(), ok=(0, 1)))
    assert [ledger.claim(0, 1) for ledger in ledgers[1:]] == [True, False]
    assert [receipt.kind for receipt in ledgers[0].state(0).receipts] == [ABANDONED]


def test_an_owner_that_stops_on_a_full_disk_has_not_died(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its receipt finds no room: its claim says at least that it gave the epoch back, and no row is suspected."""
    one = frozen(tmp_path, {"prompt": ["a", "b"]})
    ledger = one.ledger()
    assert ledger.claim(0, 0)

    def full(self: FileSystem, path: Path, content: bytes) -> None:
        with resumable(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(FileSystem, "write", full)
        with pytest.raises(Interrupted):
            ledger.release(0, 0)
    other = one.ledger()
    assert other.dead_because(other.state(0), 600.0)
    assert other.abandon(0, 0)
    assert [receipt.kind for receipt in other.state(0).receipts] == [RELEASED]
    assert other.state(0).suspicion(1).deaths == 0


@pytest.mark.parametrize("output", runs.FORMATS)
def test_a_receipt_that_cannot_be_read_costs_its_rows_another_making(tmp_path: Path, output: str) -> None:
    source, out = runs.prompts(tmp_path / "m.parquet", 8), tmp_path / "out"
    options = (*SMALL, "--format", output)
    assert runs.run(source, out, *options).code == 0
    pixels = runs.pixels(out)
    whole = (out / ".run/receipts/00000-0").read_bytes()
    (out / ".run/receipts/00000-0").write_bytes(whole.replace(b"[[0, 3]]", b"[[0, 2]]"))
    assert runs.batchgen("status", out).out.startswith("8 rows = 4 done + 0 failed + 0 rejected + 4 outstanding")
    assert runs.run(source, out, *options).closing_line == DONE
    assert runs.pixels(out) == pixels
    assert len(runs.check_images(out)) == 8
    assert verify(RunDirectory(out)).faults == ()


def test_status_says_where_every_row_and_worker_stands(tmp_path: Path) -> None:
    """planned = done + failed + rejected + outstanding, in all and for each shard, from the receipts alone. Each shard
    has rows that are settled at once, and one that is held for minutes after it."""
    prompts = ["fault: raise", "a", "a", "a", "fault: slow 600"]
    rows = [
        {"id": f"row-{width}-{place}", "prompt": prompt, "width": width, "steps": 1 + place}
        for width in (64, 128, 192)
        for place, prompt in enumerate(prompts)
    ]
    source, out = runs.manifest(tmp_path / "m.parquet", rows), tmp_path / "out"
    options = ("--set", "plan.batch_sizes=[1]", "--set", "plan.shard_images=5", "--set", "model.variant=faults")
    process = runs.start(source, out, *options, "--grace", "5.5", "--set", "run.commit_every_s=0.001")
    deadline = time.monotonic() + 200
    while True:
        facts = json.loads(runs.batchgen("status", out, "--json").out) if (out / ".run/plan/0.json").exists() else {}
        text = runs.batchgen("status", out).out if facts else ""
        if facts and facts["holders"] and facts["done"] + facts["failed"] and f"process {process.pid} on " in text:
            break
        assert time.monotonic() < deadline, process.errors()
    process.signal(signal.SIGTERM)
    process.wait()
    assert facts["rows"] == len(rows) == facts["done"] + facts["failed"] + facts["rejected"] + facts["outstanding"]
    for name in ("done", "failed", "outstanding"):
        assert sum(shard[name] for shard in facts["shards"]) == facts[name]
    assert all(one["rows"] == one["done"] + one["failed"] + one["outstanding"] for one in facts["shards"])
    (worker,) = facts["workers"]
    assert (worker["pid"], worker["done"], worker["failed"]) == (process.pid, facts["done"], facts["failed"])
    assert worker["held"] == facts["held"] > 0
    assert 0 <= worker["heartbeat_age_s"] < 60
    assert f"process {process.pid} on {worker['host']}, " in text
    assert "s ago" in text
    shutil.rmtree(out / "data")
    again = json.loads(runs.batchgen("status", out, "--json").out)
    assert again["done"] >= facts["done"]


def test_what_a_later_plan_has_taken_over_is_counted_once(tmp_path: Path) -> None:
    one = frozen(tmp_path, {"id": ["a", "b", "c"], "prompt": ["a", "b", "c"]}, overrides=["plan.shard_images=2"])
    ledger = one.ledger()
    me = replace(this_process(), host="elsewhere")
    for shard, num_rows in enumerate(one.index.shard_rows):
        assert ledger.claim(shard, 0)
        rows = tuple(range(num_rows))
        assert ledger.commit(Receipt("committed", shard, 0, me, ok=rows[1:], failed=rows[:1], cut=rows[1:]))
    plans = append_rows(one.run, one.index, failed(one.run, one.index))
    num = len(one.index.shard_rows)
    balance = take_balance(plans, ledger)
    assert (balance.rows, balance.done, balance.failed, balance.outstanding, balance.cut) == (
        3,
        3 - num,
        0,
        num,
        3 - num,
    )
    assert sum(one.rows for one in balance.shards) == 3
    assert all(one.rows == one.done + one.failed + one.outstanding for one in balance.shards)


def test_a_heartbeat_of_a_time_to_come_is_shown_as_such(tmp_path: Path) -> None:
    one = frozen(tmp_path, {"id": ["a"], "prompt": ["a"]})
    ledger = one.ledger()
    assert ledger.claim(0, 0)
    path, now_s = ledger.claim_path(0, 0), time.time()
    os.utime(path, (now_s + 600, now_s + 600))
    text = status_text(one.index, take_balance(one.index, ledger), is_finalized=False)
    assert "s ahead of this clock" in text
    assert "-5" not in text
    assert "-6" not in text
