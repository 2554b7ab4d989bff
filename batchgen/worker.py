"""One worker: take a shard, make its rows, commit them, take the next.

Nothing but the slots of the ledger connects workers; any number of them may join, leave or die at any time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

import pyarrow as pa

from batchgen.disk import write_table
from batchgen.encoders import EncoderPool
from batchgen.errors import BatchgenError, RowError
from batchgen.generator import Dropped, Generator, OutOfMemory
from batchgen.job import Job
from batchgen.ledger import COMMITTED, Ledger, Receipt, ShardState, stem
from batchgen.metadata import row_table
from batchgen.plans import PlanReader, batches
from batchgen.progress import Progress
from batchgen.publish import publish
from batchgen.records import Batch, Failure, Group, Image, Outcome, Part, Row
from batchgen.rundir import RunDirectory
from batchgen.stopping import Stop
from batchgen.writer import PartWriter

HEARTBEAT_S = 30.0
POLL_S = 1.0
"""Between looks at shards that others hold."""
COMMIT_RESERVE_S = 5.0
"""Of the grace, kept for the commit."""


@dataclass(slots=True)
class Worker:
    """The loop of one process. `work` returns when nothing is left for it: all settled, asked to stop, or (with
    `may_wait` false) only rows that others hold."""

    run: RunDirectory
    reader: PlanReader
    job: Job
    ledger: Ledger
    generator: Generator
    pool: EncoderPool
    stop: Stop
    progress: Progress
    may_wait: bool = True
    _batch_s: dict[tuple[Group, int], float] = field(default_factory=dict)

    def work(self) -> None:
        index = self.reader.index
        assert self.ledger.owner is not None
        offset = int(self.ledger.owner.token, 16) % max(1, len(index.shards))
        first = index.first_shard
        open_shards = [first + (offset + place) % len(index.shards) for place in range(len(index.shards))]
        while open_shards and not self.stop.is_asked:
            still_open = [shard for shard in open_shards if not self._take(shard)]
            has_progressed = len(still_open) < len(open_shards)
            open_shards = still_open
            if open_shards and not has_progressed:
                if not self.may_wait:
                    return
                self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + POLL_S
        while time.monotonic() < deadline and not self.stop.is_asked:
            time.sleep(0.05)

    def _take(self, shard: int) -> bool:
        """Work on a shard if that is possible; whether all its rows are settled afterwards."""
        if self.stop.is_asked:
            return False
        state = self._claimable(shard)
        num_rows = self.reader.index.shard_rows[shard - self.reader.index.first_shard]
        if state is None or len(state.settled) == num_rows:
            return state is not None
        if not self.ledger.claim(shard, state.epoch):
            return False
        with Heart(self.ledger, shard) as heart:
            return _ShardRun(self, shard, state, heart).run()

    def _claimable(self, shard: int) -> ShardState | None:
        """The shard's state once nobody alive holds its open epoch; None while somebody does."""
        while True:
            state = self.ledger.state(shard)
            num_rows = self.reader.index.shard_rows[shard - self.reader.index.first_shard]
            if not state.is_claimed or len(state.settled) == num_rows:
                return state
            reason = self.ledger.dead_because(state, self.job.run.stale_after_s)
            if reason is None:
                return None
            self.progress.say(f"shard {stem(shard, state.epoch)} is taken over: {reason}")
            self.ledger.abandon(shard, state.epoch)

    def make(self, batch: Batch) -> list[Outcome]:
        """The outcomes of a batch's rows: as planned, else in halves if memory is short, else row by row."""
        try:
            outcomes = self._generate(batch)
        except OutOfMemory as error:
            return self._make_halves(batch, error)
        except Exception as error:
            if _is_fatal(error):
                raise
            rows = f"{len(batch.rows)} rows from {batch.rows[0].id!r} on are"
            self.progress.say(f"a batch raised {type(error).__name__}: {error}; its {rows} tried one by one")
            return [self._make_alone(batch, row) for row in batch.rows]
        return [one if isinstance(one, Image) else self._make_alone(batch, one.row) for one in outcomes]

    def _make_alone(self, batch: Batch, row: Row) -> Outcome:
        """A row tried again without its neighbours, in the bucket that was planned for it."""
        alone = replace(batch, rows=(row,))
        try:
            (outcome,) = self._generate(alone)
        except OutOfMemory as error:
            (outcome,) = self._make_halves(alone, error)
        except Exception as error:
            if _is_fatal(error):
                raise
            outcome = Failure(row, type(error).__name__, str(error))
        return replace(outcome, retries=1)

    def _make_halves(self, batch: Batch, error: OutOfMemory) -> list[Outcome]:
        if batch.size == 1:
            return [Failure(row, type(error).__name__, str(error)) for row in batch.rows]
        half = batch.size // 2
        self.progress.say(f"a batch of {batch.size} does not fit into memory; it is run in batches of {half}")
        rows = [batch.rows[start : start + half] for start in range(0, len(batch.rows), half)]
        return [outcome for some in rows for outcome in self.make(replace(batch, size=half, rows=some))]

    def _generate(self, batch: Batch) -> list[Outcome]:
        started = time.monotonic()
        outcomes = self.generator.generate(batch, self._should_drop(batch, started))
        self._batch_s[batch.group, batch.size] = time.monotonic() - started
        return outcomes

    def _should_drop(self, batch: Batch, started: float) -> Callable[[], bool]:
        """Whether the batch cannot be finished in what is left of the grace, judged by the bucket's last batch."""
        expected_s = self._batch_s.get((batch.group, batch.size), 0.0)

        def should_drop() -> bool:
            if not self.stop.is_asked:
                return False
            left_s = self.job.run.grace_s - COMMIT_RESERVE_S - self.stop.age_s()
            return left_s <= max(0.0, expected_s - (time.monotonic() - started))

        return should_drop


@dataclass(slots=True)
class _ShardRun:
    """The work of one owner on one shard: an epoch after another until its rows are settled or it has to stop."""

    worker: Worker
    shard: int
    state: ShardState
    heart: Heart
    table: pa.Table = None
    epoch: int = 0

    def run(self) -> bool:
        """Whether all rows of the shard are settled."""
        worker, self.epoch = self.worker, self.state.epoch
        self.heart.beat_for(self.epoch)
        self.table = worker.reader.shard(self.shard)
        suspicion = self.state.suspicion(worker.job.run.max_deaths)
        left = batches(self.table, worker.reader.index.groups, self.state.settled)
        pending = list(_one_by_one(left) if suspicion.is_row_by_row else left)
        guilty: list[Failure] = []
        if suspicion.is_first_row_guilty:
            suspect = pending.pop(0).rows[0]
            message = f"{suspicion.deaths} processes in a row ended while they made this row alone"
            guilty = [Failure(suspect, "ProcessDied", message)]
            worker.progress.say(f"row {suspect.id!r} is given up: {message}")
            worker.progress.count(0, 1)
        while True:
            taken, outcome = self._epoch(pending, guilty, is_row_by_row=suspicion.is_row_by_row)
            pending, guilty = pending[taken:], []
            if not outcome or not pending:
                return outcome
            if worker.stop.is_asked or not self._next_epoch():
                return False

    def _next_epoch(self) -> bool:
        self.epoch += 1
        is_ours = self.worker.ledger.claim(self.shard, self.epoch)
        if is_ours:
            self.heart.beat_for(self.epoch)
        return is_ours

    def _epoch(self, pending: list[Batch], guilty: list[Failure], *, is_row_by_row: bool) -> tuple[int, bool]:
        """Make batches until it is time to commit; how many, and whether the epoch's receipt is ours."""
        worker = self.worker
        part = PartWriter(
            worker.ledger.root / "work",
            stem(self.shard, self.epoch),
            worker.job.output,
            self.table,
            worker.reader.index.model,
            worker.pool,
        )
        failures, taken, started = list(guilty), 0, time.monotonic()
        try:
            for batch in pending:
                if worker.stop.is_asked or (guilty and not taken and is_row_by_row):
                    break
                outcomes = worker.make(batch)
                made = [one for one in outcomes if isinstance(one, Image)]
                for image in made:
                    part.add(image)
                failures += [one for one in outcomes if isinstance(one, Failure)]
                worker.progress.count(len(made), len(outcomes) - len(made))
                taken += 1
                self.heart.check()
                if is_row_by_row or time.monotonic() - started > worker.job.run.commit_every_s:
                    break
        except Dropped:
            worker.progress.say("the running batch is dropped: it would not end within the grace")
        except Exception:
            part.discard()
            raise
        return taken, self._commit(part, failures)

    def _commit(self, part: PartWriter, failures: list[Failure]) -> bool:
        """Finish the part and put its receipt; False, and the part is gone, if the epoch was taken away."""
        worker, ledger = self.worker, self.worker.ledger
        finished = part.finish()
        worker.progress.count(-len(finished.failures), len(finished.failures))
        failures = [*failures, *finished.failures]
        if not finished.images and not failures:
            ledger.release(self.shard, self.epoch)
            return True
        table = row_table(self.table, worker.reader.index.model, finished.images, failures)
        table_sha256 = write_table(ledger.table_path(self.shard, self.epoch), table)
        receipt = self._receipt(finished, failures, table_sha256)
        if not ledger.commit(receipt):
            worker.progress.say(f"shard {receipt.stem} was taken away in the meantime; its part is thrown away")
            worker.progress.count(-len(receipt.ok), -len(receipt.failed))
            part.discard()
            return False
        publish(worker.run, receipt)
        return True

    def _receipt(self, part: Part, failures: list[Failure], table_sha256: str) -> Receipt:
        assert self.worker.ledger.owner is not None
        return Receipt(
            COMMITTED,
            self.shard,
            self.epoch,
            self.worker.ledger.owner,
            ok=tuple(sorted(image.index for image in part.images)),
            failed=tuple(sorted(failure.row.index for failure in failures)),
            part=part.path.name if part.path else "",
            part_bytes=part.bytes,
            part_sha256=part.sha256,
            table_sha256=table_sha256,
            num_cut=sum(bool(image.tokens_dropped) for image in part.images),
            versions=dict(self.worker.generator.versions),
        )


def _is_fatal(error: Exception) -> bool:
    """Whether what a model raised is no row's fault: it ends the run."""
    return isinstance(error, Dropped | BatchgenError) and not isinstance(error, RowError)


def _one_by_one(planned: Iterator[Batch]) -> Iterator[Batch]:
    """Each row in a batch of its own, in the bucket that was planned for it."""
    return (replace(batch, rows=(row,)) for batch in planned for row in batch.rows)


class Heart:
    """Touches the claim of the epoch at work every 30 s, on a thread of its own."""

    def __init__(self, ledger: Ledger, shard: int) -> None:
        self._ledger = ledger
        self._shard = shard
        self._epoch: int | None = None
        self._error: Exception | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if error is None or isinstance(error, Exception):
            self._thread.join()

    def beat_for(self, epoch: int) -> None:
        self._epoch = epoch

    def check(self) -> None:
        """Raise what went wrong with a heartbeat."""
        if self._error is not None:
            raise self._error

    def _beat(self) -> None:
        while not self._ended.wait(HEARTBEAT_S):
            try:
                if self._epoch is not None:
                    self._ledger.heartbeat(self._shard, self._epoch)
            except Exception as error:
                self._error = error
                return
