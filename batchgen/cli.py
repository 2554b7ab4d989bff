"""The command line: the only place that prints and exits."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from batchgen.bench.commands import bench
from batchgen.errors import BatchgenError, Interrupted, UsageError
from batchgen.filesystem import is_utf8
from batchgen.options import job_of, with_job_options
from batchgen.saying import say, say_notes, say_planned
from batchgen.slurm.commands import submit
from batchgen.version import VERSION
from batchgen.wording import counted

if TYPE_CHECKING:
    from batchgen.balance import Balance
    from batchgen.progress import Display


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(VERSION, prog_name="batchgen")
def cli() -> None:
    """Offline batch jobs for text-to-image models: a Parquet manifest in, a verified image dataset out."""


@cli.command()
@click.argument("manifest", nargs=-1, required=True)
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Run directory [default: <manifest's name>-out].")
@with_job_options
@click.option(
    "--grace", type=float, metavar="SECONDS", help="Time from a stop signal to the last commit [default: 25]."
)
@click.option("--no-wait", is_flag=True, help="Exit when the only rows left are held by other workers.")
@click.option("--requeue", is_flag=True, help="In a job of Slurm: queue it again if its time does not suffice.")
def run(manifest: tuple[str, ...], out: Path | None, no_wait: bool, requeue: bool, **options: Any) -> NoReturn:
    """Make all rows of MANIFEST; the same command resumes.

    \b
    Example: batchgen run prompts.parquet -o out --model ./stable-diffusion-v1-5
    """
    from batchgen.progress import reading_bar
    from batchgen.runner import default_directory, run_job
    from batchgen.slurm import task as slurm
    from batchgen.slurm.environment import this_task
    from batchgen.stopping import Stop, StopNow, listening

    job, task = job_of(options), this_task()
    if requeue:
        slurm.check_requeue(task)
    directory = out or default_directory(manifest)
    with listening(Stop()) as stop:
        try:
            ending = run_job(
                manifest,
                directory,
                job,
                may_wait=not no_wait,
                stop=stop,
                on_planned=lambda planned: say_planned(planned, job),
                on_reading=reading_bar(),
                on_opened=lambda index, balance: say(f"run directory {directory}: {balance.line()}"),
                progress=_display,
                time_left=slurm.time_left(task, job.slurm.warn_s, say),
            )
        except StopNow:
            _end_now(directory, stop.signal_name)
        except UsageError:
            raise
        except Exception as error:
            say(f"batchgen: {error}" if isinstance(error, BatchgenError) else traceback.format_exc())
            _say_balance(directory)
            sys.exit(error.exit_code if isinstance(error, BatchgenError) else BatchgenError.exit_code)
    for holder in ending.balance.holders:
        say(
            f"{counted(holder.rows, 'row')} of shard {holder.shard} held by process {holder.pid} on {holder.host}, "
            f"heard {holder.heartbeat_age_s:.0f} s ago"
        )
    if ending.balance.cut:
        say(ending.balance.cut_note())
    if ending.stopped_by and ending.balance.outstanding:
        say(f"stopped by {ending.stopped_by}; the same command goes on")
    click.echo(ending.balance.line())
    if requeue and ending.is_cut_short:
        slurm.requeue(task, ending.stopped_by, say)
    sys.exit(ending.exit_code)


@cli.command()
@click.argument("manifest", nargs=-1, required=True)
@with_job_options
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def plan(manifest: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Check MANIFEST and print what a run would make.

    \b
    Example: batchgen plan prompts.parquet --model ./stable-diffusion-v1-5
    """
    from batchgen.progress import reading_bar
    from batchgen.report import plan_facts, plan_text
    from batchgen.rundir import plan_manifest

    job = job_of(options)
    planned = plan_manifest(manifest, job, reading_bar())
    if as_json:
        click.echo(json.dumps(plan_facts(planned.draft), indent=2))
        return
    say_notes(planned)
    click.echo(plan_text(planned.draft, job))


@cli.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option("--check", is_flag=True, help="Exit as a run would: 0, 3, or 75 while rows are outstanding.")
def status(directory: Path, as_json: bool, check: bool) -> None:
    """Print where the run in DIRECTORY stands.

    \b
    Example: batchgen status prompts-out
    """
    from batchgen.balance import take_balance
    from batchgen.ledger import Ledger
    from batchgen.marker import is_finished
    from batchgen.report import status_facts, status_text
    from batchgen.rundir import RunDirectory

    run = RunDirectory(directory)
    index = run.index()
    balance = take_balance(index, Ledger(run.root, run.files))
    is_finalized = is_finished(run)
    if as_json:
        click.echo(json.dumps(status_facts(index, balance, is_finalized=is_finalized), indent=2))
    else:
        click.echo(status_text(index, balance, is_finalized=is_finalized))
    if check:
        sys.exit(balance.exit_code)


@cli.command()
@click.argument("directory", type=click.Path(path_type=Path))
def verify(directory: Path) -> NoReturn:
    """Read all images in DIRECTORY again and name the faults.

    \b
    Example: batchgen verify prompts-out
    """
    from tqdm import tqdm

    from batchgen.rundir import RunDirectory
    from batchgen.verify import verify as verify_run

    with tqdm(unit="img", file=sys.stderr, disable=not sys.stderr.isatty()) as bar:
        found = verify_run(RunDirectory(directory), bar.update)
    for fault in found.faults:
        row = f" (row {fault.row_id!r}, image {fault.image_number})" if fault.row_id else ""
        click.echo(f"{fault.place}{row}: {fault.what}")
    click.echo(f"{counted(found.num_images, 'image')} checked, {counted(len(found.faults), 'fault')}")
    sys.exit(3 if found.faults else 0)


@cli.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--partial", is_flag=True, help="Tables of what is made so far, under names of their own.")
def finalize(directory: Path, partial: bool) -> None:
    """Write DIRECTORY's tables, dataset card and _SUCCESS.

    \b
    Example: batchgen finalize prompts-out --partial
    """
    from batchgen.finalize import finalize as finalize_run
    from batchgen.rundir import RunDirectory

    click.echo(finalize_run(RunDirectory(directory), is_partial=partial).line())


cli.add_command(bench)
cli.add_command(submit)


@cli.command(name="import")
@click.argument("source")
@click.option("-o", "--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="The manifest.")
@click.option("--column", "columns", multiple=True, metavar="NAME=SOURCE", help="Our column from SOURCE's column.")
@click.option("--split", help="Of a data set.")
@click.option("--overwrite", is_flag=True, help="Replace an existing manifest.")
def import_(source: str, out: Path, columns: tuple[str, ...], split: str | None, overwrite: bool) -> None:
    """Make a manifest of a csv, tsv, jsonl, txt or data set.

    \b
    Example: batchgen import captions.csv -o prompts.parquet --column prompt=caption
    """
    from batchgen.importer import import_rows

    imported = import_rows(source, out, columns=_columns(columns), split=split, overwrite=overwrite)
    for note in imported.notes:
        say(note)
    click.echo(f"{counted(imported.rows, 'row')} in {out}, columns {', '.join(imported.columns)}")


def main() -> NoReturn:
    """The program: exit codes as the README lists them, no traceback for a user's mistake."""
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


def _columns(pairs: tuple[str, ...]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise click.UsageError(f"--column {pair!r} is not of the form NAME=SOURCE, such as prompt=caption")
    return {name: source for name, _, source in (pair.partition("=") for pair in pairs)}


@contextmanager
def _display(balance: Balance) -> Iterator[Display]:
    from batchgen.progress import Display

    total = balance.done + balance.failed + balance.outstanding
    with Display(total, balance.done, balance.failed) as display:
        yield display


def _say_balance(directory: Path) -> None:
    """The closing line where the run itself could not reach it; what cannot be read any more is said."""
    from batchgen.balance import take_balance
    from batchgen.ledger import Ledger
    from batchgen.rundir import RunDirectory

    run = RunDirectory(directory)
    try:
        click.echo(take_balance(run.index(), Ledger(run.root, run.files)).line())
    except (BatchgenError, OSError) as error:
        say(f"the run directory cannot be read now ({error}); the balance is not known")


def _end_now(directory: Path, signal_name: str) -> NoReturn:
    """End without waiting for any thread: what is not committed is dropped."""
    say(f"stopped at once by a second signal (the first was {signal_name}); the same command goes on")
    _say_balance(directory)
    sys.stdout.flush()
    os._exit(Interrupted.exit_code)
