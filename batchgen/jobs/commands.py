"""The commands about job files: `job init` and `job show`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from batchgen.errors import UsageError
from batchgen.jobs.files import families, new_file
from batchgen.options import job_of, origins_of, with_job_options
from batchgen.saying import say


@click.group(name="job")
def job_files() -> None:
    """Write a new job file, or show what a job comes to."""


@job_files.command()
@click.argument("family", type=click.Choice(families()), default="demo", metavar="[FAMILY]")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    help="The job file [default: FAMILY.toml]; - prints it.",
)
@click.option("--overwrite", is_flag=True, help="Replace a file that is there.")
def init(family: str, out: Path | None, overwrite: bool) -> None:
    """Write a job file for a model family, with every key and its meaning.

    \b
    FAMILY: demo, sd15, sdxl, sd3, flux, flux2, qwen-image or z-image [default: demo].
    Example: batchgen job init sdxl -o sdxl.toml
    """
    target, text = out or Path(f"{family}.toml"), new_file(family)
    if str(target) == "-":
        click.echo(text, nl=False)
        return
    try:
        with target.open("w" if overwrite else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(
            f"{target} is there already; name another file with -o, or replace it with --overwrite"
        ) from None
    except OSError as error:
        raise UsageError(f"{target} cannot be written: {error.strerror}") from None
    click.echo(f"{target}: edit it, then `batchgen run MANIFEST --job {target}`")


@job_files.command()
@with_job_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def show(as_json: bool, **options: Any) -> None:
    """Print every key of a job with its value and where that comes from.

    It takes the options of `run` that say what a job is, and prints a job file that says the same: each line ends
    with `default`, the job file's name, or the option. What is unset is the model's own, if the model is here.

    \b
    Example: batchgen job show --job sdxl.toml --set sampling.steps=20
    """
    from batchgen.jobs.origins import facts_of_values, shown, values
    from batchgen.models.folder import facts_of

    resolved, facts = job_of(options), None
    try:
        facts = facts_of(resolved.model, has_checker=resolved.engine.safety_checker)
    except UsageError as error:
        say(f"note: what the model has of its own is not shown: {error}")
    found = list(values(resolved, origins_of(options), facts))
    click.echo(json.dumps(facts_of_values(found), indent=2) if as_json else shown(found))
