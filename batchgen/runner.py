"""A run from its manifest to its dataset: plan if new, work until done, finalize."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from glob import has_magic
from pathlib import Path

from batchgen.appending import extend
from batchgen.balance import Balance, take_balance
from batchgen.costs import remember
from batchgen.encoders import EncoderPool, num_encoder_threads, num_in_flight
from batchgen.epoch import Workplace
from batchgen.errors import Interrupted, UsageError
from batchgen.finalize import finalize
from batchgen.generator import Context, Generator, open_generator
from batchgen.glance import take_glance
from batchgen.job import Job
from batchgen.ledger import Ledger
from batchgen.making import Maker
from batchgen.marker import SUCCESS, is_finished, remove_marker
from batchgen.mending import mend
from batchgen.models.folder import architecture
from batchgen.modes import settle, settle_dtype
from batchgen.owners import end, this_process
from batchgen.plan_index import PlanIndex
from batchgen.plan_reader import PlanReader
from batchgen.planned import Planned
from batchgen.presence import intact, present
from batchgen.progress import AtWork, Progress, Quiet
from batchgen.rundir import RunDirectory, open_run
from batchgen.stopping import Stop
from batchgen.timeleft import TimeLeft
from batchgen.worker import Worker


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended."""

    balance: Balance
    stopped_by: str
    """The signal's name or `OUT_OF_TIME`, "" if nothing did."""
    may_wait: bool
    worst: int = 0
    """The exit code that some worker process was left with, 0 where there is none but for a reason given above."""

    @property
    def exit_code(self) -> int:
        """0 all made · 3 all settled, some failed or rejected · 75 stopped early and resumable · `worst` where rows are
        left and nothing stopped the run."""
        if not self.balance.outstanding or self.stopped_by:
            return self.balance.exit_code
        is_held = not self.may_wait and self.balance.held == self.balance.outstanding
        return 0 if is_held else self.worst or self.balance.exit_code

    @property
    def is_cut_short(self) -> bool:
        """Whether the run was told to stop while rows were left that nobody else is making."""
        return bool(self.stopped_by) and self.balance.outstanding > self.balance.held

    @property
    def is_early(self) -> bool:
        """Whether it ended before all was done, by a signal, a crash or a mistake: not by a disk that refuses."""
        is_refused = not self.stopped_by and self.worst == Interrupted.exit_code
        return bool(self.balance.outstanding and self.exit_code) and not is_refused


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be worked off."""

    run: RunDirectory
    index: PlanIndex
    job: Job
    ledger: Ledger
    left: float
    """The share of the plan's rows that are outstanding."""
    num_others: int
    """Workers that are known to be at work on them already."""
    may_wait: bool
    time_left: TimeLeft


ProgressFactory = Callable[[Balance], AbstractContextManager[Progress]]
Opener = Callable[[Job, Context], Generator]
Workforce = Callable[[Task, Stop, Progress], int]
"""What works a task off; the exit code where rows are left that nothing else explains, 0 for none."""


@dataclass(frozen=True, slots=True)
class Terms:
    """On what terms a process takes part in a run, whatever is to be made: what ends it, whom it tells, and by whom
    rows are made."""

    may_wait: bool = True
    """For rows that only others hold."""
    stop: Stop = field(default_factory=Stop)
    time_left: TimeLeft = field(default_factory=TimeLeft)
    on_opened: Callable[[PlanIndex, Balance], None] = lambda index, balance: None
    """Told of the plans and how the run stands, before it is worked off and whenever a plan was appended meanwhile."""
    on_reading: Callable[[int, int], None] = lambda rows, total: None
    """Told of the manifest's rows just read, and of all."""
    on_planned: Callable[[Planned], None] = lambda planned: None
    """Told of a new plan before it is frozen."""
    progress: ProgressFactory = lambda balance: nullcontext(Quiet())
    workforce: Workforce | None = None
    """None for `work`: this process, by the job's own model."""


def run_job(
    manifest: Sequence[str | Path],
    out: Path,
    job: Job,
    terms: Terms | None = None,
    *,
    may_grow: bool = False,
) -> Ending:
    """Make every row of a manifest that has not been made yet, in the run directory `out`. With `may_grow`, rows that
    its plans lack are appended.

    Raises UsageError for a manifest, job, model or directory that cannot be used, Interrupted where the disk is
    full or lost.
    """
    run, terms = RunDirectory(out), terms or Terms()
    with intact(run):
        index = (extend if may_grow else open_run)(run, manifest, job, terms.on_planned, terms.on_reading)
    return run_planned(run, index, job, terms)


def run_planned(run: RunDirectory, index: PlanIndex, job: Job, terms: Terms | None = None) -> Ending:
    """Make every row of a run's plans that has not been made yet, those of plans that are appended meanwhile too.
    Raises as `run_job`."""
    terms = terms or Terms()
    with present(run):
        while True:
            balance, worst = _work_off(run, index, job, terms)
            newer = run.index()
            if newer.number == index.number:
                return Ending(balance, terms.stop.signal_name, terms.may_wait, worst)
            index = newer


def _work_off(run: RunDirectory, index: PlanIndex, job: Job, terms: Terms) -> tuple[Balance, int]:
    """Work until nothing is left of these plans, and finalize the run if they are still all; the balance, and what the
    workforce ended with."""
    owner = this_process()
    ledger = Ledger(run.root, run.files, owner, index.token)
    ledger.make_folders()
    # Before any part of a later plan is published: no row is there twice.
    mend(run, index, ledger)
    was_marked = _is_marked(run, ledger)
    glance = None if was_marked else take_glance(ledger)
    balance = take_balance(index, ledger, job.run.stale_after_s, glance)
    terms.on_opened(index, balance)
    if balance.outstanding and was_marked:
        remove_marker(run)
    worst = 0
    if balance.outstanding and not terms.stop.is_asked:
        num_others = len({(one.host, one.pid) for one in balance.holders})
        left = balance.outstanding / index.num_rows
        task = Task(run, index, job, ledger, left, num_others, terms.may_wait, terms.time_left)
        try:
            with terms.progress(balance) as shown:
                worst = (terms.workforce or work)(task, terms.stop, shown)
        finally:
            end(owner)
        balance = take_balance(index, ledger, job.run.stale_after_s)
    if not balance.outstanding and not is_finished(run, balance, reads_all=True):
        finalize(run, plan=index.number)
    return balance, worst


def work(task: Task, stop: Stop, progress: Progress, opener: Opener = open_generator) -> int:
    """Work a task off in this process, by the ledger's owner. Raises what ends a worker."""
    ledger, share = task.ledger, task.left / (1 + task.num_others)
    at_work = AtWork(progress)
    context = Context(progress.say, partial(settle, ledger), task.index.work(share), at_work.preparing)
    with at_work.waiting(f"loading the model {task.job.model.path}"):
        generator = opener(task.job, context)
    _work(task, generator, stop, progress, at_work)
    return 0


def _is_marked(run: RunDirectory, ledger: Ledger) -> bool:
    """Whether `_SUCCESS` is there, asked before the receipts are read: of a marker that comes later, from another
    worker, they say nothing."""
    is_marked = run.files.stat(run.path / SUCCESS) is not None
    if is_marked:
        ledger.refresh()
    return is_marked


def _work(task: Task, generator: Generator, stop: Stop, progress: Progress, at_work: AtWork) -> None:
    run, index, job, ledger = task.run, task.index, task.job, task.ledger
    settle_dtype(ledger, generator.versions.get("dtype"))
    threads = num_encoder_threads(job.output)
    buckets = index.work(1.0)
    largest = max(bucket.group.width * bucket.group.height for bucket in buckets)
    with (
        stop.working(),
        EncoderPool(threads, num_in_flight(threads, max(one.size for one in buckets), largest)) as pool,
    ):
        reader = PlanReader(run.plans, index)
        maker = Maker(generator, stop, job.run.grace_s, progress.say, lambda bucket: at_work.begin(str(bucket)))
        Worker(Workplace(run, reader, job, ledger, maker, pool, stop, progress, task.time_left), task.may_wait).work()
    measured = generator.measurements()
    if measured:
        versions = generator.versions
        remember(architecture(job.model), versions["device"], versions["torch"], measured)


def default_directory(manifest: Sequence[str | Path]) -> Path:
    """`<manifest's name>-out` in the current folder. Raises UsageError where several files leave no one name."""
    if len(manifest) != 1 or (has_magic(str(manifest[0])) and not os.path.lexists(manifest[0])):
        raise UsageError("several manifest files or a pattern were named; say where the results go with -o DIR")
    name = Path(manifest[0]).resolve().name
    return Path(f"{name.removesuffix('.parquet')}-out")
