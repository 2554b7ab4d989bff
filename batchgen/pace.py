"""How fast images are made of late, so that the time left can be told."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 120.0
"""Of which the rate is taken, or as long as the last two batches took."""


class Pace:
    """Images settled, with times. Starting, and getting the first batch ready, is no part of the pace."""

    def __init__(self, settled: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._events = deque([(clock(), settled)])

    def begin(self) -> None:
        """Images are made from now on, if none was before."""
        if len(self._events) == 1:
            self._events[0] = self._clock(), self._events[0][1]

    def count(self, settled: int) -> None:
        """So many are settled by now."""
        now = self._clock()
        self._events.append((now, settled))
        while len(self._events) > 3 and self._events[1][0] < now - WINDOW_S:
            self._events.popleft()

    def rate(self) -> float | None:
        """Images a second; falls while the next ones are overdue. None where nothing is known."""
        (first_s, first), (last_s, last) = self._events[0], self._events[-1]
        num = len(self._events) - 1
        if num == 0 or last <= first:
            return None
        usual_s = (last_s - first_s) / num
        overdue_s = max(0.0, self._clock() - last_s - usual_s)
        seconds = last_s - first_s + overdue_s
        return (last - first) / seconds if seconds > 0 else None
