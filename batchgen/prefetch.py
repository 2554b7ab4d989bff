"""`batchgen prefetch`: all that runs of a model read, fetched and hashed beforehand."""

from __future__ import annotations

import click

from batchgen.saying import say
from batchgen.wording import counted


@click.command()
@click.argument("model_or_job", metavar="MODEL|JOB")
@click.option("--set", "overrides", multiple=True, metavar="TABLE.KEY=VALUE", help="model.variant, model.revision.")
def prefetch(model_or_job: str, overrides: tuple[str, ...]) -> None:
    """Fetch a hub model's files, so that runs need no network.

    JOB is a job file (.toml), whose model is fetched.

    \b
    Example: batchgen prefetch stabilityai/stable-diffusion-xl-base-1.0 --set model.variant=fp16
    """
    from batchgen.job import load_job
    from batchgen.models.folder import fetch_model

    if model_or_job.endswith(".toml"):
        model = load_job(model_or_job, overrides).model
    else:
        model = load_job(None, overrides).model.model_copy(update={"path": model_or_job})
    fetched = fetch_model(model)
    if fetched.note:
        say(f"note: {fetched.note}")
    what = f"{counted(fetched.num_files, 'file')}, {fetched.num_bytes / 1e9:.2f} GB"
    commit = f", commit {fetched.folder.commit}" if fetched.folder.commit else ""
    click.echo(f"{model.path}: {what}{commit}\n{fetched.folder.path}")
