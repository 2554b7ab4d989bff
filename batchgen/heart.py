"""The heartbeat of a claim."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from batchgen.ledger import Ledger

PERIOD_S = 30.0
MIN_PERIOD_S = 0.01


class Heart:
    """Touches the claim of the epoch at work on a thread of its own: every 30 s, or four times in the time after which
    others take a silent owner for dead."""

    def __init__(self, ledger: Ledger, shard: int, stale_after_s: float) -> None:
        self._ledger = ledger
        self._shard = shard
        self._period_s = max(MIN_PERIOD_S, min(PERIOD_S, stale_after_s / 4))
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
        while not self._ended.wait(self._period_s):
            try:
                if self._epoch is not None:
                    self._ledger.heartbeat(self._shard, self._epoch)
            except Exception as error:
                self._error = error
                return
