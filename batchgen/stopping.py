"""Signals: a first one asks the run to stop in time, a second one stops it now."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
REPEAT_S = 2.0
"""Signals within this time of the first are the same one: a process group is often signalled twice."""


class StopNow(BaseException):
    """The second signal: drop everything that is not committed."""


@dataclass(slots=True)
class Stop:
    """Whether and since when the run is asked to stop."""

    clock: Callable[[], float] = time.monotonic
    signal_name: str = ""
    since: float | None = None
    is_at_once: bool = False

    @property
    def is_asked(self) -> bool:
        return self.since is not None

    def age_s(self) -> float:
        """Seconds since the first signal, 0 before it."""
        return 0.0 if self.since is None else self.clock() - self.since

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """The handler. Raises StopNow in the main thread for a second signal, once."""
        if self.since is None:
            self.signal_name = signal.Signals(number).name
            self.since = self.clock()
        elif self.age_s() > REPEAT_S and not self.is_at_once:
            self.is_at_once = True
            raise StopNow


@contextmanager
def listening(stop: Stop) -> Iterator[Stop]:
    """Take the signals for the time of the block, and give them back. A hangup that is ignored stays so: `nohup` asks
    for it."""
    taken = [one for one in SIGNALS if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]
    before = {number: signal.signal(number, stop.on_signal) for number in taken}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
