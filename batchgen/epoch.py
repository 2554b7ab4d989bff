"""One owner's work on one epoch of a shard: batches go in, a part and its receipt come out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa

from batchgen.disk import write_table
from batchgen.encoders import EncoderPool
from batchgen.errors import BatchgenError
from batchgen.generator import Dropped, Pending
from batchgen.heart import Heart
from batchgen.job import Job
from batchgen.ledger import COMMITTED, Ledger, Receipt, stem
from batchgen.making import Maker
from batchgen.metadata import row_table
from batchgen.owners import Owner
from batchgen.plan_reader import PlanReader
from batchgen.progress import Progress
from batchgen.publish import publish
from batchgen.records import Batch, Failure, Image, Part
from batchgen.rundir import RunDirectory
from batchgen.stopping import Stop
from batchgen.timeleft import TimeLeft
from batchgen.writer import PartWriter

_DROPPED = "the running batch is dropped: it would not end within the grace"


@dataclass(frozen=True, slots=True)
class Workplace:
    """What a worker works with, the same for all shards."""

    run: RunDirectory
    reader: PlanReader
    job: Job
    ledger: Ledger
    maker: Maker
    pool: EncoderPool
    stop: Stop
    progress: Progress
    time_left: TimeLeft = field(default_factory=TimeLeft)

    @property
    def me(self) -> Owner:
        assert self.ledger.owner is not None
        return self.ledger.owner


class Epoch:
    """A claimed epoch. It is filled, perhaps left alone while the next one begins, and closed."""

    def __init__(
        self, place: Workplace, shard: int, number: int, table: pa.Table, heart: Heart, failures: Sequence[Failure]
    ) -> None:
        self._place = place
        self._shard = shard
        self._number = number
        self._table = table
        self._heart = heart
        self._failures = list(failures)
        self._counted = [0, len(self._failures)]
        """Rows made and failed that the progress has been told of."""
        self._at_work: Pending | None = None
        self._started_s = time.time()
        self._part = PartWriter(
            place.ledger.root / "work",
            stem(shard, number),
            place.job.output,
            table,
            place.reader.index.model,
            place.pool,
        )

    @property
    def key(self) -> tuple[int, int]:
        """Shard and epoch."""
        return self._shard, self._number

    def fill(self, pending: Sequence[Batch], on_started: Callable[[], object], *, is_row_by_row: bool) -> int | None:
        """Make batches until it is time to commit; how many, or None if the epoch was taken away.

        While a batch is at work the next one is started; the last one is still at work when this returns.
        """
        place, started, num = self._place, time.monotonic(), 0
        try:
            for batch in pending:
                if place.stop.is_asked:
                    break
                before, self._at_work = self._at_work, place.maker.start(batch)
                on_started()
                self._take(before)
                num += 1
                if is_row_by_row or time.monotonic() - started > place.job.run.commit_every_s:
                    break
        except Dropped:
            place.progress.say(_DROPPED)
        except Exception as error:
            if not self._is_thrown_away(error):
                raise
            return None
        return num

    def close(self) -> bool:
        """Take what is still at work, commit, publish; whether the epoch was still ours."""
        place = self._place
        try:
            before, self._at_work = self._at_work, None
            self._take(before)
            receipt = self._finish()
        except Exception as error:
            if not self._is_thrown_away(error):
                raise
            return False
        self._heart.stop()
        if receipt is None:
            place.ledger.release(self._shard, self._number)
        elif place.ledger.commit(receipt):
            publish(place.run, receipt)
        else:
            self._throw_away()
            return False
        return True

    def _take(self, at_work: Pending | None) -> None:
        """Hand a batch's images to the part and remember its failures."""
        if at_work is None:
            return
        place = self._place
        try:
            outcomes = at_work()
        except Dropped:
            place.progress.say(_DROPPED)
            return
        failed = [one for one in outcomes if isinstance(one, Failure)]
        self._failures += failed
        for one in outcomes:
            if isinstance(one, Image):
                self._part.add(one)
        self._count(len(outcomes) - len(failed), len(failed))
        self._heart.check()

    def _count(self, made: int, failed: int) -> None:
        self._counted = [self._counted[0] + made, self._counted[1] + failed]
        self._place.progress.count(made, failed)

    def _finish(self) -> Receipt | None:
        """The receipt of what was made, whose part and row table are durable; None if there is nothing to name."""
        place = self._place
        finished = self._part.finish()
        self._count(-len(finished.failures), len(finished.failures))
        self._failures += finished.failures
        if not finished.images and not self._failures:
            return None
        table = row_table(self._table, place.reader.index.model, finished.images, self._failures)
        return self._receipt(finished, write_table(place.ledger.table_path(self._shard, self._number), table))

    def _receipt(self, part: Part, table_sha256: str) -> Receipt:
        spent = self._place.maker.spent()
        return Receipt(
            COMMITTED,
            self._shard,
            self._number,
            self._place.me,
            ok=tuple(sorted(image.index for image in part.images)),
            failed=tuple(sorted(failure.row.index for failure in self._failures)),
            part=part.path.name if part.path else "",
            part_bytes=part.bytes,
            part_sha256=part.sha256,
            table_sha256=table_sha256,
            cut=tuple(sorted(image.index for image in part.images if image.tokens_dropped)),
            versions=dict(self._place.maker.generator.versions),
            started_s=self._started_s,
            ended_s=time.time(),
            spent=replace(spent, stage_s={**spent.stage_s, "write": part.write_s}),
        )

    def _is_thrown_away(self, error: Exception) -> bool:
        """Discard the part after an error. True if the error is no wonder: another has filled the epoch's receipt, and
        so may have swept what lay in the work folder."""
        self._heart.stop()
        self._part.discard()
        if isinstance(error, BatchgenError):
            return False
        self._place.ledger.refresh()
        receipt = self._place.ledger.receipt(self._shard, self._number)
        if receipt is None or receipt.by == self._place.me:
            return False
        self._throw_away()
        return True

    def _throw_away(self) -> None:
        place = self._place
        name = stem(self._shard, self._number)
        place.progress.say(f"shard {name} was taken away in the meantime; its part is thrown away")
        made, failed = self._counted
        self._count(-made, -failed)
        self._part.discard()
        place.ledger.files.remove_any(place.ledger.table_path(self._shard, self._number))


def clear_work(ledger: Ledger, shard: int, epoch: int) -> None:
    """Remove what lies in the work folder of an epoch whose receipt names none of it: a full disk has better use for
    the room."""
    for name in ledger.files.names(ledger.root / "work"):
        if name.split(".")[0] == stem(shard, epoch):
            ledger.files.remove_any(ledger.root / "work" / name)
