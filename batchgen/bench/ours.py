"""batchgen measured end to end: a manifest in, durable PNG files out, by the very call that `batchgen run` makes."""

from __future__ import annotations

import gc
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from batchgen.balance import Balance
from batchgen.bench.figures import Say, rate, share
from batchgen.bench.traces import Gap, Window, longest_gaps, touch_profiler
from batchgen.bench.watch import Watched
from batchgen.bench.workload import Wanted, write_manifest
from batchgen.drafts import Draft
from batchgen.engine.engine import Engine
from batchgen.errors import BatchgenError
from batchgen.generator import Context, Generator
from batchgen.job import Job
from batchgen.planned import Planned
from batchgen.progress import Now, Progress
from batchgen.records import Batch
from batchgen.runner import Terms, run_job, work
from batchgen.stopping import Stop


@dataclass(frozen=True, slots=True)
class Ours:
    """What a run did. Bytes, seconds on the device and the idle share are None on a CPU."""

    images: int
    failed: int
    steady_s: float
    """From the first batch in, warm, to the last durable and published file."""
    steady_images_per_s: float
    cold_s: float
    """Everything: planning, hashing and loading the model, warming up, all images, the final tables."""
    cold_images_per_s: float
    load_s: float
    warm_up_s: float
    """One row more in each bucket of the first group: choosing modes, compiling and capturing."""
    stage_s: dict[str, float] | None
    """Device seconds, of the steady time."""
    modes: dict[str, int]
    """Images by mode."""
    captures: list[dict[str, Any]]
    steady_capture_s: float
    """Of the steady time: buckets of later groups."""
    costs: str
    """What the plan went by."""
    batches: dict[int, int]
    """By batch size."""
    padded_rows_share: float
    idle_row_steps_share: float
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None


@dataclass(frozen=True, slots=True)
class Idle:
    """How busy the device was in the middle of another run."""

    idle_share: float | None
    window_s: float
    batches: int
    kernels: int
    gaps: list[Gap]
    """The longest times in which it did nothing."""


@dataclass(slots=True)
class _Listener:
    """Hears what the run says and when its last file is durable."""

    say: Say
    ended_s: float = 0.0
    failed: int = 0
    made: int = 0

    def count(self, made: int, failed: int) -> None:
        self.made += made
        self.failed += failed

    def show(self, now: Now, who: str = "") -> None:
        pass

    @contextmanager
    def listening(self, balance: Balance) -> Iterator[Progress]:
        yield self
        self.ended_s = time.perf_counter()


@dataclass(slots=True)
class Bench:
    """One job and one manifest, to be run once for the clock and once more for the profiler, by one engine."""

    job: Job
    wanted: list[Wanted]
    folder: Path
    say: Say
    is_learning: bool = False
    """Whether the costs that were measured are kept for later plans, as a run keeps them."""
    engine: Engine | None = None
    watched: Watched | None = None
    draft: Draft | None = None
    _load_s: float = 0.0
    _window: Window | None = field(default=None)

    def run(self) -> Ours:
        """The timed run. Raises BatchgenError if it does not make every image."""
        started = time.perf_counter()
        heard = self._run(Stop())
        cold_s = time.perf_counter() - started
        assert self.watched is not None
        assert self.watched.first_in_s is not None
        assert self.draft is not None
        if heard.made != len(self.wanted):
            raise BatchgenError(f"batchgen made {heard.made} of {len(self.wanted)} images, {heard.failed} failed")
        steady_s = heard.ended_s - self.watched.first_in_s
        is_cuda = self.watched.engine.device.type == "cuda"
        padded, idle = wasted(self.draft)
        return Ours(
            images=heard.made,
            failed=heard.failed,
            steady_s=steady_s,
            steady_images_per_s=rate(heard.made, steady_s),
            cold_s=cold_s,
            cold_images_per_s=rate(heard.made, cold_s),
            load_s=self._load_s,
            warm_up_s=self.watched.warm_up_s,
            stage_s=self.watched.stage_s() if is_cuda else None,
            modes=dict(self.watched.modes),
            captures=[asdict(one) for one in self.watched.engine.steps.captures],
            steady_capture_s=self.watched.capture_s(),
            costs=self.draft.cost.source,
            batches=self._batches(),
            padded_rows_share=padded,
            idle_row_steps_share=idle,
            peak_allocated_bytes=self.watched.peak_bytes[0] if is_cuda else None,
            peak_reserved_bytes=self.watched.peak_bytes[1] if is_cuda else None,
        )

    def profile(self) -> Idle:
        """A second run, cut short once the profiler has seen enough of it."""
        assert self.engine is not None
        touch_profiler()
        self.engine.free()
        stop = Stop()
        self._window = Window(lambda: stop.on_signal(signal.SIGTERM, None))
        try:
            self._run(stop)
        finally:
            assert self.watched is not None
            self._window.close(len(self.watched.batches))
        window, self._window = self._window, None
        gaps = longest_gaps(window.kernels)
        return Idle(window.idle_share, window.seconds, window.batches, len(window.kernels), gaps)

    def close(self) -> None:
        """Give the device's memory back."""
        self.engine = self.watched = None
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @property
    def largest(self) -> Batch:
        """The batch with the most pixels of those that ran."""
        assert self.watched is not None
        return max(self.watched.batches, key=lambda one: one.size * one.group.width * one.group.height)

    def _run(self, stop: Stop) -> _Listener:
        heard = _Listener(self.say)
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="run-") as scratch:
            manifest = Path(scratch) / "manifest.parquet"
            write_manifest(manifest, self.wanted)
            run_job(
                [manifest],
                Path(scratch) / "out",
                self.job,
                Terms(
                    stop=stop,
                    on_planned=self._keep_draft,
                    progress=heard.listening,
                    workforce=partial(work, opener=self._open),
                ),
            )
        return heard

    def _open(self, job: Job, context: Context) -> Generator:
        if self.engine is None:
            started = time.perf_counter()
            self.engine = Engine(job, context)
            self._load_s = time.perf_counter() - started
        at_batch = self._window.at_batch if self._window else lambda number: None
        self.watched = Watched(self.engine, context.work, is_learning=self.is_learning, at_batch=at_batch)
        return self.watched

    def _keep_draft(self, planned: Planned) -> None:
        self.draft = planned.draft

    def _batches(self) -> dict[int, int]:
        assert self.watched is not None
        sizes = [batch.size for batch in self.watched.batches]
        return {size: sizes.count(size) for size in sorted(set(sizes), reverse=True)}


def wasted(draft: Draft) -> tuple[float, float]:
    """Of a plan: the share of padded rows, and the share of row evaluations in which the lane of a finished row
    stands still."""
    cut = draft.cut
    padded, evaluations = int(cut.batch_padding.sum()), int((cut.batch_size * cut.batch_evaluations).sum())
    return share(padded, cut.num_rows + padded), share(int(cut.idle_evaluations.sum()), evaluations)
