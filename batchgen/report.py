"""Texts for people: the plan before a run, and where it stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from batchgen.balance import Balance
from batchgen.job import Job
from batchgen.plans import Draft, PlanIndex
from batchgen.records import Group

_BYTES_PER_PIXEL = {"png": 1.5, "jpeg": 0.4, "webp": 0.25}
"""Of typical generated pictures at the default quality; an estimate for the disk, not a promise."""
_MAX_GROUPS = 60


def plan_text(drafted: Draft, job: Job, num_rejected: int) -> str:
    """The plan as a table: groups, batches by size, padding, and in total images, bytes, files, time."""
    cut, groups = drafted.cut, drafted.groups
    rows, batch_group = cut.batch_rows, cut.batch_group
    header = ["size", "guided", "sampler", "images", "batches (size × number)", "padded", "idle steps", "seconds"]
    lines = []
    for number, group in enumerate(groups):
        here = batch_group == number
        sizes, counts = np.unique(cut.batch_size[here], return_counts=True)
        steps = cut.idle_steps[here].sum()
        lines.append(
            [
                f"{group.width}×{group.height}",
                "yes" if group.is_guided else "no",
                _sampler(group),
                f"{rows[here].sum():,}",
                " ".join(f"{size}×{count:,}" for size, count in zip(sizes[::-1], counts[::-1], strict=True)),
                f"{(cut.batch_size[here] - rows[here]).sum():,}",
                f"{steps:,}",
                f"{cut.batch_s[here].sum():,.0f}" if drafted.cost.is_measured else "?",
            ]
        )
    shown = lines[:_MAX_GROUPS]
    if len(lines) > _MAX_GROUPS:
        shown.append([f"… {len(lines) - _MAX_GROUPS} more groups"] + [""] * (len(header) - 1))
    return "\n".join([*_table(header, shown), "", *_totals(drafted, job, num_rejected)])


def _sampler(group: Group) -> str:
    return f"{group.sampler}, {group.steps} steps" if group.sampler else f"any of form {group.form}"


def _totals(drafted: Draft, job: Job, num_rejected: int) -> list[str]:
    cut = drafted.cut
    pixels = sum(
        int(cut.batch_rows[cut.batch_group == number].sum()) * group.width * group.height
        for number, group in enumerate(drafted.groups)
    )
    size = pixels * _BYTES_PER_PIXEL[job.output.image]
    num_files = cut.num_rows if job.output.format == "files" else cut.num_shards
    padded = int((cut.batch_size - cut.batch_rows).sum())
    time = (
        f"{cut.batch_s.sum() / 3600:.2f} GPU-hours"
        if drafted.cost.is_measured
        else "not known: batches are cut by " + drafted.cost.source
    )
    return [
        f"{cut.num_rows:,} images in {len(cut.batch_size):,} batches, {cut.num_shards:,} shards, "
        f"{len(drafted.groups):,} groups; {num_rejected:,} rows rejected",
        f"padding: {padded:,} slots ({_share(padded, padded + cut.num_rows)}), {int(cut.idle_steps.sum()):,} idle "
        "row-evaluations",
        f"on disk: about {_size(size)} of {job.output.image} in {num_files:,} files ({job.output.format})",
        f"time: {time}",
    ]


def plan_facts(drafted: Draft, num_rejected: int) -> dict[str, Any]:
    """The plan for programs."""
    cut = drafted.cut
    return {
        "images": cut.num_rows,
        "rejected": num_rejected,
        "batches": len(cut.batch_size),
        "shards": cut.num_shards,
        "padded": int((cut.batch_size - cut.batch_rows).sum()),
        "idle_evaluations": int(cut.idle_steps.sum()),
        "seconds": float(cut.batch_s.sum()) if drafted.cost.is_measured else None,
        "cost": drafted.cost.source,
        "groups": [
            {
                **asdict(group),
                "images": int(cut.batch_rows[cut.batch_group == number].sum()),
                "batches": _by_size(cut.batch_size[cut.batch_group == number]),
            }
            for number, group in enumerate(drafted.groups)
        ],
    }


def _by_size(sizes: np.ndarray[tuple[int], np.dtype[np.int64]]) -> dict[str, int]:
    values, counts = np.unique(sizes, return_counts=True)
    return {str(size): int(count) for size, count in zip(values, counts, strict=True)}


def status_text(index: PlanIndex, balance: Balance, *, is_finalized: bool) -> str:
    """Where a run stands."""
    lines = [
        balance.line(),
        f"model {index.model}, {balance.shards_settled} of {balance.shards} shards settled, "
        + ("finalized" if is_finalized else "not finalized"),
        *([balance.cut_note()] if balance.cut else []),
    ]
    header = ["shard", "rows left", "host", "pid", "job", "heartbeat"]
    claims = [
        [one.shard, f"{one.rows:,}", one.host, str(one.pid), one.job_id or "-", f"{one.heartbeat_age_s:.0f} s ago"]
        for one in balance.holders
    ]
    return "\n".join([*lines, *(["", *_table(header, claims)] if claims else [])])


def status_facts(index: PlanIndex, balance: Balance, *, is_finalized: bool) -> dict[str, Any]:
    """Where a run stands, for programs."""
    return {
        "rows": balance.rows,
        "held": balance.held,
        **asdict(balance),
        "model": index.model,
        "is_finalized": is_finalized,
    }


def _table(header: list[str], lines: Sequence[list[str]]) -> list[str]:
    widths = [max(len(line[column]) for line in [header, *lines]) for column in range(len(header))]
    padded = [[text.ljust(width) for text, width in zip(line, widths, strict=True)] for line in [header, *lines]]
    return ["  ".join(line).rstrip() for line in padded]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.2%}" if whole else "0%"


def _size(num_bytes: float) -> str:
    for unit in ("bytes", "KB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
