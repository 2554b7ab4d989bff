"""Slots that are torn or endless, and owners that die or hear no reply while they put one."""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from batchgen.errors import Interrupted
from batchgen.filesystem import FileSystem
from batchgen.ledger import ABANDONED, COMMITTED, Ledger, Receipt, ShardState, stem, unstem
from batchgen.owners import Owner, start_time
from tests.plans import folder

ME = Owner("00000000000000aa", "here", "boot", "pid:[1]", os.getpid(), start_time(os.getpid()))


def make_ledger(path: Path, owner: Owner | None = ME, files: FileSystem | None = None) -> Ledger:
    ledger = Ledger(path / ".run", files or FileSystem(), owner)
    ledger.make_folders()
    return ledger


def committed(shard: int, epoch: int, ok: tuple[int, ...], failed: tuple[int, ...] = ()) -> Receipt:
    return Receipt(COMMITTED, shard, epoch, ME, ok, failed, stem(shard, epoch))


with tempfile.TemporaryDirectory() as _name:
    _ledger = make_ledger(Path(_name))
    _ledger.claim(3, 0)
    _ledger.commit(committed(3, 0, (1, 2, 5), (4,)))
    CLAIM, RECEIPT = _ledger.claim_path(3, 0).read_bytes(), _ledger.receipt_path(3, 0).read_bytes()


@given(st.integers(0, len(RECEIPT) - 1), st.booleans())
def test_a_receipt_whose_end_never_reached_the_disk_counts_as_abandoned(length: int, has_zeros: bool) -> None:
    with folder() as path:
        ledger = make_ledger(path)
        ledger.receipt_path(3, 0).write_bytes(RECEIPT[:length] + bytes(len(RECEIPT) - length if has_zeros else 0))
        (found,) = ledger.state(3).receipts
        assert (found.kind, found.is_readable, found.ok, found.failed, found.part) == (ABANDONED, False, (), (), "")
        assert (found.stem, ledger.state(3).settled) == ("00003-0", frozenset())


@given(st.integers(0, len(CLAIM) - 1), st.booleans())
def test_a_claim_whose_end_never_reached_the_disk_holds_until_it_is_old(length: int, has_zeros: bool) -> None:
    with folder() as path:
        ledger = make_ledger(path)
        ledger.claim_path(3, 0).write_bytes(CLAIM[:length] + bytes(len(CLAIM) - length if has_zeros else 0))
        state = ledger.state(3)
        assert (state.is_claimed, state.claim) == (True, None)
        assert ledger.dead_because(state, 60.0) is None
        os.utime(ledger.claim_path(3, 0), (1, 1))
        assert "heartbeat" in (ledger.dead_because(state, 60.0) or "")


@pytest.mark.parametrize("bracket", [b"[", b'{"a":'])
def test_brackets_without_end_are_no_content(tmp_path: Path, bracket: bytes) -> None:
    ledger = make_ledger(tmp_path)
    ledger.receipt_path(3, 0).write_bytes(bracket * 200_000)
    ledger.claim_path(3, 1).write_bytes(bracket * 200_000)
    state = ledger.state(3)
    assert [one.is_readable for one in state.receipts] == [False]
    assert (state.is_claimed, state.claim) == (True, None)


def test_the_receipt_of_another_slot_is_not_this_ones(tmp_path: Path) -> None:
    ledger = make_ledger(tmp_path)
    ledger.receipt_path(0, 0).write_bytes(json.dumps({"token": "t", **asdict(committed(7, 0, ()))}).encode())
    ledger.receipt_path(1, 0).write_bytes(RECEIPT)
    assert [one.is_readable for shard in (0, 1) for one in ledger.state(shard).receipts] == [False, False]


def test_a_slot_is_its_putters_however_often_it_asks_and_nobody_elses(tmp_path: Path) -> None:
    ours, theirs = make_ledger(tmp_path), make_ledger(tmp_path, replace(ME, token="bb"))
    assert [ours.claim(0, 0), theirs.claim(0, 0), ours.claim(0, 0)] == [True, False, True]
    assert [theirs.abandon(0, 0), ours.commit(committed(0, 0, (1,))), theirs.abandon(0, 0)] == [True, False, True]


class SlowClock(FileSystem):
    """A file system whose clock is an hour behind this machine's."""

    def touch(self, path: Path) -> None:
        super().touch(path)
        then = path.stat().st_mtime - 3_600
        os.utime(path, (then, then))


def test_a_clock_that_is_off_suspects_nobody(tmp_path: Path) -> None:
    ledger = make_ledger(tmp_path, files=SlowClock())
    assert ledger.claim(0, 0)
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
