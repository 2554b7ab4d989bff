"""What a job says about batches and shards."""

from __future__ import annotations

from dataclasses import dataclass

from batchgen.cost import Cost, allowed_sizes
from batchgen.errors import UsageError
from batchgen.memory import Room
from batchgen.records import Group


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one job."""

    batch_sizes: tuple[int, ...] | None = None
    max_batch: int | None = None
    shard_images: int | None = None
    room: Room | None = None
    """The memory that batches must fit into; None where no limit is known."""

    def sizes(self, group: Group, cost: Cost) -> tuple[int, ...]:
        """The batch sizes that a group may use, ascending. Raises UsageError where the job leaves none, or where none
        fits into memory."""
        allowed = allowed_sizes(group, self.batch_sizes, self.max_batch, cost)
        if not allowed:
            raise UsageError(
                f"plan.batch_sizes = {list(self.batch_sizes or ())} leaves no size within "
                f"plan.max_batch = {self.max_batch}; allow a size of at most that"
            )
        return allowed if self.room is None else self.room.within(group, allowed)
