"""batchgen: offline batch jobs for text-to-image models.

The Python API is `load_job`, `plan` and `run`; the command line uses the same functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from batchgen.version import VERSION as __version__

if TYPE_CHECKING:
    from batchgen.job import Job
    from batchgen.rundir import Planned
    from batchgen.runner import Ending

__all__ = ["__version__", "load_job", "plan", "run"]


def load_job(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Job:
    """The job of a TOML file (or of defaults) with `table.key=value` overrides. Raises errors.UsageError."""
    from batchgen import job

    return job.load_job(path, overrides)


def plan(manifest: str | Path | Sequence[str | Path], job: Job | None = None) -> Planned:
    """Check, group and cut a manifest, and write nothing. Raises errors.UsageError."""
    from batchgen.rundir import plan_manifest

    return plan_manifest(_names(manifest), job or load_job())


def run(manifest: str | Path | Sequence[str | Path], out: str | Path, job: Job | None = None) -> Ending:
    """Make every row of a manifest that is not made yet, in the run directory `out`, and finalize it.

    Raises errors.UsageError, and errors.Interrupted where the disk is full or lost; calling it again resumes.
    """
    from batchgen.runner import run_job

    return run_job(_names(manifest), Path(out), job or load_job())


def _names(manifest: str | Path | Sequence[str | Path]) -> Sequence[str | Path]:
    return [manifest] if isinstance(manifest, str | Path) else manifest
