"""batchgen: offline batch jobs for text-to-image models.

The Python API is `load_job`, `plan` and `run`; the command line calls them too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from batchgen.version import VERSION as __version__

if TYPE_CHECKING:
    from batchgen.job import Job
    from batchgen.planned import Planned
    from batchgen.runner import Ending, Terms

__all__ = ["__version__", "load_job", "plan", "run"]


def load_job(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Job:
    """The job of a TOML file, or of defaults, with `table.key=value` overrides as `--set` takes them. Raises
    errors.UsageError."""
    from batchgen import job
    from batchgen.errors import UsageError

    is_list = isinstance(overrides, Sequence) and not isinstance(overrides, str)
    if not is_list or not all(isinstance(one, str) for one in overrides):
        raise UsageError(f"overrides are a list of texts, such as ['sampling.steps=30'], and not {overrides!r}")
    if not isinstance(path, str | PathLike | None):
        raise UsageError(f"load_job takes the path of a job file, and not {_kind(path)}; overrides are for single keys")
    return job.load_job(path, overrides)


def plan(
    manifest: str | Path | Sequence[str | Path],
    job: Job | None = None,
    *,
    on_reading: Callable[[int, int], None] = lambda rows, total: None,
) -> Planned:
    """Check, group and cut a manifest, and write nothing. `on_reading` is told of the rows just read, and of all.
    Raises errors.UsageError."""
    from batchgen.planned import plan_manifest

    return plan_manifest(_names(manifest), _checked(job), on_reading)


def run(
    manifest: str | Path | Sequence[str | Path],
    out: str | Path | None = None,
    job: Job | None = None,
    *,
    gpus: str | int | None = None,
    workers: int | None = None,
    extend: bool = False,
    terms: Terms | None = None,
) -> Ending:
    """Make every row of a manifest that is not made yet, in the run directory `out` (`<manifest's name>-out`), and
    finalize it; calling it again resumes.

    `gpus` ("all", 2, "0,2"), `workers` and `extend` are the command line's options. `terms` say what stops it and
    whom it tells; without them it shows its progress: bars on a terminal and in a notebook, else a line every 30 s.

    Raises errors.UsageError, and errors.Interrupted where the disk is full or lost.
    """
    from batchgen.launcher import seats_of, workforce
    from batchgen.progress import reading_bar, showing
    from batchgen.runner import Terms, default_directory, run_job

    names, job = _names(manifest), _checked(job)
    terms = terms or Terms(on_reading=reading_bar(), progress=showing)
    if seats := seats_of(None if gpus is None else str(gpus), workers, job):
        terms = replace(terms, workforce=workforce(seats))
    return run_job(names, default_directory(names) if out is None else Path(out), job, terms, may_grow=extend)


def _names(manifest: str | Path | Sequence[str | Path]) -> Sequence[str | Path]:
    from batchgen.errors import UsageError

    if isinstance(manifest, str | PathLike):
        return [manifest]
    # A list of texts is one, a data frame and a table are none, though columns may be gone through.
    if not (isinstance(manifest, Sequence) and all(isinstance(one, str | PathLike) for one in manifest)):
        raise UsageError(
            f"a manifest is the path of a Parquet file, or a list of such, and not {_kind(manifest)}; write rows to "
            "one first, as by pyarrow.parquet.write_table(table, 'prompts.parquet')"
        )
    return manifest


def _checked(job: Job | None) -> Job:
    from batchgen.errors import UsageError
    from batchgen.job import Job

    if not isinstance(job, Job | None):
        raise UsageError(f"job is what load_job gives, as load_job('job.toml') does, and not {_kind(job)}")
    return job or load_job()


def _kind(value: object) -> str:
    return f"of type {type(value).__name__}"
