"""Signals: a first one asks the run to stop in time, a second one stops it now.

SIGHUP is heard too, where it is not ignored (as under nohup): a terminal that closes costs no work.
"""

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


class Stopped(BaseException):
    """The first signal, where there is nothing to finish: no row is being made."""


@dataclass(slots=True)
class Stop:
    """Whether and since when the run is asked to stop."""

    clock: Callable[[], float] = time.monotonic
    signal_name: str = ""
    """Of the first signal, or what else asked; "" before."""
    since: float | None = None
    is_raised: bool = False
    """Whether the first signal is raised as Stopped, beside being noted."""
    was_raised: bool = False
    """Whether it has been: libraries in C may turn it into an error of theirs."""
    is_at_once: bool = False
    """Whether a second signal came; it is raised once, however often it is repeated."""
    on_asked: Callable[[str], object] = lambda name: None
    """Told of a first signal that there is something to finish for, within the handler."""

    @property
    def is_asked(self) -> bool:
        return self.since is not None

    def age_s(self) -> float:
        """Seconds since the first signal, 0 before it."""
        return 0.0 if self.since is None else self.clock() - self.since

    def ask(self, why: str) -> None:
        """Ask without a signal; nothing happens if somebody did before."""
        if self.since is None:
            self.signal_name, self.since = why, self.clock()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """The handler. Raises in the main thread: StopNow for a second signal, Stopped for a first one that finds
        nothing to finish."""
        if self.since is None:
            self.ask(signal.Signals(number).name)
            if self.is_raised:
                self.was_raised = True
                raise Stopped
            self.on_asked(self.signal_name)
        elif self.age_s() > REPEAT_S and not self.is_at_once:
            self.is_at_once = True
            raise StopNow

    @contextmanager
    def working(self) -> Iterator[None]:
        """Within the block rows are made: a first signal is only noted, and whoever makes them comes to an end."""
        before, self.is_raised = self.is_raised, False
        try:
            yield
        finally:
            self.is_raised = before


def hear() -> None:
    """Let in the signals that have waited since the program began, and those to come."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


@contextmanager
def listening(stop: Stop) -> Iterator[Stop]:
    """Take the signals for the time of the block, and give them back. A first one raises Stopped, unless it comes
    within `stop.working()`."""
    is_hung_up = signal.getsignal(signal.SIGHUP) != signal.SIG_IGN
    heard = [number for number in SIGNALS if number != signal.SIGHUP or is_hung_up]
    stop.is_raised = True
    before = {number: signal.signal(number, stop.on_signal) for number in heard}
    try:
        yield stop
    finally:
        stop.is_raised = False
        for number, handler in before.items():
            signal.signal(number, handler)
