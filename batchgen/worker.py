"""One worker: take a shard, make its rows, commit them, take the next.

Nothing but the slots of the ledger connects workers; any number of them may join, leave or die at any time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from batchgen.epoch import Epoch, Workplace, clear_work
from batchgen.errors import Interrupted
from batchgen.filesystem import withdrawn
from batchgen.generator import DeviceLost, Dropped
from batchgen.glance import Glance, take_glance
from batchgen.heart import Heart
from batchgen.ledger import ShardState, stem
from batchgen.plan_reader import batches
from batchgen.records import Batch, Failure
from batchgen.timeleft import OUT_OF_TIME

POLL_S = 1.0
MAX_POLL_S = 30.0
"""Between looks at shards that others hold: the longer the more there are, for then many workers look."""
LOOKS = 8
"""Of such shards, how many a waiting worker looks at each time."""


@dataclass(slots=True)
class Worker:
    """The loop of one process. `work` returns when nothing is left for it: all settled, asked to stop, or (with
    `may_wait` false) only rows that others hold."""

    place: Workplace
    may_wait: bool = True
    _former: Epoch | None = None
    """An epoch whose last batch is at work: it is committed while the next shard's first batch is, so that the device
    does not wait for it."""
    _held: dict[tuple[int, int], Heart] = field(default_factory=dict)
    """The hearts of claimed epochs that have no receipt, by shard and epoch."""
    _has_claimed: bool = False
    """Whether the disk has taken a slot of this worker's: a refusal after that is no wrong place."""
    _is_late: bool = False
    """Whether this round left a shard to others, because it could not be finished in time."""
    _glance: Glance = field(default_factory=lambda: Glance({}, {}))
    _num_looks: int = 0
    """Shards that others hold and that are looked at nevertheless in this round."""

    def work(self) -> None:
        index, stop = self.place.reader.index, self.place.stop
        offset = int(self.place.me.token, 16) % max(1, len(index.shards))
        first = index.first_shard
        open_shards = [first + (offset + place) % len(index.shards) for place in range(len(index.shards))]
        try:
            most_looks = LOOKS if self.may_wait else len(open_shards)
            num_looks = 0
            while open_shards and not stop.is_asked:
                self._is_late = False
                self._glance, self._num_looks = take_glance(self.place.ledger), num_looks
                still_open = [shard for shard in open_shards if not self._take(shard)]
                has_progressed = self._close_former() or len(still_open) < len(open_shards)
                # Others come first the next time.
                open_shards = still_open[num_looks:] + still_open[:num_looks]
                if has_progressed or not open_shards:
                    num_looks = 0
                elif self._is_late:
                    stop.ask(OUT_OF_TIME)
                elif not num_looks:
                    num_looks = most_looks
                elif not self.may_wait:
                    return
                else:
                    self._wait(min(MAX_POLL_S, max(POLL_S, len(open_shards) / LOOKS)))
        except BaseException as error:
            self._give_back(error)
            if self._has_claimed and (stopped := withdrawn(error)):
                raise stopped from error
            raise

    def _give_back(self, error: BaseException) -> None:
        """Release what this worker holds, since it lives to say that it stops: only a lost device may be a row's doing.
        A finished shard is committed first, if there is time for it and the disk takes it."""
        is_lost = isinstance(error, DeviceLost)
        if isinstance(error, Exception) and not is_lost:
            try:
                self._close_former()
            except Exception as other:
                self.place.progress.say(f"a finished shard could not be committed either: {other}")
        for (shard, number), heart in self._held.items():
            heart.stop(waits=isinstance(error, Exception))
            if not is_lost:
                self._release(shard, number)

    def _release(self, shard: int, number: int) -> None:
        try:
            if self.place.ledger.release(shard, number):
                clear_work(self.place.ledger, shard, number)
        except Interrupted:
            pass  # As said already, most likely; and the claim was left as one that was given back.
        except Exception as error:
            self.place.progress.say(f"shard {stem(shard, number)} could not be given back: {error}")

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.place.stop.is_asked:
            time.sleep(0.05)

    def _close_former(self) -> bool:
        """Commit the epoch that was left; whether there was one and it was still ours."""
        former, self._former = self._former, None
        return former is not None and self._close(former)

    def _close(self, epoch: Epoch) -> bool:
        is_ours = epoch.close()
        del self._held[epoch.key]
        return is_ours

    def _take(self, shard: int) -> bool:
        """Work on a shard if that is possible; whether all its rows are known to be settled afterwards."""
        if self.place.stop.is_asked or self._is_left_to_others(shard):
            return False
        state = self._claimable(shard)
        if state is None or not self.place.reader.index.left(state):
            return state is not None
        predicted_s = self._predicted_s(state)
        if not self.place.time_left.fits(predicted_s):
            self._is_late = True
            return False
        is_settled = self._claim(shard, state.epoch) and self._timed(state, predicted_s)
        self._glance = take_glance(self.place.ledger)
        return is_settled

    def _is_left_to_others(self, shard: int) -> bool:
        """Whether another is at work on a shard, as far as the last glance told, and it is not looked at this time."""
        if not self._glance.is_held(shard):
            return False
        self._num_looks -= 1
        return self._num_looks < 0

    def _predicted_s(self, state: ShardState) -> float:
        """What the plan says of the rows that are left, in seconds of its own."""
        index = self.place.reader.index
        place = state.shard - index.first_shard
        return index.shard_s[place] * (1 - len(state.settled) / index.shard_rows[place])

    def _timed(self, state: ShardState, predicted_s: float) -> bool:
        started = self.place.time_left.clock()
        is_settled = self._work_on(state)
        self.place.time_left.learn(predicted_s, self.place.time_left.clock() - started)
        return is_settled

    def _claimable(self, shard: int) -> ShardState | None:
        """The shard's state once nobody alive holds its open epoch; None while somebody does."""
        place = self.place
        while True:
            num_rows = place.reader.index.shard_rows[shard - place.reader.index.first_shard]
            state = place.ledger.state(shard, num_rows)
            if not state.is_claimed or not place.reader.index.left(state):
                return state
            reason = place.ledger.dead_because(state, place.job.run.stale_after_s)
            if reason is None:
                return None
            place.progress.say(f"shard {stem(shard, state.epoch)} is taken over: {reason}")
            if place.ledger.abandon(shard, state.epoch):
                clear_work(place.ledger, shard, state.epoch)

    def _claim(self, shard: int, epoch: int) -> bool:
        """Whether an epoch is ours now, and its heart beats; False if another was first."""
        is_ours = self.place.ledger.claim(shard, epoch)
        if is_ours:
            self._has_claimed = True
            self._held[shard, epoch] = Heart(self.place.ledger, shard, epoch, self.place.job.run.stale_after_s)
        return is_ours

    def _work_on(self, state: ShardState) -> bool:
        """Make a claimed shard's rows, an epoch after another; whether they are known to be settled."""
        place, shard, number = self.place, state.shard, state.epoch
        try:
            table = place.reader.shard(shard)
            suspicion = state.suspicion(place.job.run.max_deaths)
            if suspicion.deaths:
                self._close_former()  # Whatever kills this shard's owners must not take another one's rows along.
            index = place.reader.index
            left = batches(table, index.groups, state.settled | index.gone(shard), place.reader.root)
            pending = list(_one_by_one(left) if suspicion.is_row_by_row else left)
            guilty = [self._given_up(pending.pop(0), suspicion.deaths)] if suspicion.is_first_row_guilty else []
            place.maker.prepare(pending)
        except Dropped:
            self._held.pop((shard, number)).stop()
            place.ledger.release(shard, number)
            return False
        while True:
            epoch = Epoch(place, shard, number, table, self._held[shard, number], guilty)
            now = [] if guilty else pending
            num = epoch.fill(now, self._close_former, is_row_by_row=suspicion.is_row_by_row)
            if num is None:
                del self._held[epoch.key]
                return False
            pending, guilty = pending[num:], []
            if not pending and not suspicion.deaths and not suspicion.is_row_by_row:
                self._close_former()
                self._former = epoch
                return False
            is_ours = self._close(epoch)
            if not is_ours or not pending:
                return is_ours
            number += 1
            if place.stop.is_asked or not self._claim(shard, number):
                return False

    def _given_up(self, batch: Batch, deaths: int) -> Failure:
        suspect = batch.rows[0]
        message = f"{deaths} processes in a row ended or fell silent while they made this row alone"
        self.place.progress.say(f"row {suspect.id!r} is given up: {message}")
        self.place.progress.count(0, 1)
        return Failure(suspect, "ProcessDied", message)


def _one_by_one(planned: Iterator[Batch]) -> Iterator[Batch]:
    """Each row in a batch of its own, in the bucket that was planned for it."""
    return (replace(batch, rows=(row,)) for batch in planned for row in batch.rows)
