"""The modes of one model side by side: an evaluation's time and deviation in each, and what captures leave behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from batchgen.bench.architectures import ARCHITECTURES, ensure_folder
from batchgen.bench.evaluations import Evaluation, batch_of, evaluation, median_s
from batchgen.bench.surroundings import quieten, save, versions, workplace
from batchgen.bench.workload import SIZES
from batchgen.engine.attention import BACKENDS, attention
from batchgen.engine.engine import Engine, device_name, find_device
from batchgen.engine.graphs import GraphPool
from batchgen.errors import UsageError
from batchgen.job import load_job
from batchgen.models.family import Network
from batchgen.records import Bucket

Say = Callable[[str], None]
MODES = ("eager", "graph", "compiled", "compiled+graph")
REPLAYS = 15
CHECKED_STEPS = 2


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
    engine: Engine, bucket: tuple[int, int, int], guidance: float, modes: Sequence[str]
) -> Iterator[ModeTime]:
    """One bucket (batch size, width, height) in the given modes, under each attention kernel that the device has."""
    one = evaluation(engine, *bucket, guidance, "euler")
    kernels: Sequence[str | None] = tuple(BACKENDS) if engine.device.type == "cuda" else (None,)
    for is_compiled in (False, True):
        wanted = [mode for mode in modes if ("compiled" in mode) == is_compiled]
        if wanted:
            # As the engine lays them out: compiled convolutions want channels-last weights.
            layout = torch.channels_last if is_compiled else torch.contiguous_format
            one.model.network.to(memory_format=layout)  # type: ignore[call-overload]
        for name in kernels:
            with torch.inference_mode(), attention(name, engine.device):
                yield from _timed(one, name or "torch's", wanted)
    one.model.network.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]


def _timed(one: Evaluation, kernels: str, modes: Sequence[str]) -> Iterator[ModeTime]:
    device, start = one.model.device, one.start()
    wanted = _after_steps(one, start, lambda: one.step(one.model.network)) if modes else None
    networks: dict[bool, Network] = {False: one.model.network}
    for mode in modes:
        assert wanted is not None
        started, pool = time.perf_counter(), GraphPool(device)
        is_compiled = "compiled" in mode
        if is_compiled and True not in networks:
            torch._dynamo.reset()
            networks[True] = torch.compile(one.model.network, fullgraph=True, dynamic=False)
        network = networks[is_compiled]

        def call(network: Network = network) -> None:
            one.step(network)

        call()
        replay = pool.capture(call) if "graph" in mode else call
        made = _after_steps(one, start, replay)
        prepare_s = time.perf_counter() - started
        seconds = median_s(replay, device, REPLAYS)
        del replay
        pool.clear()
        largest, rms = deviation(made, wanted)
        yield ModeTime(
            str(one.bucket), kernels, mode, seconds * 1e3, prepare_s, torch.equal(made, wanted), largest, rms
        )


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


def hold_buckets(engine: Engine, buckets: Sequence[tuple[int, int, int]], guidance: float) -> Iterator[Held]:
    """Run each bucket (batch size, width, height) as a run would, from prompts to pictures in two steps, in the
    engine's mode, and look at the memory then; a new group frees the one before it."""
    for size, width, height in buckets:
        batch = batch_of(engine, size, width, height, guidance, "euler", CHECKED_STEPS)
        engine.prepare([batch], lambda: False)
        engine.submit(batch, lambda: False)()
        yield Held(str(Bucket(batch.group, size)), *_memory(engine.device))


def _memory(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)


def largest_first(buckets: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Buckets in a plan's order."""
    return sorted(buckets, key=lambda one: (-one[1] * one[2], -one[1], -one[0]))


def bench_modes(settings: Settings, say: Say) -> Report:
    """Time the modes, then capture the 40 sizes if asked for. Raises UsageError and BatchgenError."""
    check_modes(settings.modes)
    quieten()
    wanted = ARCHITECTURES[settings.arch]
    with workplace(settings.folder) as folder:
        device = find_device(load_job(None, settings.overrides).engine.device)
        path = ensure_folder(settings.arch, folder, device, False, say)
        report = Report(settings.arch, device_name(device), versions())
        job = [*settings.overrides, f"model.path={path}"]
        engine = Engine(load_job(None, job))
        for size in settings.batches:
            for time_ in time_modes(engine, (size, wanted.side, wanted.side), wanted.guidance, settings.modes):
                report.times.append(time_)
                say(str(time_))
                save(report, settings.json_file)
        if settings.captured_batch:
            # The kernels are named so that no choice is measured in between.
            engine = Engine(load_job(None, [*job, "engine.mode=graph", "engine.attention=flash"]))
            sizes = [(width // wanted.divisor, height // wanted.divisor) for width, height in SIZES]
            buckets = largest_first([(settings.captured_batch, *size) for size in sizes])
            for held in hold_buckets(engine, buckets, wanted.guidance):
                report.held.append(held)
                say(f"{held.bucket}: {held.reserved_bytes / 1e9:.3f} GB reserved")
            most = max(one.reserved_bytes for one in report.held)
            report.over_largest_bytes = most - report.held[0].reserved_bytes
            say(f"{len(report.held)} buckets: {report.over_largest_bytes / 1e9:.3f} GB above the largest one alone")
        save(report, settings.json_file)
    return report
