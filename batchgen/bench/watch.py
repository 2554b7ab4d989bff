"""A generator that notes when batches come in, and leaves everything else to the engine that it watches."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from batchgen.cost import Measurement
from batchgen.engine.engine import Engine
from batchgen.generator import Pending
from batchgen.records import Batch, Bucket, Image, Outcome, Spent


class Watched:
    """An engine at work in a run; a `batchgen.generator.Generator`.

    It warms up before the first shard: the longest row of the first batch is made in each bucket of its group, so that
    the modes are chosen and these buckets compiled and captured, with room for that many steps. The
    steady time begins then, before the shard's prompts are encoded.
    """

    def __init__(
        self,
        engine: Engine,
        buckets: Iterable[Bucket],
        *,
        is_learning: bool = False,
        at_batch: Callable[[int], None] = lambda number: None,
    ) -> None:
        self.engine = engine
        self.versions: Mapping[str, str] = engine.versions
        self.first_in_s: float | None = None
        """By `time.perf_counter`."""
        self.warm_up_s = 0.0
        self.batches: list[Batch] = []
        self.modes: Counter[str] = Counter()
        """Images by mode."""
        self.peak_bytes = (0, 0)
        """Allocated and reserved."""
        self._buckets = tuple(buckets)
        self._is_learning = is_learning
        self._at_batch = at_batch
        self._stage_s: Mapping[str, float] = {}
        self._captures = 0

    def prepare(self, batches: Sequence[Batch], should_drop: Callable[[], bool]) -> None:
        """As Generator.prepare."""
        if self.first_in_s is None:
            started = time.perf_counter()
            try:
                self._warm_up(batches[0], should_drop)
            finally:  # what does not fit into memory does not end a run
                self.first_in_s = time.perf_counter()
                self.warm_up_s = self.first_in_s - started
        self.engine.prepare(batches, should_drop)

    def submit(self, batch: Batch, should_drop: Callable[[], bool]) -> Pending:
        """As Generator.submit."""
        self._at_batch(len(self.batches))
        self._see_peak()
        self.batches.append(batch)
        pending = self.engine.submit(batch, should_drop)

        def outcomes() -> list[Outcome]:
            found = pending()
            self._see_peak()
            self.modes.update(one.mode for one in found if isinstance(one, Image))
            return found

        return outcomes

    def spent(self) -> Spent:
        return self.engine.spent()

    def measurements(self) -> Sequence[Measurement]:
        """As Generator.measurements, where they are to be kept for later plans."""
        return self.engine.measurements() if self._is_learning else ()

    def _see_peak(self) -> None:
        # The engine resets the device's own peaks when it enters a group.
        if self.engine.device.type == "cuda":
            seen = (
                torch.cuda.max_memory_allocated(self.engine.device),
                torch.cuda.max_memory_reserved(self.engine.device),
            )
            self.peak_bytes = max(self.peak_bytes[0], seen[0]), max(self.peak_bytes[1], seen[1])

    def _warm_up(self, batch: Batch, should_drop: Callable[[], bool]) -> None:
        self.engine.prepare([batch], should_drop)
        for bucket in self._buckets:
            if bucket.group == batch.group:
                self.engine.submit(replace(batch, size=bucket.size, rows=batch.rows[-1:]), should_drop)()
        self._stage_s = dict(self.engine.stage_s)
        self._captures = len(self.engine.steps.captures)

    def stage_s(self) -> dict[str, float]:
        """Device seconds per stage since the first batch came in."""
        return {stage: seconds - self._stage_s.get(stage, 0.0) for stage, seconds in self.engine.stage_s.items()}

    def capture_s(self) -> float:
        """Seconds of compiling and capturing since then: they are part of the steady time."""
        return sum(capture.seconds for capture in self.engine.steps.captures[self._captures :])
