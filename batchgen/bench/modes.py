"""The modes of one model side by side: an evaluation's time and deviation in each, and what captures leave behind."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from batchgen.bench.architectures import ARCHITECTURES, Architecture
from batchgen.bench.building import ensure_folder
from batchgen.bench.evaluations import Evaluation, batch_of, evaluation, median_s
from batchgen.bench.figures import Say, save
from batchgen.bench.surroundings import quieten, versions, workplace
from batchgen.bench.workload import SIZES
from batchgen.engine.attention import attention, present
from batchgen.engine.compiling import KERNELS, Compiler, mode_of
from batchgen.engine.devices import device_name, find_device
from batchgen.engine.engine import Engine
from batchgen.engine.graphs import GraphPool
from batchgen.engine.steps import CHECKED_STEPS
from batchgen.errors import UsageError
from batchgen.job import Job, load_job
from batchgen.models.family import Network
from batchgen.records import Bucket

Place = tuple[int, int, int]
"""Batch size, width, height."""
MODES = ("eager", "graph", "regional", "regional+graph", "compiled", "compiled+graph")
REPLAYS = 15


@dataclass(frozen=True, slots=True)
class ModeTime:
    """A bucket in one mode under one attention kernel."""

    bucket: str
    attention: str
    mode: str
    ms: float
    """Median of an evaluation, on the device."""
    prepare_s: float
    """Compiling and capturing."""
    is_identical: bool
    """Whether the latents after two steps are those of eager, bit for bit."""
    relative_error: float
    """Of the latents after two steps, largest deviation from eager over the largest value."""
    relative_rms_error: float

    def __str__(self) -> str:
        bits = (
            "same bits" if self.is_identical else f"error {self.relative_error:.1e}, rms {self.relative_rms_error:.1e}"
        )
        return f"{self.bucket} {self.attention:7} {self.mode:14} {self.ms:9.3f} ms  {bits}  ({self.prepare_s:.0f} s)"


@dataclass(frozen=True, slots=True)
class Held:
    """The device's memory after a bucket was captured and used."""

    bucket: str
    reserved_bytes: int
    allocated_bytes: int


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line asks for."""

    arch: str
    batches: tuple[int, ...]
    """Batch sizes to time, at the architecture's own size."""
    modes: tuple[str, ...] = MODES
    captured_batch: int | None = None
    """Batch size of the 40 sizes to capture one after another."""
    overrides: tuple[str, ...] = ()
    """Of the job."""
    folder: Path | None = None
    json_file: Path | None = None


@dataclass(slots=True)
class Report:
    """What was measured; what was not asked for is empty or None."""

    arch: str
    device: str
    versions: dict[str, str]
    times: list[ModeTime] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    """The largest bucket first, alone so far."""
    over_largest_bytes: int | None = None
    """The most that is reserved after any bucket, less what the largest one reserved alone."""


def check_modes(modes: Sequence[str]) -> None:
    """Raises UsageError for a mode that there is not."""
    for mode in modes:
        if mode not in MODES:
            raise UsageError(f"--modes {mode!r} is not known; allowed: {', '.join(MODES)}")


def time_modes(
    engine: Engine, bucket: Place, guidance: float, kernels: str | None, modes: Sequence[str]
) -> list[ModeTime]:
    """One bucket in the given modes under one attention kernel; None is torch's own choice."""
    one = evaluation(engine, *bucket, guidance, "euler")
    times = []
    for kernels_of in KERNELS:
        # As the engine lays them out: compiled convolutions want channels-last weights.
        layout = torch.contiguous_format if kernels_of == "eager" else torch.channels_last
        one.model.network.to(memory_format=layout)  # type: ignore[call-overload]
        with torch.inference_mode(), attention(kernels, engine.device):
            times += _timed(one, kernels or "torch's", [mode for mode in modes if mode_of(mode)[0] == kernels_of])
    one.model.network.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return times


def _timed(one: Evaluation, kernels: str, modes: Sequence[str]) -> list[ModeTime]:
    """Modes of the same kernels."""
    device, start, times = one.model.device, one.start(), []
    wanted = _after_steps(one, start, lambda: one.step(one.model.network)) if modes else None
    # Attention kernels are no guard of compiled code.
    torch._dynamo.reset()
    compiler = Compiler(one.model)
    for mode in modes:
        assert wanted is not None
        made_of, is_captured = mode_of(mode)
        started, pool = time.perf_counter(), GraphPool(device)
        network, told = compiler.network(made_of, one.conditioning), one.told(compiler, made_of)

        def call(network: Network = network, told: Evaluation = told) -> None:
            told.step(network)

        call()
        replay = pool.capture(call) if is_captured else call
        made = _after_steps(one, start, replay)
        prepare_s = time.perf_counter() - started
        ms = median_s(replay, device, REPLAYS) * 1e3
        del replay
        pool.clear()
        errors = deviation(made, wanted)
        times.append(ModeTime(str(one.bucket), kernels, mode, ms, prepare_s, torch.equal(made, wanted), *errors))
    return times


def _after_steps(one: Evaluation, start: Sequence[Tensor], call: Callable[[], None]) -> Tensor:
    """The latents two steps after `start`."""
    one.restart(start)
    for _ in range(CHECKED_STEPS):
        call()
    return one.lanes.latents.clone()


def deviation(made: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Largest and root-mean-square deviation, each relative to that of the wanted values."""
    difference, reference = (made - wanted).float(), wanted.float()
    largest = difference.abs().max() / reference.abs().max()
    return float(largest), float(difference.norm() / reference.norm())


def hold_buckets(engine: Engine, buckets: Sequence[Place], guidance: float) -> Iterator[Held]:
    """Run each bucket as a run would, from prompts to pictures in two steps, in the
    engine's mode, and look at the memory then; a new group frees the one before it."""
    for size, width, height in buckets:
        batch = batch_of(engine, size, width, height, guidance, "euler", CHECKED_STEPS)
        engine.prepare([batch], lambda: False)
        engine.submit(batch, lambda: False)()
        yield Held(
            str(Bucket(batch.group, size)),
            torch.cuda.memory_reserved(engine.device),
            torch.cuda.memory_allocated(engine.device),
        )


def largest_first(buckets: Sequence[Place]) -> list[Place]:
    """Buckets in a plan's order."""
    return sorted(buckets, key=lambda one: (-one[1] * one[2], -one[1], -one[0]))


def bench_modes(settings: Settings, say: Say) -> Report:
    """Time the modes, then capture the 40 sizes if asked for. Raises UsageError and BatchgenError."""
    check_modes(settings.modes)
    quieten()
    with workplace(settings.folder) as folder:
        device = find_device(load_job(None, settings.overrides).engine.device)
        path = ensure_folder(settings.arch, folder, device, False, say)
        report = Report(settings.arch, device_name(device), versions())
        overrides = [*settings.overrides, f"model.path={path}"]
        _add_times(settings, report, load_job(None, overrides), say)
        gc.collect()
        if settings.captured_batch:
            # The kernels are named so that no choice is measured in between.
            job = load_job(None, [*overrides, "engine.mode=graph", "engine.attention=flash"])
            _add_held(settings.captured_batch, ARCHITECTURES[settings.arch], report, Engine(job), say)
    save(report, settings.json_file)
    return report


def _add_times(settings: Settings, report: Report, job: Job, say: Say) -> None:
    wanted, engine = ARCHITECTURES[settings.arch], Engine(job)
    kernels: Sequence[str | None] = [None]
    if engine.device.type == "cuda":
        kernels = present() if job.engine.attention == "auto" else [job.engine.attention]
    for size, name in product(settings.batches, kernels):
        times = time_modes(engine, (size, wanted.side, wanted.side), wanted.guidance, name, settings.modes)
        report.times += times
        say("\n".join(map(str, times)))
        save(report, settings.json_file)


def _add_held(size: int, wanted: Architecture, report: Report, engine: Engine, say: Say) -> None:
    if engine.device.type != "cuda":
        raise UsageError("--captured looks at a GPU's memory, and there is none here; leave it out")
    buckets = [(size, width // wanted.divisor, height // wanted.divisor) for width, height in SIZES]
    for held in hold_buckets(engine, largest_first(buckets), wanted.guidance):
        report.held.append(held)
        say(f"{held.bucket}: {held.reserved_bytes / 1e9:.3f} GB reserved")
    report.over_largest_bytes = max(one.reserved_bytes for one in report.held) - report.held[0].reserved_bytes
    say(f"{len(report.held)} buckets: {report.over_largest_bytes / 1e9:.3f} GB above the largest one alone")
