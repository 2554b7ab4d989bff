"""Columns of every Arrow type against oracles that read one value at a time."""

import math
import re
import struct
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.columns import decoded, floats, integers, is_given, texts

INTEGER_TYPES = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
TEXT_TYPES = [
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.dictionary(pa.int32(), pa.string()),
    pa.dictionary(pa.int8(), pa.large_string()),
    pa.dictionary(pa.uint16(), pa.string_view()),
]
OTHER_TYPES = [
    pa.bool_(),
    pa.binary(),
    pa.binary(3),
    pa.date32(),
    pa.timestamp("ns", "UTC"),
    pa.duration("s"),
    pa.list_(pa.int64()),
    pa.struct([("a", pa.int64())]),
    pa.map_(pa.string(), pa.int64()),
]
VALUES_OF_OTHERS: dict[pa.DataType, Any] = {
    pa.bool_(): True,
    pa.binary(): b"8",
    pa.binary(3): b"  8",
    pa.list_(pa.int64()): [8],
    pa.struct([("a", pa.int64())]): {"a": 8},
    pa.map_(pa.string(), pa.int64()): [("a", 8)],
}
SEEDS = [0, 1, 2**31, 2**32, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1]
BAD = "bad"


def text_array(values: list[str | None], kind: pa.DataType) -> pa.Array:
    if not pa.types.is_dictionary(kind):
        return pa.array(values, kind)
    distinct = sorted({value for value in values if value is not None})
    codes = [None if value is None else distinct.index(value) for value in values]
    return pa.DictionaryArray.from_arrays(pa.array(codes, kind.index_type), pa.array(distinct, kind.value_type))


def raw_strings(values: list[bytes | None]) -> pa.Array:
    """A string column of any bytes, as a careless writer leaves it in a file."""
    binary = pa.array(values, pa.binary())
    return pa.Array.from_buffers(pa.string(), len(values), binary.buffers())


def as_integers(column: pa.Array) -> list[Any]:
    """Per entry the exact integer, None for null, BAD for what is none."""
    parsed, is_negative = integers(column)
    assert parsed.values.dtype == np.uint64
    assert not (parsed.is_bad & ~parsed.given).any()
    lines = zip(
        parsed.values.tolist(), parsed.given.tolist(), parsed.is_bad.tolist(), is_negative.tolist(), strict=True
    )
    return [
        None if not given else BAD if is_bad else -value if negative else value
        for value, given, is_bad, negative in lines
    ]


def as_floats(column: pa.Array) -> list[Any]:
    parsed = floats(column)
    assert parsed.values.dtype == np.float64
    assert not (parsed.is_bad & ~parsed.given).any()
    lines = zip(parsed.values.tolist(), parsed.given.tolist(), parsed.is_bad.tolist(), strict=True)
    return [None if not given else BAD if is_bad else value for value, given, is_bad in lines]


def exact(value: int | None) -> Any:
    return value if value is None or -(2**63) <= value < 2**64 else BAD


def integer_spelled(text: str | None) -> Any:
    if text is None:
        return None
    found = re.fullmatch(r"([+-]?[0-9]{1,20})(\.0+)?", text.strip())
    return exact(int(found[1])) if found else BAD


def integer_of_float(value: float | None) -> Any:
    if value is None:
        return None
    is_exact = math.isfinite(value) and abs(value) <= 2**53 and value == int(value)
    return int(value) if is_exact else BAD


def finite(value: float | None) -> Any:
    return value if value is None or math.isfinite(value) else BAD


def integers_of(kind: pa.DataType) -> st.SearchStrategy[int | None]:
    is_signed = pa.types.is_signed_integer(kind)
    low, high = (-(2 ** (kind.bit_width - 1)), 2 ** (kind.bit_width - 1) - 1) if is_signed else (0, 2**kind.bit_width - 1)
    return st.none() | st.integers(low, high) | st.sampled_from([low, high])


spellings = st.one_of(
    st.none(),
    st.integers(-(2**70), 2**70).map(str),
    st.from_regex(r"[ \t]?[+-]?[0-9]{0,21}(\.[05]{0,3})?[ \n]?", fullmatch=True),
    st.sampled_from(["", "12x", "1_000", "0x10", "1e3", "½", "²", "٣", "-", "+", ".", "5.", ".5", "nan", "1 2", "--1"]),
    st.text(max_size=4),
)


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from(INTEGER_TYPES), st.booleans())
def test_integers_of_every_width_are_exact(data: st.DataObject, kind: pa.DataType, is_dictionary: bool) -> None:
    values = data.draw(st.lists(integers_of(kind), max_size=8))
    column = pa.array(values, kind)
    if is_dictionary:
        column = column.dictionary_encode()
    assert as_integers(column) == values
    assert as_floats(column) == [None if value is None else float(value) for value in values]


@settings(deadline=None, max_examples=150)
@given(st.lists(spellings, max_size=8), st.sampled_from(TEXT_TYPES))
def test_digits_as_text_are_read_exactly(values: list[str | None], kind: pa.DataType) -> None:
    assert as_integers(text_array(values, kind)) == [integer_spelled(value) for value in values]


@pytest.mark.parametrize("kind", [pa.uint64(), pa.decimal128(20, 0), pa.decimal256(60, 5), *TEXT_TYPES], ids=str)
def test_seeds_up_to_64_bits_are_exact(kind: pa.DataType) -> None:
    is_number = pa.types.is_integer(kind) or pa.types.is_decimal(kind)
    column = pa.array([Decimal(seed) for seed in SEEDS], pa.decimal256(60, 5)).cast(kind) if is_number else None
    assert as_integers(text_array([str(seed) for seed in SEEDS], kind) if column is None else column) == SEEDS


@settings(deadline=None, max_examples=100)
@given(st.lists(st.none() | st.floats() | st.integers(-(2**54), 2**54).map(float), max_size=8))
def test_floats_are_integers_where_they_are_exact(values: list[float | None]) -> None:
    assert as_integers(pa.array(values, pa.float64())) == [integer_of_float(value) for value in values]
    assert as_floats(pa.array(values, pa.float64())) == [finite(value) for value in values]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.none() | st.floats(width=16), max_size=8), st.sampled_from([pa.float16(), pa.float32()]))
def test_narrow_floats_are_read_as_they_are(values: list[float | None], kind: pa.DataType) -> None:
    stored = [None if value is None else np.float16(value) for value in values]
    column = pa.array(stored, pa.float16()).cast(kind)
    assert as_integers(column) == [integer_of_float(value) for value in values]
    assert as_floats(column) == [finite(value) for value in values]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.none() | st.decimals(-(10**24), 10**24, places=2), max_size=6),
    st.sampled_from([pa.decimal128(38, 2), pa.decimal256(50, 7)]),
)
def test_decimals_are_exact(values: list[Decimal | None], kind: pa.DataType) -> None:
    column = pa.array(values, pa.decimal256(50, 2)).cast(kind)
    whole = [None if value is None else exact(int(value)) if value == int(value) else BAD for value in values]
    assert as_integers(column) == whole
    assert as_floats(column) == [None if value is None else pytest.approx(float(value), rel=1e-15) for value in values]


@settings(deadline=None, max_examples=80)
@given(
    st.lists(
        st.none()
        | st.floats().map(repr)
        | st.sampled_from(["7", " 7.5 ", "1e400", "1_0", "", "7,5", "inf", "NaN", "0x1p3", "-0.0"])
        | st.text(max_size=3),
        max_size=6,
    ),
    st.sampled_from(TEXT_TYPES),
)
def test_floats_as_text_are_finite_or_bad(values: list[str | None], kind: pa.DataType) -> None:
    def one(value: str | None) -> Any:
        try:
            return None if value is None else BAD if "_" in value else finite(float(value))
        except ValueError:
            return BAD

    assert as_floats(text_array(values, kind)) == [one(value) for value in values]


@pytest.mark.parametrize("kind", OTHER_TYPES, ids=str)
def test_no_other_type_is_a_number_or_text(kind: pa.DataType) -> None:
    column = pa.array([VALUES_OF_OTHERS.get(kind, 8), None], kind)
    assert as_integers(column) == [BAD, None]
    assert as_floats(column) == [BAD, None]
    values, is_bad = texts(column)
    assert (values.to_pylist(), is_bad.tolist()) == ([None, None], [True, False])


@pytest.mark.parametrize("kind", [pa.null(), pa.dictionary(pa.int32(), pa.null())], ids=str)
def test_a_column_of_the_null_type_is_all_null(kind: pa.DataType) -> None:
    column = pa.nulls(3, kind)
    assert as_integers(column) == as_floats(column) == [None] * 3
    values, is_bad = texts(column)
    assert (values.to_pylist(), is_bad.any()) == ([None] * 3, False)


@settings(deadline=None, max_examples=80)
@given(st.lists(st.none() | st.text(max_size=5), max_size=8), st.sampled_from(TEXT_TYPES), st.data())
def test_texts_of_every_string_type_are_verbatim(
    values: list[str | None], kind: pa.DataType, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, len(values)))
    found, is_bad = texts(text_array(values, kind).slice(start))
    assert found.type == pa.large_string()
    assert (found.to_pylist(), is_bad.any()) == (values[start:], False)


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.none() | st.text(max_size=3).map(str.encode) | st.binary(max_size=4), max_size=8),
    st.sampled_from(TEXT_TYPES),
    st.data(),
)
def test_what_is_no_utf8_is_bad_and_hides_no_neighbour(
    values: list[bytes | None], kind: pa.DataType, data: st.DataObject
) -> None:
    def one(value: bytes | None) -> Any:
        try:
            return None if value is None else value.decode()
        except UnicodeDecodeError:
            return BAD

    start = data.draw(st.integers(0, len(values)))
    column = raw_strings(values)
    if pa.types.is_dictionary(kind):
        codes = pa.array([None if value is None else place for place, value in enumerate(values)], kind.index_type)
        column = pa.DictionaryArray.from_arrays(codes, column.cast(kind.value_type))
    else:
        column = column.cast(kind)
    found, is_bad = texts(column.slice(start))
    shown = [BAD if bad else value for value, bad in zip(found.to_pylist(), is_bad.tolist(), strict=True)]
    assert shown == [one(value) for value in values[start:]]
    assert as_integers(column) == [BAD if one(value) == BAD else integer_spelled(one(value)) for value in values]
    assert len(as_floats(column)) == len(values)


def test_a_null_in_a_dictionary_is_a_null() -> None:
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, None]), pa.array(["8", None]))
    assert is_given(column).tolist() == [True, False, False]
    assert as_integers(column) == [8, None, None]
    assert as_floats(column) == [8.0, None, None]
    assert texts(column)[0].to_pylist() == ["8", None, None]


def test_extension_types_are_what_they_store() -> None:
    assert decoded(pa.array(["8"], pa.json_(pa.string()))).to_pylist() == ["8"]
    assert as_integers(pa.ExtensionArray.from_storage(pa.opaque(pa.int64(), "a", "b"), pa.array([8, None]))) == [8, None]
    assert decoded(pa.array([bytes(16)], pa.uuid())).to_pylist() == [bytes(16)]


def test_the_bits_of_a_double_are_kept() -> None:
    values = [0.1, 2.0**-1074, 1.7976931348623157e308, -7.5]
    assert struct.pack("4d", *as_floats(pa.array(values))) == struct.pack("4d", *values)
