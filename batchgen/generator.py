"""The seam between the run and the model: what a worker asks of whatever makes its pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from batchgen.errors import BatchgenError
from batchgen.job import Job
from batchgen.records import Batch, Outcome


class Dropped(Exception):
    """`should_drop` said so before the batch was finished; nothing of the batch was made."""


class OutOfMemory(Exception):
    """The device cannot hold the batch; the worker halves it."""


class DeviceLost(BatchgenError):
    """The device's context is gone: this process can make nothing any more, another one can."""


class Generator(Protocol):
    """A loaded model.

    `generate` returns one outcome per row of the batch, in the batch's order. It raises Dropped when
    `should_drop()` turns true between two model evaluations, OutOfMemory, DeviceLost, and whatever the model raises
    when the batch as a whole cannot be made: the worker then tries each row alone.
    """

    versions: Mapping[str, str]
    """What the pixels may depend on beside the job: library versions and the device's name."""

    def generate(self, batch: Batch, should_drop: Callable[[], bool]) -> list[Outcome]: ...


def open_generator(job: Job) -> Generator:
    """Load the job's model. Raises UsageError for a model that is missing, incomplete or not understood."""
    if job.model.path == "pattern":
        from batchgen.models.pattern import PatternGenerator

        return PatternGenerator(job.model)
    from batchgen.engine.engine import Engine

    return Engine(job)
