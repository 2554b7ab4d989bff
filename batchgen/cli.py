"""The command line: the only place that prints and exits."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from batchgen.bench.commands import bench
from batchgen.errors import BatchgenError, Interrupted, UsageError
from batchgen.filesystem import is_utf8
from batchgen.prefetch import prefetch
from batchgen.version import VERSION
from batchgen.wording import counted

if TYPE_CHECKING:
    from batchgen.balance import Balance
    from batchgen.job import Job
    from batchgen.progress import Display
    from batchgen.rundir import Planned

Command = TypeVar("Command", bound=Callable[..., Any])

_JOB_OPTIONS = [
    click.option("--job", "job_file", type=click.Path(dir_okay=False), help="Job file (TOML)."),
    click.option("--model", help='"pattern", a diffusers folder or a hub id [default: "demo"].'),
    click.option(
        "--format",
        "output_format",
        type=click.Choice(["files", "webdataset", "parquet"]),
        help="Of the images [default: files].",
    ),
    click.option(
        "--on-bad-row",
        type=click.Choice(["stop", "skip"]),
        help="Refuse the manifest, or leave rows out [default: stop].",
    ),
    click.option(
        "--size-policy", type=click.Choice(["strict", "round"]), help="Whether sizes may be rounded [default: strict]."
    ),
    click.option(
        "--on-truncate", type=click.Choice(["warn", "error"]), help="Whether prompts may be cut [default: warn]."
    ),
    click.option("--set", "overrides", multiple=True, metavar="TABLE.KEY=VALUE", help="Any key of the job file."),
]
_SHORT_FORMS = {
    "model": "model.path",
    "output_format": "output.format",
    "on_bad_row": "plan.on_bad_row",
    "size_policy": "plan.size_policy",
    "on_truncate": "plan.on_truncate",
    "grace": "run.grace_s",
}


def _with_job_options(command: Command) -> Command:
    for option in reversed(_JOB_OPTIONS):
        command = option(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(VERSION, prog_name="batchgen")
def cli() -> None:
    """Offline batch jobs for text-to-image models: a Parquet manifest in, a verified image dataset out."""


@cli.command()
@click.argument("manifest", nargs=-1, required=True)
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Run directory [default: <manifest's name>-out].")
@_with_job_options
@click.option(
    "--grace", type=float, metavar="SECONDS", help="Time from a stop signal to the last commit [default: 25]."
)
@click.option("--no-wait", is_flag=True, help="Exit when the only rows left are held by other workers.")
@click.option("--gpus", metavar="all|N|0,2", help="A worker process on each of these GPUs [default: one, in here].")
@click.option("--workers", type=click.IntRange(min=1), help="So many worker processes on the job's device.")
def run(
    manifest: tuple[str, ...], out: Path | None, no_wait: bool, gpus: str | None, workers: int | None, **options: Any
) -> NoReturn:
    """Make all rows of MANIFEST; the same command resumes.

    \b
    Example: batchgen run prompts.parquet -o out --model ./stable-diffusion-v1-5
    """
    from batchgen.cores import limit_threads
    from batchgen.launcher import seats_of, workforce
    from batchgen.progress import reading_bar
    from batchgen.runner import default_directory, run_job
    from batchgen.stopping import Stop, StopNow, listening

    job = _job(options)
    directory = out or default_directory(manifest)
    seats = seats_of(gpus, workers, job)
    limit_threads()
    with listening(Stop()) as stop:
        try:
            ending = run_job(
                manifest,
                directory,
                job,
                may_wait=not no_wait,
                stop=stop,
                on_planned=lambda planned: _say_planned(planned, job),
                on_reading=reading_bar(),
                on_opened=lambda index, balance: _say(f"run directory {directory}: {balance.line()}"),
                progress=partial(_display, num_workers=len(seats) or 1),
                workforce=workforce(seats) if seats else None,
            )
        except StopNow:
            _end_now(directory, stop.signal_name)
        except UsageError:
            raise
        except Exception as error:
            _say(f"batchgen: {error}" if isinstance(error, BatchgenError) else traceback.format_exc())
            _say_balance(directory)
            sys.exit(error.exit_code if isinstance(error, BatchgenError) else BatchgenError.exit_code)
    for holder in ending.balance.holders:
        _say(
            f"{counted(holder.rows, 'row')} of shard {holder.shard} held by process {holder.pid} on {holder.host}, "
            f"heard {holder.heartbeat_age_s:.0f} s ago"
        )
    if ending.balance.cut:
        _say(ending.balance.cut_note())
    if ending.stopped_by and ending.balance.outstanding:
        _say(f"stopped by {ending.stopped_by}; the same command goes on")
    click.echo(ending.balance.line())
    sys.exit(ending.exit_code)


@cli.command()
@click.argument("manifest", nargs=-1, required=True)
@_with_job_options
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def plan(manifest: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Check MANIFEST and print what a run would make.

    \b
    Example: batchgen plan prompts.parquet --model ./stable-diffusion-v1-5
    """
    from batchgen.progress import reading_bar
    from batchgen.report import plan_facts, plan_text
    from batchgen.rundir import plan_manifest

    job = _job(options)
    planned = plan_manifest(manifest, job, reading_bar())
    if as_json:
        click.echo(json.dumps(plan_facts(planned.draft), indent=2))
        return
    _say_notes(planned)
    click.echo(plan_text(planned.draft, job))


@cli.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def status(directory: Path, as_json: bool) -> None:
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
cli.add_command(prefetch)


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
        _say(note)
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
        _say(f"batchgen: {error}")
        sys.exit(error.exit_code)
    sys.exit(0)


def _check_words(words: list[str]) -> None:
    for word in words:
        if not is_utf8(word):
            raise UsageError(f"the argument {word!r} is not UTF-8; rename what it names")


def _job(options: dict[str, Any]) -> Job:
    from batchgen.job import load_job

    given = {name: key for name, key in _SHORT_FORMS.items() if options.get(name) is not None}
    short = [f"{key}={json.dumps(options[name], ensure_ascii=False)}" for name, key in given.items()]
    flags = {key: f"--{name}" for name, key in given.items() if name == "grace"}
    return load_job(options["job_file"], [*short, *options["overrides"]], flags)


def _columns(pairs: tuple[str, ...]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise click.UsageError(f"--column {pair!r} is not of the form NAME=SOURCE, such as prompt=caption")
    return {name: source for name, _, source in (pair.partition("=") for pair in pairs)}


def _say(text: str) -> None:
    click.echo(text, err=True)


def _say_notes(planned: Planned) -> None:
    for note in planned.notes:
        _say(f"note: {note}")
    num_rejected = planned.draft.survey.num_rejected
    if num_rejected:
        _say(planned.rejections.message(num_rejected, is_skipped=True))


def _say_planned(planned: Planned, job: Job) -> None:
    from batchgen.report import plan_text

    _say_notes(planned)
    _say(plan_text(planned.draft, job))


@contextmanager
def _display(balance: Balance, num_workers: int) -> Iterator[Display]:
    from batchgen.progress import Display

    total = balance.done + balance.failed + balance.outstanding
    with Display(total, balance.done, balance.failed, num_workers=num_workers) as display:
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
        _say(f"the run directory cannot be read now ({error}); the balance is not known")


def _end_now(directory: Path, signal_name: str) -> NoReturn:
    """End without waiting for any thread: what is not committed is dropped."""
    _say(f"stopped at once by a second signal (the first was {signal_name}); the same command goes on")
    _say_balance(directory)
    sys.stdout.flush()
    os._exit(Interrupted.exit_code)
