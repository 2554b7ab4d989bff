"""Processes of several machines, one step at a time under a seeded scheduler, and the troubles that meet them.

Threads are greenlets: what runs is the product's own code, which cannot be rewritten as generators, and a switch
costs a tenth of a microsecond, where one between threads of the system costs a hundred times that.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar

from greenlet import GreenletExit, greenlet

from batchgen.owners import Owner
from batchgen.stopping import Stop
from tests.simulation.storage import Place, Storage

MAX_STEPS = 20_000
STEP_S = 0.002
CHANGES = frozenset(["link", "rename", "mkdir", "create", "write", "sync", "sync_folder", "remove", "touch"])


class ProcessDied(GreenletExit):
    """The process is gone; no handler for errors may run on."""


class Violation(Exception):
    """A promise that was not kept."""


@dataclass(slots=True)
class Trouble:
    """What happens to the process that makes a step: the first from `step` on that `call` and `at` name ("": any)."""

    step: int
    kind: str
    """kill · crash (its machine) · pause · stall (one thread of it) · signal · error (before the step is done) · lost
    (the reply, after it) · full (the disk, for all)"""
    call: str = ""
    seconds: float = 0.0
    number: int = 0
    """errno"""
    is_replaced: bool = False
    """With a pause: another process is started in its stead, as by a cluster that believes it dead."""
    at: str = ""
    """Part of the path that the step is about."""
    kills_after: int = 0
    """With a pause: so many steps after its end somebody is killed, most likely who made it; 0: nobody."""

    def __str__(self) -> str:
        what = f"{self.kind} {errno.errorcode[self.number]}" if self.number else self.kind
        how_long = f" {self.seconds:.0f} s" if self.seconds else ""
        return f"{what}{how_long}{' and replaced' if self.is_replaced else ''}"


@dataclass(slots=True, eq=False)
class Thread:
    process: Process
    name: str
    greenlet: greenlet
    wakes_at: float = 0.0


@dataclass(slots=True, eq=False)
class Process:
    """One start of a worker."""

    name: str
    slot: int
    host: int
    owner: Owner
    stop: Stop
    is_dead: bool = False
    """By force."""
    paused_until: float = 0.0
    ended: str = ""
    threads: list[Thread] = field(default_factory=list)


class World:
    """One run of one schedule."""

    now: ClassVar[Any]
    """The one in which the product's code runs."""

    def __init__(self, random: Random, troubles: list[Trouble], *, restlessness: float, lag_s: float) -> None:
        self.random = random
        self.storage = Storage()
        self.now_s = 1000.0
        self.num_steps = 0
        self.num_tokens = 0
        self.lag_s = lag_s
        """Up to so much later a name that another machine makes is seen in listings and lookups."""
        self.restlessness = restlessness
        """The probability of looking at another thread at a step."""
        self.troubles = troubles
        self._next_trouble = troubles[0].step if troubles else MAX_STEPS
        self.full_until = 0
        """Step until which nothing can be written."""
        self.processes: list[Process] = []
        self.threads: list[Thread] = []
        self.trace: list[str] | None = None
        self.on_end: Callable[[Process, BaseException | None], None] = lambda process, error: None
        self.on_trouble: Callable[[Process, Trouble], None] = lambda process, trouble: None
        self.violation: Exception | None = None
        self._hub = greenlet.getcurrent()
        self.num_done: Counter[str] = Counter()
        """Troubles that came, by kind."""
        self.me: Thread = Thread(Process("nobody", 0, 0, None, Stop()), "nobody", greenlet.getcurrent())  # type: ignore[arg-type]

    def token(self) -> str:
        self.num_tokens += 1
        return f"{self.num_tokens:04x}"

    def say(self, text: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.num_steps:5d} {self.now_s:9.2f} s  {self.me.name:<16} {text}")

    # Threads

    def start(self, process: Process, work: Callable[[], None], name: str = "") -> Thread:
        """A new thread; a process ends with its first one."""
        is_main = not process.threads
        thread = Thread(process, process.name + name, None)  # type: ignore[arg-type]

        def run() -> None:
            error: BaseException | None = None
            try:
                work()
            except ProcessDied as death:
                error = death
            except Exception as raised:
                error = raised
            self.threads.remove(thread)
            process.threads.remove(thread)
            if is_main:
                self._end(process, error)

        thread.greenlet = greenlet(run, self._hub)
        thread.wakes_at = self.now_s
        process.threads.append(thread)
        self.threads.append(thread)
        return thread

    def _end(self, process: Process, error: BaseException | None) -> None:
        process.is_dead = True
        try:
            self.on_end(process, error)
        except Violation as found:
            self.violation = found

    def run(self) -> None:
        """Until every thread has ended. Raises Violation."""
        while self.threads and self.violation is None:
            self.me = self._choose()
            if self.violation is None:
                self.me.greenlet.switch()
            self._end_dead_threads()
        if self.violation is not None:
            for thread in list(self.threads):
                thread.process.is_dead = True
            self.on_end = lambda process, error: None
            self._end_dead_threads()
            raise self.violation

    def _end_dead_threads(self) -> None:
        """End what is left of processes that have died."""
        while dead := [thread for thread in self.threads if thread.process.is_dead]:
            for thread in dead:
                self.me = thread
                is_main = thread.process.threads[0] is thread
                if thread.greenlet:
                    thread.greenlet.throw(ProcessDied)
                else:
                    self.threads.remove(thread)
                    thread.process.threads.remove(thread)
                    if is_main:
                        self._end(thread.process, ProcessDied())

    def _choose(self) -> Thread:
        while True:
            now_s = self.now_s
            ready = [one for one in self.threads if one.wakes_at <= now_s and one.process.paused_until <= now_s]
            if ready:
                return ready[int(self.random.random() * len(ready))]
            soonest = min(max(one.wakes_at, one.process.paused_until) for one in self.threads)
            if soonest == float("inf"):
                waiting = ", ".join(one.name for one in self.threads)
                self.violation = Violation(f"every thread waits for another: {waiting}")
                return self.me if self.me in self.threads else self.threads[0]
            self.now_s = soonest

    def switch(self) -> None:
        """Let others go on, then this thread again."""
        here = self.me
        chosen = self._choose()
        if self.violation is not None:
            self._leave(here)
        if chosen is not here:
            self.me = chosen
            chosen.greenlet.switch()
            self.me = here
            if here.process.is_dead:
                raise ProcessDied

    def _leave(self, here: Thread) -> None:
        here.process.is_dead = True
        raise ProcessDied

    def sleep(self, seconds: float) -> None:
        me = self.me
        if me.process.is_dead:
            raise ProcessDied
        me.wakes_at = self.now_s + seconds
        self.switch()

    # Steps

    def step(self, call: str, place: Place) -> OSError | None:
        """Called before each step. Raises what keeps it from being done; returns what is raised after it is done."""
        process = self.me.process
        if process.is_dead:
            raise ProcessDied
        self.num_steps = number = self.num_steps + 1
        self.now_s += STEP_S
        if self.random.random() < self.restlessness:
            self.switch()
        after = None
        if number >= self._next_trouble:
            after = self._meet(process, call, place)
        if self.trace is not None:
            self.say(f"{call} {place}")
        if number < self.full_until and call in ("create", "write", "mkdir", "link"):
            raise OSError(errno.ENOSPC, "No space left on device", place.text)
        return after

    def _meet(self, process: Process, call: str, place: Place) -> OSError | None:
        number = self.num_steps
        if number >= MAX_STEPS:
            self.violation = Violation(f"no end after {MAX_STEPS} steps")
            self._leave(self.me)
        for trouble in self.troubles:
            if trouble.step <= number and trouble.call in ("", call) and trouble.at in place.text:
                break
        else:
            return None
        self.troubles.remove(trouble)
        self._next_trouble = self.troubles[0].step if self.troubles else MAX_STEPS
        self.num_done[trouble.kind] += 1
        self.say(f"** {trouble}, at {call} {place}")
        return self._befall(process, trouble, place)

    def _befall(self, process: Process, trouble: Trouble, place: Place) -> OSError | None:
        self.on_trouble(process, trouble)
        match trouble.kind:
            case "kill":
                process.is_dead = True
                raise ProcessDied
            case "crash":
                self._crash(process.host)
            case "pause":
                process.paused_until = self.now_s + trouble.seconds
                self.switch()
                if trouble.kills_after:
                    self._expect(Trouble(self.num_steps + trouble.kills_after, "kill"))
            case "stall":
                self.sleep(trouble.seconds)
            case "signal":
                if process.stop.since is None:
                    process.stop.on_signal(15, None)
            case "full":
                self.full_until = self.num_steps + int(trouble.seconds)
            case "error":
                raise OSError(trouble.number, "injected", place.text)
            case "lost":
                return OSError(trouble.number, "reply lost", place.text)
        return None

    def _expect(self, trouble: Trouble) -> None:
        self.troubles = sorted([*self.troubles, trouble], key=lambda one: one.step)
        self._next_trouble = self.troubles[0].step

    def _crash(self, host: int) -> None:
        is_only = len({one.host for one in self.processes}) == 1
        for one in self.processes:
            if one.host == host:
                one.is_dead = True
        self.storage.lose(self.random, None if is_only else host)
        raise ProcessDied
