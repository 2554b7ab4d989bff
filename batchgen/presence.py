"""A run directory that has vanished while it was at work, as the mount that it lay on has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from batchgen.errors import Interrupted
from batchgen.rundir import RunDirectory


@contextmanager
def present(run: RunDirectory) -> Iterator[None]:
    """Whatever comes of a run directory that has vanished: it stops the run."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, Interrupted):
            require_present(run, f" ({error})")
        raise


def require_present(run: RunDirectory, why: str = "") -> None:
    """Raises Interrupted if a run directory that had a plan has none now."""
    if run.files.stat(run.plans / "0.json") is None:
        raise Interrupted(
            f"{run.path}: the run directory is not there any more{why}; if its file system was unmounted, mount it "
            "again. Everything committed is kept; run the same command again then"
        )
