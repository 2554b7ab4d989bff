"""Several worker processes on this machine and on one run directory: started, heard, stopped and replaced.

They share nothing but the run directory. The launcher plans and finalizes; it never loads torch.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

from batchgen.children import Child, wait_for_lines
from batchgen.cores import thread_settings, usable_cores
from batchgen.encoders import num_encoder_threads
from batchgen.errors import BatchgenError, Interrupted, UsageError
from batchgen.gpus import VISIBLE, choose_gpus, visible_gpus
from batchgen.job import Job
from batchgen.launched import OUT_OF_TIME_CODE, Order
from batchgen.models.folder import pinned
from batchgen.progress import Now, Progress
from batchgen.runner import Task, Workforce
from batchgen.stopping import Stop
from batchgen.timeleft import OUT_OF_TIME
from batchgen.wording import counted

MAX_WORKERS = 64
POLL_S = 0.1
END_S = 30.0
"""Until a worker is asked to stop that has nothing left to do; beyond the grace, until one that was asked is killed."""
AT_ONCE_S = 10.0
"""The same for one that was asked a second time."""
KILL_S = 10.0
"""Until a killed process is left behind: the kernel keeps one that waits for a lost disk or a hung device."""
_CODES = (BatchgenError.exit_code, UsageError.exit_code, Interrupted.exit_code)
"""What a worker with rows left to do may end with, the worst first."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A place for one worker process at a time."""

    name: str
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    device: str | None = None
    """None: the job's."""


@dataclass(frozen=True, slots=True)
class Account:
    """What the receipts say when a process has ended."""

    has_committed: bool
    num_left: int
    """Rows that are not settled, whoever is to make them."""


def seats_of(gpus: str | None, workers: int | None, job: Job) -> tuple[Seat, ...]:
    """What `--gpus` or `--workers` asks for; none where neither is given. Raises UsageError as `gpu_seats`, for GPUs
    that are not there, and for less than one worker."""
    if gpus is not None and workers is not None:
        raise UsageError("--gpus starts a worker for each GPU, --workers so many on one device; leave one out")
    if gpus is not None:
        return gpu_seats(choose_gpus(gpus, visible_gpus()), job)
    if workers is not None and not (type(workers) is int and 1 <= workers <= MAX_WORKERS):
        raise UsageError(f"--workers {workers!r} is not usable: it takes a whole number from 1 to {MAX_WORKERS}")
    return worker_seats(workers or 0)


def gpu_seats(gpus: tuple[str, ...], job: Job) -> tuple[Seat, ...]:
    """A seat for each GPU, named as `CUDA_VISIBLE_DEVICES` does. Raises UsageError if the job names a device itself."""
    if job.engine.device is not None:
        raise UsageError(f"--gpus chooses devices, and so does engine.device = {job.engine.device!r}; leave one out")
    return tuple(Seat(f"GPU {name}" if name.isdecimal() else name, {VISIBLE: name}, "cuda:0") for name in gpus)


def worker_seats(number: int) -> tuple[Seat, ...]:
    """Seats that share the job's device."""
    return tuple(Seat(f"worker {one}") for one in range(1, number + 1))


def workforce(seats: tuple[Seat, ...]) -> Workforce:
    """What `run_job` has a task worked off by: a process in each seat."""

    def work(task: Task, stop: Stop, progress: Progress) -> int:
        with stop.working():
            return Crew(seats, task, stop, progress).work()

    return work


class Crew:
    """The processes of one run.

    A process that crashes (a signal, a lost GPU, a bug) is replaced: until `run.max_deaths` in a row of its seat have
    ended without a commit, or one more than twice as many in the last seat that is left. So a broken GPU alone never
    makes a row fail while others are sound, and a row that ends every process does fail. Seats beyond the shards
    that are left stay free, for a process that a crash leaves without a place.
    """

    def __init__(self, seats: tuple[Seat, ...], task: Task, stop: Stop, progress: Progress) -> None:
        self._task = task
        self._stop = stop
        self._progress = progress
        self._num_workers = max(1, _num_open(task, len(seats)))
        self._free = list(seats)
        self._cores = max(1, usable_cores() // self._num_workers)
        self._orders = {seat: self._order(seat) for seat in seats}
        self._deaths = dict.fromkeys(seats, 0)
        self._codes: dict[Seat, int] = {}
        """What the last process of a seat ended with."""
        self._at_work: dict[Seat, Child] = {}
        self._told_s: float | None = None
        """When the processes were told to stop."""
        self._settled_s: float | None = None
        """When a process had nothing left to wait for: all rows were settled."""

    def work(self) -> int:
        """Until every process has ended and none is to replace it; the worst exit code that a seat was left with.

        Raises StopNow, and what ends a run, once all have ended.
        """
        try:
            self._say_free()
            for _ in range(self._num_workers):
                if not self._stop.is_asked:
                    self._start(self._free.pop(0))
            self._attend()
        except Exception:
            self._tell(signal.SIGTERM)
            self._attend()
            raise
        finally:
            self._end_at_once()
        if OUT_OF_TIME_CODE in self._codes.values():
            self._stop.ask(OUT_OF_TIME)
        return next((code for code in _CODES if code in self._codes.values()), 0)

    def _say_free(self) -> None:
        if self._num_workers < len(self._free):
            self._progress.say(
                f"{self._num_workers} of {len(self._free)} workers started: no more shards are left to make "
                "(a smaller plan.shard_images gives a new run more of them)"
            )

    def _order(self, seat: Seat) -> Order:
        task, job = self._task, self._task.job
        encoders = num_encoder_threads(job.output, self._cores)
        tables = {
            "model": pinned(job.model),
            "output": job.output.model_copy(update={"encoders": encoders}),
            "engine": job.engine.model_copy(update={"device": seat.device or job.engine.device}),
        }
        num_others = task.num_others + self._num_workers - 1
        own_job = job.model_copy(update=tables)
        return Order(task.run.path.resolve(), own_job, task.left, num_others, task.may_wait, task.time_left)

    def _start(self, seat: Seat) -> None:
        environment = {**thread_settings(self._cores), **seat.environment}
        self._progress.show(Now(preparing="starting"), seat.name)
        self._at_work[seat] = Child(seat.name, self._orders[seat], environment)

    def _attend(self) -> None:
        while self._at_work:
            wait_for_lines(list(self._at_work.values()), POLL_S)
            self._pass_on()
            for seat, child in list(self._at_work.items()):
                has_ended = child.process.poll() is not None
                self._hear(seat, child)
                if has_ended:
                    self._handle_end(seat, child)

    def _hear(self, seat: Seat, child: Child) -> None:
        for line in child.counts.take():
            told = json.loads(line)
            if "now" in told:
                self._progress.show(Now(**told["now"]), seat.name)
                continue
            made, failed = told["made"], told["failed"]
            child.made, child.failed = child.made + made, child.failed + failed
            self._progress.count(made, failed)
        for line in child.words.take():
            self._progress.say(f"{seat.name}: {line}")

    def _pass_on(self) -> None:
        """Tell the processes of a signal, or that nothing is left for those that do not see it, and kill those that
        outlast it."""
        if self._stop.is_asked and self._told_s is None:
            self._tell(signal.Signals[self._stop.signal_name])
        elif self._told_s is None and self._settled_s is not None and time.monotonic() - self._settled_s > END_S:
            self._tell(signal.SIGTERM)
        limit_s = self._task.job.run.grace_s + END_S
        if self._told_s is not None and time.monotonic() - self._told_s > limit_s:
            self._kill(f"{limit_s:.0f} s after it was told to stop")

    def _tell(self, number: int) -> None:
        self._told_s = time.monotonic()
        for child in self._at_work.values():
            child.signal(number)

    def _kill(self, when: str) -> None:
        for seat, child in self._at_work.items():
            self._progress.say(f"{seat.name}: its process {child.process.pid} is killed {when}")
            child.signal(signal.SIGKILL)
        deadline = time.monotonic() + KILL_S
        for seat, child in list(self._at_work.items()):
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._leave_behind(seat, child)

    def _leave_behind(self, seat: Seat, child: Child) -> None:
        self._progress.say(
            f"{seat.name}: its process {child.process.pid} has not ended {KILL_S:.0f} s after it was killed: the "
            "kernel keeps it, most likely because a disk or a device does not answer; it is left behind"
        )
        child.close()
        del self._at_work[seat]
        self._codes[seat] = BatchgenError.exit_code

    def _end_at_once(self) -> None:
        """Leave no process behind. A second signal is told until it is heard: a process may not know yet that the
        first one was long ago."""
        deadline = time.monotonic() + AT_ONCE_S
        while self._at_work and time.monotonic() < deadline:
            for seat, child in list(self._at_work.items()):
                child.signal(signal.SIGTERM)
                self._hear(seat, child)
                if child.process.poll() is not None:
                    child.close()
                    del self._at_work[seat]
            time.sleep(POLL_S)
        self._kill("because it did not stop")

    def _handle_end(self, seat: Seat, child: Child) -> None:
        """Take back what a process made and did not commit, and replace it if it crashed."""
        child.close()
        del self._at_work[seat]
        self._progress.show(Now(), seat.name)
        code = child.process.returncode
        is_crash = code not in (0, OUT_OF_TIME_CODE, UsageError.exit_code, Interrupted.exit_code)
        self._codes[seat] = BatchgenError.exit_code if is_crash else code
        if code == 0 and self._settled_s is None and (self._task.may_wait or not self._settle(child).num_left):
            self._settled_s = time.monotonic()
        if code not in (0, OUT_OF_TIME_CODE):
            account = self._settle(child)
            if self._told_s is None:
                self._replace(seat, child, account, is_crash=is_crash)

    def _replace(self, seat: Seat, child: Child, account: Account, *, is_crash: bool) -> None:
        """Say how a process ended, and start another if it crashed and may be replaced."""
        self._deaths[seat] = 0 if account.has_committed else self._deaths[seat] + 1
        is_missed = is_crash and account.num_left > 0
        heir = seat if is_missed and self._deaths[seat] < self._limit() else None
        if is_missed and heir is None and self._free:
            heir = self._free.pop(0)
        what_now = self._what_now(account.num_left, self._deaths[seat])
        if heir is not None:
            what_now = "another takes its place" if heir is seat else f"{heir.name} is started instead"
        self._progress.say(f"{seat.name}: {_epitaph(child)}; {what_now}")
        if heir is not None:
            self._start(heir)

    def _settle(self, child: Child) -> Account:
        """Make the progress what the receipts say of a process that has ended."""
        ledger, index, me = self._task.ledger, self._task.index, self._task.ledger.owner
        assert me is not None
        made = failed = num_left = 0
        for state in ledger.states(index.shards):
            num_left += len(index.left(state))
            for one in filter(lambda one: child.wrote(one, me), state.committed):
                made, failed = made + len(one.ok), failed + len(one.failed)
        self._progress.count(made - child.made, failed - child.failed)
        return Account(made + failed > 0, num_left)

    def _limit(self) -> int:
        """Deaths of a seat after which it stays empty."""
        max_deaths = self._task.job.run.max_deaths
        return max_deaths if self._at_work or self._free else 2 * max_deaths + 1

    def _what_now(self, num_left: int, num_deaths: int) -> str:
        if not num_left:
            return "all rows are settled"
        why = f", after {num_deaths} in a row without a commit" if num_deaths > 1 else ""
        others = counted(len(self._at_work), "other worker")
        return f"no other takes its place{why}; {others if self._at_work else 'no worker'} left"


def _num_open(task: Task, most: int) -> int:
    """Shards with rows that are not settled, counted up to so many."""
    states = task.ledger.states(task.index.shards)
    return sum(1 for _ in islice(filter(task.index.left, states), most))


def _epitaph(child: Child) -> str:
    code = child.process.returncode
    how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with code {code}"
    return f"its process {child.process.pid} {how}"


def _signal_name(number: int) -> str:
    """Real-time signals have no name of their own."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
