"""A run directory that has vanished while it was at work, as the mount that it lay on has, or lost a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batchgen.errors import Interrupted
from batchgen.rundir import RunDirectory


@contextmanager
def present(run: RunDirectory) -> Iterator[None]:
    """Whatever comes of a planned run directory that has vanished, or lost a file: it stops the run."""
    with intact(run):
        try:
            yield
        except Exception as error:
            if not isinstance(error, Interrupted):
                require_present(run, f" ({error})")
            raise


@contextmanager
def intact(run: RunDirectory) -> Iterator[None]:
    """A file that is gone from a run directory stops what is at work there. Raises Interrupted instead of
    FileNotFoundError."""
    try:
        yield
    except FileNotFoundError as error:
        path = None if error.filename is None else Path(str(error.filename))
        if path is None or run.path not in (path, *path.parents):
            raise
        raise Interrupted(
            f"{path} is gone: it was taken out of the run directory while that was in use. Everything committed is "
            "kept; run the same command again"
        ) from error


def require_present(run: RunDirectory, why: str = "") -> None:
    """Raises Interrupted if a run directory that had a plan has none now."""
    if run.files.stat(run.plans / "0.json") is None:
        raise Interrupted(
            f"{run.path}: the run directory is not there any more{why}; if its file system was unmounted, mount it "
            "again. Everything committed is kept; run the same command again then"
        )
