"""Batches into outcomes, whatever the model does: as planned, else in halves if memory is short, else row by row."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from batchgen.errors import BatchgenError, RowError
from batchgen.generator import Dropped, Generator, OutOfMemory, Pending
from batchgen.records import UNSAFE, Batch, Bucket, Failure, Group, Image, Outcome, Row, Spent
from batchgen.stopping import Stop

COMMIT_RESERVE_S = 5.0
"""Of the grace, kept for the commit."""


@dataclass(slots=True)
class Maker:
    """One worker's model, and what was learned of it: seconds per bucket, and what its memory holds."""

    generator: Generator
    stop: Stop
    grace_s: float
    say: Callable[[str], None]
    on_started: Callable[[Bucket], object] = lambda bucket: None
    """Told of each batch's bucket before it is set to work."""
    _batch_s: dict[tuple[Group, int], float] = field(default_factory=dict)
    """Of a batch of as many rows as lanes, by the bucket's last one."""
    _largest: dict[Group, int] = field(default_factory=dict)
    """The largest batch size that is still tried, where a larger one did not fit."""
    _told: Spent = field(default_factory=Spent)

    def spent(self) -> Spent:
        """What was spent since it was last asked."""
        before, self._told = self._told, self.generator.spent()
        return self._told.since(before)

    def prepare(self, batches: Sequence[Batch]) -> None:
        """Prepare a shard. Raises Dropped as soon as the run is asked to stop, and what ends the run. Any other fault
        will show again in the batch that has it."""
        try:
            self.generator.prepare(batches, lambda: self.stop.is_asked)
        except Exception as error:
            if _is_fatal(error):
                raise
            self.say(
                f"a shard cannot be prepared as a whole ({type(error).__name__}: {error}); its batches are, one by one"
            )

    def start(self, batch: Batch) -> Pending:
        """Set a batch to work. A fault is dealt with when its outcomes are asked for; here are raised Dropped and what
        ends the run."""
        if batch.size > self._largest.get(batch.group, batch.size):
            halves = [self.start(half) for half in _halves(batch)]
            return lambda: [outcome for half in halves for outcome in half()]
        try:
            pending = self._submit(batch)
        except Exception as error:
            if _is_fatal(error):
                raise
            fault = error
            return lambda: self._try_again(batch, fault)
        return lambda: self._finish(batch, pending)

    def _finish(self, batch: Batch, pending: Pending) -> list[Outcome]:
        try:
            outcomes = pending()
        except Exception as error:
            if _is_fatal(error):
                raise
            return self._try_again(batch, error)
        return [one if _is_final(one) else self._make_alone(batch, one.row) for one in outcomes]

    def _try_again(self, batch: Batch, error: Exception) -> list[Outcome]:
        if isinstance(error, OutOfMemory):
            return self._make_smaller(batch, error)
        first, num = batch.rows[0].id, len(batch.rows)
        rows = f"{num} rows from {first!r} on are tried one by one" if num > 1 else f"one row {first!r} is tried again"
        self.say(f"a batch raised {type(error).__name__}: {error}; its {rows}")
        return [self._make_alone(batch, row) for row in batch.rows]

    def _make_alone(self, batch: Batch, row: Row) -> Outcome:
        """A row tried again without its neighbours, in the bucket that was planned for it."""
        alone = replace(batch, rows=(row,))
        try:
            (outcome,) = self._submit(alone)()
        except OutOfMemory as error:
            (outcome,) = self._make_smaller(alone, error)
        except Exception as error:
            if _is_fatal(error):
                raise
            outcome = Failure(row, type(error).__name__, str(error))
        return replace(outcome, retries=1)

    def _make_smaller(self, batch: Batch, error: OutOfMemory) -> list[Outcome]:
        if batch.size == 1:
            if len(batch.rows) > 1:
                return [self._make_alone(batch, row) for row in batch.rows]
            return [Failure(batch.rows[0], type(error).__name__, str(error))]
        self._largest[batch.group] = batch.size // 2
        half, shape = batch.size // 2, f"{batch.group.width}x{batch.group.height}"
        self.say(f"a batch of {batch.size} does not fit into memory at {shape}; from now on {half} are made at once")
        return self.start(batch)()

    def _submit(self, batch: Batch) -> Pending:
        self.on_started(batch.bucket)
        started = time.monotonic()
        pending = self.generator.submit(batch, self.should_drop(batch, started))
        self._batch_s[batch.group, batch.size] = (time.monotonic() - started) / _loads(batch)
        return pending

    def should_drop(self, batch: Batch, started: float) -> Callable[[], bool]:
        """Whether the batch cannot be finished in what is left of the grace, judged by the bucket's last batch."""
        expected_s = self._batch_s.get((batch.group, batch.size), 0.0) * _loads(batch)

        def should_drop() -> bool:
            if not self.stop.is_asked:
                return False
            left_s = self.grace_s - COMMIT_RESERVE_S - self.stop.age_s()
            return left_s <= max(0.0, expected_s - (time.monotonic() - started))

        return should_drop


def _halves(batch: Batch) -> list[Batch]:
    """A batch that is too large, in two of half its size; in one if it has no more rows than that, or if its rows take
    turns: they do so in half as many lanes."""
    half = batch.size // 2
    most = half if len(batch.rows) <= batch.size else len(batch.rows)
    rows = [batch.rows[start : start + most] for start in range(0, len(batch.rows), most)]
    return [replace(batch, size=half, rows=some) for some in rows]


def _loads(batch: Batch) -> float:
    """How long a batch takes, in batches of as many rows as lanes."""
    return max(1.0, len(batch.rows) / batch.size)


def _is_final(outcome: Outcome) -> bool:
    """Whether making the row again would change nothing."""
    return isinstance(outcome, Image) or outcome.error == UNSAFE


def _is_fatal(error: Exception) -> bool:
    """Whether what a model raised is no row's fault: it ends the run."""
    return isinstance(error, Dropped | BatchgenError) and not isinstance(error, RowError)
