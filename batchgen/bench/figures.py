"""The arithmetic of a bench, plain numbers in and plain numbers out, and the file that its report goes to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

Say = Callable[[str], None]
Interval = tuple[float, float]
"""Start and end, in one unit of time."""


def rate(images: int, seconds: float) -> float:
    """Images a second; 0 where nothing was timed."""
    return images / seconds if seconds > 0 else 0.0


def ratio(ours: float, theirs: float) -> float | None:
    """How many times as fast ours is; None where theirs is not known."""
    return ours / theirs if theirs else None


def union(intervals: Iterable[Interval]) -> float:
    """The time that at least one of the intervals covers."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def idle_share(busy: Sequence[Interval]) -> float | None:
    """The share of the time from the first start to the last end that no interval covers; None for no interval."""
    if not busy:
        return None
    span = max(end for _, end in busy) - min(start for start, _ in busy)
    return 1 - union(busy) / span if span else None


def share(part: float, whole: float) -> float:
    """A part of a whole, 0 of nothing."""
    return part / whole if whole else 0.0


def spread(items: int, wanted: int) -> list[int]:
    """`wanted` places among `items`, evenly from first to last by the middle of equal stretches; all of them if there
    are no more than that or if `wanted` is 0."""
    if not wanted or wanted >= items:
        return list(range(items))
    return [(2 * number + 1) * items // (2 * wanted) for number in range(wanted)]


def save(report: Any, path: Path | None) -> None:
    """Write what a report, a dataclass, has so far, so that a bench that is cut short leaves it."""
    if path:
        path.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
