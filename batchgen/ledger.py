"""The run directory's bookkeeping: who works on a shard, and what came of it.

Two write-once slots per (shard, epoch) decide everything: the claim and the receipt. An epoch may be claimed only
when every epoch below it has a receipt; a row is settled if and only if a committed receipt names it. Clocks and
heartbeats only decide when it is worth suspecting an owner.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from batchgen.errors import Interrupted
from batchgen.filesystem import FileSystem
from batchgen.owners import Owner, gone_because, mark
from batchgen.ranges import indices, ranges
from batchgen.records import Spent
from batchgen.slots import NO_SLOT, sealed, unsealed

CLOCK_S = 60.0
FOLDERS = ("plan", "claims", "work", "receipts", "modes", "mended")
"""Of the bookkeeping."""
TABLE_SUFFIX = ".rows.parquet"
GIVEN_BACK_S = 1.0
"""The change time of a claim whose owner stopped and could not put its receipt."""
COMMITTED, RELEASED, ABANDONED = "committed", "released", "abandoned"
_PART_SUFFIXES = ("", ".tar", ".parquet")


@dataclass(frozen=True, slots=True)
class Claim:
    """The content of a claim slot."""

    owner: Owner
    shard: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Receipt:
    """The content of a receipt slot. All but the first four fields belong to a committed one."""

    kind: str
    shard: int
    epoch: int
    by: Owner
    ok: tuple[int, ...] = ()
    """Indices of the rows made, in their shard."""
    failed: tuple[int, ...] = ()
    part: str = ""
    """Name of the part under `data/`, "" where every row failed."""
    part_bytes: int = 0
    part_sha256: str = ""
    table_sha256: str = ""
    """Of the row table, `.run/work/<shard>-<epoch>.rows.parquet`."""
    cut: tuple[int, ...] = ()
    """Of the rows made: those without the end of a prompt, which was longer than the model reads."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """What the pixels may depend on beside the job: libraries and device."""
    started_s: float = 0.0
    ended_s: float = 0.0
    """When its first batch was begun and its last one had been written, Unix time by its owner's clock; 0 in receipts
    of versions that did not record it. Nothing is decided by them."""
    spent: Spent = field(default_factory=Spent)
    """Whatever the owner had spent since its last receipt."""
    plan: str = ""
    """The `PlanIndex.token` of the run that it is about."""
    is_readable: bool = True
    """False for a slot whose content is no receipt: it counts as abandoned."""

    @property
    def stem(self) -> str:
        return stem(self.shard, self.epoch)


def stem(shard: int, epoch: int) -> str:
    """The name of a (shard, epoch) in slots and files: 00017-0."""
    return f"{shard:05d}-{epoch}"


@lru_cache(2**17)  # A worker lists the same names again and again.
def unstem(name: str) -> tuple[int, int] | None:
    """Shard and epoch of a slot's name, None for any other name."""
    shard, dash, epoch = name.partition("-")
    is_name = dash and shard.isdecimal() and epoch.isdecimal() and stem(int(shard), int(epoch)) == name
    return (int(shard), int(epoch)) if is_name else None


@dataclass(frozen=True, slots=True)
class ShardState:
    """What the slots of one shard say."""

    shard: int
    receipts: tuple[Receipt, ...]
    """Of epochs 0, 1, … without a gap."""
    claim: Claim | None
    """On the first epoch without a receipt."""
    is_claimed: bool
    """Whether that claim's slot exists, readable or not."""

    @property
    def epoch(self) -> int:
        """The first epoch without a receipt."""
        return len(self.receipts)

    @property
    def committed(self) -> tuple[Receipt, ...]:
        return tuple(one for one in self.receipts if one.kind == COMMITTED)

    @property
    def settled(self) -> frozenset[int]:
        """Rows that a committed receipt names."""
        return frozenset(row for one in self.committed for row in (*one.ok, *one.failed))

    def suspicion(self, max_deaths: int) -> Suspicion:
        """How often the shard's owners died without a commit."""
        is_row_by_row, deaths = False, 0
        for one in self.receipts:
            if one.kind == COMMITTED:
                deaths = 0
            elif one.kind == ABANDONED:
                deaths += 1
                if not is_row_by_row and deaths == max_deaths:
                    is_row_by_row, deaths = True, 0
        return Suspicion(is_row_by_row, is_row_by_row and deaths >= max_deaths, deaths)


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A shard abandoned `max_deaths` times in a row is run row by row; when that many more owners have died, the
    first row that no receipt names is taken for the cause."""

    is_row_by_row: bool
    is_first_row_guilty: bool
    deaths: int


class Ledger:
    """The slots under `RUN/.run/`, as one worker (or an onlooker without an owner) sees and fills them."""

    def __init__(self, root: Path, files: FileSystem, owner: Owner | None = None, plan: str = "") -> None:
        """`plan` is the run's `PlanIndex.token`. Receipts of another run count as abandoned: their putter was at work
        here, or paused, when the directory was replaced by this run's. "" takes all."""
        self.root = root
        self.files = files
        self.owner = owner
        self.plan = plan
        self._clock_read_at = float("-inf")
        self._clock_offset_s = 0.0
        self._ahead: dict[tuple[int, int, float], float] = {}
        """When a claim (by shard and epoch) was first seen with a change time that was still to come."""

    def claim_path(self, shard: int, epoch: int) -> Path:
        return self.root / "claims" / stem(shard, epoch)

    def receipt_path(self, shard: int, epoch: int) -> Path:
        return self.root / "receipts" / stem(shard, epoch)

    def table_path(self, shard: int, epoch: int) -> Path:
        return self.root / "work" / f"{stem(shard, epoch)}{TABLE_SUFFIX}"

    def make_folders(self) -> None:
        for name in FOLDERS:
            self.files.make_folder(self.root / name)
        # Receipts are about a plan, whose putter may have died before its name was durable.
        self.files.sync_folder(self.root / "plan")

    def refresh(self) -> None:
        """See receipts that were put since, and make durable those whose putters have died before they were: opening
        their folder makes NFS forget which names it saw absent."""
        self.files.sync_folder(self.root / "receipts")

    def state(self, shard: int, num_rows: int | None = None) -> ShardState:
        """Read a shard's slots, in epoch order, until one has no receipt, or all its rows (if it is said how many there
        are) are settled: nobody asks what comes after that."""
        receipts: list[Receipt] = []
        num_left = num_rows
        while (receipt := self.receipt(shard, len(receipts))) is not None:
            receipts.append(receipt)
            if num_left is not None and receipt.kind == COMMITTED:
                num_left -= len(receipt.ok) + len(receipt.failed)
                if num_left <= 0:
                    return ShardState(shard, tuple(receipts), None, False)
        content = self.files.read(self.claim_path(shard, len(receipts)))
        return ShardState(shard, tuple(receipts), _claim(content), content is not None)

    def states(self, shards: Iterable[int]) -> Iterator[ShardState]:
        return (self.state(shard) for shard in shards)

    def committed(self, shards: Iterable[int]) -> Iterator[Receipt]:
        """All committed receipts, a shard's at a time: together they name every settled row."""
        return (receipt for state in self.states(shards) for receipt in state.committed)

    def claimed(self, shard: int, epoch: int) -> Claim | None:
        """The claim on an epoch; None if there is none that can be read."""
        return _claim(self.files.read(self.claim_path(shard, epoch)))

    def receipt(self, shard: int, epoch: int) -> Receipt | None:
        """The receipt of an epoch; one that cannot be read counts as abandoned."""
        content = self.files.read(self.receipt_path(shard, epoch))
        return None if content is None else _receipt(content, shard, epoch, self.plan)

    def claim(self, shard: int, epoch: int) -> bool:
        """Try to become the owner of an epoch that has no claim; False if another was first."""
        path = self.claim_path(shard, epoch)
        return self._put(path, {"shard": shard, "epoch": epoch, "owner": asdict(self._me)})

    def commit(self, receipt: Receipt) -> bool:
        """Settle the rows of a receipt, whose part and row table are durable; False if the epoch was taken away."""
        content = _content(replace(receipt, plan=self.plan))
        return self._put(self.receipt_path(receipt.shard, receipt.epoch), content)

    def release(self, shard: int, epoch: int) -> bool:
        """Give an epoch back without a row. On a disk that has no room for that, the claim at least is left as one that
        was given back, before Interrupted is raised."""
        try:
            return self.commit(Receipt(RELEASED, shard, epoch, self._me))
        except Interrupted:
            with suppress(Interrupted, FileNotFoundError):
                self.files.touch(self.claim_path(shard, epoch), GIVEN_BACK_S)
            raise

    def abandon(self, shard: int, epoch: int) -> bool:
        """Close the epoch of an owner that is thought dead; False if it has a receipt by now. One that could only leave
        word that it gives the epoch back has not died of it."""
        claim = self.files.stat(self.claim_path(shard, epoch))
        is_given_back = claim is not None and claim.mtime_s == GIVEN_BACK_S
        return self.commit(Receipt(RELEASED if is_given_back else ABANDONED, shard, epoch, self._me))

    def heartbeat(self, shard: int, epoch: int) -> None:
        self.files.touch(self.claim_path(shard, epoch))

    def heartbeat_age_s(self, shard: int, epoch: int) -> float | None:
        """Seconds since a claim was touched, by the file system's clock; None if there is no claim."""
        found = self.files.stat(self.claim_path(shard, epoch))
        if found is None:
            return None
        return self._now_s() - found.mtime_s

    def dead_because(self, state: ShardState, stale_after_s: float) -> str | None:
        """Why the owner of a shard's open epoch is thought dead, None if it is thought alive."""
        assert state.is_claimed
        if state.claim is not None and (reason := gone_because(state.claim.owner, self._me)):
            return reason
        silent_s = self._silent_s(state.shard, state.epoch)
        if silent_s is not None and silent_s > stale_after_s:
            return f"its heartbeat is {silent_s:.0f} s old"
        return None

    def _silent_s(self, shard: int, epoch: int) -> float | None:
        """Seconds without a heartbeat, None if there is no claim. Where the clock was set back since the last one, they
        count from when this process first saw it."""
        found = self.files.stat(self.claim_path(shard, epoch))
        if found is None:
            return None
        age_s = self._now_s() - found.mtime_s
        if age_s >= 0:
            return age_s
        now_s = time.monotonic()
        return now_s - self._ahead.setdefault((shard, epoch, found.mtime_s), now_s)

    def _now_s(self) -> float:
        """The file system's clock, read off a touched file once a minute; an onlooker writes nothing and takes its
        host's."""
        if self.owner is None:
            return time.time()
        if time.monotonic() - self._clock_read_at > CLOCK_S:
            self._clock_read_at = time.monotonic()
            self._clock_offset_s = self._touched_s() - self._clock_read_at
        return self._clock_offset_s + time.monotonic()

    def _touched_s(self) -> float:
        probe = self.root / "claims" / f"now.{self._me.token}.{mark(self._me)}.tmp"
        if self.files.stat(probe) is None:
            self.files.write(probe, b"")
        self.files.touch(probe)
        found = self.files.stat(probe)
        assert found is not None
        self.files.remove(probe)
        return found.mtime_s

    @property
    def _me(self) -> Owner:
        assert self.owner is not None, "an onlooker fills no slot"
        return self.owner

    def _put(self, path: Path, content: Mapping[str, Any]) -> bool:
        return self.files.put_if_absent(path, sealed(self._me.token, content))


_ROWS = ("ok", "failed", "cut")
"""Fields of a receipt that hold rows."""
_RECEIPT = TypeAdapter(Receipt)
_CLAIM = TypeAdapter(Claim)


def _content(receipt: Receipt) -> dict[str, Any]:
    content = asdict(receipt) | {name: ranges(getattr(receipt, name)) for name in _ROWS}
    del content["is_readable"]
    return content


def _receipt(content: bytes, shard: int, epoch: int, plan: str) -> Receipt:
    try:
        fields = unsealed(content)
        fields |= {name: indices(fields[name]) for name in _ROWS}
        receipt = _RECEIPT.validate_json(json.dumps(fields), strict=True)
        is_this_runs = not (plan and receipt.plan) or receipt.plan == plan
        if (receipt.shard, receipt.epoch) == (shard, epoch) and is_this_runs and _is_sound(receipt):
            return receipt
    except NO_SLOT:
        pass
    nobody = Owner("", "", "", "", 0, "")
    return Receipt(ABANDONED, shard, epoch, nobody, is_readable=False)


def _is_sound(receipt: Receipt) -> bool:
    """Whether a receipt can have been put: rows settled once, a part of its own name."""
    if receipt.kind != COMMITTED:
        return receipt.kind in (RELEASED, ABANDONED) and not (receipt.ok or receipt.failed or receipt.part)
    names = {"", *(f"{receipt.stem}{suffix}" for suffix in _PART_SUFFIXES)}
    is_apart = not set(receipt.ok) & set(receipt.failed) and set(receipt.cut) <= set(receipt.ok)
    return receipt.is_readable and receipt.part in names and is_apart


def _claim(content: bytes | None) -> Claim | None:
    try:
        return _CLAIM.validate_json(json.dumps(unsealed(content or b"")), strict=True)
    except NO_SLOT:
        return None
