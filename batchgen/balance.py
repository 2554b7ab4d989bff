"""Where every planned row stands, from the receipts alone."""

from __future__ import annotations

from dataclasses import dataclass

from batchgen.ledger import Glance, Ledger, ShardState, stem
from batchgen.owners import gone_because, this_process
from batchgen.plans import PlanIndex
from batchgen.wording import counted


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
class Balance:
    """rows = done + failed + rejected + outstanding; `held` of the outstanding ones belong to claims."""

    done: int
    failed: int
    rejected: int
    outstanding: int
    cut: int
    """Of the rows done: those whose prompt lost its end, because the model reads no more."""
    shards: int
    shards_settled: int
    holders: tuple[Holder, ...]

    @property
    def rows(self) -> int:
        return self.done + self.failed + self.rejected + self.outstanding

    @property
    def held(self) -> int:
        return sum(one.rows for one in self.holders)

    def line(self) -> str:
        """The line that every ending prints."""
        held = f" ({self.held} held by others)" if self.held else ""
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
    done = failed = cut = settled = 0
    holders: list[Holder] = []
    for shard, num_rows in zip(index.shards, index.shard_rows, strict=True):
        if glance is not None and glance.is_untouched(shard):
            continue
        state = ledger.state(shard, num_rows)
        done += sum(len(one.ok) for one in state.committed)
        failed += sum(len(one.failed) for one in state.committed)
        cut += sum(one.num_cut for one in state.committed)
        left = num_rows - len(state.settled)
        settled += left == 0
        if left and state.is_claimed and not _is_dead(ledger, state, stale_after_s):
            holders.append(_holder(ledger, state, left))
    return Balance(
        done=done,
        failed=failed,
        rejected=index.num_rejected,
        outstanding=index.num_rows - done - failed,
        cut=cut,
        shards=len(index.shards),
        shards_settled=settled,
        holders=tuple(holders),
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
