"""Who a row is: 128-bit digests, derived seeds. All of it on whole columns of uint64.

A digest is a pair (high, low) of uint64 arrays. Strings are hashed with XXH3 (128 bits), numbers and
combinations with the SplitMix64 finaliser (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number
generators"). Neither is meant to withstand an adversary; rows that met would still be made once each.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from batchgen.columns import decoded, is_given, is_text, plain, retyped
from batchgen.errors import UsageError
from batchgen.records import NOISE_BITS

U64 = npt.NDArray[np.uint64]
_BINARIES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)
MAX_SALT = 64
"""Draws of a derived seed; as many are recognised in a plan."""
_GOLDEN = np.uint64(0x9E37_79B9_7F4A_7C15)


@dataclass(frozen=True, slots=True)
class Digests:
    """One 128-bit digest per row."""

    high: U64
    low: U64

    def __len__(self) -> int:
        return len(self.high)

    def take(self, index: npt.NDArray[np.intp]) -> Digests:
        return Digests(self.high[index], self.low[index])

    def part(self, rows: slice) -> Digests:
        return Digests(self.high[rows], self.low[rows])

    def hex(self) -> pa.Array:
        """32 hexadecimal digits each, as an Arrow string array."""
        raw = np.column_stack([self.high, self.low]).astype(">u8").tobytes().hex().encode()
        return pa.FixedSizeBinaryArray.from_buffers(pa.binary(32), len(self), [None, pa.py_buffer(raw)]).cast(
            pa.string()
        )


def mix(values: U64) -> U64:
    """The SplitMix64 finaliser: a bijection of 64 bits."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
        return values ^ (values >> np.uint64(31))


def joined(digests: Digests, value: Digests) -> Digests:
    """The digest of a sequence one element longer."""
    with np.errstate(over="ignore"):
        high = mix(digests.high * _GOLDEN + value.high)
        low = mix((digests.low ^ high) * _GOLDEN + value.low)
    return Digests(high, low)


def text_digests(column: pa.Array) -> Digests:
    """Digest of each string's or binary's bytes; zero for null."""
    array = decoded(column).cast(pa.large_binary())
    if _repeats(array):
        distinct = array.dictionary_encode()
        hashed = _hashed(distinct.dictionary)
        code = distinct.indices.fill_null(len(distinct.dictionary)).to_numpy(zero_copy_only=False)
        zero = np.zeros(1, np.uint64)
        return Digests(np.append(hashed.high, zero)[code], np.append(hashed.low, zero)[code])
    return _hashed(array)


def _repeats(array: pa.Array) -> bool:
    """Whether its first values are mostly repetitions, so that hashing the distinct ones pays."""
    sample = array.slice(0, 1000)
    return len(sample.unique()) * 2 < len(sample)


def _hashed(array: pa.Array) -> Digests:
    _, offset_buffer, data = array.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64)[array.offset : array.offset + len(array) + 1].tolist()
    view = memoryview(data) if data is not None else memoryview(b"")
    digest = xxhash.xxh3_128_digest
    raw = b"".join([digest(view[a:b]) for a, b in itertools.pairwise(offsets)])
    pairs = np.frombuffer(raw, ">u8").astype(np.uint64).reshape(-1, 2)
    given = is_given(array).astype(np.uint64)
    return Digests(pairs[:, 0] * given, pairs[:, 1] * given)


def number_digests(values: U64) -> Digests:
    """Digest of numbers by their 64 bits."""
    with np.errstate(over="ignore"):
        return Digests(mix(values + _GOLDEN), mix(values ^ _GOLDEN))


def column_digests(column: pa.Array) -> Digests:
    """Digest of each value of a column of any Arrow type, independent of integer width and text encoding."""
    column = _shortened(plain(column)) if pa.types.is_temporal(column.type) else plain(column)
    kind = column.type
    if is_text(kind) or any(is_kind(kind) for is_kind in _BINARIES):
        return text_digests(column)
    if pa.types.is_boolean(kind):
        column, kind = column.cast(pa.uint8()), pa.uint8()
    if pa.types.is_integer(kind):
        return number_digests(column.fill_null(0).to_numpy(zero_copy_only=False).astype(np.uint64))
    if pa.types.is_floating(kind):
        values = column.cast(pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False)
        return number_digests(values.view(np.uint64))
    as_bytes = retyped(column, lambda part: pa.large_binary() if is_text(part) else part)
    spelled = [None if value is None else _spelled(value) for value in as_bytes.to_pylist()]
    return text_digests(pa.array(spelled, pa.large_string()))


def _shortened(column: pa.Array) -> pa.Array:
    """Times, in UTC or without a zone, without the zeros that a finer unit puts at the end of their seconds."""
    column = pc.replace_substring_regex(column, r"(\.\d*?)0+(Z?)$", r"\1\2")
    return pc.replace_substring_regex(column, r"\.(Z?)$", r"\1")


def _spelled(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True, default=_plain)


def _plain(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def row_digests(columns: Mapping[str, pa.Array], num_rows: int, known: Mapping[str, Digests]) -> Digests:
    """Digest of all columns of each row, by name; null counts as not there, order of columns does not count.

    `known` are digests of columns that are at hand already.
    """
    total = Digests(np.zeros(num_rows, np.uint64), np.zeros(num_rows, np.uint64))
    for name in sorted(columns):
        column = columns[name]
        key = text_digests(pa.array([name]))
        with_key = joined(total, Digests(np.repeat(key.high, num_rows), np.repeat(key.low, num_rows)))
        longer = joined(with_key, known[name] if name in known else column_digests(column))
        given = is_given(column)
        total = Digests(np.where(given, longer.high, total.high), np.where(given, longer.low, total.low))
    return total


def occurrences(digests: Digests) -> npt.NDArray[np.uint64]:
    """How many earlier rows have the same digest."""
    number = np.zeros(len(digests), np.uint64)
    again = repeated(digests.high)
    if not len(again):
        return number
    order = again[np.lexsort((again, digests.low[again], digests.high[again]))]
    high, low = digests.high[order], digests.low[order]
    is_first = np.append(True, (high[1:] != high[:-1]) | (low[1:] != low[:-1]))
    start = np.maximum.accumulate(np.where(is_first, np.arange(len(order)), 0))
    number[order] = np.arange(len(order)) - start
    return number


def repeated(values: U64) -> npt.NDArray[np.intp]:
    """Indices of all entries whose value occurs more than once, ascending."""
    ordered = np.sort(values)
    twice = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    if not len(twice):
        return np.zeros(0, np.intp)
    place = np.minimum(np.searchsorted(twice, values), len(twice) - 1)
    return np.flatnonzero(twice[place] == values)


def derived_seeds(ids: Digests, image_number: U64, run_seed: U64, salt: int = 0) -> U64:
    """The seed of a row that has none: 32 bits of (run seed, id, image number) and the salt of a re-draw."""
    with np.errstate(over="ignore"):
        key = joined(ids, number_digests(image_number))
        base = mix(run_seed + _GOLDEN * np.uint64(salt + 1))
        seeds: U64 = mix(key.high ^ mix(key.low + base)) >> np.uint64(32)
    return seeds


def noise_keys(content: npt.NDArray[np.uint32], seeds: U64) -> U64:
    """What rows of equal content and equal noise share: 32 bits of each."""
    return (content.astype(np.uint64) << np.uint64(32)) | (seeds & np.uint64(NOISE_BITS))


@dataclass(frozen=True, slots=True)
class Redrawn:
    """Rows whose derived seed was drawn again: ascending row numbers and their new seeds."""

    rows: npt.NDArray[np.intp]
    seeds: U64


def merged(one: Redrawn, other: Redrawn) -> Redrawn:
    """Both, which have no row in common."""
    rows = np.concatenate([one.rows, other.rows])
    order = np.argsort(rows)
    return Redrawn(rows[order], np.concatenate([one.seeds, other.seeds])[order])


@dataclass(frozen=True, slots=True)
class Sources:
    """What the derived seeds of some images come from."""

    ids: Digests
    image_number: U64
    run_seed: U64


def settle_seeds(
    keys: U64, is_derived: npt.NDArray[np.bool_], sources: Callable[[npt.NDArray[np.intp]], Sources]
) -> Redrawn:
    """Draw derived seeds again until no two images of equal content share their noise (`noise_keys`).

    Of images that meet, explicit seeds stay, else the lowest id does (by digest, then image number); the others
    are salted with 1, 2, … in the order of their ids. `sources` is asked for the images that meet only. Raises
    UsageError for one that gets none of its own in `MAX_SALT` draws.
    """
    meeting = repeated(keys)
    met = sources(meeting)
    by_id = (met.image_number, met.ids.low, met.ids.high)
    order = np.lexsort((*by_id, is_derived[meeting], keys[meeting]))
    ordered = keys[meeting][order]
    is_later = np.append(False, ordered[1:] == ordered[:-1])[: len(order)]
    is_loser = np.zeros(len(meeting), bool)
    is_loser[order[is_later & is_derived[meeting][order]]] = True
    taken = np.sort(keys) if is_loser.any() else keys
    seeds, fresh = np.zeros(len(meeting), np.uint64), set[int]()
    for place in (one for one in np.lexsort(by_id).tolist() if is_loser[one]):
        content = (keys[meeting[[place]]] >> np.uint64(32)).astype(np.uint32)
        for salt in range(1, MAX_SALT + 1):
            at = [place]
            seed = derived_seeds(met.ids.take(np.array(at)), met.image_number[at], met.run_seed[at], salt)
            key = noise_keys(content, seed)[0]
            if int(key) not in fresh and not _holds(taken, key):
                break
        else:
            raise UsageError(
                f"manifest: {MAX_SALT} draws have given a row no seed of its own: too many rows share one prompt and "
                "have no seed; give them seeds, or split the manifest"
            )
        fresh.add(int(key))
        seeds[place] = seed[0]
    return Redrawn(meeting[is_loser], seeds[is_loser])


def _holds(ordered: U64, value: np.uint64) -> bool:
    place = int(np.searchsorted(ordered, value))
    return place < len(ordered) and bool(ordered[place] == value)


def num_repeats(keys: U64) -> int:
    """How many entries repeat an earlier one."""
    ordered = np.sort(keys)
    return int((ordered[1:] == ordered[:-1]).sum())
