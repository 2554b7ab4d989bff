"""The command line. Only this module, `console`, `saying` and the modules of single commands print and exit."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

import batchgen
from batchgen.bench.commands import bench
from batchgen.console import end_planned, work
from batchgen.doctor.commands import doctor
from batchgen.errors import BatchgenError, UsageError
from batchgen.filesystem import is_utf8
from batchgen.importing import import_
from batchgen.jobs.commands import job_files
from batchgen.options import job_of, with_job_options
from batchgen.prefetch import prefetch
from batchgen.reporting.commands import report, sheet
from batchgen.saying import say, say_notes, say_planned
from batchgen.slurm.commands import submit
from batchgen.stopping import hear
from batchgen.streams import outlast
from batchgen.version import VERSION
from batchgen.wording import counted, listed

if TYPE_CHECKING:
    from batchgen.runner import Ending


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(VERSION, prog_name="batchgen")
@click.pass_context
def cli(context: click.Context) -> None:
    """Offline batch jobs for text-to-image models: a Parquet manifest in, a verified image dataset out.

    A manifest is a Parquet file (or several) of prompts; `import` makes one of other tables. `run` makes its images in
    a folder, the run directory, and goes on there if it was stopped. `plan` says beforehand what it would do,
    `status`, `report` and `sheet` show what it has done.
    """
    if context.invoked_subcommand != "run":  # Which hears signals once it can obey them.
        hear()


@cli.command()
@click.argument("manifest", nargs=-1, required=True)
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Run directory [default: <manifest's name>-out].")
@with_job_options
@click.option(
    "--grace",
    type=float,
    metavar="SECONDS",
    help="From Ctrl-C or another stop signal until what is finished is saved [default: 25].",
)
@click.option("--no-wait", is_flag=True, help="End, rather than wait, when other workers hold all rows that are left.")
@click.option("--extend", is_flag=True, help="Make the rows that were added to MANIFEST, too.")
@click.option(
    "--requeue", is_flag=True, help="In a Slurm job: queue it again if its time is over or another job takes its place."
)
@click.option(
    "--gpus",
    metavar="all|N|0,2",
    help="A process on each of these GPUs: all, the first N, or by number [default: this process, on the first].",
)
@click.option("--workers", type=int, metavar="N", help="So many processes on one device, such as the CPU.")
def run(
    manifest: tuple[str, ...],
    out: Path | None,
    no_wait: bool,
    extend: bool,
    requeue: bool,
    gpus: str | None,
    workers: int | None,
    **options: Any,
) -> NoReturn:
    """Make all images of MANIFEST; the same command resumes.

    MANIFEST is a Parquet file, several, a folder or a glob.

    \b
    Example: batchgen run prompts.parquet -o out --model ./stable-diffusion-v1-5
    """
    from batchgen.progress import reading_bar
    from batchgen.runner import default_directory
    from batchgen.slurm import task as slurm
    from batchgen.slurm.environment import this_task

    job, task = job_of(options), this_task()
    if requeue:
        slurm.check_requeue(task)
    directory = out or default_directory(manifest)

    def end(ending: Ending) -> None:
        if requeue and ending.is_cut_short:
            slurm.requeue(task, ending.stopped_by, say)

    work(
        directory,
        lambda terms: batchgen.run(
            manifest,
            directory,
            job,
            gpus=gpus,
            workers=workers,
            extend=extend,
            terms=replace(
                terms,
                may_wait=not no_wait,
                time_left=slurm.time_left(task, job.slurm.warn_s, say),
                on_planned=lambda planned: say_planned(planned, job),
                on_reading=reading_bar(),
            ),
        ),
        end,
    )


@cli.command()
@click.argument("manifest", nargs=-1, required=True)
@with_job_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def plan(manifest: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Check MANIFEST and print what a run would make.

    Groups of like rows, batches, images, bytes and, where it was measured, time. No model is loaded.

    \b
    Example: batchgen plan prompts.parquet --model ./stable-diffusion-v1-5
    """
    from batchgen.progress import reading_bar
    from batchgen.report import plan_facts, plan_text

    job = job_of(options)
    planned = batchgen.plan(manifest, job, on_reading=reading_bar())
    if as_json:
        click.echo(json.dumps(plan_facts(planned.draft, job, planned.demand), indent=2))
        return
    say_notes(planned)
    click.echo(plan_text(planned.draft, job, planned.demand))


@cli.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@click.option(
    "--check", is_flag=True, help="End as a run would: 0 all made, 3 some failed, 75 some are still to be made."
)
@click.option(
    "--watch",
    "watch_s",
    is_flag=False,
    flag_value=5.0,
    type=click.FloatRange(0.1, 86400),
    metavar="[SECONDS]",
    help="Print it again every 5 seconds, or so many, until all rows are made or failed; stands behind DIRECTORY.",
)
def status(directory: Path, as_json: bool, check: bool, watch_s: float | None) -> None:
    """Print where the run in DIRECTORY stands.

    \b
    Example: batchgen status prompts-out
    """
    from batchgen.rundir import RunDirectory
    from batchgen.watching import look, watch

    run = RunDirectory(directory)
    if watch_s is None:
        shown, balance = look(run, as_json=as_json)
        click.echo(shown)
    else:
        balance = watch(run, watch_s, as_json=as_json)
    if check:
        sys.exit(balance.exit_code)


_moved_model = click.option("--model", metavar="PATH", help="Where the model lies by now, if its folder was moved.")
_plan_only = click.option("--plan-only", is_flag=True, help="Plan these rows and stop; the next `run` makes them.")


@cli.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--repair", is_flag=True, help="Make damaged images again, and no others.")
@_moved_model
@_plan_only
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def verify(directory: Path, repair: bool, model: str | None, plan_only: bool, as_json: bool) -> NoReturn:
    """Read all images in DIRECTORY again and name the faults.

    It ends with 0 if there is none, else with 3.

    \b
    Example: batchgen verify prompts-out --repair
    """
    from tqdm import tqdm

    from batchgen.appending import job_of
    from batchgen.balance import take_balance
    from batchgen.ledger import Ledger
    from batchgen.marker import is_finished, is_marked
    from batchgen.mending import WITHDRAWN
    from batchgen.presence import present
    from batchgen.repairing import repair as repair_run
    from batchgen.rundir import RunDirectory
    from batchgen.runner import run_planned
    from batchgen.verify import verify as verify_run

    if plan_only and not repair:
        raise UsageError("--plan-only appends the plan that --repair works off, and stops; give both")
    if model and not repair:
        raise UsageError("--model says where the model lies that --repair makes images with; give both")
    if as_json and repair:
        raise UsageError("--json prints what was found, and --repair how rows are made; give one of them")
    run = RunDirectory(directory)
    job = job_of(run, run.index(), model) if repair else None  # Before all images are read.
    with tqdm(unit="img", file=sys.stderr, disable=not sys.stderr.isatty()) as bar:
        found = verify_run(run, bar.update)
    for fault in [] if as_json else found.faults:
        row = f" (row {fault.row_id!r}, image {fault.image_number})" if fault.row_id else ""
        click.echo(f"{fault.place}{row}: {fault.what}")
    click.echo(found.as_json() if as_json else found.line())
    index = run.index()
    balance = take_balance(index, Ledger(run.root, run.files, plan=index.token))
    # A repair that was stopped has appended its plan or taken the marker away, and neither is a fault; nor is what a
    # run that has not ended has still to make.
    is_open = balance.outstanding and index.number == 0
    goes_on = not plan_only and not is_open and not is_finished(run, balance)
    if found.damaged and not repair:
        say(f"{shlex.join(['batchgen', 'verify', str(directory), '--repair'])} makes what is damaged again")
    if not (repair and (found.faults or goes_on)):
        if balance.outstanding:
            rows = f"{balance.outstanding:,} of {counted(balance.rows, 'row')}"
            say(f"outstanding, and not looked at: {rows}; the command that began the run makes them")
        elif not is_marked(run):
            again = shlex.join(["batchgen", "finalize", str(directory)])
            say(f"not finalized: its tables and its card were not looked at; {again} writes them")
        sys.exit(3 if found.faults else 0)
    assert job is not None
    had = frozenset(run.files.names(run.root / WITHDRAWN))
    with present(run):
        index = repair_run(run, found.damaged, model)
    moved = [f"{run.root / WITHDRAWN / name}" for name in run.files.names(run.root / WITHDRAWN) if name not in had]
    if moved:
        say(f"not known to be the run's, and moved out of data/, to {listed(moved)}")
    left = [one.place for one in found.faults if not one.is_curable and os.path.lexists(run.path / one.place)]
    if left:
        say(f"not the run's, and left alone: {listed(left)}; move them out of data/, where readers find them")
    if plan_only:
        end_planned(directory)
    work(directory, lambda terms: run_planned(run, index, job, terms))


@cli.command()
@click.argument("directory", type=click.Path(path_type=Path))
@_moved_model
@_plan_only
def retry(directory: Path, model: str | None, plan_only: bool) -> NoReturn:
    """Try the failed rows of the run in DIRECTORY again.

    \b
    Example: batchgen retry prompts-out
    """
    from batchgen.appending import append_rows, failed, job_of
    from batchgen.balance import take_balance
    from batchgen.ledger import Ledger
    from batchgen.rundir import RunDirectory
    from batchgen.runner import run_planned

    run = RunDirectory(directory)
    index = run.index()
    job = job_of(run, index, model)
    rows = failed(run, index)
    if not rows:
        say(f"no row of {directory} has failed: there is nothing to try again")
        balance = take_balance(index, Ledger(run.root, run.files, plan=index.token))
        if balance.outstanding and index.number == 0:  # Of a later plan they are those of a retry that was stopped.
            say("the command that began the run makes the rows that are outstanding")
            click.echo(balance.line())
            sys.exit(balance.exit_code)
    index = append_rows(run, index, rows, model)
    if plan_only:
        end_planned(directory)
    work(directory, lambda terms: run_planned(run, index, job, terms))


@cli.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option(
    "--partial", is_flag=True, help="Of what is made so far: metadata.partial.parquet, failures.partial.parquet."
)
def finalize(directory: Path, partial: bool) -> None:
    """Write DIRECTORY's tables, dataset card and _SUCCESS.

    A run does so itself when all its rows are made or failed.

    \b
    Example: batchgen finalize prompts-out --partial
    """
    from batchgen.finalize import finalize as finalize_run
    from batchgen.rundir import RunDirectory

    balance = finalize_run(RunDirectory(directory), is_partial=partial)
    assert balance is not None
    click.echo(balance.line())


cli.add_command(bench)
cli.add_command(import_)
cli.add_command(doctor)
cli.add_command(job_files)
cli.add_command(prefetch)
cli.add_command(report)
cli.add_command(sheet)
cli.add_command(submit)


def main() -> NoReturn:
    """The program: exit codes as the README lists them, no traceback for a user's mistake."""
    outlast()
    try:
        _check_words(sys.argv[1:])
        cli.main(prog_name="batchgen", standalone_mode=False)
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except BatchgenError as error:
        say(f"batchgen: {error}")
        sys.exit(error.exit_code)
    sys.exit(0)


def _check_words(words: list[str]) -> None:
    for word in words:
        if not is_utf8(word):
            raise UsageError(f"the argument {word!r} is not UTF-8; rename what it names")
