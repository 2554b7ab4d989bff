"""The page put together: what was counted, in words, tables and plots, through a template that escapes every value."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from batchgen.balance import Balance
from batchgen.errors import UsageError
from batchgen.plan_index import PlanIndex
from batchgen.records import Group
from batchgen.report import sampler_text
from batchgen.reporting.cards import Card
from batchgen.reporting.plan_counts import PlanCounts
from batchgen.reporting.plots import pace_plots, stage_plots
from batchgen.reporting.rows import RowCounts
from batchgen.reporting.spending import Pace, Spending, pace
from batchgen.version import VERSION
from batchgen.wording import counted, listed, sized

_MOST_LINES = 40
"""Of each table."""
_MOST_CHOICES = 200
"""Groups that the gallery can be narrowed to."""
_STAGES = {
    "text": "encode prompts",
    "denoise": "denoise",
    "decode": "decode",
    "paint": "paint",
    "write": "write files (all encoder threads)",
}
"""In the order in which they are shown."""


@dataclass(frozen=True, slots=True)
class Table:
    """Lines for the template; numbers are set in columns of their own kind."""

    header: Sequence[str]
    lines: Sequence[Sequence[str]]
    num_texts: int = 1
    """So many columns, from the left, are texts."""
    name: int = 0
    """The column that says what a line is about."""
    left_out: int = 0


@dataclass(frozen=True)
class Findings:
    """All that a page is about."""

    name: str
    """Of the run directory."""
    index: PlanIndex
    balance: Balance
    is_finalized: bool
    plan: PlanCounts
    spending: Spending
    rows: RowCounts
    cards: Sequence[Card]
    rejected: Sequence[str]
    """Faults of the first rejected rows."""

    @cached_property
    def labels(self) -> Sequence[str]:
        """Of the groups, in their order."""
        return group_labels(self.index.groups)

    @property
    def outstanding(self) -> int:
        return self.plan.planned - self.plan.made - self.plan.failed


def page(found: Findings) -> str:
    """The HTML text."""
    return str(_template().render(**_context(found)))


def require_libraries() -> None:
    """Raises UsageError where one is missing that pages are made with."""
    missing = [name for name in ("jinja2", "matplotlib") if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"a report is made with {listed(missing)}, which this installation lacks: pip install {' '.join(missing)}"
        )


def _template() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("batchgen.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html")


_PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"} | {127: "\u2421"}
"""Of control characters, which HTML cannot hold."""


def _visible(value: object) -> object:
    return value.translate(_PICTURES) if type(value) is str else value


def _context(found: Findings) -> dict[str, Any]:
    from markupsafe import Markup

    script = _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    known = pace(found.spending)
    stages = {text: s for stage, text in _STAGES.items() if (s := found.spending.stage_s.get(stage, 0.0)) > 0.0}
    return {
        "found": found,
        "version": VERSION,
        "written": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "script": Markup(script),
        "style": Markup(_asset("page.css")),
        "policy": f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
        f"style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        "tiles": list(_tiles(found, known)),
        "notes": list(_notes(found)),
        "pace": known,
        "pace_plots": {kind: Markup(svg) for kind, svg in pace_plots(known).items()} if known else {},
        "break_note": _break_note(known),
        "stage_plots": {kind: Markup(svg) for kind, svg in stage_plots(stages).items()} if stages else {},
        "reasons": sorted(found.rows.reasons.items(), key=lambda one: -one[1].count)[:_MOST_LINES],
        "groups": _groups(found),
        "buckets": _buckets(found),
        "captures": _captures(found.spending),
        "memory": _memory(found.spending),
        "workers": _workers(found.spending),
        "labels": found.labels,
        "choices": sorted({card.group for card in found.cards})[:_MOST_CHOICES],
        "versions": {name: ", ".join(sorted(some)) for name, some in sorted(found.spending.versions.items())},
        "job": json.dumps(found.index.job, indent=2, ensure_ascii=False),
        "counted": counted,
    }


def _asset(name: str) -> str:
    return (files("batchgen.reporting") / "templates" / name).read_text(encoding="utf-8")


def group_labels(groups: Sequence[Group]) -> list[str]:
    """The groups in words; what all of them have of samplers is left out."""
    samplers = [f", {sampler_text(group)}" for group in groups]
    if len(set(samplers)) == 1:
        samplers = [""] * len(groups)
    return [
        f"{group.width}×{group.height}, {'guided' if group.is_guided else 'unguided'}{sampler}"
        for group, sampler in zip(groups, samplers, strict=True)
    ]


def _tiles(found: Findings, known: Pace | None) -> Sequence[tuple[str, str, str]]:
    """What a number is of, the number, and the kind of it."""
    plan = found.plan
    tiles = [
        ("images made", f"{plan.made:,}", ""),
        ("failed", f"{plan.failed:,}", "bad" if plan.failed else ""),
        ("rejected", f"{found.index.num_rejected:,}", "bad" if found.index.num_rejected else ""),
        ("outstanding", f"{found.outstanding:,}", "open" if found.outstanding else ""),
    ]
    if known is not None and not found.spending.num_untimed and known.work_s > 1:
        tiles += [
            ("images/s", f"{plan.made / known.work_s:,.3g}", ""),
            ("of work", lasting(known.work_s), ""),
        ]
    return [
        *tiles,
        ("of image files", sized(found.rows.num_bytes), ""),
        ("worker starts", f"{len(found.spending.workers):,}", ""),
    ]


def lasting(seconds: float) -> str:
    """A time in the units that fit it: "42 s", "12 min", "3 h 05 min"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60:,} h {minutes % 60:02d} min"


def _notes(found: Findings) -> Sequence[str]:
    """What a person should know of the images, each a sentence."""
    rows, plan = found.rows, found.plan
    notes = [
        (plan.cut, "{} made of prompts that were cut, because the model reads no more (tokens_dropped)"),
        (rows.flat, "{} of one colour (is_flat)"),
        (rows.retried, "{} made again alone after their batch had failed (retries)"),
        (rows.smaller, "{} made in smaller batches than planned, because memory was short"),
    ]
    said = [f"{text.format(counted(number, 'image'))}." for number, text in notes if number]
    lost = [f"Left out, because it cannot be read: {text}" for text in rows.unreadable[:_MOST_LINES]]
    return [*said, *lost]


def _break_note(known: Pace | None) -> str:
    if known is None or not known.breaks_s:
        return ""
    times = counted(len(known.breaks_s), "break")
    return f"{times} without any worker, {lasting(known.cut_s)} in all, cut out at the dotted lines."


def _groups(found: Findings) -> Table:
    seconds = found.rows.group_s
    total = sum(seconds.values()) or 1.0
    made = {number: one for number, one in found.plan.groups.items() if one.made and number in seconds}
    slowest = sorted(made, key=lambda number: -seconds[number] / made[number].made)
    lines = [
        (
            found.labels[number],
            f"{made[number].made:,}",
            f"{made[number].failed:,}",
            f"{seconds[number] / made[number].made:,.3g}",
            f"{seconds[number] / total:.1%}",
        )
        for number in slowest[:_MOST_LINES]
    ]
    header = ("group", "images", "failed", "seconds an image", "of all seconds")
    return Table(header, lines, left_out=len(slowest) - len(lines))


def _buckets(found: Findings) -> Table:
    buckets = sorted(found.plan.buckets.items(), key=lambda one: -one[1].images)
    is_known = any(one.at_work is not None for _, one in buckets)
    lines = [
        (
            found.labels[group],
            f"{size:,}",
            f"{one.batches:,}",
            f"{one.images:,}",
            f"{one.made:,}",
            f"{one.padded:,}",
            *(["" if one.at_work is None else f"{one.at_work:.1%}"] if is_known else []),
        )
        for (group, size), one in buckets[:_MOST_LINES]
    ]
    header = [
        "group",
        "batch size",
        "batches",
        "images",
        "made",
        "padded lanes",
        *(["lanes at work"] if is_known else []),
    ]
    return Table(header, lines, left_out=len(buckets) - len(lines))


def _captures(spending: Spending) -> Table:
    captures = sorted(spending.captures.values(), key=lambda one: -one.seconds)
    lines = [
        (
            one.bucket,
            one.mode,
            one.device,
            f"{one.count:,}",
            f"{one.seconds:,.1f}",
            f"{one.compile_s:,.1f}",
            sized(one.held_bytes),
        )
        for one in captures[:_MOST_LINES]
    ]
    header = ("bucket", "mode", "device", "captures", "seconds", "compiling", "memory held")
    return Table(header, lines, num_texts=3, left_out=len(captures) - len(lines))


def _memory(spending: Spending) -> Table:
    lines = [
        (device, sized(peak), sized(total), f"{peak / total:.0%}" if total else "")
        for device, (peak, total) in sorted(spending.memory.items())
    ]
    return Table(("device", "most in use", "of", ""), lines)


def _workers(spending: Spending) -> Table:
    workers = list(enumerate(spending.workers, 1))
    lines = [
        (
            f"{number}",
            one.host,
            f"{one.pid}",
            one.device or "-",
            f"{one.rows:,}",
            lasting(busy_s) if busy_s else "-",
            f"{one.rows / busy_s:,.3g}" if busy_s > 1 else "-",
        )
        for number, one in workers[:_MOST_LINES]
        for busy_s in [spending.busy_s(number - 1)]
    ]
    header = ("", "host", "process", "device", "rows", "at work", "rows/s")
    return Table(header, lines, num_texts=4, name=1, left_out=len(workers) - len(lines))
