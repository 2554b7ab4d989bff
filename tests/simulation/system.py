"""Threads, clock, tokens and the table of processes, as the product's modules ask for them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from batchgen.owners import Owner
from tests.simulation.world import ProcessDied, Thread, World


class Event:
    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Thread] = []

    def set(self) -> None:
        self._is_set = True
        for thread in self._waiting:
            thread.wakes_at = World.now.now_s

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            self._waiting.append(World.now.me)
            World.now.sleep(float("inf") if timeout is None else timeout)
            self._waiting.clear()
        return self._is_set


class SimulatedThread:
    def __init__(self, target: Callable[[], None], name: str, daemon: bool) -> None:
        self._target = target
        self._name = name
        self._ended = Event()

    def start(self) -> None:
        World.now.start(World.now.me.process, self._run, f".{self._name}")

    def join(self) -> None:
        if World.now.me.process.is_dead:
            raise ProcessDied
        self._ended.wait()

    def _run(self) -> None:
        self._target()
        self._ended.set()


def monotonic() -> float:
    return World.now.now_s + 100.0 * World.now.me.process.host


def sleep(seconds: float) -> None:
    """Longer than asked for, as it may be: so that waiting costs few steps."""
    World.now.sleep(seconds + World.now.random.random() * World.now.oversleep_s)


CLOCK = SimpleNamespace(monotonic=monotonic, sleep=sleep, time=lambda: World.now.now_s)
SECRETS = SimpleNamespace(token_hex=lambda num: World.now.token())
THREADING = SimpleNamespace(Event=Event, Thread=SimulatedThread)


def start_time(pid: int) -> str:
    """Of the process with this pid on the caller's machine."""
    host = World.now.me.process.host
    alive = (one for one in World.now.processes if one.host == host and one.owner.pid == pid and not one.is_dead)
    return next((one.owner.start_time for one in alive), "")


def this_process() -> Owner:
    return World.now.me.process.owner


def has_ended(owner: Owner) -> bool:
    return owner.token in World.now.ended_tokens


def end(owner: Owner) -> None:
    if not World.now.me.process.is_dead:
        World.now.ended_tokens.add(owner.token)
