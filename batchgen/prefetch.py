"""`batchgen prefetch`: all that runs of a model read, fetched and hashed beforehand."""

from __future__ import annotations

import click

from batchgen.saying import say
from batchgen.wording import counted


@click.command()
@click.argument("model_or_job", metavar="MODEL|JOB")
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="TABLE.KEY=VALUE",
    help="Only model.variant, model.revision, model.config and engine.safety_checker.",
)
def prefetch(model_or_job: str, overrides: tuple[str, ...]) -> None:
    """Fetch a hub model's files, so that runs need no network.

    JOB is a job file (.toml), whose model is fetched, with the VAE and the LoRAs that it names.

    \b
    Example: batchgen prefetch stabilityai/stable-diffusion-xl-base-1.0 --set model.variant=fp16
    """
    from batchgen.job import load_job
    from batchgen.models.fetching import fetch_model

    is_job = model_or_job.endswith(".toml")
    job = load_job(model_or_job if is_job else None, overrides)
    model = job.model if is_job else job.model.model_copy(update={"path": model_or_job})
    fetched = fetch_model(model, has_checker=job.engine.safety_checker)
    if fetched.note:
        say(f"note: {fetched.note}")
    what = f"{counted(fetched.num_files, 'file')}, {fetched.num_bytes / 1e9:.2f} GB"
    commit = f", commit {fetched.folder.commit}" if fetched.folder.commit else ""
    click.echo(f"{model.path}: {what}{commit}\n{fetched.folder.path}")
