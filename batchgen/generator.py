"""The seam between the run and the model: what a worker asks of whatever makes its pictures."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from batchgen.cost import Measurement
from batchgen.errors import BatchgenError
from batchgen.job import Job
from batchgen.records import Batch, Bucket, Outcome, Spent, Work


class Dropped(Exception):
    """`should_drop` said so before the batch was finished; nothing of the batch was made."""


class OutOfMemory(Exception):
    """The device cannot hold the batch; the worker halves it."""


class NoRoom(Exception):
    """The device cannot hold what takes the same memory for any batch; the worker tries each row alone."""


class DeviceLost(BatchgenError):
    """The device's context is gone: this process can make nothing any more, another one can."""


class Preparing(Protocol):
    """What is done before a bucket's first batch, and whether it may take minutes."""

    def __call__(self, what: str, *, is_long: bool) -> AbstractContextManager[None]: ...


def unannounced(what: str, *, is_long: bool) -> AbstractContextManager[None]:
    """Where nobody is told."""
    return nullcontext()


@dataclass(frozen=True, slots=True)
class Context:
    """What a generator is told of the run it works for, and how it tells the run."""

    say: Callable[[str], None] = lambda text: None
    settle: Callable[[str, str], str] = lambda name, value: value
    """Make a value the run's under a name, or learn the one that another worker has settled."""
    work: Mapping[Bucket, Work] = field(default_factory=dict)
    """What this worker may expect to do in each bucket."""
    preparing: Preparing = unannounced
    """Within it a bucket is made ready; told before, for people wonder where no image comes."""


Pending = Callable[[], list[Outcome]]
"""A batch that a device is at work on: waits for it and returns one outcome per row, in the batch's order."""


class Generator(Protocol):
    """A loaded model.

    Both calls raise Dropped when `should_drop()` turns true at a place where work can be cut off (between two model
    evaluations), OutOfMemory, DeviceLost, and whatever the model raises when what was asked cannot be made as a
    whole: the worker then tries each row alone. So does a Pending, but for Dropped.
    """

    versions: Mapping[str, str]
    """What the pixels may depend on beside the job: library versions and the device's name."""

    def prepare(self, batches: Sequence[Batch], should_drop: Callable[[], bool]) -> None:
        """Do what the batches of one shard share, such as encoding their prompts, each distinct one once."""

    def submit(self, batch: Batch, should_drop: Callable[[], bool]) -> Pending:
        """Set a batch to work. The next one may be submitted before this one's outcomes are asked for."""

    def measurements(self) -> Sequence[Measurement]:
        """What the buckets that ran were seen to cost on a GPU."""

    def spent(self) -> Spent:
        """What all batches took whose outcomes were asked for."""


def open_generator(job: Job, context: Context | None = None) -> Generator:
    """Load the job's model. Raises UsageError for a model that is missing, incomplete or not understood."""
    if job.model.path == "pattern":
        from batchgen.models.pattern import PatternGenerator

        return PatternGenerator(job.model)
    # Else transformers, as it is imported, advises programmers of what is of no concern here.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from batchgen.engine.whole import open_model

    return open_model(job, context)
