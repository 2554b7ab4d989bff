"""What the names of all slots say, at the price of two listings: enough to choose at which shards to look."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from batchgen.filesystem import FileSystem
from batchgen.ledger import Ledger, unstem


@dataclass(frozen=True, slots=True)
class Glance:
    """The slots of a moment ago; decides nothing, for a listing may be late."""

    claimed: Mapping[int, int]
    """The last epoch with a claim, by shard."""
    received: Mapping[int, int]
    """The last epoch with a receipt, by shard."""

    def is_untouched(self, shard: int) -> bool:
        """Whether nobody has claimed it."""
        return shard not in self.claimed and shard not in self.received

    def is_held(self, shard: int) -> bool:
        """Whether an epoch was claimed and not yet closed."""
        return self.claimed.get(shard, -1) > self.received.get(shard, -1)


def take_glance(ledger: Ledger) -> Glance:
    """List the slots."""
    return Glance(*(_last_epochs(ledger.files, ledger.root / folder) for folder in ("claims", "receipts")))


def _last_epochs(files: FileSystem, folder: Path) -> dict[int, int]:
    last: dict[int, int] = {}
    for shard, epoch in filter(None, map(unstem, files.names(folder))):
        last[shard] = max(epoch, last.get(shard, -1))
    return last
