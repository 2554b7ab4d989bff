"""`submit`, the command that gives a run to a Slurm cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchgen.errors import UsageError
from batchgen.options import job_of, laid_over, with_job_options
from batchgen.saying import say, say_planned
from batchgen.wording import counted, listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchgen.job import Job
    from batchgen.slurm.script import Submission, Window
    from batchgen.slurm.submit import Left, Request


@click.command()
@click.argument("manifest", nargs=-1)
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Run directory [default: <manifest's name>-out].")
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    metavar="DIRECTORY",
    help="Instead of MANIFEST: send tasks for what is left of this run.",
)
@with_job_options
@click.option(
    "--requeue",
    is_flag=True,
    help="Have tasks queue themselves again if their time is over or another job takes their place.",
)
@click.option("--dry-run", is_flag=True, help="Show the scripts; write and submit nothing.")
def submit(
    manifest: tuple[str, ...], out: Path | None, resume: Path | None, requeue: bool, dry_run: bool, **options: Any
) -> None:
    """Plan MANIFEST here and have Slurm make its rows.

    \b
    Example: batchgen submit prompts.parquet -o out --job jobs/slurm.toml --dry-run
    """
    from batchgen.slurm.script import windows
    from batchgen.slurm.submit import max_array_size, next_commands, send, submission

    if bool(manifest) == bool(resume) or (resume and out):
        raise UsageError("submit takes a MANIFEST, with -o DIRECTORY if need be, or --resume DIRECTORY and no manifest")
    if requeue:
        options["overrides"] = (*options["overrides"], "slurm.requeue=true")
    request, place = _request(manifest, out, resume, options)
    job = job_of(request.options)
    given = submission(request, place, job)
    # Before anything is planned: where there is no Slurm, nothing is left behind.
    max_size = max_array_size(may_guess=dry_run)
    left = _left(request, place, job, is_planned=bool(resume), is_dry=dry_run)
    for line in left.said:
        say(line)
    most = min(job.slurm.tasks, left.shards)
    if most == 0:
        say("nothing is submitted: " + ("others hold all rows that are left" if left.rows else "all rows are settled"))
        return
    num_tasks = most - _num_waiting(place, left)
    if num_tasks <= 0:
        limit = "slurm.tasks allows" if most == job.slurm.tasks else "there are shards that nobody works on"
        say(f"nothing is submitted: that is as many as {limit}")
        return
    arrays = windows(num_tasks, max_size, job.slurm.throttle)
    if dry_run:
        _show(given, arrays)
        return
    request.keep(place)
    click.echo(next_commands(send(given, arrays, click.echo), given))


def _request(
    manifest: tuple[str, ...], out: Path | None, resume: Path | None, options: dict[str, Any]
) -> tuple[Request, Path]:
    """What is asked, and the run directory."""
    from batchgen.runner import default_directory
    from batchgen.slurm.submit import Request

    if options["job_file"] is not None:
        options["job_file"] = str(Path(options["job_file"]).absolute())
    if resume is None:
        return Request(str(Path.cwd()), manifest, options), (out or default_directory(manifest)).absolute()
    before = Request.of(resume.absolute())
    return Request(before.folder, before.manifest, laid_over(before.options, options)), resume.absolute()


def _left(request: Request, out: Path, job: Job, *, is_planned: bool, is_dry: bool) -> Left:
    """What is to be done, of a run that is planned now, unless it was before or nothing may be written."""
    from batchgen.planned import plan_manifest
    from batchgen.progress import reading_bar
    from batchgen.rundir import RunDirectory, open_run
    from batchgen.slurm.submit import Left, left_of

    run = RunDirectory(out)
    if is_dry and not run.has_plan:
        planned = plan_manifest(request.manifest, job, reading_bar())
        say_planned(planned, job)
        return Left(planned.draft.cut.num_shards, planned.draft.cut.num_rows)
    if not is_planned:
        open_run(run, request.manifest, job, lambda planned: say_planned(planned, job), reading_bar())
    return left_of(run, job.run.stale_after_s)


def _num_waiting(out: Path, left: Left) -> int:
    """Tasks that were sent before and have no work yet, which is said of them."""
    from batchgen.slurm.submit import waiting

    found = waiting(out, left.at_work, say)
    if found:
        jobs = dict.fromkeys(name.partition("_")[0] for name in found)
        say(
            f"{counted(len(found), 'task')} sent before, in the queue or just begun: {listed(found[:5], len(found))} "
            f"(scancel {' '.join(jobs)} takes all tasks back)"
        )
    return len(found)


def _show(given: Submission, arrays: Sequence[Window]) -> None:
    from batchgen.slurm.script import ARRAY, FINISH, array_script, finish_script

    for name, text in ((ARRAY, array_script(given, arrays[0])), (FINISH, finish_script(given))):
        click.echo(f"==> {name} <==\n{text}")
    for window in arrays[1:]:
        click.echo(f"{ARRAY} again for the tasks from {window.first} on, with --array={window.indices}")
