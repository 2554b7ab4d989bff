"""What the receipts say of time, stages, captures and memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from batchgen.ledger import Receipt
from batchgen.records import Captured

BREAK_S = 120.0
"""Without any worker at work: a break, which charts leave out."""
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Span:
    """An epoch's time, and the rows that it settled."""

    started_s: float
    ended_s: float
    rows: int
    worker: int
    """Place among the workers."""


@dataclass(slots=True)
class WorkerTime:
    """One start of a worker."""

    host: str
    pid: int
    device: str
    rows: int = 0


@dataclass(slots=True)
class CaptureCount:
    """Captures of one bucket on one device."""

    device: str
    bucket: str
    mode: str
    count: int = 0
    seconds: float = 0.0
    compile_s: float = 0.0
    held_bytes: int = 0
    """The most of any."""

    def add(self, one: Captured) -> None:
        self.count += 1
        self.seconds += one.seconds
        self.compile_s += one.compile_s
        self.held_bytes = max(self.held_bytes, one.held_bytes)


@dataclass(slots=True)
class Spending:
    """Sums over receipts."""

    spans: list[Span] = field(default_factory=list)
    workers: list[WorkerTime] = field(default_factory=list)
    stage_s: dict[str, float] = field(default_factory=dict)
    captures: dict[tuple[str, str, str], CaptureCount] = field(default_factory=dict)
    memory: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Most bytes in use and all bytes, by device."""
    versions: dict[str, set[str]] = field(default_factory=dict)
    num_untimed: int = 0
    """Receipts of versions that recorded none of this."""
    _places: dict[str, int] = field(default_factory=dict)

    def add(self, receipt: Receipt, rows: int) -> None:
        """Count a committed receipt, and those of its rows that count."""
        device = receipt.versions.get("device", "")
        for name, version in receipt.versions.items():
            self.versions.setdefault(name, set()).add(version)
        worker = self._places.setdefault(receipt.by.token, len(self.workers))
        if worker == len(self.workers):
            self.workers.append(WorkerTime(receipt.by.host, receipt.by.pid, device))
        self.workers[worker].rows += rows
        if not receipt.ended_s:
            self.num_untimed += 1
            return
        ended_s = max(receipt.started_s, receipt.ended_s)  # A clock may have been set back meanwhile.
        self.spans.append(Span(receipt.started_s, ended_s, rows, worker))
        for stage, seconds in receipt.spent.stage_s.items():
            self.stage_s[stage] = self.stage_s.get(stage, 0.0) + seconds
        for one in receipt.spent.captures:
            key = (device, one.bucket, one.mode)
            self.captures.setdefault(key, CaptureCount(*key)).add(one)
        if receipt.spent.peak_bytes:
            peak, total = self.memory.get(device, (0, 0))
            self.memory[device] = max(peak, receipt.spent.peak_bytes), max(total, receipt.spent.device_bytes)

    def busy_s(self, worker: int) -> float:
        """The time of a worker's epochs; where they overlap, once."""
        own = (span for span in self.spans if span.worker == worker)
        return sum(end - start for start, end in _stretches(own, break_s=0.0))


@dataclass(frozen=True, slots=True)
class Pace:
    """Images a second over the time that any worker was at work; breaks are cut out."""

    edges_s: Floats
    """`[N + 1]`: of the bins, from the first start on."""
    rates: Mapping[str, Floats]
    """`[N]` images/s of each worker, or of all together."""
    breaks_s: Sequence[float]
    """Where breaks were cut out, in seconds of work."""
    cut_s: float
    """All breaks together."""

    @property
    def work_s(self) -> float:
        return float(self.edges_s[-1])

    @property
    def total(self) -> Floats:
        """`[N]` images/s of all workers."""
        return np.sum(list(self.rates.values()), axis=0)  # type: ignore[no-any-return]


def pace(spending: Spending, num_bins: int = 90, max_workers: int = 6) -> Pace | None:
    """An epoch's rows are spread evenly over its time. None where no receipt says when it was."""
    stretches = _stretches(spending.spans)
    if not stretches:
        return None
    offsets = np.cumsum([0.0, *(end - start for start, end in stretches)])
    starts = [start for start, _ in stretches]
    edges = np.linspace(0.0, max(offsets[-1], 1e-3), num_bins + 1)

    def at_work(moment_s: float) -> float:
        place = bisect_right(starts, moment_s) - 1
        return float(offsets[place]) + moment_s - stretches[place][0]

    is_apart = 1 < len(spending.workers) <= max_workers
    rates = {name: np.zeros(num_bins) for name in (_names(spending.workers) if is_apart else ["all workers"])}
    series = list(rates.values())
    for span in spending.spans:
        start, end = at_work(span.started_s), at_work(span.ended_s)
        _spread(series[span.worker if is_apart else 0], edges, start, end, span.rows)
    gaps = [later - earlier for (_, earlier), (later, _) in pairwise(stretches)]
    return Pace(edges, rates, offsets[1:-1].tolist(), sum(gaps))


def _names(workers: Sequence[WorkerTime]) -> list[str]:
    return [f"{number}: {one.host}, process {one.pid}" for number, one in enumerate(workers, 1)]


def _stretches(spans: Iterable[Span], break_s: float = BREAK_S) -> list[tuple[float, float]]:
    """Times in which somebody was at work, ascending, with longer breaks between them."""
    found: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda one: one.started_s):
        if found and span.started_s - found[-1][1] <= break_s:
            found[-1] = (found[-1][0], max(found[-1][1], span.ended_s))
        else:
            found.append((span.started_s, span.ended_s))
    return found


def _spread(rates: Floats, edges: Floats, start: float, end: float, rows: int) -> None:
    """Add rows to the bins that they fall into, in rows a second."""
    width = edges[1] - edges[0]
    if end - start < 1e-6:
        rates[min(len(rates) - 1, int(start / width))] += rows / width
        return
    inside = np.clip(np.minimum(edges[1:], end) - np.maximum(edges[:-1], start), 0.0, None)
    rates += rows * inside / (end - start) / width
