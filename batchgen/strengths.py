"""The manifest's `strength` column: how much of its init image a row leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.columns import Bools, floats
from batchgen.job import Job
from batchgen.models.facts import Facts

NO_IMAGE = "has no effect: this model takes no init image"


@dataclass(frozen=True, slots=True)
class Strengths:
    """A batch's; arrays have an entry per row."""

    values: npt.NDArray[np.float64]
    """NaN where the row has no init image."""
    skipped: npt.NDArray[np.int64]
    """Steps that the init image stands for; -1 where the row has none."""
    broken: Mapping[str, Bools]
    """The rows that break each rule."""


def strengths(column: pa.Array, has_image: Bools, steps: npt.NDArray[np.int64], facts: Facts, job: Job) -> Strengths:
    """The strengths of rows with these steps, of which some have an init image."""
    parsed = floats(column)
    told = job.sampling.strength
    default = (facts.strength or 0.0) if told is None else told
    asked = np.where(parsed.given, parsed.values, default)
    is_bad = has_image & parsed.given & (parsed.is_bad | ~((asked > 0) & (asked <= 1)))
    skipped = facts.skipped(steps, np.where(has_image & ~is_bad, asked, 1.0))
    return Strengths(
        values=np.where(has_image, asked, np.nan),
        skipped=np.where(has_image, skipped, -1),
        broken={
            "has no effect without an image" if facts.takes_image else NO_IMAGE: parsed.given & ~has_image,
            "must be a number above 0 and at most 1": is_bad,
            "leaves none of the row's steps to make: give it more steps, or a greater strength": has_image
            & (skipped >= steps),
        },
    )
