"""`batchgen doctor`: what a run would find on this machine."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

if TYPE_CHECKING:
    from batchgen.doctor.findings import Finding
    from batchgen.job import Job


@click.command()
@click.argument("model_or_job", metavar="[MODEL|JOB]", required=False)
@click.option("--set", "overrides", multiple=True, metavar="TABLE.KEY=VALUE", help="Any key of a job file.")
@click.option(
    "--manifest",
    multiple=True,
    metavar="FILE",
    help="Also whether it can be made, and the disk has room for its images.",
)
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    help="Where a run would write, or a run: also whether the disk has room for what is left.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def doctor(
    model_or_job: str | None, overrides: tuple[str, ...], manifest: tuple[str, ...], out: Path | None, as_json: bool
) -> NoReturn:
    """Check machine, model and disk, and advise.

    JOB is a job file (.toml). Nothing is loaded or fetched; it ends with 0, or with 3 if something is amiss.

    \b
    Example: batchgen doctor ./stable-diffusion-v1-5 --manifest prompts.parquet
    """
    from batchgen.doctor.findings import exit_code, facts, text

    found = list(_findings(_job(model_or_job, overrides, out), manifest, out))
    click.echo(json.dumps(facts(found), indent=2) if as_json else text(found, _width()))
    sys.exit(exit_code(found))


def _job(model_or_job: str | None, overrides: tuple[str, ...], out: Path | None) -> Job:
    """The job that is named; else that of the run, if there is one; else the default."""
    from batchgen.job import load_job, load_stored
    from batchgen.rundir import RunDirectory

    run = RunDirectory(out) if out is not None else None
    if model_or_job is None and run is not None and run.has_plan and not overrides:
        return load_stored(run.index().job, run.plans / "0.json")
    if model_or_job is None or model_or_job.endswith(".toml"):
        return load_job(model_or_job, overrides)
    return load_job(None, [f"model.path={json.dumps(model_or_job, ensure_ascii=False)}", *overrides])


def _findings(job: Job, manifest: tuple[str, ...], out: Path | None) -> Iterator[Finding]:
    from batchgen.doctor import machine, model, work
    from batchgen.doctor.findings import Finding
    from batchgen.doctor.torch_probe import Probe
    from batchgen.rundir import RunDirectory
    from batchgen.runner import default_directory

    probe = Probe()  # It takes longest.
    facts, found_model = model.known(job)
    needs_torch = facts is None or facts.needs_torch
    run = RunDirectory(out) if out is not None else None
    need, found_work = None, None
    if manifest and facts is None:
        found_work = Finding(
            "manifest", "note", "not looked at", "see to the model first: it says what a row may ask for"
        )
    elif manifest:
        need, found_work = work.of_manifest(manifest, job)
    elif run is not None and run.has_plan:
        need, found_work = work.of_run(run, job)
    torch = probe.result()
    yield machine.python()
    yield machine.machine()
    yield machine.torch(torch, is_needed=needs_torch)
    yield from machine.gpus(torch, is_wanted=needs_torch and job.engine.device != "cpu")
    yield from machine.libraries(is_needed=needs_torch)
    yield found_model
    if facts is not None:
        yield model.columns(facts)
        yield from model.loras(job)
        yield from model.room(job, facts, () if job.engine.device == "cpu" else torch.gpus, machine.memory()[0])
    if found_work is not None:
        yield found_work
    yield work.disk(out or (default_directory(manifest) if len(manifest) == 1 else Path()), need)
    yield machine.slurm()


def _width() -> int:
    return max(60, min(120, shutil.get_terminal_size((100, 24)).columns))
