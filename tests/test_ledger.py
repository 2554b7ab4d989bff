"""The ledger: claims and receipts of many owners on one directory, each free to die at any instruction."""

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from batchgen.errors import Interrupted
from batchgen.filesystem import FileSystem
from batchgen.ledger import (
    ABANDONED,
    COMMITTED,
    RELEASED,
    Ledger,
    Owner,
    Receipt,
    ShardState,
    _content,
    _receipt,
    gone_because,
    start_time,
    stem,
    this_process,
    unstem,
)

ME = Owner("00000000000000aa", "here", "boot", "pid:[1]", os.getpid(), start_time(os.getpid()))


def make_ledger(folder: Path, owner: Owner | None = ME, files: FileSystem | None = None) -> Ledger:
    ledger = Ledger(folder / ".run", files or FileSystem(), owner)
    ledger.make_folders()
    return ledger


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return make_ledger(tmp_path)


def committed(shard: int, epoch: int, ok: tuple[int, ...], failed: tuple[int, ...] = (), by: Owner = ME) -> Receipt:
    return Receipt(COMMITTED, shard, epoch, by, ok, failed, stem(shard, epoch), 5, "ab", "cd", {"torch": "2"})


# Names


@given(st.integers(0, 10**7), st.integers(0, 10**4))
def test_stems_come_back(shard: int, epoch: int) -> None:
    assert unstem(stem(shard, epoch)) == (shard, epoch)


@given(st.text(max_size=12) | st.from_regex(r"\A[0-9²٣-]{1,9}\Z"))
def test_no_other_name_is_taken_for_a_slot(name: str) -> None:
    found = unstem(name)
    assert found is None or stem(*found) == name


# Content of slots

INDICES = st.sets(st.integers(0, 2_000), max_size=60).map(lambda found: tuple(sorted(found)))
OWNERS = st.builds(
    Owner, st.text(), st.text(), st.text(), st.text(), st.integers(0), st.text(), st.text(), st.integers(0)
)
RECEIPTS = st.builds(
    Receipt,
    st.sampled_from([COMMITTED, RELEASED, ABANDONED]),
    st.just(3),
    st.just(1),
    OWNERS,
    INDICES,
    INDICES,
    st.text(),
    st.integers(0),
    st.text(),
    st.text(),
    st.dictionaries(st.text(), st.text(), max_size=3),
)


def slot_content(receipt: Receipt) -> bytes:
    return json.dumps({"token": "t", **_content(receipt)}).encode()


@given(RECEIPTS)
def test_any_receipt_comes_back_as_it_was(receipt: Receipt) -> None:
    assert _receipt(slot_content(receipt), 3, 1) == receipt


def test_a_thousand_rows_in_one_piece_are_one_range() -> None:
    assert _content(committed(0, 0, tuple(range(1_000))))["ok"] == [[0, 999]]
    assert _content(committed(0, 0, (9, 7, 8, 1)))["ok"] == [[1, 1], [7, 9]]


@given(RECEIPTS, st.data())
@settings(max_examples=60)
def test_a_torn_receipt_counts_as_abandoned(receipt: Receipt, data: st.DataObject) -> None:
    content = slot_content(receipt)
    length = data.draw(st.integers(0, len(content) - 1))
    for torn in (content[:length], content[:length] + bytes(len(content) - length)):
        found = _receipt(torn, 3, 1)
        assert (found.kind, found.is_readable, found.ok, found.failed) == (ABANDONED, False, (), ())
        assert found.stem == "00003-1"


FOREIGN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
).map(lambda found: json.dumps(found).encode())


def test_brackets_without_end_are_no_receipt(ledger: Ledger) -> None:
    assert not _receipt(b"[" * 200_000, 3, 1).is_readable
    ledger.claim_path(3, 0).write_bytes(b"[" * 200_000)
    assert ledger.state(3).claim is None


@given(st.binary(max_size=200) | FOREIGN)
def test_bytes_that_are_no_receipt_and_no_claim_break_nothing(content: bytes) -> None:
    assert not _receipt(content, 3, 1).is_readable
    with tempfile.TemporaryDirectory() as folder:
        ledger = make_ledger(Path(folder))
        ledger.claim_path(3, 0).write_bytes(content)
        state = ledger.state(3)
        assert state.is_claimed
        assert state.claim is None
        assert ledger.dead_because(state, 60.0) is None
        os.utime(ledger.claim_path(3, 0), (1, 1))
        assert "heartbeat" in (ledger.dead_because(state, 60.0) or "")


def test_the_receipt_of_another_slot_is_not_this_ones(ledger: Ledger) -> None:
    ledger.receipt_path(0, 0).write_bytes(slot_content(committed(7, 0, (1, 2))))
    assert [one.is_readable for one in ledger.state(0).receipts] == [False]


# States


def test_a_shard_without_slots_is_open(ledger: Ledger) -> None:
    assert ledger.state(4) == ShardState(4, (), None, False)


def test_a_state_is_what_its_slots_say(ledger: Ledger) -> None:
    assert ledger.claim(0, 0)
    assert ledger.commit(committed(0, 0, (0, 1), (4,)))
    assert not ledger.abandon(0, 0)
    assert ledger.release(0, 1)
    assert ledger.commit(committed(0, 2, (2,)))
    assert ledger.claim(0, 3)
    state = ledger.state(0)
    assert [one.kind for one in state.receipts] == [COMMITTED, RELEASED, COMMITTED]
    assert state.settled == {0, 1, 2, 4}
    assert state.epoch == 3
    assert state.claim is not None
    assert (state.claim.owner, state.claim.shard, state.claim.epoch) == (ME, 0, 3)


def test_a_slot_is_its_putters_however_often_it_asks_and_nobody_elses(tmp_path: Path) -> None:
    ours, theirs = make_ledger(tmp_path), make_ledger(tmp_path, replace(ME, token="bb"))
    assert [ours.claim(0, 0), theirs.claim(0, 0), ours.claim(0, 0)] == [True, False, True]
    assert [theirs.abandon(0, 0), ours.commit(committed(0, 0, (1,))), theirs.abandon(0, 0)] == [True, False, True]


def test_receipts_beyond_a_gap_do_not_count(ledger: Ledger) -> None:
    ledger.commit(committed(0, 0, (0,)))
    ledger.commit(committed(0, 2, (1,)))
    assert ledger.state(0).settled == {0}
    assert ledger.state(0).epoch == 1


def test_an_onlooker_reads_and_fills_no_slot(tmp_path: Path) -> None:
    onlooker = make_ledger(tmp_path, None)
    assert onlooker.state(0).epoch == 0
    with pytest.raises(AssertionError, match="onlooker"):
        onlooker.claim(0, 0)


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ("", (False, False, 0)),
        ("aa", (False, False, 2)),
        ("aac", (False, False, 0)),
        ("aacaa", (False, False, 2)),
        ("aaa", (True, False, 0)),
        ("ararara", (True, False, 1)),
        ("aaac", (True, False, 0)),
        ("aaaaa", (True, False, 2)),
        ("aaaaaca", (True, False, 1)),
        ("aaaaaa", (True, True, 3)),
        ("aaaaaac", (True, False, 0)),
        ("aaaaaacaaa", (True, True, 3)),
    ],
)
def test_three_deaths_make_a_shard_suspect_and_three_more_its_first_row_guilty(
    kinds: str, expected: tuple[bool, bool, int]
) -> None:
    names = {"a": ABANDONED, "c": COMMITTED, "r": RELEASED}
    receipts = tuple(Receipt(names[kind], 0, epoch, ME) for epoch, kind in enumerate(kinds))
    found = ShardState(0, receipts, None, False).suspicion(3)
    assert (found.is_row_by_row, found.is_first_row_guilty, found.deaths) == expected


@given(st.text("acr", max_size=30), st.integers(1, 4))
def test_a_row_is_guilty_only_after_so_many_deaths_in_a_row(kinds: str, max_deaths: int) -> None:
    names = {"a": ABANDONED, "c": COMMITTED, "r": RELEASED}
    receipts = tuple(Receipt(names[kind], 0, epoch, ME) for epoch, kind in enumerate(kinds))
    found = ShardState(0, receipts, None, False).suspicion(max_deaths)
    since_commits = [len(piece) for piece in kinds.replace("r", "").split("c")]
    assert found.is_row_by_row == (max(since_commits) >= max_deaths)
    was_before = max([0, *since_commits[:-1]]) >= max_deaths
    assert found.is_first_row_guilty == (since_commits[-1] >= (1 if was_before else 2) * max_deaths)


# Owners thought dead


def test_this_process_is_alive_and_its_own_namesake() -> None:
    me = this_process()
    assert gone_because(me, this_process()) is None
    assert me.token != this_process().token
    assert (me.pid, me.start_time) == (os.getpid(), start_time(os.getpid()))


def test_a_process_that_has_ended_is_gone_whether_reaped_or_not() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = replace(this_process(), pid=child.pid, start_time=start_time(child.pid))
    assert owner.start_time
    assert gone_because(owner, this_process()) is None
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert "is gone" in (gone_because(owner, this_process()) or "")
    child.communicate()
    assert "is gone" in (gone_because(owner, this_process()) or "")


GONE = [
    ("its pid belongs to a later process", {"start_time": "1"}, {}, True),
    ("the machine was started again", {"boot_id": "earlier", "start_time": "1"}, {}, False),
    ("another container", {"pid_namespace": "pid:[2]", "start_time": "1"}, {}, False),
    ("Slurm restarted its job", {"boot_id": "b", "job_id": "7_1"}, {"job_id": "7_1", "restart_count": 1}, True),
    ("the same start of the job", {"boot_id": "b", "job_id": "7_1"}, {"job_id": "7_1"}, False),
    ("we are the earlier start", {"boot_id": "b", "job_id": "7", "restart_count": 2}, {"job_id": "7"}, False),
    ("another task of the array", {"boot_id": "b", "job_id": "7_1"}, {"job_id": "7_2", "restart_count": 1}, False),
    ("no Slurm on either side", {"boot_id": "b"}, {"restart_count": 1}, False),
]


@pytest.mark.parametrize(("owner", "me", "is_gone"), [case[1:] for case in GONE], ids=[case[0] for case in GONE])
def test_who_is_known_to_be_gone_without_a_clock(
    owner: dict[str, object], me: dict[str, object], *, is_gone: bool
) -> None:
    reason = gone_because(replace(ME, **owner), replace(ME, **me))  # type: ignore[arg-type]
    assert (reason is not None) == is_gone


def test_slurm_names_a_task_of_an_array_by_job_and_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    assert this_process().job_id == "12"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "10")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "4")
    assert (this_process().job_id, this_process().restart_count) == ("10_2", 4)


def test_a_heartbeat_is_judged_by_the_file_systems_clock(tmp_path: Path) -> None:
    ledger = make_ledger(tmp_path, replace(ME, boot_id="ours"))
    make_ledger(tmp_path).claim(0, 0)
    state = ledger.state(0)
    assert ledger.dead_because(state, 600.0) is None
    written = ledger.claim_path(0, 0).stat().st_mtime
    os.utime(ledger.claim_path(0, 0), (written - 601, written - 601))
    assert "heartbeat is 60" in (ledger.dead_because(state, 600.0) or "")
    ledger.heartbeat(0, 0)
    assert ledger.dead_because(state, 600.0) is None
    assert os.listdir(ledger.root / "claims") == ["00000-0"]
    assert ledger.heartbeat_age_s(9, 0) is None


class SlowClock(FileSystem):
    """A file system whose clock is an hour behind this machine's."""

    def touch(self, path: Path) -> None:
        super().touch(path)
        then = path.stat().st_mtime - 3_600
        os.utime(path, (then, then))


def test_a_clock_that_is_off_suspects_nobody(tmp_path: Path) -> None:
    make_ledger(tmp_path, replace(ME, boot_id="other"), SlowClock()).claim(0, 0)
    ledger = make_ledger(tmp_path, files=SlowClock())
    ledger.heartbeat(0, 0)
    assert ledger.dead_because(ledger.state(0), 600.0) is None


# Many owners, each free to die at any instruction

NUM_ROWS, NUM_AGENTS = 4, 3
AGENTS = st.integers(0, NUM_AGENTS - 1)
FATES = st.sampled_from(["", "", "", "dies before", "dies after", "loses the disk"])


class Killed(BaseException):
    """Stands for SIGKILL."""


class Mortal(FileSystem):
    """Dies, or loses a reply, at the next slot."""

    fate = ""

    def sync_file(self, file: BinaryIO) -> None:
        """Nothing: these deaths spare the machine."""

    def sync_folder(self, path: Path) -> None:
        """Nothing either."""

    def put_if_absent(self, path: Path, content: bytes) -> bool:
        fate, self.fate = self.fate, ""
        if fate == "dies before":
            self.write(path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp"), content[: len(content) // 2])
            raise Killed
        is_ours = super().put_if_absent(path, content)
        if fate == "dies after":
            raise Killed
        if fate == "loses the disk":
            raise Interrupted("the reply is lost")
        return is_ours


@dataclass
class Agent:
    """A worker between any two of its steps; one that dies is followed by another process."""

    folder: Path
    number: int
    files: Mortal = field(default_factory=Mortal)
    looked: ShardState | None = None
    owned: ShardState | None = None
    """The state that was read before its open epoch became ours."""

    @property
    def ledger(self) -> Ledger:
        return make_ledger(self.folder, replace(ME, token=f"{self.number:016x}"), self.files)

    @contextmanager
    def mortality(self, fate: str) -> Iterator[None]:
        self.files.fate = fate
        try:
            yield
        except (Killed, Interrupted):
            self.number += NUM_AGENTS
            self.owned = self.looked = None


class Owners(RuleBasedStateMachine):
    """Whatever agents do in whatever order, no row is committed twice, and what one was told holds."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.agents = [Agent(Path(self.folder.name), number) for number in range(NUM_AGENTS)]
        self.onlooker = make_ledger(Path(self.folder.name), None)
        self.committed: list[int] = []

    @rule(agent=AGENTS)
    def look(self, agent: int) -> None:
        self.agents[agent].looked = self.agents[agent].ledger.state(0)

    @rule(agent=AGENTS)
    def suspect(self, agent: int) -> None:
        """Rightly or wrongly: no clock decides anything."""
        one = self.agents[agent]
        if one.looked is not None and one.looked.is_claimed:
            one.ledger.abandon(0, one.looked.epoch)

    @rule(agent=AGENTS, fate=FATES)
    def claim(self, agent: int, fate: str) -> None:
        one = self.agents[agent]
        if one.looked is None or one.looked.is_claimed or one.owned is not None:
            return
        with one.mortality(fate):
            if one.ledger.claim(0, one.looked.epoch):
                one.owned = one.looked
        one.looked = None

    @rule(agent=AGENTS, fate=FATES, wanted=st.sets(st.integers(0, NUM_ROWS - 1)), failing=st.sets(st.integers(0, 3)))
    def commit(self, agent: int, fate: str, wanted: set[int], failing: set[int]) -> None:
        one = self.agents[agent]
        if one.owned is None:
            return
        state, one.owned, one.looked = one.owned, None, None
        rows = wanted - state.settled
        with one.mortality(fate):
            if not rows:
                one.ledger.release(0, state.epoch)
            elif one.ledger.commit(committed(0, state.epoch, tuple(sorted(rows - failing)), tuple(rows & failing))):
                self.committed += rows

    @invariant()
    def every_row_is_committed_once_at_most(self) -> None:
        named = rows_named(self.onlooker.state(0))
        assert len(named) == len(set(named))
        assert len(self.committed) == len(set(self.committed))
        assert set(self.committed) <= set(named)

    @invariant()
    def epochs_are_claimed_in_order(self) -> None:
        claimed = [found[1] for name in os.listdir(self.onlooker.root / "claims") if (found := unstem(name))]
        assert max([-1, *claimed]) <= self.onlooker.state(0).epoch

    def teardown(self) -> None:
        """Whatever happened, one more owner brings every row to its end."""
        last = Agent(Path(self.folder.name), 10**6).ledger
        if last.state(0).is_claimed:
            last.abandon(0, last.state(0).epoch)
        state = last.state(0)
        assert last.claim(0, state.epoch)
        assert last.commit(committed(0, state.epoch, tuple(sorted(set(range(NUM_ROWS)) - state.settled))))
        assert sorted(rows_named(last.state(0))) == list(range(NUM_ROWS))
        self.folder.cleanup()


def rows_named(state: ShardState) -> list[int]:
    return [row for one in state.committed for row in (*one.ok, *one.failed)]


TestOwners = Owners.TestCase
TestOwners.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
