"""Rows of a shard as they are written down: ascending pairs of first and last."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MAX_ROWS = 2**20
"""Of a shard: a receipt that names more cannot be one."""


def ranges(rows: Iterable[int]) -> list[tuple[int, int]]:
    """Indices as ascending (first, last) pairs."""
    pairs: list[tuple[int, int]] = []
    for row in sorted(rows):
        if pairs and pairs[-1][1] == row - 1:
            pairs[-1] = (pairs[-1][0], row)
        else:
            pairs.append((row, row))
    return pairs


def indices(pairs: Iterable[Sequence[int]]) -> tuple[int, ...]:
    """The indices of `ranges`. Raises ValueError for pairs that are not ascending or leave what a shard can hold."""
    found: list[int] = []
    for first, last in pairs:
        if not (found[-1] if found else -1) < first <= last < MAX_ROWS:
            raise ValueError(f"rows {first} to {last}")
        found += range(first, last + 1)
    return tuple(found)
