"""A workforce that loses a worker process midway, as a machine's memory killer or a lost GPU would take it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

from batchgen.launcher import Seat, workforce
from batchgen.ledger import Ledger
from batchgen.owners import Owner
from batchgen.progress import Now, Progress
from batchgen.runner import Task, Workforce
from batchgen.stopping import Stop


class Killer:
    """Kills by SIGKILL the first worker found with a claim, once `after` images are made."""

    def __init__(self, after: int) -> None:
        self._after = after
        self.made = 0
        """Images made when it happened."""
        self.killed: Owner | None = None
        """None: nobody was, yet."""

    def workforce(self, seats: tuple[Seat, ...]) -> Workforce:
        """A process in each seat, one of which is killed."""

        def work(task: Task, stop: Stop, progress: Progress) -> int:
            return workforce(seats)(task, stop, _Counting(self, task, progress))

        return work

    def heed(self, made: int, task: Task) -> None:
        """Kill if it is time to."""
        if self.killed is None and made >= self._after:
            self.killed = next(_at_work(task.ledger, task.index.shards), None)
            if self.killed:
                self.made = made
                os.kill(self.killed.pid, signal.SIGKILL)


def _at_work(ledger: Ledger, shards: range) -> Iterator[Owner]:
    """The processes that this one started and that hold a claim."""
    for state in ledger.states(shards):
        if state.claim and state.claim.owner.launcher_pid == os.getpid():
            yield state.claim.owner


class _Counting:
    """A progress that counts what is made for a killer."""

    def __init__(self, killer: Killer, task: Task, progress: Progress) -> None:
        self._killer, self._task, self._progress = killer, task, progress
        self._made = 0

    def count(self, made: int, failed: int) -> None:
        self._progress.count(made, failed)
        self._made += made
        self._killer.heed(self._made, self._task)

    def say(self, text: str) -> None:
        self._progress.say(text)

    def show(self, now: Now, who: str = "") -> None:
        self._progress.show(now, who)
