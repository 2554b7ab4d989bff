"""One schedule: everything about it follows from its seed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from random import Random
from typing import Any

from batchgen import finalize as finalizing
from batchgen import runner
from batchgen.errors import Interrupted, UsageError
from batchgen.job import Job, load_job
from batchgen.marker import SUCCESS, is_finished
from batchgen.owners import Owner
from batchgen.rundir import RunDirectory
from batchgen.stopping import Stop
from tests.simulation import promises
from tests.simulation.appends import MOST_APPENDERS, append
from tests.simulation.drawing import Schedule, draw, with_appenders
from tests.simulation.files import RUN, SimulatedFiles
from tests.simulation.storage import Folder, Place
from tests.simulation.system import monotonic
from tests.simulation.work import SimulatedGenerator, base_shards, index_of, is_odd
from tests.simulation.world import Process, ProcessDied, Trouble, Violation, World

OUTSIDERS_SLOT = 90
APPENDERS_SLOT = 92
NUM_TRIES = 6
"""Of an appender, while rows are outstanding or there is nothing to append."""


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
        self.schedule = one = schedule or with_appenders(drawn, Random(f"appenders of {seed}"))
        super().__init__(random, list(one.troubles), restlessness=one.restlessness, lag_s=one.lag_s)
        self.trace = [] if traced else None
        self.batch_size, self.batch_s, self.odd_shard = one.batch_size, one.batch_s, one.odd_shard
        self.shard_rows, self.oversleep_s = one.shard_rows, one.oversleep_s
        self.new_rows = tuple(f"new.{row}" for row in range(one.num_new_rows))
        self.is_stubborn = one.is_stubborn
        self.ended_tokens: set[str] = set()
        self.job = job_of(one.commit_every_s, one.stale_after_s, one.max_deaths, one.output_format)
        self.num_starts = [0] * (APPENDERS_SLOT + MOST_APPENDERS)
        self.is_grown = False
        """Whether the grown manifest is planned."""
        self.num_crashes = 0
        self.marked_by: Process | None = None
        """Who put the marker that is there."""
        self.finishers: set[Process] = set()
        """Who put a table, a card or a marker."""
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
        if target.parent is RUN or target is promises.OWN_TABLE:
            self.finishers.add(self.me.process)
        if target is RUN / SUCCESS:
            self.marked_by = self.me.process
        promises.check_slot(self.storage, target, self.schedule.output_format)

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
            self._terms(process, may_wait=self.schedule.may_wait or is_last),
        )
        self._check_ending(process, ending)

    def _terms(self, process: Process, *, may_wait: bool) -> runner.Terms:
        workforce = partial(runner.work, opener=lambda job, context: SimulatedGenerator())
        return runner.Terms(may_wait, process.stop, workforce=workforce)

    def _check_ending(self, process: Process, ending: runner.Ending) -> None:
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

    def appender(self, process: Process) -> None:
        """A person who waits until the rows are settled, and has some made again, or more of them."""
        one, run = self.schedule.appenders[process.slot - APPENDERS_SLOT], self.run_directory(RUN)
        self.sleep(one.after_s)
        index = None
        for _ in range(NUM_TRIES):
            try:
                index = append(run, one, self.job)
                if index.number:
                    break
            except UsageError as error:
                self.say(f"is told: {error}")
            self.sleep(one.again_s)
        self.is_grown |= index is not None and one.kind == "extend"
        if index is not None and not one.is_plan_only:
            terms = self._terms(process, may_wait=self.schedule.may_wait)
            ending = runner.run_planned(run, index, self.job, terms)
            self._check_ending(process, ending)

    def _ended(self, process: Process, error: BaseException | None) -> None:
        process.ended = "normally" if error is None else f"{type(error).__name__}: {error}"
        self.say(f"** {process.name} ended: {process.ended}")
        if isinstance(error, Violation):
            raise error
        is_told = isinstance(error, Interrupted) and self.num_done.keys() & {"error", "lost", "full"}
        if error is not None and not isinstance(error, ProcessDied) and not is_told:
            raise Violation(f"{process.name} ended by {process.ended}") from error
        if error is not None or process.stop.is_asked:
            self._begin_again(process.slot)

    def _begin_again(self, slot: int) -> None:
        may_begin = not OUTSIDERS_SLOT <= slot < APPENDERS_SLOT and self.num_starts[slot] <= self.schedule.num_restarts
        if may_begin:
            work = self.worker if slot < OUTSIDERS_SLOT else self.appender
            self.begin(slot, work, 10 ** self.random.uniform(-2, 3))

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
        for number in range(len(self.schedule.appenders)):
            self.begin(APPENDERS_SLOT + number, self.appender)
        self.run()
        self._finish()

    def _look(self) -> None:
        """Somebody asks whether the run is finished."""
        may_be_old, found = self._may_marker_be_old(), []
        may_be_others = any(one.ended != "normally" for one in self.finishers)
        self.begin(OUTSIDERS_SLOT, lambda process: found.append(is_finished(self.run_directory(RUN), reads_all=True)))
        self.run()
        promises.check_quiet(
            self.storage,
            self.schedule.output_format,
            is_finished=found == [True],
            may_be_old=may_be_old,
            may_be_others=may_be_others,
        )

    def _may_marker_be_old(self) -> bool:
        """Whether somebody was kept from taking a marker away that a plan was appended to."""
        owed_by = [one for one in self.processes if one.slot >= APPENDERS_SLOT or one is self.marked_by]
        return any(one.ended != "normally" for one in owed_by)

    def _plan(self) -> None:
        """The plan lies there, durably, with all folders."""
        for name in (".run/plan/0-aa", ".run/claims", ".run/work", ".run/receipts", ".run/modes", "data"):
            self.storage.create_all(RUN / name)
        rows = json.dumps(base_shards(self.shard_rows)).encode()
        index = index_of("0-aa", rows, {"output": {"format": self.schedule.output_format}})
        for place, content in (("0.json", index.to_bytes("aa")), ("0-aa/0000.parquet", rows)):
            file = self.storage.create(RUN / ".run" / "plan" / place, self.now_s, None)
            file.content = file.synced = content
        for one in self.storage.walk():
            if isinstance(one, Folder):
                one.synced = dict(one.names)

    def _calm_down(self) -> None:
        self.troubles.clear()
        self._next_trouble = self.num_steps + 5_000
        self.full_until, self.lag_s, self.restlessness = 0, 0.0, 0.0
        self.now_s += 100 * self.schedule.stale_after_s

    def _finish(self) -> None:
        """Nothing happens any more: one worker comes to its end, and finalize works."""
        self._calm_down()
        if self.schedule.appenders:
            self._look()

        def work(process: Process) -> None:
            self.worker(process)
            finalizing.finalize(self.run_directory(RUN))

        self.num_crashes += 1
        self.begin(OUTSIDERS_SLOT - 1, work)
        self.run()
        last = self.processes[-1]
        promises.require(last.ended == "normally", f"an undisturbed worker ended by {last.ended}")
        promises.require(self.storage.get(RUN / SUCCESS) is not None, "no _SUCCESS in the end")
        promises.check_success(self.storage, self.schedule.output_format)
        promises.check_planned(self.storage, self._manifest())
        promises.check_failures(self.storage, self._odd_rows(), self.schedule.max_deaths)
        promises.check_swept(self.storage)

    def _manifest(self) -> list[str]:
        """The ids that are planned, of a grown manifest if one was planned to the end."""
        planned = promises.counting(self.storage, promises.plans(self.storage))
        new = self.new_rows if self.is_grown else [name for name in planned if name in self.new_rows]
        return [*(name for shard in base_shards(self.shard_rows) for name in shard), *new]

    def _odd_rows(self) -> set[tuple[int, int]]:
        """Those that cannot be encoded, by shard and index."""
        shards = promises.planned_ids(self.storage, promises.plans(self.storage))
        rows = ((shard, row, name) for shard, names in enumerate(shards) for row, name in enumerate(names))
        return {(shard, row) for shard, row, name in rows if is_odd(shard, name)}


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

    @property
    def is_mistaken(self) -> bool:
        """Whether it tells of a plant that does not fit the product, and not of a promise."""
        return any(f"ended by {name}" in self.broken for name in ("TypeError", "AttributeError", "NameError"))


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
