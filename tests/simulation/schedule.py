"""One schedule: everything about it follows from its seed."""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

from batchgen import finalize as finalizing
from batchgen import runner
from batchgen.errors import Interrupted, UsageError
from batchgen.job import Job, load_job
from batchgen.marker import SUCCESS
from batchgen.owners import Owner
from batchgen.rundir import RunDirectory
from batchgen.stopping import Stop
from tests.simulation import promises
from tests.simulation.files import RUN, SimulatedFiles
from tests.simulation.storage import Folder, Place
from tests.simulation.system import monotonic
from tests.simulation.work import SimulatedGenerator, index_of
from tests.simulation.world import CHANGES, Dead, Process, Trouble, Violation, World

ERRORS = (errno.ENOSPC, errno.EIO, errno.ESTALE)
LOST_REPLIES = (errno.EEXIST, errno.EIO, errno.ETIMEDOUT, errno.ESTALE)
KINDS = (
    ("kill",) * 5
    + ("crash",) * 2
    + ("pause",) * 5
    + ("stall",) * 2
    + ("signal", "error", "error", "lost", "lost", "full")
)
CALLS = ("",) * 4 + (
    "link",
    "link",
    "sync",
    "sync_folder",
    "remove",
    "rename",
    "rename",
    "create",
    "names",
    "read",
    "touch",
)
OUTSIDERS_SLOT = 90


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is drawn before the first step."""

    num_workers: int
    num_hosts: int
    shard_rows: tuple[int, ...]
    batch_size: int
    batch_s: float
    commit_every_s: float
    stale_after_s: float
    max_deaths: int
    output_format: str
    lag_s: float
    restlessness: float
    oversleep_s: float
    odd_shard: int
    """The one whose first row cannot be encoded; -1: none."""
    num_restarts: int
    """Of each worker."""
    num_finalizers: int
    """Processes that finalize what there is, beside the workers."""
    is_planned: bool
    has_jobs: bool
    may_wait: bool
    troubles: tuple[Trouble, ...]


def draw(random: Random) -> Schedule:
    choice, num = random.choice, random.randrange
    num_workers = choice((2, 2, 2, 3, 4))
    stale_after_s = choice((60.0, 600.0))
    return Schedule(
        num_workers=num_workers,
        num_hosts=choice((1, 1, 2, num_workers)),
        shard_rows=tuple(num(1, 4) for _ in range(choice((1, 1, 1, 2, 3)))),
        batch_size=choice((1, 1, 2)),
        batch_s=choice((1.0, 60.0, 200.0)),
        commit_every_s=choice((0.001, 30.0, 120.0)),
        stale_after_s=stale_after_s,
        max_deaths=choice((1, 2, 3)),
        output_format=choice(("files", "webdataset")),
        lag_s=choice((0.0, 0.0, 3.0, 60.0)),
        restlessness=choice((0.02, 0.1, 0.3, 0.7)),
        oversleep_s=stale_after_s * choice((0.1, 0.4, 1.5)),
        odd_shard=choice((-1, -1, 0)),
        num_restarts=num(4),
        num_finalizers=choice((0, 0, 0, 1, 2)),
        is_planned=random.random() < 0.7,
        has_jobs=random.random() < 0.3,
        may_wait=random.random() < 0.9,
        troubles=tuple(_troubles(random, num_workers)),
    )


def _troubles(random: Random, num_workers: int) -> list[Trouble]:
    last = random.choice((60, 200, 120 * num_workers))
    found = [_trouble(random, random.randrange(last)) for _ in range(random.randrange(7))]
    return sorted(found, key=lambda one: one.step)


def _trouble(random: Random, step: int) -> Trouble:
    kind = random.choice(KINDS)
    call = random.choice(CALLS)
    match kind:
        case "pause":
            return Trouble(step, kind, call, 10 ** random.uniform(-1, 4.5), is_replaced=random.random() < 0.3)
        case "stall":
            return Trouble(step, kind, call, 10 ** random.uniform(-1, 3.5))
        case "error":
            return Trouble(step, kind, call, number=random.choice(ERRORS))
        case "lost":
            call = random.choice(("link", "link", *CHANGES_SORTED))
            return Trouble(step, kind, call, number=random.choice(LOST_REPLIES if call == "link" else ERRORS))
        case "full":
            return Trouble(step, kind, call, seconds=random.randrange(1, 60))
    return Trouble(step, kind, call)


CHANGES_SORTED = sorted(CHANGES)


@cache
def job_of(commit_every_s: float, stale_after_s: float, max_deaths: int, output_format: str) -> Job:
    return load_job(
        None,
        [
            "model.path=pattern",
            f"run.commit_every_s={commit_every_s}",
            f"run.stale_after_s={stale_after_s}",
            f"run.max_deaths={max_deaths}",
            f"output.format={output_format}",
        ],
    )


class Run(World):
    """A schedule while it is run: the processes that the product's modules are run in."""

    def __init__(self, seed: int, *, traced: bool = False, schedule: Schedule | None = None) -> None:
        random = Random(seed)
        drawn = draw(random)
        self.schedule = one = schedule or drawn
        super().__init__(random, list(one.troubles), restlessness=one.restlessness, lag_s=one.lag_s)
        self.trace = [] if traced else None
        self.batch_size, self.batch_s, self.odd_shard = one.batch_size, one.batch_s, one.odd_shard
        self.shard_rows, self.oversleep_s = one.shard_rows, one.oversleep_s
        self.ended_tokens: set[str] = set()
        self.job = job_of(one.commit_every_s, one.stale_after_s, one.max_deaths, one.output_format)
        self.num_starts = [0] * (OUTSIDERS_SLOT + 2)
        self.num_crashes = 0
        self._caches: dict[int, tuple[dict[Any, float], dict[Any, Any]]] = {}
        self._files: dict[Process, SimulatedFiles] = {}
        self.on_end, self.on_trouble = self._ended, self._befallen

    def files(self, process: Process) -> SimulatedFiles:
        found = self._files.get(process)
        if found is None:
            found = self._files[process] = SimulatedFiles(
                self, process.host, *self._caches.setdefault(process.host, ({}, {}))
            )
        return found

    def run_directory(self, path: Place) -> RunDirectory:
        return RunDirectory(path, self.files(self.me.process))  # type: ignore[arg-type]

    def on_link(self, target: Place) -> None:
        promises.check_slot(self.storage, target, self.shard_rows, self.schedule.output_format)

    # Processes

    def begin(self, slot: int, work: Callable[[Process], None], after_s: float = 0.0) -> None:
        before = [one for one in self.processes if one.slot == slot]
        number = self.num_starts[slot] = self.num_starts[slot] + 1
        host = slot % self.schedule.num_hosts + 100 * self.num_crashes
        is_free = all(one.is_dead for one in before)
        owner = Owner(
            token=f"{len(self.processes) * 7 + slot:016x}",
            host=f"host-{host}",
            boot_id=f"boot-{host}",
            pid_namespace="",
            pid=slot + 1 if is_free else 1000 + len(self.processes),
            start_time=str(len(self.processes) + 1),
            job_id=f"job-{slot}" if self.schedule.has_jobs else "",
            restart_count=number - 1,
        )
        process = Process(f"w{slot}.{number}", slot, host, owner, Stop(clock=monotonic))
        self.processes.append(process)
        self.start(process, lambda: work(process)).wakes_at += after_s

    def worker(self, process: Process) -> None:
        is_last = process.slot == OUTSIDERS_SLOT - 1
        ending = runner.run_job(
            [],
            RUN,
            self.job,
            may_wait=self.schedule.may_wait or is_last,
            stop=process.stop,
            opener=lambda job, context: SimulatedGenerator(),
        )
        left = ending.balance.outstanding
        if left and ending.may_wait and not process.stop.is_asked:
            raise Violation(f"{process.name} ended, and {left} rows are outstanding")

    def finalizer(self, process: Process) -> None:
        """A person who wants to see what there is."""
        self.sleep(10 ** self.random.uniform(-1, 3))
        try:
            finalizing.finalize(self.run_directory(RUN), is_partial=self.random.random() < 0.7)
        except UsageError as error:
            self.say(f"is told: {error}")

    def _ended(self, process: Process, error: BaseException | None) -> None:
        process.ended = "normally" if error is None else f"{type(error).__name__}: {error}"
        self.say(f"** {process.name} ended: {process.ended}")
        if isinstance(error, Violation):
            raise error
        is_told = isinstance(error, Interrupted) and self.num_done.keys() & {"error", "lost", "full"}
        if error is not None and not isinstance(error, Dead) and not is_told:
            raise Violation(f"{process.name} ended by {process.ended}") from error
        if error is not None or process.stop.is_asked:
            self._begin_again(process.slot)

    def _begin_again(self, slot: int) -> None:
        if slot < OUTSIDERS_SLOT and self.num_starts[slot] <= self.schedule.num_restarts:
            self.begin(slot, self.worker, 10 ** self.random.uniform(-2, 3))

    def _befallen(self, process: Process, trouble: Trouble) -> None:
        if trouble.kind == "crash":
            self.num_crashes += 1
        if trouble.is_replaced:
            self._begin_again(process.slot)

    # The whole

    def go(self) -> None:
        """Raises Violation."""
        World.now = self
        if self.schedule.is_planned:
            self._plan()
        for slot in range(self.schedule.num_workers):
            self.begin(slot, self.worker, self.random.random() * 10)
        for number in range(self.schedule.num_finalizers):
            self.begin(OUTSIDERS_SLOT + number, self.finalizer)
        self.run()
        self._finish()

    def _plan(self) -> None:
        """The plan lies there, durably, with all folders."""
        for name in (".run/plan/0-aa", ".run/claims", ".run/work", ".run/receipts", ".run/modes", "data"):
            self.storage.create_all(RUN / name)
        index = index_of("0-aa", self.shard_rows, {"output": {"format": self.schedule.output_format}})
        for place, content in (("0.json", index.to_bytes("aa")), ("0-aa/0000.parquet", b"0-aa")):
            file = self.storage.create(RUN / ".run" / "plan" / place, self.now_s, None)
            file.content = file.synced = content
        for one in self.storage.walk():
            if isinstance(one, Folder):
                one.synced = dict(one.names)

    def _finish(self) -> None:
        """Nothing happens any more: one worker comes to its end, and finalize works."""
        self.troubles.clear()
        self._next_trouble = self.num_steps + 5_000
        self.full_until, self.lag_s, self.restlessness = 0, 0.0, 0.0
        self.now_s += 100 * self.schedule.stale_after_s

        def work(process: Process) -> None:
            self.worker(process)
            finalizing.finalize(self.run_directory(RUN))

        self.num_crashes += 1
        self.begin(OUTSIDERS_SLOT - 1, work)
        self.run()
        last = self.processes[-1]
        promises.require(last.ended == "normally", f"an undisturbed worker ended by {last.ended}")
        promises.require(self.storage.get(RUN / SUCCESS) is not None, "no _SUCCESS in the end")
        promises.check_success(self.storage, self.shard_rows, self.schedule.output_format)
        promises.check_failures(self.storage, self.shard_rows, self.odd_shard, self.schedule.max_deaths)
        promises.check_swept(self.storage, self.shard_rows)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a schedule."""

    seed: int
    steps: int
    troubles: Counter[str]
    """That befell a process, by kind."""
    broken: str = ""
    """The promise, "" if all were kept."""
    trace: tuple[str, ...] = ()


def try_seed(seed: int, *, traced: bool = False) -> Outcome:
    """Run a schedule, within `doubles.installed()`."""
    run, broken = Run(seed, traced=traced), ""
    try:
        run.go()
    except Violation as violation:
        broken = str(violation)
        run.say(f"!! {broken}")
    return Outcome(seed, run.num_steps, run.num_done, broken, tuple(run.trace or ()))


def search(first: int, num: int) -> Outcome | None:
    """Run schedules from a seed on until one breaks a promise."""
    return next((one for one in map(try_seed, range(first, first + num)) if one.broken), None)
