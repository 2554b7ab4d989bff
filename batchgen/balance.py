"""Where every planned row stands, from the receipts alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

from batchgen.glance import Glance
from batchgen.ledger import Ledger, ShardState, stem
from batchgen.owners import Owner, gone_because, this_process
from batchgen.plan_index import PlanIndex
from batchgen.wording import counted

_KINDS = ("ok", "failed", "cut")
"""What a receipt says of its rows."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A claim on the open epoch of a shard with unsettled rows."""

    shard: str
    """Shard and epoch, 00017-0."""
    rows: int
    """Unsettled."""
    host: str
    pid: int
    job_id: str
    heartbeat_age_s: float


@dataclass(frozen=True, slots=True)
class ShardBalance:
    """One shard: rows = done + failed + outstanding, of those rows that no later plan has taken over."""

    shard: int
    epoch: int
    """The first one without a receipt."""
    rows: int
    done: int
    failed: int
    outstanding: int


@dataclass(frozen=True, slots=True)
class WorkerBalance:
    """One start of a worker: the rows it has settled, and those of the shards that it holds."""

    host: str
    pid: int
    job_id: str
    done: int
    failed: int
    held: int
    heartbeat_age_s: float | None
    """Of the latest claim; None where it holds none."""


@dataclass(frozen=True, slots=True)
class Balance:
    """rows = done + failed + rejected + outstanding; `held` of the outstanding ones belong to claims."""

    done: int
    failed: int
    rejected: int
    outstanding: int
    cut: int
    """Of the rows done: those whose prompt lost its end, because the model reads no more."""
    shards: tuple[ShardBalance, ...]
    workers: tuple[WorkerBalance, ...]
    """In the order in which their first shard lies in the plan."""
    holders: tuple[Holder, ...]

    @property
    def rows(self) -> int:
        return self.done + self.failed + self.rejected + self.outstanding

    @property
    def shards_settled(self) -> int:
        return sum(not one.outstanding for one in self.shards)

    @property
    def held(self) -> int:
        return sum(one.rows for one in self.holders)

    @property
    def exit_code(self) -> int:
        """0 all made · 3 all settled, some failed or rejected · 75 rows are outstanding."""
        if self.outstanding:
            return 75
        return 3 if self.failed or self.rejected else 0

    def line(self) -> str:
        """The line that every ending prints."""
        held = f" ({self.held} held by workers)" if self.held else ""
        return (
            f"{self.rows} rows = {self.done} done + {self.failed} failed + {self.rejected} rejected "
            f"+ {self.outstanding} outstanding{held}"
        )

    def cut_note(self) -> str:
        """What a person should know of prompts that were cut, "" if none was."""
        if not self.cut:
            return ""
        return (
            f"{counted(self.cut, 'image')} made of prompts that were cut, because the model reads no more "
            "(tokens_dropped in the metadata; --on-truncate error refuses such prompts)"
        )


def take_balance(
    index: PlanIndex, ledger: Ledger, stale_after_s: float | None = None, glance: Glance | None = None
) -> Balance:
    """Count every shard's receipts. With `stale_after_s`, claims of owners thought dead hold nothing. What a glance
    says to be untouched is not looked at: where listings are late, that counts too few rows as done."""
    done = failed = cut = 0
    shards: list[ShardBalance] = []
    holders: list[Holder] = []
    workers: dict[Owner, WorkerBalance] = {}
    for shard, num_rows in zip(index.shards, index.shard_rows, strict=True):
        is_untouched = glance is not None and glance.is_untouched(shard)
        state = ShardState(shard, (), None, False) if is_untouched else ledger.state(shard, num_rows)
        rows, left = index.rows(state.shard), index.left(state)
        here = [frozenset(chain.from_iterable(getattr(one, name) for one in state.committed)) & rows for name in _KINDS]
        num_done, num_failed, num_cut = map(len, here)
        done, failed, cut = done + num_done, failed + num_failed, cut + num_cut
        shards.append(ShardBalance(state.shard, state.epoch, len(rows), num_done, num_failed, len(left)))
        for one in state.committed:
            _credit(workers, one.by, done=len(rows.intersection(one.ok)), failed=len(rows.intersection(one.failed)))
        if left and state.is_claimed and not _is_dead(ledger, state, stale_after_s):
            holders.append(_holder(ledger, state, len(left)))
            if state.claim is not None:
                _credit(workers, state.claim.owner, held=len(left), age_s=holders[-1].heartbeat_age_s)
    return Balance(
        done=done,
        failed=failed,
        rejected=index.num_rejected,
        outstanding=sum(one.outstanding for one in shards),
        cut=cut,
        shards=tuple(shards),
        workers=tuple(workers.values()),
        holders=tuple(holders),
    )


def _credit(
    workers: dict[Owner, WorkerBalance],
    owner: Owner,
    *,
    done: int = 0,
    failed: int = 0,
    held: int = 0,
    age_s: float | None = None,
) -> None:
    had = workers.get(owner, WorkerBalance(owner.host, owner.pid, owner.job_id, 0, 0, 0, None))
    ages = [one for one in (had.heartbeat_age_s, age_s) if one is not None]
    workers[owner] = replace(
        had,
        done=had.done + done,
        failed=had.failed + failed,
        held=had.held + held,
        heartbeat_age_s=min(ages, default=None),
    )


def _is_dead(ledger: Ledger, state: ShardState, stale_after_s: float | None) -> bool:
    if state.claim is not None and gone_because(state.claim.owner, this_process()):
        return True
    return stale_after_s is not None and ledger.dead_because(state, stale_after_s) is not None


def _holder(ledger: Ledger, state: ShardState, rows: int) -> Holder:
    age_s = ledger.heartbeat_age_s(state.shard, state.epoch) or 0.0
    name = stem(state.shard, state.epoch)
    if state.claim is None:
        return Holder(name, rows, "unknown (the claim cannot be read)", 0, "", age_s)
    owner = state.claim.owner
    return Holder(name, rows, owner.host, owner.pid, owner.job_id, age_s)
