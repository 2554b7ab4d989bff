"""A worker's dealings with the Slurm job it runs in: how long it may still run, and going back into the queue."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

from batchgen.errors import UsageError
from batchgen.slurm import programs
from batchgen.slurm.environment import Task
from batchgen.timeleft import OUT_OF_TIME, TimeLeft

WARNING = "SIGUSR1"
"""The signal that the scripts ask for before the time limit; preemption may send it too."""
_NOTICE = "SIGTERM"
"""Under `srun` it comes at the start of the grace time that a preempted job has, and the job is running still; by then
a cancelled one is not."""


def time_left(task: Task, warn_s: float, say: Callable[[str], None]) -> TimeLeft:
    """What this process may use: until the warning before the time limit."""
    left_s = time_left_s(task, say)
    return TimeLeft(None if left_s is None else time.monotonic() + left_s - warn_s)


def time_left_s(task: Task, say: Callable[[str], None]) -> float | None:
    """Seconds until the time limit: as the environment has it, else as squeue is asked, once. None outside Slurm,
    without a limit, or if squeue does not tell, which is then said."""
    if task.ends_at_s is not None:
        return task.ends_at_s - time.time()
    if not task.name:
        return None
    try:
        return programs.time_left_s(task.name)
    except programs.SlurmError as error:
        say(f"the time left of job {task.name} is not known ({error}); shards are taken until a signal comes")
        return None


def check_requeue(task: Task) -> None:
    """Raises UsageError where a worker must not put its job into the queue again."""
    if not task.name:
        raise UsageError("--requeue is for jobs of Slurm, and there is no SLURM_JOB_ID here; leave it out")
    if task.num_processes > 1:
        raise UsageError(
            f"--requeue would end {task.num_processes} processes of job {task.name} when the first of them is ready; "
            "give each worker a task of its own"
        )


def requeue(task: Task, stopped_by: str, say: Callable[[str], None]) -> None:
    """Put this task into the queue again, by its own name, if its time was over or it has to make room for another
    job; a refusal is said."""
    # Slurm ends the job's processes at once, and this one has nothing left to lose.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        if stopped_by in (WARNING, OUT_OF_TIME) or (stopped_by == _NOTICE and programs.is_running(task.name)):
            programs.requeue(task.name)
            say(f"job {task.name} is in the queue again")
    except programs.SlurmError as error:
        say(f"job {task.name} could not be put into the queue again ({error}); batchgen submit --resume goes on")
