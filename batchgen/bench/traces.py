"""What torch.profiler saw on the device: when it was busy in a running job, and which kernels a call spends it on."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from batchgen.bench.figures import idle_share, share

SKIPPED_BATCHES = 2
"""At the start of a run, until the next batch always waits behind the one at work."""
MIN_BATCHES = 3
MIN_S = 5.0
WARM_UPS = 3
TOP = 12


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel that ran on the device; copies and fills are none. Microseconds."""

    name: str
    start_us: float
    end_us: float


@dataclass(frozen=True, slots=True)
class Gap:
    """A time in which no kernel ran."""

    ms: float
    after: str
    """The kernel that ran before it."""
    before: str


def longest_gaps(kernels: Iterable[Kernel]) -> list[Gap]:
    """The times between kernels, the longest first, and as many as TOP."""
    gaps: list[Gap] = []
    latest: Kernel | None = None
    for one in sorted(kernels, key=lambda kernel: kernel.start_us):
        if latest is not None and one.start_us > latest.end_us:
            gaps.append(Gap((one.start_us - latest.end_us) / 1e3, latest.name, one.name))
        if latest is None or one.end_us > latest.end_us:
            latest = one
    return sorted(gaps, key=lambda gap: -gap.ms)[:TOP]


@dataclass(slots=True)
class Window:
    """A profiler that is on for some batches of a run; afterwards it calls `stop`, to end the run."""

    stop: Callable[[], None]
    kernels: list[Kernel] = field(default_factory=list)
    """That ran meanwhile."""
    batches: int = 0
    _profiler: Any = None
    _started_s: float = 0.0
    _first: int = 0
    _is_over: bool = False

    @property
    def idle_share(self) -> float | None:
        """1 - the union of kernels' time over the time from the first kernel's start to the last one's end."""
        return idle_share([(one.start_us, one.end_us) for one in self.kernels])

    @property
    def seconds(self) -> float:
        if not self.kernels:
            return 0.0
        return (max(one.end_us for one in self.kernels) - min(one.start_us for one in self.kernels)) / 1e6

    def at_batch(self, number: int) -> None:
        """To be called before each batch is submitted."""
        if self._is_over or number < SKIPPED_BATCHES:
            return
        if self._profiler is None:
            self._profiler = torch.profiler.profile(activities=[ProfilerActivity.CUDA])
            self._profiler.start()
            self._started_s, self._first = time.perf_counter(), number
        elif number - self._first >= MIN_BATCHES and time.perf_counter() - self._started_s >= MIN_S:
            self.close(number)
            self.stop()

    def close(self, number: int) -> None:
        """Turn the profiler off, before batch `number`, if it is on."""
        if self._profiler is None or self._is_over:
            return
        self._is_over = True
        self.batches = number - self._first
        self._profiler.stop()
        self.kernels = kernels_of(self._profiler)


def touch_profiler() -> None:
    """Attach the device's tracing for good: the kernels of a graph are seen only if it was there at the capture."""
    os.environ |= {"DISABLE_CUPTI_LAZY_REINIT": "1", "TEARDOWN_CUPTI": "0"}
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]):
        torch.zeros(1, device="cuda").add_(1)
        torch.cuda.synchronize()


def kernels_of(profiler: Any) -> list[Kernel]:
    """What a stopped profiler saw."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_bytes())["traceEvents"]
    return [
        Kernel(event["name"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "kernel"
    ]


@dataclass(frozen=True, slots=True)
class KernelTime:
    """A kernel (on a CPU an operator) of a profiled call, all its calls together."""

    name: str
    calls: int
    ms: float
    share: float


def kernel_times(call: Callable[[], object], device: torch.device) -> list[KernelTime]:
    """Where the device time of one call goes."""
    for _ in range(WARM_UPS):
        call()
    if device.type != "cuda":
        with torch.profiler.profile(activities=[ProfilerActivity.CPU]) as profiler:
            call()
        return most((one.key, one.count, one.self_cpu_time_total / 1e3) for one in profiler.key_averages())
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize(device)
    return most((one.name, 1, (one.end_us - one.start_us) / 1e3) for one in kernels_of(profiler))


def most(spent: Iterable[tuple[str, int, float]]) -> list[KernelTime]:
    """Names with calls and milliseconds, summed by name: those that took longest, then a line of everything."""
    calls: dict[str, int] = defaultdict(int)
    ms: dict[str, float] = defaultdict(float)
    for name, count, time_ms in spent:
        calls[name] += count
        ms[name] += time_ms
    total = sum(ms.values())
    rows = [
        KernelTime(name, calls[name], ms[name], share(ms[name], total))
        for name in sorted(ms, key=lambda name: -ms[name])[:TOP]
    ]
    return [*rows, KernelTime("everything", sum(calls.values()), total, 1.0)]
