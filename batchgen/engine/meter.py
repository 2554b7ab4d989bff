"""What batches cost on a GPU: device seconds by stage, and seconds and memory by bucket. Nothing on a CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from batchgen.cost import Measurement
from batchgen.models.transfer import Mark
from batchgen.records import Bucket
from batchgen.schedule import makespan

STAGES = ("text", "denoise", "decode")


@dataclass(slots=True)
class Watch:
    """One batch on its way: a mark before each stage and one after the last."""

    device: torch.device
    marks: list[Mark] = field(default_factory=list)
    peak_bytes: int = 0
    """Most memory that was allocated while it was queued."""

    def pass_stage(self) -> None:
        """Note that the next stage begins, or that the last one has ended."""
        self.marks.append(Mark(self.device))
        if self.device.type == "cuda":
            self.peak_bytes = torch.cuda.max_memory_allocated(self.device)


class Meter:
    """Gathers what watched batches cost."""

    def __init__(self, device: torch.device) -> None:
        self.stage_s: dict[str, float] = dict.fromkeys(STAGES, 0.0)
        """Device seconds, of batches whose outcomes were asked for."""
        self.peak_bytes = 0
        """The most memory of any of them, graphs included."""
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._weights_bytes = torch.cuda.memory_allocated(device) if self._is_cuda else 0
        self._measured: dict[Bucket, Measurement] = {}
        self._encoding: tuple[Mark, Mark, int] | None = None
        self._text_row_s = 0.0

    @property
    def measurements(self) -> Sequence[Measurement]:
        return tuple(self._measured.values())

    @contextmanager
    def encoding(self, num_rows: int) -> Iterator[None]:
        """A shard's texts are encoded in the block."""
        start = Mark(self._device)
        yield
        self._encoding = (start, Mark(self._device), max(1, num_rows))

    def watch(self) -> Watch:
        """Watch a batch, whose first stage begins."""
        self.forget_peak()
        watch = Watch(self._device)
        watch.pass_stage()
        return watch

    def forget_peak(self) -> None:
        """Have what was allocated until now not counted as a batch's."""
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)

    def count(self, watch: Watch, num_rows: int, held_bytes: int) -> list[float]:
        """Add the stages of a batch that the device has passed, while graphs held so much. Their seconds, with its
        share of the shard's texts."""
        if self._is_cuda:
            self.peak_bytes = max(self.peak_bytes, watch.peak_bytes + held_bytes)
        stage_s = [end.seconds_since(start) for start, end in pairwise(watch.marks)]
        if self._encoding is not None:
            start, end, num_texts = self._encoding
            self._encoding = None
            self.stage_s["text"] += end.seconds_since(start)
            self._text_row_s = end.seconds_since(start) / num_texts
        for stage, seconds in zip(STAGES, stage_s, strict=True):
            self.stage_s[stage] += seconds
        stage_s[0] += self._text_row_s * num_rows
        return stage_s

    def measure(
        self, bucket: Bucket, mode: str, evaluations: Sequence[int], stage_s: Sequence[float], peak_bytes: int
    ) -> None:
        """Keep what a batch of a bucket, with these evaluations of its rows, cost: the least time of any, the most
        memory. Of rows that took turns as many are reckoned as there are lanes."""
        if not self._is_cuda:
            return
        text_s, denoise_s, decode_s = stage_s
        share = min(1.0, bucket.size / len(evaluations))
        num = makespan(evaluations, bucket.size)
        before = self._measured.get(bucket)
        self._measured[bucket] = Measurement(
            bucket.group.width,
            bucket.group.height,
            bucket.group.is_guided,
            bucket.size,
            fixed_s=min(share * (text_s + decode_s), before.fixed_s if before else math.inf),
            evaluation_s=min(denoise_s / num, before.evaluation_s if before else math.inf),
            peak_bytes=max(peak_bytes, (before.peak_bytes or 0) if before else 0),
            weights_bytes=self._weights_bytes,
            device_bytes=torch.cuda.get_device_properties(self._device).total_memory,
            mode=mode,
        )
