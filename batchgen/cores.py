"""How many processor cores this process may really use: a node has more than a job, a container or a task is given."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc/self")
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""What torch reads when it is loaded: MKL's before OpenMP's, so that either alone is heeded only while the other is not
set."""
_COMPILE_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


def usable_cores(proc: Path = _PROC, environment: Mapping[str, str] = os.environ) -> int:
    """The least of the affinity, the control groups' CPU quotas and Slurm's `--cpus-per-task`; at least 1."""
    cores = [float(len(os.sched_getaffinity(0))), *_quotas(proc)]
    of_task = environment.get("SLURM_CPUS_PER_TASK", "")
    if of_task.isdecimal():
        cores.append(float(of_task))
    return max(1, int(min(cores)))


def thread_settings(cores: int, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment variables that hold a process which has not loaded torch yet to some cores; those that are set
    already stay as they are, and decide."""
    is_set = any(name in environment for name in _THREADS)
    names = (*(() if is_set else _THREADS), _COMPILE_THREADS)
    return {name: str(cores) for name in names if name not in environment}


def limit_threads() -> None:
    """Hold this process to its cores, before torch is loaded, where the affinity does not say all: torch sees that
    alone, and counts physical cores where it may use all."""
    cores = usable_cores()
    if cores < len(os.sched_getaffinity(0)):
        os.environ.update(thread_settings(cores))


def _quotas(proc: Path) -> Iterator[float]:
    """The CPU quota, in cores, of each control group that this process is in (kernel documentation: cgroup-v2,
    `cpu.max`; cgroup-v1, `cpu.cfs_quota_us`)."""
    for folder in _groups(proc):
        with suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            yield float(quota) / float(period) if quota != "max" else float("inf")
        with suppress(OSError, ValueError):
            quota_us = float((folder / "cpu.cfs_quota_us").read_text())
            yield quota_us / float((folder / "cpu.cfs_period_us").read_text()) if quota_us > 0 else float("inf")


def _groups(proc: Path) -> Iterator[Path]:
    """The folders of the control groups that this process is in, and of those above them, as far as they are mounted
    here."""
    paths = _paths(proc)
    for line in _lines(proc / "mountinfo"):
        mount, _, kind = line.partition(" - ")
        _, _, _, root, point, *_ = mount.split()
        controllers = kind.split()[-1].split(",")
        name = "" if kind.startswith("cgroup2 ") else "cpu" if "cpu" in controllers else None
        if kind.startswith("cgroup") and name in paths:
            below = Path(paths[name].removeprefix(root.rstrip("/")).lstrip("/"))
            yield from (Path(point) / one for one in (below, *below.parents))


def _paths(proc: Path) -> dict[str | None, str]:
    """The path of this process's group in version 2's hierarchy ("") and in version 1's of `cpu`."""
    found: dict[str | None, str] = {}
    for line in _lines(proc / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers or "cpu" in controllers.split(","):
            found["cpu" if controllers else ""] = path
    return found


def _lines(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    return []
