"""What the commands say on standard error, beside their answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from batchgen.job import Job
    from batchgen.planned import Planned


def say(text: str) -> None:
    """A line for a person."""
    click.echo(text, err=True)


def say_notes(planned: Planned) -> None:
    """What a person should know of a manifest."""
    for note in planned.notes:
        say(f"note: {note}")
    num_rejected = planned.draft.survey.num_rejected
    if num_rejected:
        say(planned.rejections.message(num_rejected, is_skipped=True))


def say_planned(planned: Planned, job: Job) -> None:
    """A new plan, with its notes."""
    from batchgen.report import plan_text

    say_notes(planned)
    say(plan_text(planned.draft, job, planned.demand))
