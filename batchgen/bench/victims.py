"""Workers to be killed: `batchgen run` in a process of its own, with a log of what it did and a signal at a step.

A step is one change to the run directory, or one call by which a change becomes durable, named by the call and the
place: "link .run/receipts/N" is the moment of a commit.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import runpy
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tqdm import tqdm

from batchgen import starts
from batchgen.filesystem import FileSystem
from batchgen.generator import Pending
from batchgen.models.pattern import PatternGenerator
from batchgen.owners import start_time
from batchgen.records import Batch

_CALLS = ("link", "unlink", "fsync", "rename", "replace", "utime", "mkdir")
_NAMES = (
    (re.compile(r"\.[0-9a-f]{8}-\d+-\d*(?=[./]|$)"), ""),
    (re.compile(r"\d{5,}-\d+"), "N"),
    (re.compile(r"(?<![^-./])[0-9a-f]{8,16}(?![^./-])"), "T"),
    (re.compile(r"\d{4}(?=\.parquet)"), "0000"),
    (re.compile(r"[^/]+\.png"), "*.png"),
)
_CLAIMED = "claimed"
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["batchgen.cli", "batchgen.runner", "batchgen.report", "batchgen.bench.victims"])


@dataclass(frozen=True, slots=True)
class Order:
    """The signal that a worker sends itself at a step: before or after the call, at one of its visits."""

    signal: signal.Signals
    step: str
    visit: int = 1
    is_after: bool = False


@dataclass(frozen=True, slots=True)
class Made:
    """A batch that a worker has made, by its monotonic clock."""

    ids: tuple[str, ...]
    started_s: float
    ended_s: float


@dataclass(slots=True)
class Log:
    """What a worker did, until the moment it died."""

    steps: list[str] = field(default_factory=list)
    """In order, with every visit."""
    made: list[Made] = field(default_factory=list)
    closed: list[tuple[int, str]] = field(default_factory=list)
    """Receipts that it asked for, whoever's they became: how many batches it had made by then, and the slot's name."""


class Victim:
    """A worker at work on a run directory. Its output and its log lie in `folder`, which it makes."""

    def __init__(self, words: Sequence[str], out: Path, folder: Path, order: Order | None = None) -> None:
        folder.mkdir()
        self.folder = folder
        self.order = order
        self.started_s = time.monotonic()
        self._process: ForkServerProcess = _processes.Process(target=_live, args=(tuple(words), out, folder, order))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self.start_time = start_time(self.pid)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started_s

    @property
    def has_claimed(self) -> bool:
        """Whether it has come to a shard."""
        return (self.folder / _CLAIMED).exists()

    @property
    def exit_code(self) -> int | None:
        """None while it runs; the negative number of a signal that ended it."""
        return self._process.exitcode

    @property
    def is_stopped(self) -> bool:
        """Whether a signal holds it up."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="latin-1")
        except (FileNotFoundError, ProcessLookupError):
            return False
        return stat.rpartition(")")[2].split()[0] == "T"

    def send(self, number: signal.Signals) -> None:
        """A signal, if it still runs. Until it is waited for, nobody else has its pid."""
        if self.exit_code is None:
            os.kill(self.pid, number)

    def errors(self) -> str:
        """Its standard error so far."""
        path = self.folder / "err"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def log(self) -> Log:
        """Its log so far; of a line that it died in, nothing."""
        log, path = Log(), self.folder / "log"
        lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
        for kind, *values in map(json.loads, lines):
            match kind:
                case "step":
                    log.steps += values
                case "made":
                    log.made.append(Made(tuple(values[0]), values[1], values[2]))
                case "closed":
                    log.closed.append((len(log.made), values[0]))
        return log


def _live(words: tuple[str, ...], out: Path, folder: Path, order: Order | None) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    tqdm.set_lock(threading.RLock())  # Its own has a semaphore, which a killed process leaves behind.
    _Witness(out, folder, order).watch()
    sys.argv = ["batchgen", *words]
    runpy.run_module("batchgen", run_name="__main__")


class _Witness:
    """Sits between this process and its disk: writes the log, and sends the signal when its time has come."""

    def __init__(self, out: Path, folder: Path, order: Order | None) -> None:
        self._out = out
        self._folder = folder
        self._log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._order = order
        self._visits: Counter[str] = Counter()
        self._lock = threading.Lock()

    def watch(self) -> None:
        """Replace the calls, for the rest of the process, and lift the limit of starts for nothing: these are killed
        on purpose, and a user has no use for an option that says so."""
        starts.MOST = sys.maxsize
        for name in _CALLS:
            setattr(os, name, self._watched(name, getattr(os, name)))
        put, submit = FileSystem.put_if_absent, PatternGenerator.submit

        def watched_put(files: FileSystem, path: Path, content: bytes) -> bool:
            is_ours = put(files, path, content)
            if path.parent.name == "receipts":
                self._write("closed", path.name)
            return is_ours

        def watched_submit(model: PatternGenerator, batch: Batch, should_drop: Callable[[], bool]) -> Pending:
            started = time.monotonic()
            pending = submit(model, batch, should_drop)
            self._write("made", [row.id for row in batch.rows], started, time.monotonic())
            return pending

        FileSystem.put_if_absent = watched_put  # type: ignore[method-assign, assignment]
        PatternGenerator.submit = watched_submit  # type: ignore[method-assign, assignment]

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            step = self._step(name, arguments[1 if name in ("link", "rename", "replace") else 0])
            if not step:
                return call(*arguments, **options)
            with self._lock:
                self._visits[step] += 1
                visit = self._visits[step]
            self._write("step", step)
            self._obey(step, visit, is_after=False)
            result = call(*arguments, **options)
            if step == "link .run/claims/N":
                self._folder.joinpath(_CLAIMED).touch()
            self._obey(step, visit, is_after=True)
            return result

        return watched

    def _step(self, name: str, target: Any) -> str:
        """A step's name, "" for what is no part of the run directory."""
        path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)
        place = os.path.relpath(path, self._out)
        if place.startswith("..") or not os.path.isabs(path):
            return ""
        for pattern, name_of_kind in _NAMES:
            place = pattern.sub(name_of_kind, place)
        return f"{name} {place}"

    def _obey(self, step: str, visit: int, *, is_after: bool) -> None:
        order = self._order
        if order is not None and (step, visit, is_after) == (order.step, order.visit, order.is_after):
            os.kill(os.getpid(), order.signal)

    def _write(self, *event: object) -> None:
        os.write(self._log, json.dumps(event).encode() + b"\n")
