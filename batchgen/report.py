"""Texts for people: the plan before a run, and where it stands."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from batchgen import memory
from batchgen.balance import Balance, WorkerBalance
from batchgen.drafts import Draft
from batchgen.job import Job
from batchgen.ledger import stem
from batchgen.memory import Demand
from batchgen.plan_index import PlanIndex
from batchgen.records import Group
from batchgen.wording import counted, sized

_BYTES_PER_PIXEL = {"png": 1.5, "jpeg": 0.4, "webp": 0.25}
"""Of typical generated pictures at the default quality; an estimate for the disk, not a promise."""
_MAX_GROUPS = 60
_MAX_LINES = 40
"""Of a table of workers or shards."""
_COLUMNS, _LAST = 80, 12
"""Of a terminal; of a table's last column at least."""


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """One group of a draft, counted."""

    group: Group
    images: int
    batches: Mapping[int, int]
    """Number of batches by size, largest size first."""
    padded: int
    idle_evaluations: int
    seconds: float

    @property
    def pixels(self) -> int:
        return self.images * self.group.width * self.group.height


def summarise(drafted: Draft) -> list[GroupSummary]:
    """The groups of a draft that it has rows of, in plan order; a group's batches lie side by side. Of a manifest that
    has grown, an earlier plan may have all rows of others."""
    cut = drafted.cut
    rows = cut.batch_rows
    edges = np.searchsorted(cut.batch_group, np.arange(len(drafted.groups) + 1))
    summaries = []
    for group, start, end in zip(drafted.groups, edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if start == end:
            continue
        here = slice(start, end)
        sizes, counts = np.unique(cut.batch_size[here], return_counts=True)
        images = int(rows[here].sum())
        summaries.append(
            GroupSummary(
                group=group,
                images=images,
                batches=dict(zip(sizes[::-1].tolist(), counts[::-1].tolist(), strict=True)),
                padded=int(cut.batch_padding[here].sum()),
                idle_evaluations=int(cut.idle_evaluations[here].sum()),
                seconds=float(cut.batch_s[here].sum()),
            )
        )
    return summaries


def plan_text(drafted: Draft, job: Job, demand: Demand | None = None) -> str:
    """The plan as a table: groups, batches by size, padding, and in total images, bytes, files, time; and, of a model
    that needs it, what memory its batches fit into."""
    summaries = summarise(drafted)
    header = ["size", "guided", "sampler", "images", "padded", "idle", "seconds", "batch×number"]
    has_loras = any(one.group.lora for one in summaries)
    header = [*header[:3], "lora", *header[3:]] if has_loras else header
    lines = [
        [
            f"{one.group.width}×{one.group.height}{one.group.lengths}",
            "yes" if one.group.is_guided else "no",
            sampler_text(one.group),
            *([one.group.lora or "-"] if has_loras else []),
            f"{one.images:,}",
            f"{one.padded:,}",
            f"{one.idle_evaluations:,}",
            f"{one.seconds:,.0f}" if drafted.cost.is_measured else "?",
            " ".join(f"{size}×{count:,}" for size, count in one.batches.items()),
        ]
        for one in summaries[:_MAX_GROUPS]
    ]
    if len(summaries) > _MAX_GROUPS:
        lines.append([f"… {len(summaries) - _MAX_GROUPS} more groups"] + [""] * (len(header) - 1))
    fitting = [] if demand is None else memory.lines(job, demand, [(one.group, max(one.batches)) for one in summaries])
    return "\n".join([*_table(header, lines, _COLUMNS), "", *_totals(drafted, job, summaries), *fitting])


def sampler_text(group: Group) -> str:
    """Which sampler a group's rows have, or which update form all of theirs have."""
    skipped = f" but the first {group.skipped}" if group.skipped else ""
    return f"{group.sampler}, {group.steps} steps{skipped}" if group.sampler else f"form {group.form}"


def _totals(drafted: Draft, job: Job, summaries: Sequence[GroupSummary]) -> list[str]:
    cut = drafted.cut
    size, num_files = (
        image_bytes(sum(one.pixels for one in summaries), job),
        num_parts(cut.num_rows, cut.num_shards, job),
    )
    num_batches = len(cut.batch_size)
    padded = sum(one.padded for one in summaries)
    idle = sum(one.idle_evaluations for one in summaries)
    time = (
        f"{cut.batch_s.sum() / 3600:.2f} GPU-hours, by {drafted.cost.source}"
        if drafted.cost.is_measured
        else "not known: batches are cut by " + drafted.cost.source
    )
    return [
        f"{counted(cut.num_rows, 'image')}, {num_batches:,} batch{'' if num_batches == 1 else 'es'}, "
        f"{counted(cut.num_shards, 'shard')}, {counted(len(summaries), 'group')}; "
        f"{counted(drafted.survey.num_rejected, 'row')} rejected",
        f"padding: {counted(padded, 'slot')} ({_share(padded, padded + cut.num_rows)}), "
        f"{counted(idle, 'idle row-evaluation')}",
        f"on disk: about {sized(size)} of {job.output.image} in {counted(num_files, 'file')} ({job.output.format})",
        f"time: {time}",
    ]


def image_bytes(pixels: float, job: Job) -> float:
    """About what so many pixels take on the disk."""
    return pixels * _BYTES_PER_PIXEL[job.output.image]


def num_parts(num_images: int, num_shards: int, job: Job) -> int:
    """Files under `data/` that so many images are in."""
    return num_images if job.output.format == "files" else num_shards


def plan_facts(drafted: Draft, job: Job, demand: Demand | None = None) -> dict[str, Any]:
    """The plan for programs."""
    cut, summaries = drafted.cut, summarise(drafted)
    return {
        "images": cut.num_rows,
        "rejected": drafted.survey.num_rejected,
        "batches": len(cut.batch_size),
        "shards": cut.num_shards,
        "padded": sum(one.padded for one in summaries),
        "idle_evaluations": sum(one.idle_evaluations for one in summaries),
        "seconds": float(cut.batch_s.sum()) if drafted.cost.is_measured else None,
        "cost": drafted.cost.source,
        "memory": None if demand is None else memory.facts(job, demand, drafted.groups),
        "groups": [{**asdict(one.group), "images": one.images, "batches": one.batches} for one in summaries],
    }


def status_text(index: PlanIndex, balance: Balance, *, is_finalized: bool) -> str:
    """Where a run stands: in all, by worker, and by shard for those that are not settled."""
    lines = [
        balance.line(),
        f"model {index.model}, {balance.shards_settled} of {len(balance.shards)} shards settled, "
        + ("finalized" if is_finalized else "not finalized"),
        *([balance.cut_note()] if balance.cut else []),
    ]
    workers = [
        [one.host, str(one.pid), one.job_id or "-", *map(_number, (one.done, one.failed, one.held)), _age(one)]
        for one in sorted(balance.workers, key=lambda one: -one.held)
    ]
    by = {one.shard: f"process {one.pid} on {one.host}, {_ago(one.heartbeat_age_s)}" for one in balance.holders}
    still_open = [
        [
            *(f"{one.shard:05d}", str(one.epoch)),
            *map(_number, (one.rows, one.done, one.failed, one.outstanding)),
            by.get(stem(one.shard, one.epoch), "-"),
        ]
        for one in balance.shards
        if one.outstanding
    ]
    tables = [
        (["worker's host", "process", "job", "done", "failed", "holds", "heartbeat"], workers),
        (["shard", "epoch", "rows", "done", "failed", "outstanding", "held by, heard"], still_open),
    ]
    for header, entries in tables:
        if entries:
            lines += ["", *_table(header, entries[:_MAX_LINES])]
        if len(entries) > _MAX_LINES:
            lines.append(f"… {len(entries) - _MAX_LINES:,} more; --json has them all")
    return "\n".join(lines)


def _number(number: int) -> str:
    return f"{number:,}"


def _age(worker: WorkerBalance) -> str:
    return "-" if worker.heartbeat_age_s is None else _ago(worker.heartbeat_age_s)


def _ago(age_s: float) -> str:
    """Where clocks differ a heartbeat may be of a time to come."""
    return f"{age_s:.0f} s ago" if age_s > -1 else f"{-age_s:.0f} s ahead of this clock"


def status_facts(index: PlanIndex, balance: Balance, *, is_finalized: bool) -> dict[str, Any]:
    """Where a run stands, for programs."""
    return {
        "rows": balance.rows,
        "held": balance.held,
        **asdict(balance),
        "model": index.model,
        "is_finalized": is_finalized,
    }


def _table(header: list[str], lines: Sequence[list[str]], columns: int = 1000) -> list[str]:
    """Columns side by side; where they need more than so many of a terminal, the last one goes on in lines below."""
    widths = [max(len(line[column]) for line in [header, *lines]) for column in range(len(header))]
    last = min(widths.pop(), max(_LAST, columns - sum(widths) - 2 * len(widths)))
    begin = "".join(f"{{:{width}}}  " for width in widths)
    shown = []
    for line in [header, *lines]:
        texts = textwrap.wrap(line[-1], last) or [""]
        shown += [
            begin.format(*line[:-1]) + texts[0],
            *(" " * len(begin.format(*line[:-1])) + one for one in texts[1:]),
        ]
    return [line.rstrip() for line in shown]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.2%}" if whole else "0%"
