"""Predicted seconds of a bucket: measured on the GPU where a profile is at hand, else a conservative model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Protocol

from pydantic import ConfigDict, Field, PositiveInt, TypeAdapter, ValidationError

from batchgen.errors import UsageError
from batchgen.records import Group

HEAD_ROOM = 0.85
"""Of a device's memory, what a batch may fill together with the weights."""
GAIN = 0.98
"""A larger batch must cost less than this, per row, of what a smaller one costs."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """What one batch of a bucket costs: `fixed_s` (encoding, decoding) + evaluations × `evaluation_s`. Rows beyond
    its size cost `fixed_s` again, for each further lot of that size."""

    fixed_s: float
    evaluation_s: float

    def of(self, evaluations: int) -> float:
        return self.fixed_s + evaluations * self.evaluation_s


class Cost(Protocol):
    """Predicts buckets. Only a measured one is trusted with time predictions and with padding."""

    @property
    def source(self) -> str: ...

    @property
    def is_measured(self) -> bool: ...

    def seconds(self, group: Group, size: int) -> Seconds: ...

    def max_batch(self, group: Group) -> int:
        """The largest batch that memory holds and that still gains by its size."""


@dataclass(frozen=True, slots=True)
class ConservativeModel:
    """A bucket's cost where nothing was measured: never below a launch-bound evaluation, linear in pixels above.

    The figures are those of Stable Diffusion 1.5 run eagerly in float16 on one H200 (25 ms floor, 3 ms per row
    of the network at 512×512, 20 ms to decode one image of that size). They order batch sizes; they are not
    shown as predictions.
    """

    source: str = "a conservative model (no profile of this model and GPU)"
    is_measured: bool = False

    def seconds(self, group: Group, size: int) -> Seconds:
        area = group.width * group.height / 512**2
        rows = size * (2 if group.is_guided else 1)
        return Seconds(fixed_s=0.02 * size * area, evaluation_s=0.002 + max(0.023, 0.003 * rows * area))

    def max_batch(self, group: Group) -> int:
        return max_batch_unmeasured(group)


@dataclass(frozen=True, slots=True)
class PatternModel:
    """The cost of painting with `pattern`, measured on one core of a 2-core x86-64 machine."""

    source: str = "the pattern model's own cost"
    is_measured: bool = False

    def seconds(self, group: Group, size: int) -> Seconds:
        return Seconds(fixed_s=0.001 + size * (0.001 + 30e-9 * group.width * group.height), evaluation_s=0.0)

    def max_batch(self, group: Group) -> int:
        return max_batch_unmeasured(group)


_Count = Annotated[int, Field(gt=0, lt=2**31)]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One line of a profile."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    width: _Count
    height: _Count
    is_guided: bool
    batch_size: _Count
    fixed_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    evaluation_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    peak_bytes: PositiveInt | None = None
    """Most device memory in use while the bucket ran, weights included; None where it was not measured, like the
    next two."""
    weights_bytes: PositiveInt | None = None
    device_bytes: PositiveInt | None = None
    mode: str = ""
    """That the bucket ran in; "" where it is not told."""

    @property
    def group(self) -> Group:
        """The group as far as it decides costs."""
        return Group(self.width, self.height, self.is_guided, 0, "")


_MEASUREMENTS = TypeAdapter(Annotated[tuple[Measurement, ...], Field(min_length=1)])


@dataclass(frozen=True, slots=True)
class Profile:
    """Measured buckets. One that was not measured takes the nearest one's seconds, in the proportion that the
    conservative model sees between the two: a smaller batch is never much cheaper just because it is unknown."""

    source: str
    measurements: tuple[Measurement, ...]
    is_measured: bool = True

    def seconds(self, group: Group, size: int) -> Seconds:
        area = group.width * group.height

        def distance(one: Measurement) -> tuple[bool, bool, float, float]:
            ratio = one.width * one.height / area
            return (
                one.is_guided != group.is_guided,
                (one.width, one.height) != (group.width, group.height),
                abs(one.batch_size / size - 1),
                max(ratio, 1 / ratio),
            )

        best = min(self.measurements, key=distance)
        there = ConservativeModel().seconds(best.group, best.batch_size)
        here = ConservativeModel().seconds(group, size)
        return Seconds(
            best.fixed_s * (here.fixed_s / there.fixed_s),
            best.evaluation_s * (here.evaluation_s / there.evaluation_s),
        )

    def max_batch(self, group: Group) -> int:
        """What is left of the device beside head-room and weights, over the most bytes per pixel that any bucket
        needed; a batch larger than was measured to gain by its size is not taken."""
        most = max_batch_unmeasured(group)
        same = sorted(
            (one.batch_size, one.evaluation_s / one.batch_size)
            for one in self.measurements
            if (one.width, one.height, one.is_guided) == (group.width, group.height, group.is_guided)
        )
        for (_, before_s), (size, row_s) in pairwise(same):
            if size > most and row_s < GAIN * before_s:
                most = size
        limits = [_fitting(one, group) for one in self.measurements]
        return max(1, min(most, *(limit for limit in limits if limit is not None), most))


def _fitting(one: Measurement, group: Group) -> int | None:
    """The largest batch of a group that fits, by one bucket's peak."""
    if one.peak_bytes is None or one.weights_bytes is None or one.device_bytes is None:
        return None
    pixels = one.width * one.height * one.batch_size * (2 if one.is_guided else 1)
    needed = max(1, one.peak_bytes - one.weights_bytes) / pixels
    room = HEAD_ROOM * one.device_bytes - one.weights_bytes
    return int(room / (needed * group.width * group.height * (2 if group.is_guided else 1)))


def load_profile(path: Path) -> Profile:
    """A profile file: `{"source": …, "measurements": [{width, height, is_guided, batch_size, fixed_s,
    evaluation_s}, …]}`. Raises UsageError if it is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        measurements = _MEASUREMENTS.validate_python(content["measurements"])
        return Profile(f"{path} ({content['source']})", measurements)
    except ValidationError as error:
        first = error.errors()[0]
        what = f"{'.'.join(map(str, ('measurements', *first['loc'])))}: {first['msg']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        what = repr(error)
    raise UsageError(f"plan.profile = {str(path)!r} is not a profile that batchgen can read: {what}")


def save_profile(path: Path, source: str, measurements: Sequence[Measurement]) -> None:
    """Write a profile file. Raises UsageError where it cannot be written."""
    content = {"source": source, "measurements": [asdict(one) for one in measurements]}
    try:
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{path}: the profile cannot be written here: {error.strerror}") from None


def max_batch_unmeasured(group: Group) -> int:
    """8 megapixels in one batch, at most 32 rows."""
    return max(1, min(32, 8 * 1024**2 // (group.width * group.height)))


def allowed_sizes(group: Group, sizes: Sequence[int] | None, max_batch: int | None, cost: Cost) -> tuple[int, ...]:
    """The batch sizes that a group may use, ascending: the job's, else the powers of two up to its limit."""
    if sizes is not None:
        return tuple(sorted({size for size in sizes if max_batch is None or size <= max_batch}))
    limit = max_batch or cost.max_batch(group)
    return tuple(2**power for power in range(limit.bit_length()) if 2**power <= limit)
