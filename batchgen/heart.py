"""The heartbeat of a claim."""

from __future__ import annotations

import threading

from batchgen.ledger import Ledger
from batchgen.owners import has_ended

PERIOD_S = 30.0
MIN_PERIOD_S = 0.01


class Heart:
    """Touches the claim of an epoch on a thread of its own, from the start until it is stopped or its owner has ended:
    every 30 s, or four times in the time after which others take a silent owner for dead."""

    def __init__(self, ledger: Ledger, shard: int, epoch: int, stale_after_s: float) -> None:
        self._ledger = ledger
        self._shard = shard
        self._epoch = epoch
        self._period_s = max(MIN_PERIOD_S, min(PERIOD_S, stale_after_s / 4))
        self._error: Exception | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what went wrong with a heartbeat."""
        if self._error is not None:
            raise self._error

    def stop(self, *, waits: bool = True) -> None:
        """Beat no more; wait for the last beat unless there is no time. Doing it twice is harmless."""
        self._stopped.set()
        if waits:
            self._thread.join()

    def _beat(self) -> None:
        assert self._ledger.owner is not None
        while not self._stopped.wait(self._period_s) and not has_ended(self._ledger.owner):
            try:
                self._ledger.heartbeat(self._shard, self._epoch)
            except Exception as error:
                self._error = error
                return
