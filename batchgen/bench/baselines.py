"""What people run otherwise: diffusers' own pipeline, its pictures written as PNG by as many threads."""

from __future__ import annotations

import gc
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import diffusers
import torch

from batchgen.bench.building import network_of
from batchgen.bench.figures import Say, rate, spread
from batchgen.bench.workload import Wanted
from batchgen.errors import BatchgenError
from batchgen.models.facts import Facts
from batchgen.models.folder import facts_of
from batchgen.models.reading import read_json
from batchgen.weights import Model
from batchgen.wording import first_line

TRIED_BATCHES = (4, 8, 16, 32)
LOOP_CALLS = 5
"""A sampled loop at batch 1 makes this many calls for every batch of the others."""
SIZE_CALLS = 2
"""A sampled baseline per size makes this many sizes for every batch of the others."""
WARM_UP_STEPS = 2
Call = tuple[Wanted, ...]
"""Rows of one size, step count and guidance scale that the pipeline makes in one call."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """One way to call diffusers, timed."""

    name: str
    batch_size: int
    """Of its largest call."""
    images: int
    calls: int
    of_calls: int
    """What the whole workload would take; fewer were sampled if it is more than `calls`."""
    seconds: float
    """Until the last picture is made; until the last file is written where nothing was sampled."""
    images_per_s: float
    warm_up_s: float
    """Not counted: compiling, and a call of each shape with few steps."""
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None


def in_batches(rows: Sequence[Wanted], size: int) -> list[Call]:
    """Rows that agree in all but prompt and seed, `size` at a time."""
    return [tuple(rows[start : start + size]) for start in range(0, len(rows), size)]


def to_sample(calls: list[Call], wanted: int) -> list[Call]:
    """What a sample of `wanted` batches is drawn from: the full ones, where there are as many."""
    full = [call for call in calls if len(call) == len(calls[0])]
    return full if 0 < wanted <= len(full) else calls


def per_set(rows: Iterable[Wanted], size: int) -> list[Call]:
    """One call for each exact set of width, height, steps and guidance, of at most `size` rows, by a row's work."""
    sets: dict[tuple[object, ...], list[Wanted]] = defaultdict(list)
    for row in rows:
        sets[row.width, row.height, row.steps, row.guidance_scale].append(row)
    calls = [call for alike in sets.values() for call in in_batches(alike, size)]
    return sorted(calls, key=lambda call: call[0].work)


def per_size(rows: Sequence[Wanted], size: int) -> list[list[Call]]:
    """For each size its calls, every row given the workload's mean step count and guidance scale."""
    steps = round(statistics.fmean(row.steps for row in rows))
    guidance = round(statistics.fmean(row.guidance_scale for row in rows), 1)
    sizes: dict[tuple[int, int], list[Wanted]] = defaultdict(list)
    for row in rows:
        sizes[row.size].append(replace(row, steps=steps, guidance_scale=guidance))
    return [in_batches(alike, size) for _, alike in sorted(sizes.items(), key=lambda one: one[1][0].work)]


@dataclass(slots=True)
class Diffusers:
    """The pipeline of a folder on a device, and how it is timed."""

    path: Path
    device: torch.device
    threads: int
    sample: int
    """Batches that each baseline makes; 0 makes the whole workload."""
    say: Say
    pipeline: Any = None

    @property
    def facts(self) -> Facts:
        """What is known of the folder's model."""
        return facts_of(Model(path=str(self.path)))

    def loop(self, rows: Sequence[Wanted]) -> Baseline:
        """One row a call."""
        return self._timed("loop", in_batches(rows, 1), self.sample * LOOP_CALLS)

    def best(self, rows: Sequence[Wanted]) -> Baseline:
        """The fastest eager batch size: one batch of each is timed, then as many of the fastest as are sampled, since
        a GPU clocks down within seconds of full load."""
        fastest = self.fastest(rows)
        if self.sample == fastest.calls:
            return fastest
        return self._batches("best", rows, fastest.batch_size, self.sample)

    def fastest(self, rows: Sequence[Wanted]) -> Baseline:
        """Of one batch of each size that the device holds and the workload fills."""
        tried: list[Baseline] = []
        for size in TRIED_BATCHES:
            if tried and size > len(rows):
                break
            try:
                tried.append(self._batches("best", rows, size, 1))
            except torch.OutOfMemoryError as error:
                self.say(f"  batch {size} does not fit: {first_line(error)}")
                break
        if not tried:
            raise BatchgenError(
                f"diffusers cannot make {TRIED_BATCHES[0]} images at once on {self.device}: its memory is too small; "
                "leave out what needs a batch with --baselines loop, or none"
            )
        return max(tried, key=lambda one: one.images_per_s)

    def compiled(self, rows: Sequence[Wanted], size: int, mode: str) -> Baseline:
        """A batch size with network and decoder compiled and their weights channels-last, for good."""
        self._load()
        name = network_of(self.pipeline)
        network = getattr(self.pipeline, name)
        for part in (network, self.pipeline.vae):
            part.to(memory_format=torch.channels_last)
        options: dict[str, Any] = {"fullgraph": True, "dynamic": False, "mode": mode}
        setattr(self.pipeline, name, torch.compile(network, **options))
        self.pipeline.vae.decode = torch.compile(self.pipeline.vae.decode, **options)
        return self._batches("compiled", rows, size, self.sample)

    def exact(self, rows: Sequence[Wanted]) -> Baseline:
        """A call for every exact parameter set, sampled evenly by the work of a call."""
        return self._timed("exact", per_set(rows, TRIED_BATCHES[-1]), self.sample * LOOP_CALLS)

    def sized(self, rows: Sequence[Wanted]) -> Baseline:
        """Size after size at one step count and guidance, at the batch size that is best for the middle one; sampled
        evenly by area."""
        alike = per_size(rows, len(rows))
        middle = [row for call in alike[len(alike) // 2] for row in call]
        enough = max(len(middle), TRIED_BATCHES[-1])
        size = self.fastest(list(islice(cycle(middle), enough))).batch_size
        sizes = per_size(rows, size)
        picked = [sizes[place] for place in spread(len(sizes), self.sample * SIZE_CALLS)]
        calls = [call for one in picked for call in one]
        return self._timed("sized", calls, 0, of_calls=sum(map(len, sizes)))

    def close(self) -> None:
        """Give the device's memory back."""
        self.pipeline = None
        torch._dynamo.reset()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _load(self) -> None:
        if self.pipeline is not None:
            return
        dtype = getattr(torch, self.facts.half_dtype) if self.device.type == "cuda" else torch.float32
        index = read_json(self.path / "model_index.json")
        without = {name: None for name, entry in index.items() if entry == [None, None]}
        made = diffusers.DiffusionPipeline.from_pretrained(self.path, torch_dtype=dtype, **without)
        made.set_progress_bar_config(disable=True)
        self.pipeline = made.to(self.device)

    def _batches(self, name: str, rows: Sequence[Wanted], size: int, sample: int) -> Baseline:
        """Rows that agree in all but prompt and seed, `size` at a time."""
        calls = in_batches(rows, size)
        return self._timed(name, to_sample(calls, sample), sample, len(calls))

    def _timed(self, name: str, calls: list[Call], sample: int, of_calls: int = 0) -> Baseline:
        self._load()
        picked = [calls[place] for place in spread(len(calls), sample)]
        self._set_sampler(picked[0][0].sampler)
        is_cuda = self.device.type == "cuda"
        if is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        started = time.perf_counter()
        for call in {(call[0].size, len(call)): call for call in picked}.values():
            self._make(tuple(replace(row, steps=WARM_UP_STEPS) for row in call))
        warm_up_s = time.perf_counter() - started
        made_s, written_s = self._write(picked)
        images = sum(map(len, picked))
        whole = of_calls or len(calls)
        seconds = written_s if len(picked) == whole else made_s
        baseline = Baseline(
            name,
            max(map(len, picked)),
            images,
            len(picked),
            whole,
            seconds,
            rate(images, seconds),
            warm_up_s,
            torch.cuda.max_memory_allocated(self.device) if is_cuda else None,
            torch.cuda.max_memory_reserved(self.device) if is_cuda else None,
        )
        self.say(f"  {line(baseline)}")
        return baseline

    def _write(self, calls: Sequence[Call]) -> tuple[float, float]:
        """Seconds until the last picture was made and until the last file was written."""
        with tempfile.TemporaryDirectory(prefix="baseline-") as scratch, ThreadPoolExecutor(self.threads) as pool:
            writing: list[Future[None]] = []
            started = time.perf_counter()
            for call in calls:
                for row, image in zip(call, self._make(call), strict=True):
                    writing.append(pool.submit(image.save, Path(scratch) / f"{row.seed:07}-{len(writing)}.png"))
            made_s = time.perf_counter() - started
            for one in writing:
                one.result()
            return made_s, time.perf_counter() - started

    def _make(self, call: Call) -> list[Any]:
        """The pictures of one call."""
        return list(
            self.pipeline(
                prompt=[row.prompt for row in call],
                width=call[0].width,
                height=call[0].height,
                num_inference_steps=call[0].steps,
                guidance_scale=call[0].guidance_scale,
                generator=[torch.Generator("cpu").manual_seed(row.seed) for row in call],
            ).images
        )

    def _set_sampler(self, name: str) -> None:
        known = self.facts.sampler_facts(name)
        scheduler = getattr(diffusers, known.scheduler)
        self.pipeline.scheduler = scheduler.from_config(self.pipeline.scheduler.config, **known.options)


def line(one: Baseline) -> str:
    """A baseline in words."""
    sampled = "all" if one.calls == one.of_calls else f"{one.calls} of {one.of_calls} calls"
    return (
        f"diffusers {one.name:9} batch {one.batch_size:3}: {one.images_per_s:7.3f} images/s ({one.images} images, "
        f"{sampled}, {one.seconds:.1f} s; warm-up {one.warm_up_s:.1f} s)"
    )
