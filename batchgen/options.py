"""The options of the command line that say what a job is, and the words that say the same elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from batchgen.job import Job

Command = TypeVar("Command", bound=Callable[..., Any])

_JOB_OPTIONS = [
    click.option(
        "--job", "job_file", type=click.Path(dir_okay=False), help="Job file (TOML); `batchgen job init` writes one."
    ),
    click.option("--model", help='A diffusers folder, a fetched hub id, "demo" or "pattern" [default: "demo"].'),
    click.option(
        "--format",
        "output_format",
        type=click.Choice(["files", "webdataset", "parquet"]),
        help="Image folders, tars, or Parquet files with images [default: files].",
    ),
    click.option(
        "--on-bad-row",
        type=click.Choice(["stop", "skip"]),
        help="On rows that cannot be made as asked: make none, or leave them out [default: stop].",
    ),
    click.option(
        "--size-policy",
        type=click.Choice(["strict", "round"]),
        help="Sizes that the model cannot do are wrong, or are rounded [default: strict].",
    ),
    click.option(
        "--on-truncate",
        type=click.Choice(["warn", "error"]),
        help="Prompts that are longer than the model reads are cut and counted, or are wrong [default: warn].",
    ),
    click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="TABLE.KEY=VALUE",
        help="Any key of a job file, such as sampling.steps=30; may be given several times.",
    ),
    click.option(
        "--max-memory", metavar="SIZE", help='Of a GPU, such as "24GB": plan for it, take no more [default: all].'
    ),
]
_SHORT_FORMS = {
    "model": "model.path",
    "output_format": "output.format",
    "on_bad_row": "plan.on_bad_row",
    "size_policy": "plan.size_policy",
    "on_truncate": "plan.on_truncate",
    "max_memory": "engine.max_memory",
    "grace": "run.grace_s",
}
_FLAGS = {
    "job_file": "--job",
    "model": "--model",
    "output_format": "--format",
    "on_bad_row": "--on-bad-row",
    "size_policy": "--size-policy",
    "on_truncate": "--on-truncate",
    "max_memory": "--max-memory",
    "overrides": "--set",
}


def with_job_options(command: Command) -> Command:
    """The options that `run`, `plan` and `submit` share."""
    for option in reversed(_JOB_OPTIONS):
        command = option(command)
    return command


def job_of(options: Mapping[str, Any]) -> Job:
    """The job that the options name. Raises UsageError."""
    from batchgen.job import load_job

    given = {name: key for name, key in _SHORT_FORMS.items() if options.get(name) is not None}
    short = [f"{key}={json.dumps(options[name], ensure_ascii=False)}" for name, key in given.items()]
    flags = {key: f"--{name.replace('_', '-')}" for name, key in given.items() if name in ("grace", "max_memory")}
    return load_job(options["job_file"], [*short, *options["overrides"]], flags)


def origins_of(options: Mapping[str, Any]) -> dict[str, str]:
    """What has given the keys of such a job that are not defaults, by `table.key`: the job file or an option."""
    from batchgen.job import keys_given

    short = {key: f"--{name}" for name, key in _SHORT_FORMS.items() if options.get(name) is not None}
    short = {key: _FLAGS.get(name.removeprefix("--"), name) for key, name in short.items()}
    file = options["job_file"]
    return {
        **dict.fromkeys(keys_given(file, ()), file),
        **short,
        **dict.fromkeys(keys_given(None, options["overrides"]), "--set"),
    }


def words_of(options: Mapping[str, Any]) -> Iterator[str]:
    """The options as words of a command line that is given in the same folder."""
    for name, flag in _FLAGS.items():
        value = options.get(name)
        for one in [value] if isinstance(value, str) else value or ():
            yield from (flag, one)


def laid_over(before: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Options given earlier, with those that are given now."""
    given = {name: value for name, value in options.items() if name in _FLAGS and value is not None}
    return {**before, **given, "overrides": (*before["overrides"], *options["overrides"])}
