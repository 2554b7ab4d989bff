"""One worker process and several on the same rows, by the very launcher that `run --gpus` has: images a second of all
over those of one, whether the pixels are the same, and what becomes of a run that loses one of them."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from batchgen.bench.figures import Say, rate, ratio
from batchgen.bench.killing import Killer
from batchgen.bench.workload import Workload, write_manifest
from batchgen.cores import usable_cores
from batchgen.errors import BatchgenError
from batchgen.job import Job, load_job
from batchgen.launcher import Seat, workforce
from batchgen.ledger import Ledger
from batchgen.progress import showing
from batchgen.rundir import RunDirectory
from batchgen.runner import Terms, Workforce, run_job
from batchgen.wording import counted


@dataclass(frozen=True, slots=True)
class Measured:
    """A run by some workers."""

    workers: int
    images: int
    images_of_each: list[int]
    window_s: float
    """From when each worker had written its first batch until one of them had written its last image."""
    images_per_s: float
    """In that window, of all together, to files on the disk."""
    whole_s: float
    """Everything: loading, warming up, all images, the final tables."""
    versions: dict[str, str]
    """As a worker reported them."""

    @property
    def has_rate(self) -> bool:
        """Whether any image was written in the window."""
        return self.images_per_s > 0


@dataclass(frozen=True, slots=True)
class Loss:
    """A run by some workers, one of which was killed by SIGKILL midway."""

    killed_after: int
    """Images made until then, by all workers; those that the killed one had not committed are made again."""
    images: int
    images_of_each: list[int]
    """Of each process that committed any: the one that took the killed one's place is another."""
    whole_s: float
    has_same_pixels: bool
    """As one worker's run."""


@dataclass(slots=True)
class Comparison:
    """What a bench of workers found."""

    arch: str
    workload: dict[str, Any]
    cores: int
    runs: list[Measured] = field(default_factory=list)
    speedup: float | None = None
    """Images a second of the last run over those of the first; None where there were too few rows to tell."""
    has_same_pixels: bool | None = None
    loss: Loss | None = None


def compare(report: Comparison, manifest: Path, folder: Path, job: Job, seats: tuple[Seat, ...], say: Say) -> None:
    """Run the manifest by the first seat, then by all, into a report. Raises BatchgenError if rows are left or fail."""
    one, all_ = folder / "one", folder / "all"
    report.runs.append(_measured_run(manifest, one, job, seats[:1], say))
    _prepare(all_, one)
    report.runs.append(_measured_run(manifest, all_, job, seats, say))
    if not any(map(too_few, report.runs, (1, len(seats)))):
        report.speedup = ratio(report.runs[1].images_per_s, report.runs[0].images_per_s)
    report.has_same_pixels = _pixels(one) == _pixels(all_)


def lose_one(report: Comparison, manifest: Path, folder: Path, job: Job, seats: tuple[Seat, ...], say: Say) -> None:
    """After `compare`: run by all seats once more and kill a worker when a third is made. Raises BatchgenError if rows
    are left or fail, or if all were made before a worker could be killed."""
    one, out = folder / "one", folder / "loss"
    _prepare(out, one)
    killer = Killer(report.runs[0].images // 3)
    whole_s = _run(manifest, out, job, killer.workforce(seats))
    if killer.killed is None:
        raise BatchgenError("all rows were made before a worker could be killed; ask for more with --rows")
    made = measure(out, whole_s)
    report.loss = Loss(killer.made, made.images, made.images_of_each, whole_s, _pixels(one) == _pixels(out))
    what = f"one of {counted(len(seats), 'worker')} killed after {counted(killer.made, 'image')}"
    say(f"{what}: {made.images_of_each} images each; {whole_s:.1f} s in all")


def _prepare(out: Path, one: Path) -> None:
    """A run directory with the same plan, and what the first worker settled: nothing but the workers differs."""
    for name in ("plan", "modes"):
        shutil.copytree(one / ".run" / name, out / ".run" / name)
    (out / "data").mkdir()


def _run(manifest: Path, out: Path, job: Job, force: Workforce) -> float:
    """Make all rows; the seconds that it took."""
    started = time.perf_counter()

    ending = run_job([manifest], out, job, Terms(progress=showing, workforce=force))
    if ending.exit_code:
        raise BatchgenError(f"the bench's run ended with exit code {ending.exit_code}: {ending.balance.line()}")
    return time.perf_counter() - started


def _measured_run(manifest: Path, out: Path, job: Job, seats: tuple[Seat, ...], say: Say) -> Measured:
    measured = measure(out, _run(manifest, out, job, workforce(seats)))
    speed = f"{measured.images_per_s:.3f} images/s over {measured.window_s:.1f} s"
    say(
        f"{counted(measured.workers, 'worker')}: {speed if measured.has_rate else 'no rate'}, "
        f"{measured.images_of_each} images each; {measured.whole_s:.1f} s in all"
    )
    if why := too_few(measured, len(seats)):
        say(why)
    return measured


def too_few(measured: Measured, num_workers: int) -> str:
    """Why a run of so many workers gives no rate of theirs, and what to do; "" if it does."""
    rows = counted(measured.images, "row")
    if measured.workers < num_workers:
        return (
            f"{rows} are too few for {num_workers} workers: {measured.workers} made all of them before the others had "
            "a shard; ask for more with --rows"
        )
    if not measured.has_rate:
        return (
            f"{rows} are too few for a rate of {counted(num_workers, 'worker')}: one had written its last image before "
            "every one had written its first batch; ask for more with --rows"
        )
    return ""


def measure(out: Path, whole_s: float) -> Measured:
    """Of a finished run in the `files` format, by the times at which its images were written."""
    run = RunDirectory(out)
    sizes = {line["file_name"]: line["batch_size"] for line in _lines(out, "file_name", "batch_size")}
    times: dict[str, list[float]] = {}
    begins: dict[str, int] = {}
    versions: dict[str, str] = {}
    for receipt in Ledger(run.root, run.files).committed(run.index().shards):
        files = sorted((run.data / receipt.part).iterdir(), key=lambda file: file.stat().st_mtime_ns)
        written = times.setdefault(receipt.by.token, [])
        if not written or files[0].stat().st_mtime < min(written):
            begins[receipt.by.token] = sizes[f"data/{receipt.part}/{files[0].name}"]
        written += [file.stat().st_mtime for file in files]
        versions = dict(receipt.versions)
    ordered = {token: sorted(written) for token, written in times.items()}
    start = max(written[min(begins[token], len(written)) - 1] for token, written in ordered.items())
    end = min(written[-1] for written in ordered.values())
    everything = [at for written in ordered.values() for at in written]
    return Measured(
        workers=len(ordered),
        images=len(everything),
        images_of_each=sorted(map(len, ordered.values()), reverse=True),
        window_s=max(0.0, end - start),
        images_per_s=rate(sum(start < at <= end for at in everything), end - start),
        whole_s=whole_s,
        versions=versions,
    )


def bench_workers(
    arch: str,
    workload: Workload,
    overrides: Sequence[str],
    seats: tuple[Seat, ...],
    loses_one: bool,
    folder: Path,
    say: Say,
) -> Comparison:
    """Measure one worker and all seats on a workload, and if asked, all but a killed one. Raises UsageError and
    BatchgenError."""
    builder = multiprocessing.get_context("spawn").Process(target=_build, args=(arch, folder))
    builder.start()
    builder.join()
    if builder.exitcode:
        raise BatchgenError(f"{arch} could not be built in {folder}; see above")
    job = load_job(None, [*overrides, f"model.path={folder / arch}"])
    manifest = folder / "manifest.parquet"
    write_manifest(manifest, workload.wanted())
    report = Comparison(arch, asdict(workload), usable_cores())
    with tempfile.TemporaryDirectory(dir=folder, prefix="runs-") as scratch:
        compare(report, manifest, Path(scratch), job, seats, say)
        if loses_one:
            lose_one(report, manifest, Path(scratch), job, seats, say)
    return report


def _build(arch: str, folder: Path) -> None:
    """In a process of its own, which gives the GPU back."""
    from batchgen.bench.building import ensure_folder
    from batchgen.bench.surroundings import quieten
    from batchgen.engine.devices import find_device

    quieten()
    ensure_folder(arch, folder, find_device(None), False, print)


def _pixels(out: Path) -> dict[str, str]:
    return {line["id"]: line["pixel_sha256"] for line in _lines(out, "id", "pixel_sha256")}


def _lines(out: Path, *columns: str) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = pq.read_table(out / "metadata.parquet", columns=list(columns)).to_pylist()
    return lines
