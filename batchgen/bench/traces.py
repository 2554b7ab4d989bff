"""What torch.profiler saw on the device: when it was busy in a running job, and which kernels a call spends it on."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from batchgen.bench.figures import Interval, idle_share, share

SKIPPED_BATCHES = 2
"""At the start of a run, until the next batch always waits behind the one at work."""
MIN_BATCHES = 3
MIN_S = 5.0
WARM_UPS = 3


@dataclass(slots=True)
class Window:
    """A profiler that is on for some batches of a run; afterwards it calls `stop`, to end the run."""

    stop: Callable[[], None]
    busy_s: list[Interval] = field(default_factory=list)
    """Each kernel's start and end."""
    batches: int = 0
    _profiler: Any = None
    _started_s: float = 0.0
    _first: int = 0
    _is_over: bool = False

    @property
    def idle_share(self) -> float | None:
        """1 - the union of kernels' time over the time from the first kernel's start to the last one's end."""
        return idle_share(self.busy_s)

    @property
    def seconds(self) -> float:
        return max(end for _, end in self.busy_s) - min(start for start, _ in self.busy_s) if self.busy_s else 0.0

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
        self.busy_s = kernel_intervals(self._profiler)


def kernel_intervals(profiler: Any) -> list[Interval]:
    """Start and end, in seconds, of each kernel that a stopped profiler saw; copies and fills are none."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_bytes())["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    return [(event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in kernels]


@dataclass(frozen=True, slots=True)
class KernelTime:
    """A kernel (on a CPU an operator) of a profiled call."""

    name: str
    calls: int
    ms: float
    share: float


def kernel_times(call: Callable[[], object], device: torch.device, top: int = 12) -> list[KernelTime]:
    """Where the device time of one call goes, the largest first, and a last line of everything."""
    for _ in range(WARM_UPS):
        call()
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.synchronize(device)
    activity = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        call()
        if is_cuda:
            torch.cuda.synchronize(device)
    spent = [
        (one.key, one.count, (one.self_device_time_total if is_cuda else one.self_cpu_time_total) / 1e3)
        for one in profiler.key_averages()
    ]
    spent = sorted((one for one in spent if one[2] > 0), key=lambda one: -one[2])
    total = sum(ms for _, _, ms in spent)
    rows = [KernelTime(name, calls, ms, share(ms, total)) for name, calls, ms in spent[:top]]
    return [*rows, KernelTime("everything", sum(calls for _, calls, _ in spent), total, 1.0)]
