"""Which mode each bucket runs in, and which attention kernels: asked for, or weighed against the work that is left.

The first worker of a run decides for all, since modes change the last bits of pixels.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import torch
from pydantic import TypeAdapter, ValidationError

from batchgen.engine.attention import attention, present
from batchgen.engine.chunks import chunk_of, most_decoded
from batchgen.engine.compiling import mode_of
from batchgen.engine.forecasts import COMPILE_S, COMPILE_S_PER_PARAMETER, Forecast, decodes_that_pay, forecasts, size_of
from batchgen.errors import UsageError
from batchgen.generator import Context
from batchgen.job import Engine
from batchgen.models.transfer import Mark
from batchgen.records import Bucket
from batchgen.wording import first_line, listed

_PROBES = 3
_NAMED = 4


@dataclass(frozen=True, slots=True)
class Choice:
    """What a run has settled for one kind of GPU."""

    attention: str | None
    modes: Mapping[str, str] = field(default_factory=dict)
    """By the bucket's name; one that is not named runs eager."""
    decodes: Mapping[str, str] = field(default_factory=dict)
    """Kernels by the image's size, as 512x512."""
    chunks: Mapping[str, int] = field(default_factory=dict)
    """Images of a size that are decoded at once, likewise."""

    def mode(self, bucket: Bucket) -> str:
        """What `auto` runs a bucket in."""
        return self.modes.get(str(bucket), "eager")


_CHOICE = TypeAdapter(Choice)


class Tuning:
    """The choice, made at the first batch."""

    def __init__(
        self, engine: Engine, device: torch.device, device_name: str, memory_bytes: int | None, context: Context
    ) -> None:
        self._engine = engine
        self._device = device
        self._memory_bytes = memory_bytes
        self._name = f"choice-{re.sub('[^A-Za-z0-9]+', '-', device_name)}"
        self._context = context
        self._choice: Choice | None = None
        self._forecasts: dict[Bucket, Forecast] = {}

    @property
    def is_settled(self) -> bool:
        return self._choice is not None

    def choose(self, bucket: Bucket, num_parameters: int, probe: Callable[[], object]) -> None:
        """Make or learn the run's choice. It may be measured: `probe` runs one eager evaluation of this bucket."""
        mine = self._chosen(bucket, num_parameters, probe)
        self._choice = _choice(self._context.settle(self._name, json.dumps(asdict(mine))))
        if self._is_auto and not self._is_cpu:
            self._say(self._choice)

    def mode(self, bucket: Bucket) -> str:
        """The mode of a bucket."""
        assert self._choice is not None
        return self._choice.mode(bucket) if self._is_auto else self._engine.mode

    @property
    def is_compiled(self) -> bool:
        """Whether anything is: then the weights lie in channels-last order, as compiled convolutions want them."""
        assert self._choice is not None
        if self._is_auto:
            kernels = [mode_of(mode)[0] for mode in self._choice.modes.values()] + [*self._choice.decodes.values()]
            return any(one != "eager" for one in kernels)
        return mode_of(self._engine.mode)[0] != "eager"

    def decoding(self, bucket: Bucket) -> tuple[str, int]:
        """The kernels that a bucket's images are decoded by, and how many at once: no more than there are, unless
        another number would have to be compiled."""
        assert self._choice is not None
        size = size_of(bucket)
        kernels = self._choice.decodes.get(size, "eager") if self._is_auto else mode_of(self._engine.mode)[0]
        chunk = self._choice.chunks.get(size) or chunk_of(bucket.size, self._most_decoded(bucket))
        return kernels, chunk if kernels == "compiled" else min(chunk, bucket.size)

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """The chosen attention kernels for the time of the block."""
        with attention(self._choice.attention if self._choice else None, self._device):
            yield

    @property
    def _is_cpu(self) -> bool:
        return self._device.type != "cuda"

    @property
    def _is_auto(self) -> bool:
        return self._engine.mode == "auto"

    def _most_decoded(self, bucket: Bucket) -> int:
        return self._engine.decode_batch or most_decoded(bucket.group.width, bucket.group.height, self._memory_bytes)

    def _chunks(self) -> dict[str, int]:
        """For each size, what suits its largest batches."""
        buckets = sorted(self._context.work, key=lambda one: one.size)
        largest = {size_of(bucket): bucket for bucket in buckets}
        return {size: chunk_of(bucket.size, self._most_decoded(bucket)) for size, bucket in largest.items()}

    def _chosen(self, bucket: Bucket, num_parameters: int, probe: Callable[[], object]) -> Choice:
        wanted = None if self._engine.attention == "auto" else self._engine.attention
        if self._is_cpu or (wanted and not self._is_auto):
            return Choice(wanted, chunks=self._chunks())
        timed = dict(self._timed([wanted] if wanted else present(), probe))
        fastest = min(timed, key=lambda name: timed[name])
        times = ", ".join(f"{name} {1000 * seconds:.1f} ms" for name, seconds in timed.items())
        self._context.say(f"fastest attention kernels here: {fastest} (an eager evaluation of {bucket}: {times})")
        if not self._is_auto:
            return Choice(fastest, chunks=self._chunks())
        compile_s, work = COMPILE_S + COMPILE_S_PER_PARAMETER * num_parameters, self._context.work
        self._forecasts = forecasts(work, bucket, timed[fastest], compile_s)
        modes = {str(one): told.mode for one, told in self._forecasts.items() if told.mode != "eager"}
        return Choice(fastest, modes, decodes_that_pay(work), self._chunks())

    def _timed(self, names: Sequence[str], probe: Callable[[], object]) -> Iterator[tuple[str, float]]:
        """Seconds of each kernel that works here. Raises what the last one raised if none does."""
        num_timed = 0
        for name in names:
            try:
                yield name, self._time(name, probe)
                num_timed += 1
            except (torch.OutOfMemoryError, torch.AcceleratorError):
                raise
            except (RuntimeError, ValueError) as error:
                if name == names[-1] and not num_timed:
                    raise
                self._context.say(f"attention kernels {name} do not work here ({first_line(error)})")

    def _time(self, name: str, probe: Callable[[], object]) -> float:
        """Median seconds of an eager evaluation."""
        with attention(name, self._device):
            times = []
            for _ in range(_PROBES + 1):
                Mark(self._device).wait()
                started = time.perf_counter()
                probe()
                Mark(self._device).wait()
                times.append(time.perf_counter() - started)
        return statistics.median(times[1:])

    def _say(self, choice: Choice) -> None:
        """A line a mode, the buckets of most work named in it."""
        by_mode: dict[str, list[Bucket]] = {}
        for bucket in sorted(self._context.work, key=lambda one: -self._context.work[one].evaluations):
            by_mode.setdefault(choice.mode(bucket), []).append(bucket)
        for mode, buckets in by_mode.items():
            names = "; ".join(str(one) for one in buckets[:_NAMED])
            more = f" and {len(buckets) - _NAMED:,} more" if len(buckets) > _NAMED else ""
            self._context.say(f"mode {mode} {self._predicted(buckets)}for {names}{more}")
        for kernels in sorted(set(choice.decodes.values())):
            sizes = [size for size, one in choice.decodes.items() if one == kernels]
            more = f" and {len(sizes) - _NAMED:,} more" if len(sizes) > _NAMED else ""
            self._context.say(f"mode {kernels} for decoding {listed(sizes[:_NAMED])}{more}")

    def _predicted(self, buckets: Sequence[Bucket]) -> str:
        told = [self._forecasts[one] for one in buckets if one in self._forecasts]
        if not told:
            return ""
        return f"(predicted {sum(one.seconds for one in told):.0f} s, eager {sum(one.eager_s for one in told):.0f} s) "


def _choice(settled: str) -> Choice:
    """A choice that a slot holds. Raises UsageError if it is none."""
    try:
        return _CHOICE.validate_json(settled)
    except ValidationError as error:
        what = error.errors()[0]["msg"]
        raise UsageError(f"the modes that this run has settled cannot be read ({what}); start a new run") from None
