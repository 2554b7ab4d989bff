"""One worker: take a shard, make its rows, commit them, take the next.

Nothing but the slots of the ledger connects workers; any number of them may join, leave or die at any time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pyarrow as pa

from batchgen.disk import remove, write_table
from batchgen.encoders import EncoderPool
from batchgen.generator import Dropped, Pending
from batchgen.heart import Heart
from batchgen.job import Job
from batchgen.ledger import COMMITTED, Ledger, Receipt, ShardState, stem
from batchgen.making import Maker
from batchgen.metadata import row_table
from batchgen.plans import PlanReader, batches
from batchgen.progress import Progress
from batchgen.publish import publish
from batchgen.records import Batch, Failure, Image, Part
from batchgen.rundir import RunDirectory
from batchgen.stopping import Stop
from batchgen.writer import PartWriter

POLL_S = 1.0
"""Between looks at shards that others hold."""
_DROPPED = "the running batch is dropped: it would not end within the grace"


@dataclass(slots=True)
class Worker:
    """The loop of one process. `work` returns when nothing is left for it: all settled, asked to stop, or (with
    `may_wait` false) only rows that others hold."""

    run: RunDirectory
    reader: PlanReader
    job: Job
    ledger: Ledger
    maker: Maker
    pool: EncoderPool
    stop: Stop
    progress: Progress
    may_wait: bool = True

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
        with Heart(self.ledger, shard, self.job.run.stale_after_s) as heart:
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
            message = f"{suspicion.deaths} processes in a row ended or fell silent while they made this row alone"
            guilty = [Failure(suspect, "ProcessDied", message)]
            worker.progress.say(f"row {suspect.id!r} is given up: {message}")
            worker.progress.count(0, 1)
        if not self._prepare(pending):
            return False
        while True:
            taken, is_ours = self._epoch(pending, guilty, is_row_by_row=suspicion.is_row_by_row)
            pending, guilty = pending[taken:], []
            if not is_ours or not pending:
                return is_ours
            if worker.stop.is_asked or not self._next_epoch():
                return False

    def _prepare(self, pending: list[Batch]) -> bool:
        """False, and the epoch is given back, if the run is asked to stop meanwhile."""
        try:
            self.worker.maker.prepare(pending)
        except Dropped:
            self.worker.ledger.release(self.shard, self.epoch)
            return False
        return True

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
        failures = list(guilty)
        try:
            taken = self._fill(part, [] if guilty else pending, failures, is_row_by_row=is_row_by_row)
            receipt = self._finish(part, failures)
        except Exception:
            part.discard()
            if not self._is_taken_away():
                raise
            self._throw_away(part, failures)
            return 0, False
        if receipt is None:
            worker.ledger.release(self.shard, self.epoch)
        elif worker.ledger.commit(receipt):
            publish(worker.run, receipt)
        else:
            self._throw_away(part, failures)
            return taken, False
        return taken, True

    def _fill(self, part: PartWriter, pending: list[Batch], failures: list[Failure], *, is_row_by_row: bool) -> int:
        """Make batches until it is time to commit; how many. While one is at work the next one is submitted."""
        worker, started, taken = self.worker, time.monotonic(), 0
        at_work: Pending | None = None
        try:
            for batch in pending:
                if worker.stop.is_asked:
                    break
                before, at_work = at_work, worker.maker.start(batch)
                taken += self._take(part, before, failures)
                if is_row_by_row or time.monotonic() - started > worker.job.run.commit_every_s:
                    break
        except Dropped:
            worker.progress.say(_DROPPED)
        return taken + self._take(part, at_work, failures)

    def _take(self, part: PartWriter, at_work: Pending | None, failures: list[Failure]) -> int:
        """Hand a batch's images to the part, its failures to the list. 1, or 0 where there is no batch any more."""
        if at_work is None:
            return 0
        try:
            outcomes = at_work()
        except Dropped:
            self.worker.progress.say(_DROPPED)
            return 0
        failed = [one for one in outcomes if isinstance(one, Failure)]
        failures += failed
        for one in outcomes:
            if isinstance(one, Image):
                part.add(one)
        self.worker.progress.count(len(outcomes) - len(failed), len(failed))
        self.heart.check()
        return 1

    def _finish(self, part: PartWriter, failures: list[Failure]) -> Receipt | None:
        """The receipt of what was made, whose part and row table are durable; None if there is nothing to name."""
        worker = self.worker
        finished = part.finish()
        worker.progress.count(-len(finished.failures), len(finished.failures))
        failures += finished.failures
        if not finished.images and not failures:
            return None
        table = row_table(self.table, worker.reader.index.model, finished.images, failures)
        table_sha256 = write_table(worker.ledger.table_path(self.shard, self.epoch), table)
        return self._receipt(finished, failures, table_sha256)

    def _is_taken_away(self) -> bool:
        """Whether another has filled the epoch's receipt, and so may have swept what lay in the work folder."""
        receipt = self.worker.ledger.receipt(self.shard, self.epoch)
        return receipt is not None and receipt.by != self.worker.ledger.owner

    def _throw_away(self, part: PartWriter, failures: list[Failure]) -> None:
        worker = self.worker
        worker.progress.say(
            f"shard {stem(self.shard, self.epoch)} was taken away in the meantime; its part is thrown away"
        )
        worker.progress.count(len(failures) - part.num_added, -len(failures))
        part.discard()
        remove(worker.ledger.table_path(self.shard, self.epoch))

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
            versions=dict(self.worker.maker.generator.versions),
        )


def _one_by_one(planned: Iterator[Batch]) -> Iterator[Batch]:
    """Each row in a batch of its own, in the bucket that was planned for it."""
    return (replace(batch, rows=(row,)) for batch in planned for row in batch.rows)
