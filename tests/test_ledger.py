"""The protocol of claims and receipts: what a slot says, who is dead, and no row lost or made twice."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from batchgen.filesystem import FileSystem
from batchgen.ledger import (
    ABANDONED,
    COMMITTED,
    RELEASED,
    Ledger,
    Receipt,
    ShardState,
    Suspicion,
    stem,
    unstem,
)
from batchgen.owners import Owner, gone_because, start_time, this_process
from tests.plans import folder

ME = this_process()


def ledger_at(path: Path, owner: Owner | None = ME) -> Ledger:
    ledger = Ledger(path, FileSystem(), owner)
    ledger.make_folders()
    return ledger


def receipt_of(shard: int = 0, epoch: int = 0, kind: str = COMMITTED, by: Owner = ME, **fields: Any) -> Receipt:
    return Receipt(kind, shard, epoch, by, **fields)


ROWS = st.sets(st.integers(0, 300), max_size=40).map(lambda rows: tuple(sorted(rows)))


@given(ROWS, ROWS, st.text(max_size=5))
def test_a_receipt_reads_back_as_it_was_put(ok: tuple[int, ...], failed: tuple[int, ...], device: str) -> None:
    failed = tuple(sorted(set(failed) - set(ok)))
    with folder() as path:
        ledger = ledger_at(path)
        receipt = receipt_of(
            7, 0, ok=ok, failed=failed, part="00007-0.tar", part_bytes=5, part_sha256="ab", table_sha256="cd",
            versions={"device": device},
        )  # fmt: skip
        assert ledger.commit(receipt)
        assert ledger.receipt(7, 0) == receipt
        content = json.loads(ledger.receipt_path(7, 0).read_bytes())
        assert next(iter(content)) == "token"
        assert len(content["ok"]) == sum(1 for row in ok if row - 1 not in ok)


def test_epochs_follow_each_other(tmp_path: Path) -> None:
    ledger, other = ledger_at(tmp_path), ledger_at(tmp_path, this_process())
    assert ledger.state(3) == ShardState(3, (), None, False)
    assert ledger.claim(3, 0)
    assert not other.claim(3, 0)
    state = other.state(3)
    assert (state.epoch, state.is_claimed, state.claim and state.claim.owner) == (0, True, ME)
    assert ledger.commit(receipt_of(3, 0, ok=(0, 2)))
    assert not other.abandon(3, 0)
    state = other.state(3)
    assert (state.epoch, state.is_claimed, state.settled) == (1, False, {0, 2})
    assert other.claim(3, 1)
    assert ledger.abandon(3, 1)
    assert not other.commit(receipt_of(3, 1, by=other.owner or ME, ok=(1,)))
    assert ledger.state(3).settled == {0, 2}
    assert [one.kind for one in ledger.state(3).receipts] == [COMMITTED, ABANDONED]


def test_a_receipt_beyond_a_gap_is_not_seen(tmp_path: Path) -> None:
    ledger = ledger_at(tmp_path)
    assert ledger.commit(receipt_of(0, 2, ok=(1,)))
    assert ledger.state(0).receipts == ()


with tempfile.TemporaryDirectory() as _name:
    _ledger = ledger_at(Path(_name))
    _ledger.commit(receipt_of(ok=(1, 2, 3), part="00000-0"))
    WHOLE = _ledger.receipt_path(0, 0).read_bytes()
JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
DAMAGED = st.one_of(
    st.binary(max_size=40),
    JSON.map(lambda value: json.dumps(value).encode()),
    st.integers(0, len(WHOLE) - 1).map(lambda length: WHOLE[:length]),
    st.tuples(st.sampled_from(["kind", "shard", "epoch", "by", "ok", "failed"]), JSON).map(
        lambda pair: json.dumps(json.loads(WHOLE) | {pair[0]: pair[1]}).encode()
    ),
)


@given(DAMAGED)
def test_a_damaged_receipt_counts_as_abandoned(content: bytes) -> None:
    with folder() as path:
        ledger = ledger_at(path)
        ledger.receipt_path(0, 0).write_bytes(content)
        ledger.claim_path(0, 1).write_bytes(content)
        state = ledger.state(0)
        (receipt,) = state.receipts
        if receipt.is_readable:
            assert json.loads(content).keys() == json.loads(WHOLE).keys()
        else:
            assert (receipt.kind, receipt.part, state.settled) == (ABANDONED, "", frozenset())
        assert state.is_claimed
        assert ledger.dead_because(state, 600.0) is None or state.claim is not None


@given(st.integers(0, 200_000), st.integers(0, 2_000))
def test_stems_are_names_and_back(shard: int, epoch: int) -> None:
    assert unstem(stem(shard, epoch)) == (shard, epoch)


@given(st.text(max_size=9) | st.sampled_from(["²-0", "1-0", "00001-00", "00001-", "٣٣٣٣٣-1", "00001-0.tar", "+0001-0"]))
def test_any_other_name_is_none(name: str) -> None:
    found = unstem(name)
    assert found is None or stem(*found) == name


def suspicion_of(kinds: str, max_deaths: int = 3) -> Suspicion:
    names = {"c": COMMITTED, "a": ABANDONED, "r": RELEASED}
    receipts = tuple(receipt_of(0, epoch, names[kind]) for epoch, kind in enumerate(kinds))
    return ShardState(0, receipts, None, False).suspicion(max_deaths)


@pytest.mark.parametrize(
    ("kinds", "is_row_by_row", "is_guilty"),
    [
        ("", False, False),
        ("aa", False, False),
        ("aaca", False, False),
        ("aacaa", False, False),
        ("araa", True, False),
        ("aaa", True, False),
        ("aaaaa", True, False),
        ("aaaaaa", True, True),
        ("aaaaac", True, False),
        ("aaaaacaa", True, False),
        ("aaaaacaaa", True, True),
        ("aaaaaac", True, False),
        ("aaaaaacaaa", True, True),
        ("rrrrrr", False, False),
    ],
)
def test_deaths_make_suspects_and_commits_clear_them(kinds: str, is_row_by_row: bool, is_guilty: bool) -> None:
    found = suspicion_of(kinds)
    assert (found.is_row_by_row, found.is_first_row_guilty) == (is_row_by_row, is_guilty)


SCRIPT = """
import json
from dataclasses import asdict
from batchgen.owners import this_process
print(json.dumps(asdict(this_process())))
"""


def ended_process() -> Owner:
    """An owner whose process has come and gone on this machine."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    ended = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    return Owner(**json.loads(ended.stdout))


def test_owners_are_gone_with_their_process_or_their_slurm_job() -> None:
    gone = ended_process()
    assert gone_because(ME, ME) is None
    assert "is gone" in (gone_because(gone, ME) or "")
    assert "is gone" in (gone_because(replace(ME, start_time="1"), ME) or "")
    elsewhere = replace(gone, boot_id="another")
    assert gone_because(elsewhere, ME) is None
    assert gone_because(replace(gone, pid_namespace="pid:[1]"), ME) is None
    in_job = replace(elsewhere, job_id="17_3", restart_count=1)
    assert gone_because(in_job, replace(ME, job_id="17_3", restart_count=1)) is None
    assert gone_because(in_job, replace(ME, job_id="17_4", restart_count=2)) is None
    assert gone_because(in_job, replace(ME, job_id="17_3", restart_count=2)) == "Slurm has restarted its job 17_3"
    assert gone_because(replace(elsewhere, restart_count=0), replace(ME, restart_count=5)) is None


HIDDEN = """
import os, sys
from dataclasses import replace
from batchgen.owners import gone_because, is_gone, mark, this_process

me = this_process()
alive = sys.argv[1].split()
for change in (os.setresgid, os.setresuid):
    change(*[65534] * 3)
for pid, start_time in (alive, ("99999999", "1"), (f"1{'0' * 30}", "1")):
    owner = replace(me, pid=int(pid), start_time=start_time)
    print(gone_because(owner, me) is not None, is_gone(f"a.{mark(owner)}.tmp", me))
"""


@pytest.mark.parametrize("hidepid", [1, 2])
def test_a_process_that_another_user_may_not_see_is_not_gone(hidepid: int) -> None:
    """As `/proc` is mounted on many clusters; mounting it needs root, which CI has."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    child = subprocess.Popen(["sleep", "60"])
    alive = f"{child.pid} {start_time(child.pid)}"
    try:
        script = 'mount -t proc -o "hidepid=$1" proc /proc && shift && exec "$@"'
        words = ["unshare", "--mount", "sh", "-c", script, "-", str(hidepid), sys.executable, "-c", HIDDEN, alive]
        ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    finally:
        child.kill()
        child.wait()
    assert ended.stdout.splitlines() == ["False False", "True True", "True True"], ended.stderr


def test_a_process_that_waits_to_be_reaped_has_ended() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + 20
    while start_time(child.pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert start_time(child.pid) == ""
    child.wait()
    assert start_time(os.getpid()) == ME.start_time != ""


@pytest.mark.parametrize(
    ("environment", "job_id", "restart_count"),
    [
        ({}, "", 0),
        ({"SLURM_JOB_ID": "17", "SLURM_RESTART_COUNT": "2"}, "17", 2),
        ({"SLURM_JOB_ID": "19", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3"}, "17_3", 0),
        ({"SLURM_JOB_ID": "19", "SLURM_ARRAY_JOB_ID": "17"}, "19", 0),
        ({"SLURM_JOB_ID": "19", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": ""}, "19", 0),
        ({"SLURM_ARRAY_JOB_ID": "17"}, "", 0),
        ({"SLURM_RESTART_COUNT": ""}, "", 0),
        ({"SLURM_RESTART_COUNT": "many"}, "", 0),
        ({"SLURM_RESTART_COUNT": "-1"}, "", 0),
        ({"SLURM_RESTART_COUNT": "9" * 5000}, "", 0),
    ],
)
def test_this_process_says_who_it_is(
    environment: dict[str, str], job_id: str, restart_count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    me = this_process()
    assert (me.job_id, me.restart_count, me.pid) == (job_id, restart_count, os.getpid())
    assert me.token != this_process().token


def test_heartbeats_grow_old_by_the_file_system_s_clock(tmp_path: Path) -> None:
    far = replace(ME, token="ff", boot_id="another", pid=1)
    owner, watcher = ledger_at(tmp_path, far), ledger_at(tmp_path)
    assert watcher.heartbeat_age_s(0, 0) is None
    owner.claim(0, 0)
    state = watcher.state(0)
    assert watcher.dead_because(state, 60.0) is None
    os.utime(watcher.claim_path(0, 0), (0, time.time() - 100))
    assert 99 < (watcher.heartbeat_age_s(0, 0) or 0) < 160
    assert "its heartbeat is 1" in (watcher.dead_because(state, 60.0) or "")
    assert watcher.dead_because(state, 1000.0) is None
    owner.heartbeat(0, 0)
    assert watcher.dead_because(state, 60.0) is None
    assert os.listdir(tmp_path / "claims") == ["00000-0"]


def test_a_heartbeat_from_the_future_grows_old_from_when_it_is_seen(tmp_path: Path) -> None:
    """A file server's clock was ahead, and has been set right."""
    far = replace(ME, token="ff", boot_id="another", pid=1)
    owner, watcher = ledger_at(tmp_path, far), ledger_at(tmp_path)
    owner.claim(0, 0)
    state = watcher.state(0)
    os.utime(watcher.claim_path(0, 0), (0, time.time() + 1000))
    assert watcher.dead_because(state, 60.0) is None
    deadline = time.monotonic() + 20
    while watcher.dead_because(state, 0.2) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "its heartbeat is 0" in (watcher.dead_because(state, 0.2) or "")
    os.utime(watcher.claim_path(0, 0), (0, time.time() + 2000))
    assert watcher.dead_because(state, 0.2) is None
    owner.heartbeat(0, 0)
    assert watcher.dead_because(state, 60.0) is None


def test_an_onlooker_sees_ages_and_writes_nothing(tmp_path: Path) -> None:
    ledger_at(tmp_path).claim(0, 0)
    files = FileSystem()
    onlooker = Ledger(tmp_path, files)
    files.write = files.touch = None  # type: ignore[method-assign, assignment]
    assert -5 < (onlooker.heartbeat_age_s(0, 0) or 0) < 60
    with pytest.raises(AssertionError, match="an onlooker fills no slot"):
        onlooker.claim(0, 1)


NUM_ROWS, NUM_WORKERS, NUM_SHARDS = 5, 3, 2


class Workers(RuleBasedStateMachine):
    """Workers that claim, commit, release, die, sleep and suspect each other at any moment, on one folder."""

    @initialize()
    def begin(self) -> None:
        self.temporary = tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        self.names = itertools.count()
        self.ledgers = [ledger_at(Path(self.temporary.name), self.new_owner()) for _ in range(NUM_WORKERS)]
        self.held: dict[int, ShardState] = {}
        """What a worker knew when it claimed; it acts on that however late."""

    def new_owner(self) -> Owner:
        return replace(ME, token=f"{next(self.names):016x}")

    def owner_of(self, worker: int) -> Owner:
        owner = self.ledgers[worker].owner
        assert owner is not None
        return owner

    @rule(worker=st.integers(0, NUM_WORKERS - 1), shard=st.integers(0, NUM_SHARDS - 1))
    def claim(self, worker: int, shard: int) -> None:
        state = self.ledgers[worker].state(shard)
        if worker in self.held or state.is_claimed or len(state.settled) == NUM_ROWS:
            return
        if self.ledgers[worker].claim(shard, state.epoch):
            self.held[worker] = state

    @rule(shard=st.integers(0, NUM_SHARDS - 1), order=st.permutations(range(NUM_WORKERS)))
    def claim_at_once(self, shard: int, order: list[int]) -> None:
        """All read the state before any of them claims."""
        free = [worker for worker in order if worker not in self.held]
        states = {worker: self.ledgers[worker].state(shard) for worker in free}
        won = [worker for worker in free if self.ledgers[worker].claim(shard, states[worker].epoch)]
        assert len(won) <= 1
        self.held |= {worker: states[worker] for worker in won}

    @rule(worker=st.integers(0, NUM_WORKERS - 1), data=st.data())
    def commit(self, worker: int, data: st.DataObject) -> None:
        if worker not in self.held:
            return
        state = self.held.pop(worker)
        left = sorted(set(range(NUM_ROWS)) - state.settled)
        num = data.draw(st.integers(0, len(left)))
        is_ok = data.draw(st.lists(st.booleans(), min_size=num, max_size=num))
        rows = list(zip(left, is_ok, strict=False))
        if not rows:
            self.ledgers[worker].release(state.shard, state.epoch)
            return
        ok, failed = (tuple(row for row, is_good in rows if is_good == kind) for kind in (True, False))
        receipt = receipt_of(state.shard, state.epoch, by=self.owner_of(worker), ok=ok, failed=failed)
        has_won = self.ledgers[worker].commit(receipt)
        assert has_won == (self.ledgers[0].receipt(state.shard, state.epoch) == receipt)

    @rule(worker=st.integers(0, NUM_WORKERS - 1))
    def die(self, worker: int) -> None:
        self.held.pop(worker, None)
        self.ledgers[worker].owner = self.new_owner()

    @rule(worker=st.integers(0, NUM_WORKERS - 1), shard=st.integers(0, NUM_SHARDS - 1))
    def suspect(self, worker: int, shard: int) -> None:
        """Rightly or not: an owner that sleeps may wake up."""
        state = self.ledgers[worker].state(shard)
        if state.is_claimed:
            self.ledgers[worker].abandon(shard, state.epoch)

    @rule(shard=st.integers(0, NUM_SHARDS - 1))
    def tear(self, shard: int) -> None:
        """The machine dies while a slot is put: a temporary file is left."""
        state = self.ledgers[0].state(shard)
        for path in (self.ledgers[0].claim_path(shard, state.epoch), self.ledgers[0].receipt_path(shard, state.epoch)):
            path.with_name(f"{path.name}.{next(self.names)}.tmp").write_bytes(b'{"token": "')

    @invariant()
    def no_row_is_settled_twice(self) -> None:
        for shard in range(NUM_SHARDS) if hasattr(self, "ledgers") else ():
            rows = [row for one in self.ledgers[0].state(shard).committed for row in (*one.ok, *one.failed)]
            assert len(rows) == len(set(rows))

    def teardown(self) -> None:
        """Whatever has happened, one more worker settles every row, each once."""
        if not hasattr(self, "ledgers"):
            return
        last = self.ledgers[0]
        last.owner = self.new_owner()
        for shard in range(NUM_SHARDS):
            while len((state := last.state(shard)).settled) < NUM_ROWS:
                if state.is_claimed:
                    last.abandon(shard, state.epoch)
                elif last.claim(shard, state.epoch):
                    left = tuple(sorted(set(range(NUM_ROWS)) - state.settled))
                    assert last.commit(receipt_of(shard, state.epoch, by=last.owner, ok=left))
        self.no_row_is_settled_twice()
        for shard in range(NUM_SHARDS):
            assert last.state(shard).settled == set(range(NUM_ROWS))
        self.temporary.cleanup()


TestWorkers = Workers.TestCase
TestWorkers.settings = settings(
    settings.get_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick")), stateful_step_count=30
)
