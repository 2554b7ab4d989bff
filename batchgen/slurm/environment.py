"""What Slurm tells a process about its job, through the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Task:
    """The job, or the task of an array, that a process belongs to."""

    name: str
    """`ARRAYJOB_TASK`, of a job that is no array its id; "" outside Slurm."""
    restart_count: int
    """How often Slurm has started it again."""
    num_processes: int
    """Processes that one `srun` started together, this one among them."""
    ends_at_s: int | None
    """When its time is over, in seconds since 1970; None where Slurm does not tell (before 23.02)."""


def this_task(environment: Mapping[str, str] = os.environ) -> Task:
    """The task of the running process. Values that make no sense count as absent."""
    array_job, index = (environment.get(f"SLURM_ARRAY_{name}") for name in ("JOB_ID", "TASK_ID"))
    is_step = "SLURM_STEP_ID" in environment
    return Task(
        name=f"{array_job}_{index}" if array_job and index else environment.get("SLURM_JOB_ID", ""),
        restart_count=_number(environment, "SLURM_RESTART_COUNT") or 0,
        num_processes=(_number(environment, "SLURM_STEP_NUM_TASKS") or 1) if is_step else 1,
        ends_at_s=_number(environment, "SLURM_JOB_END_TIME"),
    )


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if re.fullmatch("[0-9]{1,12}", text) else None
