"""A bench of images: batchgen and diffusers on the same rows, side by side, and the figures that follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from batchgen.bench import ours
from batchgen.bench.baselines import Baseline, Diffusers
from batchgen.bench.building import ensure_folder
from batchgen.bench.evaluations import Evaluation, evaluation, matmul_flops_per_s, total_flops
from batchgen.bench.figures import Say, ratio, save, share
from batchgen.bench.surroundings import quieten, versions, workplace
from batchgen.bench.traces import KernelTime, kernel_times
from batchgen.bench.workload import Workload
from batchgen.cores import usable_cores
from batchgen.cost import save_profile
from batchgen.encoders import num_encoder_threads
from batchgen.engine.compiling import KERNELS, Compiler
from batchgen.engine.devices import device_name, find_device
from batchgen.engine.engine import Engine
from batchgen.errors import UsageError
from batchgen.job import Job, load_job
from batchgen.planner import MAX_SHARD_IMAGES

BASELINES = {"single": ("loop", "best", "compiled"), "mixed": ("exact", "sized")}
PROFILES = KERNELS
NAMED_GAPS = 4


LONG_SHARDS = f"plan.shard_images={MAX_SHARD_IMAGES}"
"""The few rows of a bench stand for the middle of a long run, whose shards are as large as they may be."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line asks for."""

    arch: str
    workload: Workload
    overrides: tuple[str, ...] = ()
    """Of the job."""
    baselines: tuple[str, ...] = ()
    sample: int = 2
    """Batches that each baseline makes; 0: all."""
    compile_mode: str = "default"
    """torch.compile's, of the compiled baseline."""
    upcasts_vae: bool = False
    runs_batchgen: bool = True
    is_learning: bool = False
    profile_out: Path | None = None
    """Where the measured costs go, as a profile that `plan.profile` takes."""
    profiles_idle: bool = True
    profiles: tuple[str, ...] = ()
    folder: Path | None = None
    json_file: Path | None = None


@dataclass(frozen=True, slots=True)
class Compute:
    """Floating-point work against what the device can do."""

    tflop_per_image: float
    tflop_per_s: float
    matmul_tflop_per_s: float
    utilisation: float


@dataclass(slots=True)
class Report:
    """Everything that was measured; what was not asked for is empty or None."""

    arch: str
    workload: dict[str, Any]
    job: dict[str, Any]
    upcasts_vae: bool
    compile_mode: str
    encoder_threads: int
    cores: int
    device: str
    versions: dict[str, str]
    batchgen: ours.Ours | None = None
    idle: ours.Idle | None = None
    compute: Compute | None = None
    baselines: list[Baseline] = field(default_factory=list)
    ratios: dict[str, float | None] = field(default_factory=dict)
    """batchgen's steady rate over each baseline's."""
    kernels: dict[str, list[KernelTime]] = field(default_factory=dict)

    def add(self, baseline: Baseline) -> None:
        self.baselines.append(baseline)
        if self.batchgen:
            self.ratios[baseline.name] = ratio(self.batchgen.steady_images_per_s, baseline.images_per_s)


def check(settings: Settings) -> None:
    """Raises UsageError for parts that do not fit together."""
    allowed = BASELINES[settings.workload.sizes]
    for name in settings.baselines:
        if name not in allowed:
            raise UsageError(
                f"--baselines {name!r} does not fit --sizes {settings.workload.sizes}; "
                f"allowed: none, {', '.join(allowed)}"
            )
    for name in settings.profiles:
        if name not in PROFILES:
            raise UsageError(f"--profile {name!r} is not known; allowed: none, {', '.join(PROFILES)}")
    if settings.profiles and not settings.runs_batchgen:
        raise UsageError("--profile looks at batchgen's own model; leave out --no-batchgen")
    if settings.profile_out and not settings.runs_batchgen:
        raise UsageError("--profile-out is of batchgen's own run; leave out --no-batchgen")


def bench_images(settings: Settings, say: Say) -> Report:
    """Run all parts that were asked for, one after another. Raises UsageError and BatchgenError."""
    check(settings)
    quieten()
    with workplace(settings.folder) as folder:
        job = load_job(None, settings.overrides)
        device = find_device(job.engine.device)
        if settings.profile_out and device.type == "cpu":
            raise UsageError("--profile-out needs a GPU: on a CPU nothing is measured for later plans; leave it out")
        path = ensure_folder(settings.arch, folder, device, settings.upcasts_vae, say)
        job = load_job(None, [*settings.overrides, f"model.path={path}"])
        report = _report(settings, job, device)
        if settings.runs_batchgen:
            _run_batchgen(settings, job, folder, report, say)
        _run_baselines(settings, Diffusers(path, device, report.encoder_threads, settings.sample, say), report, say)
    return report


def _report(settings: Settings, job: Job, device: torch.device) -> Report:
    return Report(
        arch=settings.arch,
        workload=asdict(settings.workload),
        job=job.model_copy(update={"model": job.model.model_copy(update={"path": settings.arch})}).model_dump(
            mode="json"
        ),
        upcasts_vae=settings.upcasts_vae,
        compile_mode=settings.compile_mode,
        encoder_threads=num_encoder_threads(job.output),
        cores=usable_cores(),
        device=device_name(device),
        versions=versions(),
    )


def _run_batchgen(settings: Settings, job: Job, folder: Path, report: Report, say: Say) -> None:
    wanted = settings.workload.wanted()
    bench = ours.Bench(job, wanted, folder, say, settings.is_learning)
    say(f"batchgen: {len(wanted)} images, end to end")
    report.batchgen = bench.run()
    if settings.profile_out is not None:
        assert bench.engine is not None
        measured = bench.engine.measurements()
        if measured:
            save_profile(settings.profile_out, f"{settings.arch} on {report.device}", measured)
        else:
            say(f"  {settings.profile_out} is not written: no bucket ran twice; ask for more with --rows")
    for one in lines(report.batchgen):
        say(f"  {one}")
    save(report, settings.json_file)
    if settings.profiles_idle and torch.cuda.is_available():
        report.idle = bench.profile()
        say(f"  {idle_line(report.idle)}")
        save(report, settings.json_file)
    assert bench.engine is not None
    for mode in settings.profiles:
        report.kernels |= profile(bench, mode, settings.workload.sampler, say)
        save(report, settings.json_file)
    report.compute = compute(bench.engine, settings.workload, report.batchgen.steady_images_per_s)
    say(f"  {compute_line(report.compute)}")
    save(report, settings.json_file)
    bench.close()


def compute(engine: Engine, workload: Workload, images_per_s: float) -> Compute:
    """The useful work of the rows, its rate, and the share of a matrix product's rate that this is."""
    wanted = workload.wanted()
    per_image = total_flops(engine, wanted) / len(wanted) / 1e12
    peak = matmul_flops_per_s(engine.device) / 1e12
    return Compute(per_image, per_image * images_per_s, peak, share(per_image * images_per_s, peak))


@torch.inference_mode()
def profile(bench: ours.Bench, mode: str, sampler: str, say: Say) -> dict[str, list[KernelTime]]:
    """Where the device time of a step, and of a decode, of the largest bucket goes."""
    engine, batch = bench.engine, bench.largest
    assert engine is not None
    guidance = batch.rows[0].guidance_scale
    one = evaluation(engine, batch.size, batch.group.width, batch.group.height, guidance, sampler)
    engine.free()
    # As the engine lays them out: compiled convolutions want channels-last weights.
    layout = torch.contiguous_format if mode == "eager" else torch.channels_last
    for part in (one.model.network, one.model.vae):
        part.to(memory_format=layout)  # type: ignore[call-overload]
    compiler = Compiler(one.model)
    network, decoder = compiler.network(mode, one.conditioning), compiler.decoder(mode)
    calls = calls_of(one.told(compiler, mode), network, decoder, engine.decode_chunk(one.bucket))
    found = {f"{mode} {what}": kernel_times(call, engine.device) for what, call in calls.items()}
    for what, times in found.items():
        say(f"  {what}, {one.bucket}:")
        for row in times:
            say(f"    {row.ms:9.3f} ms {row.share:6.1%} {row.calls:5} × {row.name[:90]}")
    return found


def calls_of(one: Evaluation, network: Any, decoder: Any, chunk: int) -> dict[str, Callable[[], object]]:
    """The step and the decode as calls without arguments."""
    return {"step": lambda: one.step(network), "decode": lambda: one.decode(decoder, chunk)}


def _run_baselines(settings: Settings, peer: Diffusers, report: Report, say: Say) -> None:
    rows = settings.workload.wanted()
    best = 0
    for name in settings.baselines:
        say(f"diffusers, {name}:")
        if name == "best":
            report.add(peer.best(rows))
            best = report.baselines[-1].batch_size
        elif name == "compiled":
            best = best or peer.fastest(rows).batch_size
            report.add(peer.compiled(rows, best, settings.compile_mode))
        else:
            report.add({"loop": peer.loop, "exact": peer.exact, "sized": peer.sized}[name](rows))
        if name in report.ratios:
            say(f"  batchgen's steady rate is {report.ratios[name]:.2f} times this")
        save(report, settings.json_file)
    peer.close()


def lines(one: ours.Ours) -> Iterator[str]:
    """What batchgen did, in words."""
    yield f"steady {one.steady_images_per_s:.3f} images/s ({one.images} images in {one.steady_s:.1f} s)"
    yield (
        f"cold   {one.cold_images_per_s:.3f} images/s ({one.cold_s:.1f} s, of which load {one.load_s:.1f} s, "
        f"warm-up {one.warm_up_s:.1f} s)"
    )
    batches = ", ".join(f"{count} of {size}" for size, count in one.batches.items())
    modes = ", ".join(f"{mode} {count}" for mode, count in one.modes.items())
    yield f"batches: {batches}; modes: {modes}"
    yield f"planned by {one.costs}"
    yield f"padded rows {one.padded_rows_share:.2%}, idle row-steps {one.idle_row_steps_share:.2%}"
    yield f"{len(one.captures)} captures, {one.steady_capture_s:.1f} s of them in the steady time"
    if one.stage_s:
        yield "device: " + ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in one.stage_s.items())
    if one.peak_allocated_bytes is not None and one.peak_reserved_bytes is not None:
        yield f"peak memory {one.peak_allocated_bytes / 1e9:.2f} GB, reserved {one.peak_reserved_bytes / 1e9:.2f} GB"


def idle_line(one: ours.Idle) -> str:
    """How busy the device was, in words."""
    if one.idle_share is None:
        return "device idle: the profiler saw no kernel"
    longest = ", ".join(f"{gap.ms:.1f}" for gap in one.gaps[:NAMED_GAPS])
    return (
        f"device idle {one.idle_share:.2%} of {one.window_s:.1f} s ({one.batches} batches, {one.kernels:,} kernels; "
        f"at longest {longest} ms)"
    )


def compute_line(one: Compute) -> str:
    """The floating-point work in words."""
    return (
        f"{one.tflop_per_image:.3g} TFLOP an image: {one.tflop_per_s:.3g} TFLOP/s, {one.utilisation:.1%} of a matrix "
        f"product's {one.matmul_tflop_per_s:.4g}"
    )
