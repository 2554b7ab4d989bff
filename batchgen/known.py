"""The images that a run's plans have already, as the survey of a grown manifest needs them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.identity import (
    MAX_SALT,
    U64,
    Digests,
    Redrawn,
    Sources,
    derived_seeds,
    joined,
    number_digests,
    text_digests,
)
from batchgen.records import NOISE_BITS

_HEX_DIGITS = 32


@dataclass(frozen=True, slots=True)
class Known:
    """Images by their keys, ascending, and the seeds they have."""

    keys: Digests
    seeds: U64

    @classmethod
    def of(cls, shards: Iterable[pa.Table], *, has_ids: bool) -> Known:
        """Those of a plan's shards; `has_ids`: their ids are the manifest's own, else they are digests."""
        high, low, seeds = ([np.zeros(0, np.uint64)] for _ in range(3))
        for table in shards:
            column = table["id"].combine_chunks()
            ids = text_digests(column) if has_ids else _digests(column)
            keys = image_keys(ids, table["image_number"].to_numpy().astype(np.uint64))
            high.append(keys.high)
            low.append(keys.low)
            seeds.append(table["seed"].to_numpy())
        all_keys = Digests(np.concatenate(high), np.concatenate(low))
        order = np.lexsort((all_keys.low, all_keys.high))
        return cls(all_keys.take(order), np.concatenate(seeds)[order])

    def find(self, keys: Digests) -> npt.NDArray[np.intp]:
        """The place of each key, -1 where it is not known."""
        found = np.full(len(keys), -1, np.intp)
        place = np.searchsorted(self.keys.high, keys.high)
        asked = np.arange(len(keys))
        while len(asked):
            inside = place[asked] < len(self.keys)
            asked = asked[inside]
            at = place[asked]
            same_high = self.keys.high[at] == keys.high[asked]
            is_found = same_high & (self.keys.low[at] == keys.low[asked])
            found[asked[is_found]] = at[is_found]
            # Others may share the high half.
            asked = asked[same_high & ~is_found]
            place[asked] += 1
        return found

    def seeds_as_planned(
        self, place: npt.NDArray[np.intp], keys: U64, is_derived: npt.NDArray[np.bool_], sources: Sources
    ) -> Redrawn:
        """Of images that are known: those whose derived seed was drawn again when they were planned, and that seed.

        All arguments are per image; `keys` are `noise_keys` of the seeds as first drawn.
        """
        planned = self.seeds[place]
        differs = is_derived & (planned != (keys & np.uint64(NOISE_BITS)))
        rows = np.flatnonzero(differs)
        is_ours = np.zeros(len(rows), bool)
        for salt in range(1, MAX_SALT + 1) if len(rows) else ():
            drawn = derived_seeds(sources.ids.take(rows), sources.image_number[rows], sources.run_seed[rows], salt)
            is_ours |= drawn == planned[rows]
        return Redrawn(rows[is_ours], planned[rows[is_ours]])


def image_keys(ids: Digests, image_number: U64) -> Digests:
    """Who an image is: its row and its number in it."""
    return joined(ids, number_digests(image_number))


def _digests(column: pa.Array) -> Digests:
    """Digests back from the ids that `Digests.hex` made of them."""
    column = column.cast(pa.large_string())
    if not pc.all(pc.match_substring_regex(column, f"^[0-9a-f]{{{_HEX_DIGITS}}}$")).as_py():
        return text_digests(column)
    raw = bytes.fromhex("".join(column.to_pylist()))
    pairs = np.frombuffer(raw, ">u8").astype(np.uint64).reshape(-1, 2)
    return Digests(pairs[:, 0].copy(), pairs[:, 1].copy())
