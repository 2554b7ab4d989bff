"""The only place that calls Slurm's programs. None may take longer than its time."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from batchgen.errors import BatchgenError

ASKING_S = 10.0
SUBMITTING_S = 120.0
"""A busy controller lets `sbatch` wait for a minute."""
_NO_LIMIT = ("UNLIMITED", "NOT_SET")


class SlurmError(BatchgenError):
    """A program of Slurm is missing, refuses or does not answer."""


def submit(script: Path, options: Sequence[str] = ()) -> str:
    """`sbatch` a script; the job's id. `options` go before those in the script."""
    answer = _call(["sbatch", "--parsable", *options, str(script)], SUBMITTING_S)
    job_id = answer.strip().partition(";")[0]
    if not job_id.isdecimal():
        raise SlurmError(f"sbatch answered {answer.strip()!r} where a job's id was expected; look with squeue --me")
    return job_id


def require(program: str) -> None:
    """Raises SlurmError where a program is not there."""
    if shutil.which(program) is None:
        raise _missing(program)


def _missing(program: str) -> SlurmError:
    return SlurmError(f"there is no {program} here; is this a machine of the cluster?")


def version() -> str:
    """What `sbatch` says it is. Raises SlurmError where it is not there."""
    return _call(["sbatch", "--version"], ASKING_S).strip()


def requeue(name: str) -> None:
    """Put a running job, or one task of an array, into the queue again: its processes are ended."""
    _call(["scontrol", "requeue", name], ASKING_S)


def max_array_size() -> int:
    """The cluster's MaxArraySize: no task of an array may have that index or a higher one."""
    found = re.search(r"(?m)^MaxArraySize\s*=\s*([0-9]+)", _call(["scontrol", "show", "config"], ASKING_S))
    if found is None:
        raise SlurmError("scontrol show config names no MaxArraySize")
    return int(found[1])


def is_running(name: str) -> bool:
    """Whether Slurm lets a job, or one task of an array, run on: one that it is ending is not running to it."""
    return _ask(name, "%T") == "RUNNING"


def time_left_s(name: str) -> float | None:
    """Seconds until the time limit of a job or of one task of an array, None if it has none."""
    answer = _ask(name, "%L")
    return None if answer in _NO_LIMIT else seconds(answer)


def tasks(ids: Sequence[str]) -> tuple[str, ...]:
    """The tasks of arrays, `ARRAYJOB_TASK`, that wait in the queue or are at work; none of arrays that Slurm has
    forgotten."""
    try:
        answer = _call(["squeue", "-h", "-r", "-j", ",".join(ids), "-o", "%i %T"], ASKING_S) if ids else ""
    except SlurmError as error:
        if "Invalid job id" not in str(error):
            raise
        answer = ""
    found = [line.split() for line in answer.splitlines()]
    if wrong := [words for words in found if len(words) != 2]:
        raise SlurmError(f"squeue says {' '.join(wrong[0])!r} where a task and its state were expected")
    return tuple(name for name, state in found if state != "COMPLETING")


def _ask(name: str, what: str) -> str:
    return _call(["squeue", "-h", "-j", name, "-o", what], ASKING_S).strip()


def seconds(text: str) -> float:
    """A time as `squeue` writes it, `[[days-]hours:]minutes:seconds`."""
    found = re.fullmatch(r"(?:(?:([0-9]+)-)?([0-9]+):)?([0-9]+):([0-9]+)", text)
    if found is None:
        raise SlurmError(f"squeue says {text!r} where the time left was expected")
    days, hours, minutes, rest = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + rest)


def _call(words: list[str], timeout_s: float) -> str:
    """What a program prints. Raises SlurmError with what it says to its error output."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False)
    except FileNotFoundError:
        raise _missing(words[0]) from None
    except OSError as error:
        raise SlurmError(f"{words[0]} cannot be run: {error}") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{words[0]} has not answered for {timeout_s:.0f} s") from None
    if done.returncode:
        said = done.stderr.strip() or f"it ended with code {done.returncode}"
        raise SlurmError(f"{words[0]} refuses: {said}")
    return done.stdout
