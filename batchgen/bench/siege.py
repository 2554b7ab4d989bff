"""One run directory whose workers are killed, again and again, until it is left in peace to finish."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from batchgen.bench.victims import Log, Order, Victim
from batchgen.marker import is_finished
from batchgen.rundir import RunDirectory

STALE_AFTER_S = 1.0
_PAUSE_S = 1.6
"""How long a stopped worker is left alone."""
_MOMENT_S = 0.8
"""The longest life of a worker that dies at a moment."""
_PATIENCE_S = 3.0
"""For a worker to come to its step; then any moment is good."""
_STARTING_S = 20.0
"""For a worker to come to a shard."""
_AT_WORK = 0.8
"""Of the workers, those whose time counts from there."""
_DRAIN_S = 30.0
_FINISH_S = 240.0
_TRIES = 2
_POLL_S = 0.005
_ENDS = {signal.SIGKILL: {-signal.SIGKILL}, signal.SIGTERM: {0, 75, -signal.SIGTERM}}
"""How a worker may end that a signal has come to. SIGTERM ends it as such before it listens."""


class Targets:
    """The steps to die at, in the order in which an undisturbed run comes to them."""

    def __init__(self, steps: Sequence[str]) -> None:
        """`steps` are those of an undisturbed run, with every visit."""
        self._visits = Counter(steps)
        self.hits: Counter[tuple[str, bool]] = Counter()
        """SIGKILLs at a step, before (False) and after (True) its call."""
        self.misses: Counter[tuple[str, bool]] = Counter()
        """Workers that were to die there, and came to the end of the run."""

    def learn(self, steps: Sequence[str]) -> None:
        """Steps that were come to under kills: those of taking over are no part of an undisturbed run."""
        for step in steps:
            self._visits.setdefault(step, 1)

    def left(self) -> list[Order]:
        """An order for each step, before and after its call, at which nobody has died, but for those that several
        workers have not come to."""
        sides = [(step, is_after) for step in self._visits for is_after in (False, True)]
        left = [side for side in sides if not self.hits[side] and self.misses[side] < _TRIES]
        return [Order(signal.SIGKILL, step, is_after=is_after) for step, is_after in left]

    def draw(self, random: Random) -> Order:
        """Any order for a worker; without a step it is for a moment."""
        number = random.choices([signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP], [5, 2, 3])[0]
        if random.random() < 0.5:
            return Order(number, "")
        step = random.choice(list(self._visits))
        return Order(number, step, random.randint(1, 1 + self._visits[step] // 16), random.random() < 0.5)

    def table(self) -> dict[str, list[int]]:
        """SIGKILLs before and after the call of each step that is known."""
        return {step: [self.hits[step, False], self.hits[step, True]] for step in self._visits}


@dataclass(slots=True)
class Running:
    """A worker that runs, and what is to become of it."""

    victim: Victim
    order: Order
    until_s: float
    """When the signal is sent, if the worker has not come to its step: seconds after it has come to a shard."""
    counts_from_claim: bool
    """Else they are counted from its start."""
    claimed_at: float | None = None
    sent_at: float | None = None
    """When it was sent by its age."""
    stopped_at: float | None = None
    was_stopped: bool = False

    @property
    def is_due(self) -> bool:
        """Whether its signal is to be sent. On a machine that is busy a worker may take long to come to a shard."""
        if not self.counts_from_claim or self.victim.age_s > _STARTING_S:
            return self.victim.age_s > self.until_s
        if self.claimed_at is None and self.victim.has_claimed:
            self.claimed_at = time.monotonic()
        return self.claimed_at is not None and time.monotonic() - self.claimed_at > self.until_s


@dataclass(frozen=True, slots=True)
class Ended:
    """A worker that has ended."""

    victim: Victim
    log: Log
    signal: signal.Signals | None
    """That it was sent; None for none."""
    was_stopped: bool


@dataclass(slots=True)
class Siege:
    """Kills on one run directory. `problems` is what no kill excuses."""

    run: RunDirectory
    words: Sequence[str]
    """Of the command, after "run"."""
    targets: Targets
    random: Random
    num_workers: int
    folder: Path
    on_kill: Callable[[], object]
    kills: Counter[tuple[signal.Signals, bool]] = field(default_factory=Counter)
    """By signal, and whether at a step."""
    ended: list[Ended] = field(default_factory=list)
    longest_drain_s: float = 0.0
    """From a SIGTERM to the end of its worker."""
    problems: list[str] = field(default_factory=list)
    _running: list[Running] = field(default_factory=list)
    _victims: list[Victim] = field(default_factory=list)
    """All that were started."""

    def sweep(self) -> None:
        """One worker after another dies at the next step that none has died at, until the run is finished."""
        with self._leaving_none():
            for order in self.targets.left():
                one = Running(self._victim(order), order, 0.0, counts_from_claim=False)
                self._await_end([one.victim])
                self._record_end(one)
                self.targets.misses[order.step, order.is_after] += 1
                if is_finished(self.run) or self.problems:
                    break
            self._finish()

    def go(self, num_kills: int) -> None:
        """Kill up to `num_kills` times, as long as the run is not finished; then finish it."""
        with self._leaving_none():
            while self.kills.total() < num_kills and not self.problems and not is_finished(self.run):
                self._start()
                self._tend()
                time.sleep(_POLL_S)
            self._kill_all()
            self._finish()

    @contextmanager
    def _leaving_none(self) -> Iterator[None]:
        """However the block ends, no worker outlives it."""
        try:
            yield
        finally:
            for one in self._victims:
                one.send(signal.SIGKILL)

    def _start(self) -> None:
        while len(self._running) < self.num_workers:
            order = self.targets.draw(self.random)
            until_s = _PATIENCE_S if order.step else self.random.uniform(0.0, _MOMENT_S)
            counts_from_claim = self.random.random() < _AT_WORK
            self._running.append(Running(self._victim(order), order, until_s, counts_from_claim))

    def _victim(self, order: Order | None) -> Victim:
        folder = self.folder / f"worker-{len(self._victims) + 1}"
        self._victims.append(Victim(("run", *self.words), self.run.path, folder, order))
        return self._victims[-1]

    def _tend(self) -> None:
        for one in list(self._running):
            if one.victim.exit_code is not None:
                self._running.remove(one)
                self._record_end(one)
            elif one.victim.is_stopped:
                self._wake(one)
            elif one.sent_at is None and one.is_due:
                one.sent_at = time.monotonic()
                one.victim.send(one.order.signal)
            elif one.sent_at is not None and time.monotonic() - one.sent_at > _DRAIN_S:
                self._complain(one.victim, f"has not ended {_DRAIN_S:.0f} s after its signal")
                one.victim.send(signal.SIGKILL)

    def _wake(self, one: Running) -> None:
        """Let a stopped worker go on when others have taken it for dead, to meet another end."""
        now = time.monotonic()
        if one.order.signal != signal.SIGSTOP:
            one.victim.send(signal.SIGCONT)  # It was late at its step, and had been stopped before.
        elif one.stopped_at is None:
            one.stopped_at = now
        elif now - one.stopped_at > _PAUSE_S:
            one.victim.send(signal.SIGCONT)
            self._count(signal.SIGSTOP, is_at_step=one.sent_at is None)
            number = self.random.choice([signal.SIGKILL, signal.SIGTERM])
            one.order, one.stopped_at, one.was_stopped, one.sent_at = Order(number, ""), None, True, None
            one.until_s, one.counts_from_claim = one.victim.age_s + self.random.uniform(0.0, 2 * _MOMENT_S), False

    def _record_end(self, one: Running) -> None:
        log, code, order, is_sent = one.victim.log(), one.victim.exit_code, one.order, one.sent_at is not None
        self.targets.learn(log.steps)
        is_at_step = not is_sent and bool(order.step) and log.steps.count(order.step) >= order.visit
        has_come = is_sent or is_at_step
        if order.signal == signal.SIGSTOP or (order.signal == signal.SIGKILL and code == 0):
            has_come = False  # It had ended when the signal was sent.
        allowed = _ENDS[order.signal] if has_come else {0}
        if code not in allowed:
            self._complain(one.victim, f"ended with {code}; allowed are {sorted(allowed)}")
        if has_come:
            self._count(order.signal, is_at_step=is_at_step)
            if is_at_step and order.signal == signal.SIGKILL:
                self.targets.hits[order.step, order.is_after] += 1
            if order.signal == signal.SIGTERM and one.sent_at is not None:
                self.longest_drain_s = max(self.longest_drain_s, time.monotonic() - one.sent_at)
        self.ended.append(Ended(one.victim, log, order.signal if has_come else None, one.was_stopped))

    def _count(self, number: signal.Signals, *, is_at_step: bool) -> None:
        self.kills[number, is_at_step] += 1
        self.on_kill()

    def _kill_all(self) -> None:
        for one in self._running:
            one.victim.send(signal.SIGKILL)
        self._await([one.victim for one in self._running], _DRAIN_S)
        for one in self._running:
            if one.victim.exit_code == -signal.SIGKILL:
                one.order, one.sent_at = Order(signal.SIGKILL, ""), time.monotonic()
            self._record_end(one)
        self._running.clear()

    def _finish(self) -> None:
        """All workers once more, undisturbed."""
        victims = [self._victim(None) for _ in range(self.num_workers)]
        self._await_end(victims)
        for one in victims:
            if one.exit_code != 0:
                self._complain(one, f"was left in peace and ended with {one.exit_code}")
            self.ended.append(Ended(one, one.log(), None, was_stopped=False))

    def _await_end(self, victims: Sequence[Victim]) -> None:
        """Those that do not end in time are complained of and killed."""
        self._await(victims, _FINISH_S)
        hanging = [one for one in victims if one.exit_code is None]
        for one in hanging:
            self._complain(one, f"has not ended after {_FINISH_S:.0f} s")
            one.send(signal.SIGKILL)
        self._await(hanging, _DRAIN_S)

    def _await(self, victims: Sequence[Victim], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while any(one.exit_code is None for one in victims) and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _complain(self, victim: Victim, what: str) -> None:
        said = "\n".join(victim.errors().splitlines()[-20:])
        self.problems.append(f"{self.run.path.name}: a worker ({victim.folder.name}, {victim.order}) {what}\n{said}")
