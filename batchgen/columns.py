"""Arrow columns of whatever type people store -> exact numbers and texts, with a mask of what does not parse.

Everything here works on one batch of rows at a time and keeps no Python object per row beyond it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.wording import shorten

Column = TypeVar("Column", pa.Array, pa.ChunkedArray)
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Parsed:
    """A column as numbers. `values` says nothing where `given` is false (null) or `is_bad` is true."""

    values: npt.NDArray[Any]
    given: Bools
    is_bad: Bools

    def filled(self, is_bad: Bools, default: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Integers, with the default where none is given or one is bad, by this rule or another."""
        return np.where(self.given & ~is_bad, self.values.astype(np.int64), default)


def decoded(column: pa.Array) -> pa.Array:
    """The column without dictionary encoding or an extension wrapper, strings as large_string."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_dictionary(column.type):
        return decoded(column.dictionary).take(column.indices)
    if is_text(column.type):
        return column.cast(pa.large_string())
    return column


def is_text(kind: pa.DataType) -> bool:
    """Whether an Arrow type is one of the string types, dictionaries of strings among them."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def texts(column: pa.Array) -> tuple[pa.Array, Bools]:
    """The column as large_string (null where it is no valid text) and a mask of the entries that are not
    UTF-8 text; nulls are not bad here."""
    column = decoded(column)
    if not is_text(column.type):
        return pa.nulls(len(column), pa.large_string()), is_given(column)
    is_bad = is_garbled(column)
    if is_bad.any():
        raw = column.cast(pa.large_binary()).to_pylist()
        cleaned = [None if bad else value for value, bad in zip(raw, is_bad, strict=True)]
        column = pa.array(cleaned, pa.large_binary()).cast(pa.large_string())
    return column, is_bad


def is_garbled(column: pa.Array) -> Bools:
    """Which entries of a column of any type hold text, at whatever depth, that is not UTF-8."""
    column = decoded(column)
    if _is_valid(column):
        return np.zeros(len(column), dtype=bool)
    column = plain(column)
    return np.array([not _is_valid(column.take(pa.array([row]))) for row in range(len(column))], dtype=bool)


def shown(cell: pa.Scalar) -> str:
    """A cell's value for a person, in Python's spelling where Python can hold it, 80 characters at most."""
    try:
        text = repr(cell.as_py())
    except UnicodeDecodeError:
        text = repr(cell.cast(pa.binary()).as_py()) if is_text(cell.type) else f"a {cell.type} with broken text"
    except (ValueError, OverflowError):
        text = f"a {cell.type} that is out of range"
    return shorten(text)


def plain(column: pa.Array) -> pa.Array:
    """The column in types whose every value Python can hold and Arrow can pick: dates and times, at whatever depth,
    are texts as Arrow writes them (in UTC), dictionaries and extension types what they stand for, views none."""
    in_utc = retyped(decoded(column), _in_utc)
    return retyped(in_utc, lambda kind: pa.string() if pa.types.is_temporal(kind) else kind)


def retyped(column: pa.Array, replace: Callable[[pa.DataType], pa.DataType]) -> pa.Array:
    """The column in its type as `replaced` makes it."""
    return as_type(column, replaced(column.type, replace))


def as_type(column: Column, kind: pa.DataType) -> Column:
    """The column itself if it has the type, else cast: Arrow's cast of nulls within structs to their own type fails."""
    return column if column.type == kind else column.cast(kind)


def _in_utc(kind: pa.DataType) -> pa.DataType:
    if isinstance(kind, pa.BaseExtensionType):
        return kind.storage_type
    if pa.types.is_dictionary(kind):
        return kind.value_type
    return pa.timestamp(kind.unit, "UTC") if pa.types.is_timestamp(kind) and kind.tz else without_views(kind)


def without_views(kind: pa.DataType) -> pa.DataType:
    """The type itself, but for views of texts and bytes, among which Arrow cannot pick rows."""
    return {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}.get(kind, kind)


def replaced(kind: pa.DataType, replace: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """A type with `replace` applied to it and to each type within, from the outside in, as often as it changes one."""
    while (changed := replace(kind)) != kind:
        kind = changed

    def within(field: pa.Field) -> pa.Field:
        return field.with_type(replaced(field.type, replace))

    if pa.types.is_struct(kind):
        return pa.struct([within(field) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(within(kind.key_field), within(kind.item_field))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(within(kind.value_field), kind.list_size)
    if pa.types.is_list(kind):
        return pa.list_(within(kind.value_field))
    if pa.types.is_large_list(kind):
        return pa.large_list(within(kind.value_field))
    return kind


def integers(column: pa.Array) -> tuple[Parsed, Bools]:
    """Exact integers from -2^63 to 2^64 - 1: `values` are the magnitudes (uint64), the mask beside them says
    which are negative.

    Taken are integer types, digits as text, decimals and floats without a fraction (floats up to 2^53, where
    they are exact). Everything else, True and NaN included, is bad.
    """
    column = decoded(column)
    kind = column.type
    given = is_given(column)
    if pa.types.is_null(kind):
        return Parsed(np.zeros(len(column), np.uint64), given, np.zeros(len(column), bool)), given
    if pa.types.is_integer(kind):
        return _from_integers(column, given)
    if pa.types.is_floating(kind):
        return _from_floats(column, given)
    if pa.types.is_decimal(kind):
        return _from_texts([None if value is None else f"{value:f}" for value in column.to_pylist()], given)
    if is_text(kind):
        return _from_texts(texts(column)[0].to_pylist(), given)
    return Parsed(np.zeros(len(column), np.uint64), given, given.copy()), np.zeros(len(column), bool)


def floats(column: pa.Array) -> Parsed:
    """Finite float64 values of a numeric or text column."""
    column = decoded(column)
    given = is_given(column)
    kind = column.type
    if pa.types.is_null(kind):
        return Parsed(np.zeros(len(column)), given, np.zeros(len(column), bool))
    if pa.types.is_decimal(kind):
        # Arrow's own cast does not round to the nearest.
        values = np.array([float(value or 0) for value in column.to_pylist()], float)
        return Parsed(values, given, given & ~np.isfinite(values))
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        values = column.cast(pa.float64(), safe=False).fill_null(0.0).to_numpy(zero_copy_only=False)
        return Parsed(values, given, given & ~np.isfinite(values))
    if is_text(kind):
        values = np.array([_float(text) for text in texts(column)[0].to_pylist()])
        return Parsed(np.where(given, values, 0.0), given, given & ~np.isfinite(values))
    return Parsed(np.zeros(len(column)), given, given.copy())


def is_given(column: pa.Array) -> Bools:
    """Which entries are not null, be it by themselves or by what their dictionary holds."""
    if pa.types.is_dictionary(column.type) and column.dictionary.null_count:
        column = decoded(column)
    given: Bools = pc.is_valid(column).to_numpy(zero_copy_only=False)
    return given


def _from_integers(column: pa.Array, given: Bools) -> tuple[Parsed, Bools]:
    raw = column.fill_null(0).to_numpy(zero_copy_only=False)
    is_negative = raw < 0
    magnitude = np.where(is_negative, -raw.astype(np.int64), 0).view(np.uint64)
    values = np.where(is_negative, magnitude, raw.astype(np.uint64))
    return Parsed(values, given, np.zeros(len(raw), bool)), is_negative


def _from_floats(column: pa.Array, given: Bools) -> tuple[Parsed, Bools]:
    raw = column.cast(pa.float64()).fill_null(0.0).to_numpy(zero_copy_only=False)
    is_exact = np.isfinite(raw) & (np.abs(raw) <= 2.0**53)
    magnitude = np.abs(np.where(is_exact, raw, 0.0))
    is_exact &= magnitude == np.floor(magnitude)
    return Parsed(magnitude.astype(np.uint64), given, given & ~is_exact), raw < 0


def _from_texts(spelled: list[str | None], given: Bools) -> tuple[Parsed, Bools]:
    numbers = [_integer(text) for text in spelled]
    is_bad = given & np.array([number is None for number in numbers], dtype=bool)
    values = np.array([abs(number or 0) for number in numbers], dtype=np.uint64)
    return Parsed(values, given, is_bad), np.array([(number or 0) < 0 for number in numbers], dtype=bool)


def _integer(text: str | None) -> int | None:
    """The integer that a text spells in ASCII digits, None if it spells none or one beyond 64 bits."""
    if text is None:
        return None
    whole, point, fraction = text.strip().partition(".")
    digits = whole[1:] if whole[:1] in ("-", "+") else whole
    if not (digits.isascii() and digits.isdigit() and len(digits.lstrip("0")) <= 20) or fraction.strip("0"):
        return None
    if point and not fraction:
        return None
    number = int(digits.lstrip("0") or "0") * (-1 if whole[:1] == "-" else 1)
    return number if -(2**63) <= number < 2**64 else None


def _float(text: str | None) -> float:
    if text is None or "_" in text or not text.isascii():
        return np.nan
    try:
        return float(text)
    except ValueError:
        return np.nan


def _is_valid(column: pa.Array) -> bool:
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True
