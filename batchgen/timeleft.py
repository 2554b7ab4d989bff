"""How long a process may still work, and whether a shard fits into that."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

OUT_OF_TIME = "the time limit"
"""Why a run stops whose worker finds no shard that it could finish."""


@dataclass(slots=True)
class TimeLeft:
    """A limit, and this worker's pace. The first shard always fits: nothing is known of the pace yet, and a task that
    did nothing would do nothing again the next time."""

    ends_at: float | None = None
    """By the clock; None without a limit."""
    clock: Callable[[], float] = time.monotonic
    _pace: float | None = None
    """Seconds for each that the plan predicts, in the last shard."""

    def fits(self, predicted_s: float) -> bool:
        """Whether work can be finished in time, as far as can be known."""
        return self.ends_at is None or self._pace is None or self.clock() + self._pace * predicted_s <= self.ends_at

    def learn(self, predicted_s: float, seconds: float) -> None:
        """Note how long a shard took."""
        if predicted_s > 0:
            self._pace = seconds / predicted_s
