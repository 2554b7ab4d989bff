"""Which mode each bucket runs in, and which attention kernels: asked for, or weighed against the work that is left.

The first worker of a run decides for all, since modes change the last bits of pixels.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import count
from typing import Annotated

import torch
from pydantic import Field, PositiveInt, TypeAdapter, ValidationError

from batchgen.chunks import chunk_of, most_decoded
from batchgen.engine.attention import BACKENDS, attention, present
from batchgen.engine.compiling import KERNELS, mode_of
from batchgen.engine.devices import is_memory
from batchgen.engine.forecasts import (
    COMPILE_S,
    COMPILE_S_PER_PARAMETER,
    Forecast,
    Speed,
    decodes_that_pay,
    forecasts,
    size_of,
)
from batchgen.errors import UsageError
from batchgen.generator import Context
from batchgen.job import Engine
from batchgen.models.transfer import Mark
from batchgen.records import Bucket
from batchgen.wording import first_line, listed

_PROBES = 3
_NAMED = 4
_BUSY = 1.5
"""A device that is at work for so many times what launching takes is not held up by it."""
_MOST_REPEATS = 16
_Attention = Annotated[str, Field(pattern=f"^({'|'.join(BACKENDS)})$")]
_Kernels = Annotated[str, Field(pattern=f"^({'|'.join(KERNELS)})$")]
_Mode = Annotated[str, Field(pattern=f"^(graph|({'|'.join(KERNELS)})|(regional|compiled)\\+graph)$")]


@dataclass(frozen=True, slots=True)
class Choice:
    """What a run has settled for one kind of GPU."""

    attention: _Attention | None
    modes: Mapping[str, _Mode] = field(default_factory=dict)
    """By the bucket's name: of all buckets that there were."""
    decodes: Mapping[str, _Kernels] = field(default_factory=dict)
    """Kernels by the image's size, as 512x512; eager ones where none are named."""
    chunks: Mapping[str, PositiveInt] = field(default_factory=dict)
    """Images of a size that are decoded at once, likewise: of all sizes that there were."""

    def has(self, bucket: Bucket) -> bool:
        """Whether the bucket's mode is settled."""
        return str(bucket) in self.modes

    def mode(self, bucket: Bucket) -> str:
        """What `auto` runs a bucket in. One that is not named is what memory has left of a larger one, and takes the
        mode of the next larger one that is."""
        if self.has(bucket):
            return self.modes[str(bucket)]
        before, after = map(re.escape, str(bucket).split(f" {bucket.size}, ", 1))
        named = [(re.fullmatch(rf"{before} (\d+), {after}", name), mode) for name, mode in self.modes.items()]
        larger = {int(found[1]): mode for found, mode in named if found and int(found[1]) > bucket.size}
        return larger[min(larger)] if larger else "eager"

    def with_more(self, later: Choice) -> Choice:
        """With what a later choice says of buckets and sizes that this one says nothing of."""
        decodes = {size: kernels for size, kernels in later.decodes.items() if size not in self.chunks}
        return replace(
            self,
            modes={**later.modes, **self.modes},
            decodes={**decodes, **self.decodes},
            chunks={**later.chunks, **self.chunks},
        )


@dataclass(frozen=True, slots=True)
class Timed:
    """An eager evaluation."""

    seconds: float
    launch_s: float
    """Until its last kernel was launched, of `seconds`."""


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

    def choose(self, bucket: Bucket, num_parameters: int, probe: Callable[[int], object]) -> None:
        """Make or learn the run's choice. It may be measured: `probe` runs one eager evaluation of this bucket, its
        rows so many times over.

        What is settled stays so, since rows are made by it. Buckets of a plan that was appended later are settled by a
        slot more.
        """
        mine = self._chosen(bucket, num_parameters, probe)
        choice = self._settled(self._name, mine)
        if self._is_auto and not self._is_cpu:
            for number in count(1):
                if all(map(choice.has, self._context.work)):
                    break
                choice = choice.with_more(self._settled(f"{self._name}.{number}", mine))
            self._say(choice)
        self._choice = choice

    def _settled(self, name: str, mine: Choice) -> Choice:
        return _choice(self._context.settle(name, json.dumps(asdict(mine))))

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

    def _chosen(self, bucket: Bucket, num_parameters: int, probe: Callable[[int], object]) -> Choice:
        wanted = None if self._engine.attention == "auto" else self._engine.attention
        if self._is_cpu or (wanted and not self._is_auto):
            return Choice(wanted, chunks=self._chunks())
        timed = dict(self._timed([wanted] if wanted else present(), probe))
        fastest = min(timed, key=lambda name: timed[name].seconds)
        times = ", ".join(f"{name} {1000 * one.seconds:.1f} ms" for name, one in timed.items())
        self._context.say(f"fastest attention kernels here: {fastest} (an eager evaluation of {bucket}: {times})")
        if not self._is_auto:
            return Choice(fastest, chunks=self._chunks())
        compile_s, work = COMPILE_S + COMPILE_S_PER_PARAMETER * num_parameters, self._context.work
        self._forecasts = forecasts(work, self._speed(bucket, fastest, timed[fastest], probe), compile_s)
        modes = {str(one): told.mode for one, told in self._forecasts.items()}
        return Choice(fastest, modes, decodes_that_pay(work), self._chunks())

    def _speed(self, bucket: Bucket, name: str, once: Timed, probe: Callable[[int], object]) -> Speed:
        """What launching takes, and what the device takes where it is not held up by that: with the bucket's rows
        several times over, if need be and if they fit."""
        launch_s, timed, repeats = once.launch_s, once, 1
        while timed.seconds < _BUSY * launch_s and repeats < _MOST_REPEATS:
            try:
                timed = self._time(name, partial(probe, 2 * repeats))
            except RuntimeError as error:
                if not is_memory(error):
                    raise
                break
            repeats *= 2
        return Speed(launch_s, timed.seconds / repeats / bucket.pixels)

    def _timed(self, names: Sequence[str], probe: Callable[[int], object]) -> Iterator[tuple[str, Timed]]:
        """Seconds of each kernel that works here. Raises what the last one raised if none does."""
        num_timed = 0
        for name in names:
            try:
                yield name, self._time(name, partial(probe, 1))
                num_timed += 1
            except (RuntimeError, ValueError) as error:
                is_last = name == names[-1] and not num_timed
                if is_last or is_memory(error) or isinstance(error, torch.AcceleratorError):
                    raise
                self._context.say(f"attention kernels {name} do not work here ({first_line(error)})")

    def _time(self, name: str, call: Callable[[], object]) -> Timed:
        """Median seconds of a call."""
        with attention(name, self._device):
            times = []
            for _ in range(_PROBES + 1):
                Mark(self._device).wait()
                started = time.perf_counter()
                call()
                launch_s = time.perf_counter() - started
                Mark(self._device).wait()
                times.append(Timed(time.perf_counter() - started, launch_s))
        return sorted(times[1:], key=lambda one: one.seconds)[_PROBES // 2]

    def _say(self, choice: Choice) -> None:
        """A line a mode, the buckets of most work named in it."""
        by_mode: dict[str, list[Bucket]] = {}
        for bucket in sorted(self._context.work, key=lambda one: -self._context.work[one].evaluations):
            by_mode.setdefault(choice.mode(bucket), []).append(bucket)
        for mode, buckets in by_mode.items():
            names = "; ".join(str(one) for one in buckets[:_NAMED])
            more = f" and {len(buckets) - _NAMED:,} more" if len(buckets) > _NAMED else ""
            self._context.say(f"mode {mode} {self._predicted(mode, buckets)}for {names}{more}")
        for kernels in sorted(set(choice.decodes.values())):
            sizes = [size for size, one in choice.decodes.items() if one == kernels]
            more = f" and {len(sizes) - _NAMED:,} more" if len(sizes) > _NAMED else ""
            self._context.say(f"mode {kernels} for decoding {listed(sizes[:_NAMED])}{more}")

    def _predicted(self, mode: str, buckets: Sequence[Bucket]) -> str:
        told = [self._forecasts[one] for one in buckets if mode in self._forecasts[one].modes_s]
        if not told:
            return ""
        seconds, eager_s = sum(one.modes_s[mode] for one in told), sum(one.eager_s for one in told)
        return f"(predicted {seconds:.0f} s, eager {eager_s:.0f} s) "


def _choice(settled: str) -> Choice:
    """A choice that a slot holds. Raises UsageError if it is none."""
    try:
        return _CHOICE.validate_json(settled)
    except ValidationError as error:
        first = error.errors()[0]
        what = ": ".join([*map(str, first["loc"]), first["msg"]])
        raise UsageError(f"the modes that this run has settled cannot be read ({what}); start a new run") from None
