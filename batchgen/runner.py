"""A run from its manifest to its dataset: plan if new, work until done, finalize."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from glob import has_magic
from pathlib import Path

from batchgen.balance import Balance, take_balance
from batchgen.costs import remember
from batchgen.encoders import EncoderPool, num_encoder_threads, num_in_flight
from batchgen.epoch import Workplace
from batchgen.errors import UsageError
from batchgen.finalize import finalize
from batchgen.generator import Context, Generator, open_generator
from batchgen.job import Job
from batchgen.ledger import Ledger
from batchgen.making import Maker
from batchgen.marker import SUCCESS, is_finished
from batchgen.models.folder import architecture
from batchgen.modes import settle, settle_dtype
from batchgen.owners import end, this_process
from batchgen.plans import PlanIndex, PlanReader
from batchgen.progress import Progress, Quiet
from batchgen.rundir import Planned, RunDirectory, open_run
from batchgen.stopping import Stop
from batchgen.worker import Worker


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended."""

    balance: Balance
    stopped_by: str
    """The signal's name, "" if none came."""
    may_wait: bool
    worst: int = 0
    """The exit code that some worker process ended with, 0 where none did but for a reason given above."""

    @property
    def exit_code(self) -> int:
        """0 all made · 3 all settled, some failed or rejected · 75 stopped early and resumable · `worst` where rows are
        left, no signal came and it is known."""
        if self.balance.outstanding:
            is_held = not self.may_wait and self.balance.held == self.balance.outstanding
            return 75 if self.stopped_by else 0 if is_held else self.worst or 75
        return 3 if self.balance.failed or self.balance.rejected else 0


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


ProgressFactory = Callable[[Balance], AbstractContextManager[Progress]]
Opener = Callable[[Job, Context], Generator]
Workforce = Callable[[Task, Stop, Progress], int]
"""What works a task off; the exit code where rows are left that nothing else explains, 0 for none."""


def run_job(
    manifest: Sequence[str | Path],
    out: Path,
    job: Job,
    *,
    may_wait: bool = True,
    stop: Stop | None = None,
    on_planned: Callable[[Planned], None] = lambda planned: None,
    on_reading: Callable[[int, int], None] = lambda rows, total: None,
    on_opened: Callable[[PlanIndex, Balance], None] = lambda index, balance: None,
    progress: ProgressFactory = lambda balance: nullcontext(Quiet()),
    opener: Opener = open_generator,
    workforce: Workforce | None = None,
) -> Ending:
    """Make every row of a manifest that has not been made yet, in the run directory `out`: in this process, by a model
    that `opener` loads, or by a `workforce` of others.

    Raises UsageError for a manifest, job, model or directory that cannot be used, Interrupted where the disk is
    full or lost.
    """
    stop = stop or Stop()
    run = RunDirectory(out)
    index = open_run(run, manifest, job, on_planned, on_reading)
    owner = this_process()
    ledger = Ledger(run.root, run.files, owner)
    ledger.make_folders()
    was_marked = _is_marked(run)
    glance = None if was_marked else ledger.glance()
    balance = take_balance(index, ledger, job.run.stale_after_s, glance)
    on_opened(index, balance)
    if balance.outstanding and was_marked:
        run.files.remove(run.path / SUCCESS)
    worst = 0
    if balance.outstanding and not stop.is_asked:
        num_others = len({(one.host, one.pid) for one in balance.holders})
        task = Task(run, index, job, ledger, balance.outstanding / index.num_rows, num_others, may_wait)
        try:
            with progress(balance) as shown:
                worst = (workforce or partial(work, opener=opener))(task, stop, shown)
        finally:
            end(owner)
        balance = take_balance(index, ledger, job.run.stale_after_s)
    if not balance.outstanding and not is_finished(run):
        finalize(run)
    return Ending(balance, stop.signal_name, may_wait, worst)


def work(task: Task, stop: Stop, progress: Progress, opener: Opener = open_generator) -> int:
    """Work a task off in this process, by the ledger's owner. Raises what ends a worker."""
    ledger, share = task.ledger, task.left / (1 + task.num_others)
    context = Context(progress.say, partial(settle, ledger), task.index.work(share))
    _work(task, opener(task.job, context), stop, progress)
    return 0


def _is_marked(run: RunDirectory) -> bool:
    """Whether `_SUCCESS` is there, asked before the receipts are read: of a marker that comes later, from another
    worker, they say nothing."""
    is_marked = run.files.stat(run.path / SUCCESS) is not None
    if is_marked:
        # Opening the folder makes NFS forget which receipts it saw absent.
        run.files.sync_folder(run.root / "receipts")
    return is_marked


def _work(task: Task, generator: Generator, stop: Stop, progress: Progress) -> None:
    run, index, job, ledger = task.run, task.index, task.job, task.ledger
    settle_dtype(ledger, generator.versions.get("dtype"))
    threads = num_encoder_threads(job.output)
    buckets = index.work(1.0)
    largest = max(bucket.group.width * bucket.group.height for bucket in buckets)
    with EncoderPool(threads, num_in_flight(threads, max(one.size for one in buckets), largest)) as pool:
        reader = PlanReader(run.plans, index)
        maker = Maker(generator, stop, job.run.grace_s, progress.say)
        Worker(Workplace(run, reader, job, ledger, maker, pool, stop, progress), task.may_wait).work()
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
