"""The `bench` commands of the command line."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from batchgen.bench.figures import save
from batchgen.errors import UsageError
from batchgen.models.facts import SAMPLERS


def _writable(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
    """An output file, looked at before anything is measured. Raises BadParameter if it cannot be written."""
    if path is None:
        return None
    if not path.parent.is_dir():
        raise click.BadParameter(f"{path}: there is no folder {path.parent}; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise click.BadParameter(f"{path} cannot be written here; name a place where you may write")
    return path


def _without_model(context: click.Context, parameter: click.Parameter, overrides: tuple[str, ...]) -> tuple[str, ...]:
    """Raises BadParameter for a model: the bench has its own."""
    if any(one.partition("=")[0].strip() == "model.path" for one in overrides):
        raise click.BadParameter("model.path has no effect here: the bench builds what --arch names; leave it out")
    return overrides


_FOLDER = click.option(
    "--folder", type=click.Path(path_type=Path, file_okay=False), help="Where it works [default: a temporary one]."
)
_ARCH = click.option(
    "--arch",
    type=click.Choice(["sd15", "sdxl", "sd3", "flux", "tiny", "tiny-sd3", "tiny-flux"]),
    default="sd15",
    show_default=True,
    help="sd3: medium, without T5; flux: FLUX.1-dev, with a text encoder of one layer.",
)
_SET = click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="TABLE.KEY=VALUE",
    callback=_without_model,
    help="Any key of the job file.",
)
_FILE = click.Path(path_type=Path, dir_okay=False)
_JSON_FILE = click.option("--json", "json_file", type=_FILE, callback=_writable, help="Write all of it.")


@click.group()
def bench() -> None:
    """Measure what this machine does.

    \b
    Example: batchgen bench plan --rows 10000000
    """


@bench.command()
@click.option(
    "--rows", type=click.IntRange(min=1), default=10_000_000, show_default=True, help="Rows of the synthetic manifest."
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Where it may write [default: the system's].",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def plan(rows: int, folder: Path | None, as_json: bool) -> None:
    """Time and memory to check, cut and freeze a manifest of many rows in 40 sizes.

    \b
    Example: batchgen bench plan --rows 1000000
    """
    from dataclasses import asdict

    from batchgen.bench.plan import bench_plan

    measured = bench_plan(rows, folder)
    click.echo(json.dumps(asdict(measured), indent=2) if as_json else "\n".join(measured.lines()))


@bench.command()
@_ARCH
@click.option("--rows", type=click.IntRange(min=1), default=200, show_default=True)
@click.option("--sizes", type=click.Choice(["single", "mixed"]), default="single", show_default=True)
@click.option("--steps", type=click.IntRange(min=1), help="Of every row, where sizes are single.")
@click.option("--guidance", type=float, help="Of every row, where sizes are single.")
@click.option("--sampler", type=click.Choice(list(SAMPLERS)), default="euler", show_default=True)
@click.option("--mode", default="auto", show_default=True, help="engine.mode.")
@click.option("--batch", type=click.IntRange(min=1), help="plan.max_batch.")
@click.option("--max-memory", metavar="SIZE", help="engine.max_memory.")
@click.option("--baselines", help="none, or of loop,best,compiled (single) and exact,sized (mixed) [default: all].")
@click.option("--sample", type=click.IntRange(min=0), default=2, show_default=True, help="Batches a baseline; 0: all.")
@click.option("--compile-mode", default="default", show_default=True, help="torch.compile's, of the compiled baseline.")
@click.option("--upcast-vae", is_flag=True, help="A VAE that asks for float32.")
@click.option("--no-batchgen", is_flag=True, help="Leave out batchgen itself.")
@click.option("--no-idle", is_flag=True, help="Leave out the second run, which measures idle time.")
@click.option("--learn", "is_learning", is_flag=True, help="Keep measured costs for later plans, as a run does.")
@click.option("--profile-out", type=_FILE, callback=_writable, help="Measured costs, for plan.profile.")
@click.option("--profile", help="Kernels of a step and a decode: none, or of eager,regional,compiled.")
@_SET
@_JSON_FILE
@_FOLDER
def images(arch: str, json_file: Path | None, **options: Any) -> None:
    """Images a second of batchgen and of diffusers' own pipeline, with random weights, to PNG files.

    \b
    Example: batchgen bench images --arch sd15 --rows 1000 --json sd15.json
    """
    from batchgen.bench.architectures import ARCHITECTURES
    from batchgen.bench.images import BASELINES, LONG_SHARDS, Settings, bench_images
    from batchgen.bench.workload import Workload

    if options["sizes"] == "mixed" and (options["steps"], options["guidance"]) != (None, None):
        raise UsageError("--steps and --guidance are of single sizes; mixed rows draw theirs, so leave them out")
    wanted = ARCHITECTURES[arch]
    workload = Workload(
        rows=options["rows"],
        sizes=options["sizes"],
        side=wanted.side,
        divisor=wanted.divisor,
        steps=options["steps"] or wanted.steps,
        guidance=wanted.guidance if options["guidance"] is None else options["guidance"],
        sampler=options["sampler"],
        mixed_steps=wanted.mixed_steps,
    )
    batch = [f"plan.max_batch={options['batch']}"] if options["batch"] else []
    batch += [f"engine.max_memory={options['max_memory']}"] if options["max_memory"] else []
    settings = Settings(
        arch=arch,
        workload=workload,
        overrides=(LONG_SHARDS, f"engine.mode={options['mode']}", *batch, *options["overrides"]),
        baselines=_names(options["baselines"], BASELINES[options["sizes"]]),
        sample=options["sample"],
        compile_mode=options["compile_mode"],
        upcasts_vae=options["upcast_vae"],
        runs_batchgen=not options["no_batchgen"],
        is_learning=options["is_learning"],
        profile_out=options["profile_out"],
        profiles_idle=not options["no_idle"],
        profiles=_names(options["profile"], ()),
        folder=options["folder"],
        json_file=json_file,
    )
    bench_images(settings, click.echo)
    if json_file:
        click.echo(str(json_file))


@bench.command()
@_ARCH
@click.option("--batches", default="1,4,16", show_default=True, help="Batch sizes to time; none: no times.")
@click.option("--modes", help="Of eager, graph, regional, compiled, and the last two +graph [default: all].")
@click.option(
    "--captured", type=click.IntRange(min=1), metavar="BATCH", help="Capture the 40 sizes at this batch size."
)
@_SET
@_JSON_FILE
@_FOLDER
def modes(arch: str, batches: str, modes: str | None, captured: int | None, **options: Any) -> None:
    """Time and deviation of one model evaluation in each mode, and what captures hold of the memory.

    \b
    Example: batchgen bench modes --arch sd15 --batches 1,8 --modes eager,graph
    """
    from batchgen.bench.modes import MODES, Settings, bench_modes

    sizes = _names(batches, ())
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise click.BadParameter(f"{batches!r} is no list like 1,4,16", param_hint="--batches")
    settings = Settings(
        arch=arch,
        batches=tuple(map(int, sizes)),
        modes=_names(modes, MODES),
        captured_batch=captured,
        overrides=options["overrides"],
        folder=options["folder"],
        json_file=options["json_file"],
    )
    bench_modes(settings, click.echo)
    if settings.json_file:
        click.echo(str(settings.json_file))


@bench.command()
@click.option(
    "--kills",
    type=click.IntRange(min=1),
    default=500,
    show_default=True,
    help="At least; a run directory that is begun is ended.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of what is drawn.")
@click.option("--workers", default="1-4", show_default=True, help="On one run directory, fewest and most.")
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    default=240,
    show_default=True,
    help="Of each run directory, but for the first few.",
)
@click.option("--formats", default="files,parquet,webdataset", show_default=True, help="Of the images.")
@_JSON_FILE
@_FOLDER
def soak(kills: int, seed: int, workers: str, rows: int, formats: str, **options: Any) -> None:
    """Kill workers at every step and at random, and hold what they leave against an undisturbed run.

    \b
    Example: batchgen bench soak --kills 500 --json soak.json
    """
    from batchgen.bench.soak import FORMATS, Settings, bench_soak
    from batchgen.errors import BatchgenError

    bounds = workers.partition("-")
    fewest, most = bounds[0], bounds[2] or bounds[0]
    if not (fewest.isdecimal() and most.isdecimal() and 1 <= int(fewest) <= int(most) <= 64):
        raise click.BadParameter(f"{workers!r} is no range like 1-4, of at most 64", param_hint="--workers")
    names = _names(formats, ())
    if not names or set(names) - set(FORMATS):
        raise click.BadParameter(f"{formats!r} is no list of {', '.join(FORMATS)}", param_hint="--formats")
    settings = Settings(kills, seed, (int(fewest), int(most)), names, rows, folder=options["folder"])
    report = bench_soak(settings, click.echo)
    save(report, options["json_file"])
    click.echo("\n".join(report.lines()))
    if report.problems:
        raise BatchgenError(f"{len(report.problems)} problems, named above; the first: {report.problems[0]}")


@bench.command(name="long")
@click.option("--rows", type=click.IntRange(min=1000), default=200_000, show_default=True)
@click.option("--format", "output_format", type=click.Choice(["files", "webdataset", "parquet"]), default="webdataset")
@_JSON_FILE
@_FOLDER
def long_(rows: int, output_format: str, json_file: Path | None, folder: Path | None) -> None:
    """Memory and rate of one worker over many rows, and how soon the next one goes on.

    \b
    Example: batchgen bench long --rows 200000
    """
    from batchgen.bench.long import bench_long

    measured = bench_long(rows, output_format, folder)
    save(measured, json_file)
    click.echo("\n".join(measured.lines()))


@bench.command()
@_ARCH
@click.option("--rows", type=click.IntRange(min=2), default=200, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), help="Of every row.")
@click.option("--gpus", metavar="all|N|0,2", help="The first of these, then all.")
@click.option("--workers", "num_workers", type=click.IntRange(min=1), help="Instead: processes on the job's device.")
@click.option("--kill", "loses_one", is_flag=True, help="Run once more, and kill one of the processes midway.")
@_SET
@_JSON_FILE
@_FOLDER
def workers(
    arch: str,
    rows: int,
    steps: int | None,
    gpus: str | None,
    num_workers: int | None,
    loses_one: bool,
    **options: Any,
) -> None:
    """Images a second of several worker processes over those of one, and whether the pixels are the same.

    \b
    Example: batchgen bench workers --arch sd15 --rows 2000 --gpus 2 --json two.json
    """
    from batchgen.bench.architectures import ARCHITECTURES
    from batchgen.bench.surroundings import workplace
    from batchgen.bench.workers import bench_workers
    from batchgen.bench.workload import Workload
    from batchgen.job import load_job
    from batchgen.launcher import seats_of

    job = load_job(None, options["overrides"])
    if job.output.format != "files":
        raise UsageError(
            f"output.format = {job.output.format!r}: bench workers reads the times at which single images were "
            "written, and only files have them; leave it out"
        )
    seats = seats_of(gpus, num_workers, job)
    if not seats:
        raise UsageError("bench workers compares one process with several; say how many with --gpus or --workers")
    known = ARCHITECTURES[arch]
    side, steps, guidance = known.side, steps or known.steps, known.guidance
    workload = Workload(rows, "single", side, known.divisor, steps, guidance, "euler")
    with workplace(options["folder"]) as folder:
        report = bench_workers(arch, workload, options["overrides"], seats, loses_one, folder, click.echo)
    save(report, options["json_file"])
    speedup = "not known, of too few rows" if report.speedup is None else f"{report.speedup:.3f}"
    click.echo(f"speed-up {speedup}, pixels {_sameness(report.has_same_pixels)}")
    if report.loss:
        click.echo(f"with one worker killed midway: pixels {_sameness(report.loss.has_same_pixels)}")


def _sameness(is_same: bool | None) -> str:
    return "the same" if is_same else "DIFFER"


def _names(given: str | None, default: tuple[str, ...]) -> tuple[str, ...]:
    """The names of a list with commas; "none" is the empty one."""
    if given is None:
        return default
    return tuple(name for name in given.split(",") if name and name != "none")
