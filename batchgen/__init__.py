"""batchgen: offline batch jobs for text-to-image models.

The Python API is `load_job`, `plan` and `run`; the command line calls them too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
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

    return plan_manifest(_names(manifest), job or load_job(), on_reading)


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

    names, job = _names(manifest), job or load_job()
    terms = terms or Terms(on_reading=reading_bar(), progress=showing)
    if seats := seats_of(None if gpus is None else str(gpus), workers, job):
        terms = replace(terms, workforce=workforce(seats))
    return run_job(names, default_directory(names) if out is None else Path(out), job, terms, may_grow=extend)


def _names(manifest: str | Path | Sequence[str | Path]) -> Sequence[str | Path]:
    return [manifest] if isinstance(manifest, str | Path) else manifest
