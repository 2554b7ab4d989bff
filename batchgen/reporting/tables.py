"""The page's tables, and numbers as it writes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batchgen.reporting.findings import Findings
from batchgen.reporting.spending import Spending
from batchgen.wording import sized

MOST_LINES = 40
"""Of each table."""


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


def lasting(seconds: float) -> str:
    """A time in the units that fit it: "42 s", "12 min", "3 h 05 min"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60:,} h {minutes % 60:02d} min"


def rate(number: float) -> str:
    """Three digits, or all before the point."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def groups(found: Findings) -> Table:
    """Where an image took most seconds, first."""
    seconds, images = found.rows.group_s, found.rows.group_images
    total = sum(seconds.values()) or 1.0
    slowest = sorted(seconds, key=lambda number: -seconds[number] / images[number])
    lines = [
        (
            found.labels[number],
            f"{images[number]:,}",
            f"{found.plan.groups[number].failed:,}",
            rate(seconds[number] / images[number]),
            f"{seconds[number] / total:.1%}",
        )
        for number in slowest[:MOST_LINES]
    ]
    header = ("group", "images", "failed", "seconds an image", "of all seconds")
    return Table(header, lines, left_out=len(slowest) - len(lines))


def buckets(found: Findings) -> Table:
    """The largest first."""
    every = sorted(found.plan.buckets.items(), key=lambda one: -one[1].images)
    is_known = any(one.at_work is not None for _, one in every)
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
        for (group, size), one in every[:MOST_LINES]
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
    return Table(header, lines, left_out=len(every) - len(lines))


def captures(spending: Spending) -> Table:
    """The longest first."""
    every = sorted(spending.captures.values(), key=lambda one: -one.seconds)
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
        for one in every[:MOST_LINES]
    ]
    header = ("bucket", "mode", "device", "captures", "seconds", "compiling", "memory held")
    return Table(header, lines, num_texts=3, left_out=len(every) - len(lines))


def memory(spending: Spending) -> Table:
    """By device."""
    lines = [
        (device, sized(peak), sized(total), f"{peak / total:.0%}" if total else "")
        for device, (peak, total) in sorted(spending.memory.items())
    ]
    return Table(("device", "most in use", "of", ""), lines)


def workers(spending: Spending) -> Table:
    """In the order in which their first part lies in the plan."""
    every = list(enumerate(spending.workers, 1))
    lines = [
        (
            f"{number}",
            one.host,
            f"{one.pid}",
            one.device or "-",
            f"{one.rows:,}",
            lasting(busy_s) if busy_s else "-",
            rate(one.rows / busy_s) if busy_s > 1 else "-",
        )
        for number, one in every[:MOST_LINES]
        for busy_s in [spending.busy_s(number - 1)]
    ]
    header = ("", "host", "process", "device", "rows", "at work", "rows/s")
    return Table(header, lines, num_texts=4, name=1, left_out=len(every) - len(lines))
