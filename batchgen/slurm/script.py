"""The scripts that `submit` gives to sbatch, as pure functions of what they are about."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from batchgen.errors import UsageError
from batchgen.job import Run, Slurm

FOLDER = Path(".run") / "slurm"
"""Of scripts and logs, in the run directory."""
ARRAY, FINISH = "array.sbatch", "finish.sbatch"


@dataclass(frozen=True, slots=True)
class Submission:
    """A run as its scripts see it. All paths are absolute."""

    slurm: Slurm
    out: Path
    """The run directory."""
    folder: Path
    """Where the workers start: relative paths in a job file count from here."""
    words: tuple[str, ...]
    """Of the worker's command line, after `run`."""
    program: str
    """What stands for `batchgen`, as shell text."""
    cache: Path
    """What all tasks share beside the run directory: compiled kernels, measured costs."""
    device: str | None = None
    """The job's `engine.device`."""
    grace_s: float = Run().grace_s
    """The job's `run.grace_s`."""


@dataclass(frozen=True, slots=True)
class Window:
    """One array of those that together hold all tasks: the tasks from `first` on, as indices from 0."""

    first: int
    size: int
    throttle: int | None

    @property
    def indices(self) -> str:
        """The value of sbatch's --array."""
        limit = "" if self.throttle is None else f"%{self.throttle}"
        return f"0-{self.size - 1}{limit}"


def windows(num_tasks: int, max_array_size: int, throttle: int | None) -> tuple[Window, ...]:
    """Arrays of at most `max_array_size` tasks, which share the throttle. Nothing depends on a task's index."""
    if max_array_size < 1:
        raise UsageError("this cluster takes no job arrays (its MaxArraySize is 0); start workers with sbatch yourself")
    starts = range(0, num_tasks, max_array_size)
    if throttle is not None and throttle < len(starts):
        raise UsageError(
            f"slurm.throttle = {throttle} is fewer than the {len(starts)} arrays that {num_tasks:,} tasks make on this "
            f"cluster (MaxArraySize {max_array_size}); allow {len(starts)} at once, or ask for fewer tasks"
        )
    shares = [None if throttle is None else len(range(place, throttle, len(starts))) for place in range(len(starts))]
    return tuple(
        Window(first, min(max_array_size, num_tasks - first), share)
        for first, share in zip(starts, shares, strict=True)
    )


def check(submission: Submission) -> None:
    """Raises UsageError for what no script can say."""
    slurm = submission.slurm
    if slurm.nodes > 1 and slurm.launcher != "srun":
        raise UsageError(f"slurm.nodes = {slurm.nodes} needs slurm.launcher = 'srun', which starts a worker on each")
    if slurm.nodes > 1 and slurm.requeue:
        raise UsageError("slurm.requeue needs a task for each worker: ask for slurm.nodes = 1 and for more slurm.tasks")
    num_gpus = _num_gpus(slurm)
    if num_gpus > 1 and submission.device is not None:
        raise UsageError(
            f"[slurm] gives each task {num_gpus} GPUs, and a worker to each, but engine.device = "
            f"{submission.device!r} names one device for all; leave engine.device out, or ask for one GPU a task"
        )
    if slurm.warn_s < submission.grace_s:
        raise UsageError(
            f"slurm.warn_s = {slurm.warn_s} leaves no time for the last commit, which run.grace_s = "
            f"{submission.grace_s:g} allows; raise slurm.warn_s, or lower run.grace_s"
        )
    if slurm.time is not None and limit_s(slurm.time) <= slurm.warn_s:
        raise UsageError(
            f"slurm.time = {slurm.time!r} is over before a worker begins: it is told to stop {slurm.warn_s} s before "
            "(slurm.warn_s); ask for more time, or lower slurm.warn_s"
        )
    for path in map(str, (submission.out, submission.folder, submission.cache)):
        if not path.isprintable() or "\\" in path:
            raise UsageError(
                f"the path {path!r} holds a line break, a backslash or another character that a batch script "
                "cannot name; rename the folder"
            )


def limit_s(time: str) -> int:
    """Seconds of a time limit as sbatch reads it: minutes, minutes:seconds, hours:minutes:seconds, or
    days-hours[:minutes[:seconds]]."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:
        hours, minutes, seconds = ((0, *parts, 0), (0, *parts), parts)[len(parts) - 1]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def array_script(submission: Submission, window: Window) -> str:
    """The script of the workers."""
    slurm, cache = submission.slurm, submission.cache
    is_step = slurm.launcher == "srun"
    options = [
        ("array", window.indices),
        ("partition", slurm.partition),
        ("account", slurm.account),
        ("time", slurm.time),
        ("nodes", slurm.nodes),
        ("ntasks-per-node", 1),
        ("cpus-per-task", _cpus(slurm)),
        ("mem", slurm.memory),
        ("gres", slurm.gres),
        ("constraint", slurm.constraint),
        ("signal", f"{'' if is_step else 'B:'}USR1@{slurm.warn_s}"),
    ]
    worker = [submission.program, "run", *map(shlex.quote, submission.words)]
    worker += ["--gpus", "all"] if _num_gpus(slurm) > 1 else []
    worker += ([] if slurm.wait else ["--no-wait"]) + (["--requeue"] if slurm.requeue else [])
    lines = [
        *_head(submission, submission.out.name, options, "%A_%a", slurm.options),
        "# Workers: they share nothing but the run directory, and nothing depends on an index or a count.",
        "# Any of them can be sent again: sbatch --array=3,7 THIS_FILE",
        # The warning may come before the worker listens.
        *([] if is_step else ["trap '' USR1"]),
        *_setup(submission),
        f"export BATCHGEN_CACHE={shlex.quote(str(cache))}",
        f"export TORCHINDUCTOR_CACHE_DIR={shlex.quote(str(cache / 'inductor'))}",
        f"export TRITON_CACHE_DIR={shlex.quote(str(cache / 'triton'))}",
        "exec " + " ".join([*_srun(slurm), *_container(slurm), *worker]),
    ]
    return "\n".join(lines) + "\n"


def _num_gpus(slurm: Slurm) -> int:
    """GPUs of a node that a task asks for, by `gres` or by one of sbatch's own options."""
    found = (_GPU_OPTION.fullmatch(option) for option in slurm.options)
    return max([_in_gres(slurm.gres or ""), *(_in_gres(f"gpu:{one[1]}" if one[1] else one[2]) for one in found if one)])


_GPU_OPTION = re.compile(r"(?:--gpus(?:-per-node|-per-task)?[= ]|-G *)(\S+)|--gres[= ](\S+)")


def _in_gres(gres: str) -> int:
    """GPUs in a list such as "gpu:a100:4,shard:8" or "gres:gpu:2"."""
    asked = [one.removeprefix("gres:").split("(")[0].split(":") for one in gres.split(",")]
    return sum(int(words[-1]) if words[-1].isdecimal() else 1 for words in asked if words[0] == "gpu")


def _cpus(slurm: Slurm) -> int | None:
    """CPUs of a task: of each of its workers' as many."""
    return None if slurm.cpus is None else slurm.cpus * max(1, _num_gpus(slurm))


def finish_script(submission: Submission) -> str:
    """The script of the job that comes after all workers, however they ended: it looks for itself."""
    slurm, out = submission.slurm, shlex.quote(str(submission.out))
    options = [
        ("partition", slurm.finish_partition or slurm.partition),
        ("account", slurm.account),
        ("time", slurm.finish_time or slurm.time),
    ]
    batchgen = " ".join([*_container(slurm), submission.program])
    lines = [
        *_head(submission, f"{submission.out.name}-finish", options, "%j", slurm.finish_options),
        "# Ends with 0 if all rows are made, 3 if some failed or were rejected, 75 while rows are outstanding.",
        *_setup(submission),
        "code=0",
        f"{batchgen} status {out} --check || code=$?",
        'if [ "$code" != 0 ] && [ "$code" != 3 ]; then exit "$code"; fi',
        f"{batchgen} finalize {out}",
        f"{batchgen} verify {out}",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _head(
    submission: Submission, name: str, options: Sequence[tuple[str, str | int | None]], log: str, more: Sequence[str]
) -> Iterator[str]:
    yield "#!/bin/bash -l" if submission.slurm.modules else "#!/bin/bash"
    folder = str(submission.out / FOLDER)
    given = [
        ("job-name", name),
        *options,
        ("output", f"{folder.replace('%', '%%')}/{log}.log"),
        ("open-mode", "append"),
    ]
    yield from (f"#SBATCH --{name}={_quoted(str(value))}" for name, value in given if value is not None)
    yield "#SBATCH --requeue"
    yield from (f"#SBATCH {option}" for option in more)


def _setup(submission: Submission) -> Iterator[str]:
    yield "set -e"
    yield f"cd {shlex.quote(str(submission.folder))}"
    yield from (f"module load {shlex.quote(module)}" for module in submission.slurm.modules)
    yield from submission.slurm.setup


def _srun(slurm: Slurm) -> Iterator[str]:
    if slurm.launcher == "srun":
        yield "srun"
        if slurm.cpus is not None:
            # Since Slurm 22.05 a step does not inherit it from its job.
            yield f"--cpus-per-task={_cpus(slurm)}"


def _container(slurm: Slurm) -> Iterator[str]:
    if slurm.container is not None:
        yield slurm.container


def _quoted(value: str) -> str:
    """A value for a #SBATCH line: sbatch reads quotes, backslashes and # as a shell does."""
    if all(char.isalnum() or char in "@%+=:,./_-" for char in value):
        return value
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
