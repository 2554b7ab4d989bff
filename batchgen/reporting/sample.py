"""Which rows the page shows: some of every group, spread evenly over the manifest, the same each time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_WEYL = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: its multiples modulo 2^64 fill the range evenly (Knuth, The Art of Computer Programming,
vol. 3, 6.4), so the rows whose positions' multiples are least lie evenly in the manifest."""

Key = TypeVar("Key", bound=Hashable)


class Sample(Generic[Key]):
    """The rows with the least keys of each kind, at most as many as its quota."""

    def __init__(self, quota: Callable[[Key], int]) -> None:
        self._quota = quota
        self._kept: dict[Key, pa.Table] = {}
        self._keys: dict[Key, npt.NDArray[np.uint64]] = {}

    def add(self, kind: Key, rows: pa.Table) -> None:
        """Offer rows of one kind, of one schema, with their column `position`."""
        quota = self._quota(kind)
        keys = rows["position"].to_numpy() * np.uint64(_WEYL)
        had = self._keys.get(kind, np.zeros(0, np.uint64))
        if quota == 0 or (len(had) == quota and not (keys < had[-1]).any()):
            return
        both = np.concatenate([had, keys])
        least = np.argsort(both, kind="stable")[:quota]
        together = pa.concat_tables([self._kept[kind], rows], promote_options="default") if kind in self._kept else rows
        self._kept[kind], self._keys[kind] = together.take(pa.array(least)).combine_chunks(), both[least]

    def kinds(self) -> list[tuple[Key, pa.Table]]:
        """What was kept."""
        return list(self._kept.items())


def quotas(counts: Mapping[Key, int], most: int) -> dict[Key, int]:
    """Shares of at most `most` in all: one for each kind that has any, of the largest kinds if there are more, and the
    rest in proportion."""
    there = sorted((one for one in counts.items() if one[1] > 0), key=lambda one: -one[1])[:most]
    left = most - len(there)
    total = sum(count - 1 for _, count in there)
    shares = {kind: 1 + (min(count - 1, (count - 1) * left // total) if total else 0) for kind, count in there}
    for kind, count in there:
        if sum(shares.values()) < most and shares[kind] < count:
            shares[kind] += 1
    return shares
