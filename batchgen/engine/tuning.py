"""Which mode each bucket runs in, and which attention kernels: asked for, or weighed against the work that is left.

The first worker of a run decides for all, since modes change the last bits of pixels.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

from batchgen.engine.attention import BACKENDS, attention
from batchgen.errors import UsageError
from batchgen.generator import Context
from batchgen.job import Engine
from batchgen.models.transfer import Mark
from batchgen.records import Bucket, Work
from batchgen.wording import listed

COMPILED_SHARE = 0.75
"""Of the seconds of an evaluation, what compiled kernels need: 0.66 to 0.82 were measured (SD1.5 and SDXL, batches of
8 and more, one H200, torch 2.11)."""
COMPILE_S = 30.0
COMPILE_S_PER_PARAMETER = 3e-8
"""A whole compile took 53 s for SD1.5 (0.86e9 parameters) and about 100 s for SDXL (2.6e9)."""
DECODE_GAIN_S = 35e-9
"""Seconds per pixel that a compiled VAE saves: 77 ms against 35 ms for 1024x1024."""
DECODE_COMPILE_S = 40.0
LAUNCH_BOUND_S = 0.025
"""An eager evaluation is never faster: Python launches its kernels one by one."""
CAPTURE_EVALUATIONS = 9
"""A capture runs about as many: warm-ups, the record, and the check against eager."""
_SURPLUS = 1.2
"""What is paid must be earned back this many times."""
_PROBES = 3
_NAMED = 4


@dataclass(frozen=True, slots=True)
class Choice:
    """What a run has settled for one kind of GPU."""

    attention: str | None
    compiled: tuple[str, ...] = ()
    """Buckets by name."""
    captured: tuple[str, ...] = ()
    decodes: tuple[str, ...] = ()
    """Sizes, as 512x512, whose decoder is compiled."""

    def mode(self, bucket: Bucket) -> str:
        """What `auto` runs a bucket in."""
        is_compiled, is_captured = str(bucket) in self.compiled, str(bucket) in self.captured
        return "compiled+graph" if is_compiled else "graph" if is_captured else "eager"


@dataclass(frozen=True, slots=True)
class Forecast:
    """How long a bucket's work is predicted to take, in the mode that suits it."""

    mode: str
    seconds: float
    """What must be compiled and captured included."""
    eager_s: float


class Tuning:
    """The choice, made at the first batch."""

    def __init__(self, engine: Engine, device: torch.device, device_name: str, context: Context) -> None:
        self._engine = engine
        self._device = device
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
            return bool(self._choice.compiled or self._choice.decodes)
        return "compiled" in self._engine.mode

    def decodes_compiled(self, width: int, height: int) -> bool:
        """Whether images of a size are decoded by compiled code."""
        assert self._choice is not None
        if self._is_auto:
            return f"{width}x{height}" in self._choice.decodes
        return "compiled" in self._engine.mode

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

    def _chosen(self, bucket: Bucket, num_parameters: int, probe: Callable[[], object]) -> Choice:
        wanted = None if self._engine.attention == "auto" else self._engine.attention
        if self._is_cpu or (wanted and not self._is_auto):
            return Choice(wanted)
        timed = {name: self._time(name, probe) for name in ([wanted] if wanted else BACKENDS)}
        fastest = min(timed, key=lambda name: timed[name])
        times = ", ".join(f"{name} {1000 * seconds:.1f} ms" for name, seconds in timed.items())
        self._context.say(f"attention kernels: {fastest} (an eager evaluation of {bucket}: {times})")
        if not self._is_auto:
            return Choice(fastest)
        compile_s, work = COMPILE_S + COMPILE_S_PER_PARAMETER * num_parameters, self._context.work
        self._forecasts = {one: forecast(one, work[one], bucket, timed[fastest], compile_s) for one in work}
        named = {
            mode: tuple(str(one) for one, told in self._forecasts.items() if told.mode == mode)
            for mode in ("compiled+graph", "graph")
        }
        return Choice(fastest, named["compiled+graph"], named["graph"], decodes_that_pay(work))

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
        if choice.decodes:
            self._context.say(f"mode compiled for decoding {listed(choice.decodes)}")

    def _predicted(self, buckets: Sequence[Bucket]) -> str:
        told = [self._forecasts[one] for one in buckets if one in self._forecasts]
        if not told:
            return ""
        return f"(predicted {sum(one.seconds for one in told):.0f} s, eager {sum(one.eager_s for one in told):.0f} s) "


def forecast(bucket: Bucket, left: Work, measured: Bucket, measured_s: float, compile_s: float) -> Forecast:
    """The mode that is done first with what is left, if what must be paid beforehand counts _SURPLUS times.

    `measured_s` is an eager evaluation of one bucket; others are taken to be in proportion to their pixels.
    """
    kernel_s = measured_s * bucket.pixels / measured.pixels
    eager_s = max(kernel_s, LAUNCH_BOUND_S)
    capture_s = CAPTURE_EVALUATIONS * eager_s
    options = {
        "eager": (left.evaluations * eager_s, 0.0),
        "graph": (left.evaluations * kernel_s, capture_s),
        "compiled+graph": (left.evaluations * kernel_s * COMPILED_SHARE, compile_s + capture_s),
    }
    mode = min(options, key=lambda name: options[name][0] + _SURPLUS * options[name][1])
    return Forecast(mode, sum(options[mode]), sum(options["eager"]))


def decodes_that_pay(work: Mapping[Bucket, Work]) -> tuple[str, ...]:
    """Sizes of which so many images are left that compiling their decoder pays."""
    pixels = Counter[str]()
    for bucket, left in work.items():
        width, height = bucket.group.width, bucket.group.height
        pixels[f"{width}x{height}"] += left.batches * bucket.size * width * height
    return tuple(size for size, num in pixels.items() if num * DECODE_GAIN_S > _SURPLUS * DECODE_COMPILE_S)


def _choice(settled: str) -> Choice:
    """A choice that a slot holds. Raises UsageError if it is none."""
    try:
        fields = json.loads(settled)
        lists = {name: tuple(map(str, fields[name])) for name in ("compiled", "captured", "decodes")}
        return Choice(fields["attention"], **lists)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"the modes that this run has settled cannot be read ({error!r}); start a new run") from None
