"""Arrow columns of every type that Parquet holds, for tests: hypothesis strategies and broken text."""

from __future__ import annotations

import io
from decimal import Context, Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st

TEXT_TYPES = (pa.string(), pa.large_string(), pa.string_view())
INTEGER_TYPES = (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
FLOAT_TYPES = (pa.float16(), pa.float32(), pa.float64())
DECIMAL_TYPES = (pa.decimal128(38, 10), pa.decimal128(20, 0), pa.decimal256(60, 20), pa.decimal32(5, 2))
EDGE_INTEGERS = (0, 1, -1, -2, 63, 64, 2**32, 2**53 - 1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63))
EDGE_TEXTS = (
    *map(str, EDGE_INTEGERS),
    "18446744073709551616", "-9223372036854775809", "3.5", "12x", "", " 7 ", "+8", "007", "0" * 30 + "9", "5.", ".5",
    "5.0", "-0", "1e3", "1_000", "٣", "7.5", "nan", "inf", "-inf", "Infinity", "0x10", "a\x00b", "NULL", "ddim", "heun",
)  # fmt: skip
EDGE_FLOATS = (
    0.0,
    -0.0,
    1.0,
    64.0,
    3.5,
    -2.0,
    2.0**53,
    2.0**53 + 2,
    2.0**64,
    float("nan"),
    float("inf"),
    -float("inf"),
)


def nullable(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


def integers_of(kind: pa.DataType) -> st.SearchStrategy[int]:
    least, most = np.iinfo(kind.to_pandas_dtype()).min, np.iinfo(kind.to_pandas_dtype()).max
    edges = [value for value in EDGE_INTEGERS if least <= value <= most]
    return st.sampled_from(edges) | st.integers(int(least), int(most))


def decimals_of(kind: pa.DataType) -> st.SearchStrategy[Decimal]:
    most = 10**kind.precision - 1
    whole = st.integers(0, 100).map(lambda number: number * 10**kind.scale).filter(lambda number: number <= most)
    return (st.integers(-most, most) | whole).map(lambda number: Decimal(number).scaleb(-kind.scale, context=_EXACT))


_EXACT = Context(prec=100)


@st.composite
def scalars_columns(draw: st.DrawFn, size: int) -> tuple[pa.Array, list[Any]]:
    """A column of numbers, texts or truths and what it holds, as Python values."""
    kind = draw(st.sampled_from([*TEXT_TYPES, *INTEGER_TYPES, *FLOAT_TYPES, *DECIMAL_TYPES, pa.bool_(), pa.null()]))
    if pa.types.is_null(kind):
        return pa.nulls(size), [None] * size
    values = draw(st.lists(nullable(_cells(kind)), min_size=size, max_size=size))
    column = pa.array(values, kind)
    if pa.types.is_floating(kind):
        values = column.cast(pa.float64()).to_pylist()
    if kind not in (pa.float16(), pa.decimal32(5, 2)) and draw(st.booleans()):
        column = draw(dictionaries(column))
    return column, values


def _cells(kind: pa.DataType) -> st.SearchStrategy[Any]:
    if kind in TEXT_TYPES:
        return st.sampled_from(EDGE_TEXTS) | st.text(max_size=5) | st.integers().map(str)
    if pa.types.is_integer(kind):
        return integers_of(kind)
    if pa.types.is_decimal(kind):
        return decimals_of(kind)
    if pa.types.is_boolean(kind):
        return st.booleans()
    if kind == pa.float16():
        return st.sampled_from([0.0, 1.0, 64.0, 3.5, -2.0, float("nan"), float("inf")]).map(np.float16)
    return st.sampled_from(EDGE_FLOATS) | st.floats(width=32 if kind == pa.float32() else 64)


@st.composite
def dictionaries(draw: st.DrawFn, column: pa.Array) -> pa.Array:
    """The column as a dictionary, its nulls among the indices or among the values; not those of views, of which pyarrow
    makes empty texts there."""
    is_null_a_value = "view" not in str(column.type) and draw(st.booleans())
    return column.dictionary_encode(null_encoding="encode" if is_null_a_value else "mask")


def garbled(values: list[bytes | None], kind: pa.DataType) -> pa.Array:
    """A text column that holds these bytes, UTF-8 or not."""
    large = pa.array(values, pa.large_binary())
    column = pa.Array.from_buffers(pa.large_string(), len(large), large.buffers(), large.null_count)
    if pa.types.is_dictionary(kind):
        return column.dictionary_encode()
    return column if kind == pa.large_string() else _narrowed(values, kind)


def _narrowed(values: list[bytes | None], kind: pa.DataType) -> pa.Array:
    narrow = pa.array(values, pa.binary_view() if kind == pa.string_view() else pa.binary())
    return pa.Array.from_buffers(kind, len(narrow), narrow.buffers(), narrow.null_count)


_LEAVES = (
    *TEXT_TYPES, *INTEGER_TYPES, *FLOAT_TYPES, *DECIMAL_TYPES, pa.bool_(), pa.null(), pa.binary(), pa.large_binary(),
    pa.binary(3), pa.binary_view(), pa.date32(), pa.date64(), pa.time32("ms"), pa.time64("us"), pa.time64("ns"),
    pa.timestamp("ms"), pa.timestamp("us"), pa.timestamp("ns"), pa.timestamp("us", "Europe/Berlin"),
    pa.timestamp("us", "No/Where"), pa.duration("ns"), pa.uuid(), pa.json_(),
)  # fmt: skip
TYPES = st.recursive(
    st.sampled_from(_LEAVES),
    lambda inner: st.one_of(
        inner.map(pa.list_),
        inner.map(pa.large_list),
        inner.map(lambda kind: pa.list_(kind, 2)),
        st.lists(inner, min_size=1, max_size=3).map(lambda kinds: pa.struct(list(zip("abc", kinds, strict=False)))),
        st.tuples(st.sampled_from([pa.string(), pa.int32()]), inner).map(lambda pair: pa.map_(*pair)),
    ),
    max_leaves=4,
)


@st.composite
def any_column(draw: st.DrawFn, size: int) -> pa.Array:
    """A column of any type that Parquet holds, its values from the whole range of the type."""
    kind = draw(TYPES)
    column = draw(arrays(kind, size))
    assert len(column) == size
    if pa.types.is_string(kind) and draw(st.booleans()):
        column = column.dictionary_encode()
    return column


@st.composite
def arrays(draw: st.DrawFn, kind: pa.DataType, size: int) -> pa.Array:
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, draw(arrays(kind.storage_type, size)))
    if pa.types.is_struct(kind):
        parts = [draw(arrays(field.type, size)) for field in kind]
        return pa.StructArray.from_arrays(parts, fields=list(kind))
    if pa.types.is_fixed_size_list(kind):
        return pa.FixedSizeListArray.from_arrays(draw(arrays(kind.value_type, size * kind.list_size)), type=kind)
    if pa.types.is_nested(kind):
        lengths = draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
        offsets = np.append(0, np.cumsum(lengths))
        if pa.types.is_map(kind):
            keys = pa.array([str(n) if kind.key_type == pa.string() else n for n in range(sum(lengths))], kind.key_type)
            return pa.MapArray.from_arrays(
                pa.array(offsets, pa.int32()), keys, draw(arrays(kind.item_type, sum(lengths)))
            )
        of, index = (pa.LargeListArray, pa.int64()) if pa.types.is_large_list(kind) else (pa.ListArray, pa.int32())
        return of.from_arrays(pa.array(offsets, index), draw(arrays(kind.value_type, sum(lengths))))
    return draw(_leaves(kind, size))


@st.composite
def _leaves(draw: st.DrawFn, kind: pa.DataType, size: int) -> pa.Array:
    def lists(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(nullable(values), min_size=size, max_size=size))

    if pa.types.is_null(kind):
        return pa.nulls(size)
    if pa.types.is_temporal(kind):
        storage = pa.int32() if pa.types.is_date32(kind) or pa.types.is_time32(kind) else pa.int64()
        values = integers_of(storage)
        if pa.types.is_time(kind):
            values = st.integers(0, 86_399_999)
        if pa.types.is_date64(kind):
            values = st.integers(-(2**31), 2**31 - 1).map(lambda days: days * 86_400_000)
        return pa.array(lists(values), storage).view(kind)
    if kind == pa.binary(3):
        return pa.array(lists(st.binary(min_size=3, max_size=3)), kind)
    if pa.types.is_fixed_size_binary(kind):
        return pa.array(lists(st.binary(min_size=16, max_size=16)), kind)
    if "binary" in str(kind):
        return pa.array(lists(st.binary(max_size=4)), kind)
    if kind in TEXT_TYPES and draw(st.integers(0, 9)) == 0:
        return garbled(lists(st.binary(max_size=3)), kind)
    return pa.array(lists(_cells(kind)), kind)


def through_parquet(table: pa.Table) -> bytes | None:
    """The table as a Parquet file, None where it cannot be one."""
    file = io.BytesIO()
    try:
        pq.write_table(table, file)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        return None
    return file.getvalue()
