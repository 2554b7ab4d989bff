"""Columns of every Arrow type against plain Python, cell by cell."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.columns import floats, integers, is_garbled, is_given, plain, shown, texts
from tests.arrow import TEXT_TYPES, any_column, dictionaries, garbled, scalars_columns

SEEDS = [0, 2**32, 2**53 + 1, 2**63 - 1, 2**64 - 1]


def whole_number(value: Any) -> int | None:
    """The integer that a cell means, None for none: an oracle in Python's own numbers."""
    number: int | None = None
    if isinstance(value, str):
        spelled = re.fullmatch(r"([+-]?[0-9]+)(\.0+)?", value.strip())
        number = int(spelled[1]) if spelled else None
    elif isinstance(value, bool):
        number = None
    elif isinstance(value, int):
        number = value
    elif isinstance(value, float):
        number = int(value) if math.isfinite(value) and value == int(value) and abs(value) <= 2**53 else None
    elif isinstance(value, Decimal):
        number = int(value) if value == int(value) else None
    return number if number is not None and -(2**63) <= number < 2**64 else None


def finite_number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        try:
            number = float(value) if value.isascii() and "_" not in value else math.nan
        except ValueError:
            return None
    else:
        number = float(value)
    return number if math.isfinite(number) else None


@given(st.integers(0, 6).flatmap(scalars_columns))
def test_integers_are_exact_or_bad(pair: tuple[pa.Array, list[Any]]) -> None:
    column, values = pair
    parsed, is_negative = integers(column)
    assert parsed.given.tolist() == [value is not None for value in values]
    for place, value in enumerate(values):
        if value is None:
            assert not parsed.is_bad[place]
            continue
        number = whole_number(value)
        assert bool(parsed.is_bad[place]) == (number is None), value
        if number is not None:
            assert (int(parsed.values[place]), bool(is_negative[place])) == (abs(number), number < 0)


@given(st.integers(0, 6).flatmap(scalars_columns))
def test_floats_are_finite_or_bad(pair: tuple[pa.Array, list[Any]]) -> None:
    column, values = pair
    parsed = floats(column)
    assert parsed.given.tolist() == [value is not None for value in values]
    for place, value in enumerate(values):
        number = None if value is None else finite_number(value)
        assert bool(parsed.is_bad[place]) == (value is not None and number is None), value
        if number is not None:
            assert parsed.values[place] == number


@pytest.mark.parametrize("kind", TEXT_TYPES, ids=str)
@given(st.lists(st.none() | st.binary(max_size=4) | st.text(max_size=4).map(str.encode)), st.booleans())
def test_texts_keep_what_is_utf8_and_name_what_is_not(
    kind: pa.DataType, values: list[bytes | None], is_dictionary: bool
) -> None:
    def decoded(value: bytes | None) -> str | None:
        try:
            return None if value is None else value.decode()
        except UnicodeDecodeError:
            return None

    wanted = [decoded(value) for value in values]
    column = garbled(values, pa.dictionary(pa.int32(), kind) if is_dictionary else kind)
    found, is_bad = texts(column)
    assert found.to_pylist() == wanted
    is_wrong = [value is not None and text is None for value, text in zip(values, wanted, strict=True)]
    assert is_bad.tolist() == is_wrong == is_garbled(column).tolist()
    nested = pa.StructArray.from_arrays([pa.ListArray.from_arrays(range(len(column) + 1), column)], ["a"])
    assert is_garbled(nested).tolist() == is_wrong


@given(st.data())
def test_a_null_is_a_null_wherever_its_dictionary_keeps_it(data: st.DataObject) -> None:
    values = data.draw(st.lists(st.none() | st.text(max_size=2)))
    column = data.draw(dictionaries(pa.array(values, pa.string())))
    assert is_given(column).tolist() == [value is not None for value in values]
    assert texts(column)[0].to_pylist() == values


@given(st.integers(0, 4).flatmap(any_column))
def test_every_type_is_read_without_an_error(column: pa.Array) -> None:
    parsed, _ = integers(column)
    nulls = ~is_given(column)
    for is_bad in (parsed.is_bad, floats(column).is_bad, texts(column)[1]):
        assert len(is_bad) == len(column)
        assert not (is_bad & nulls).any()
    is_broken = is_garbled(column)
    for place in range(len(column)):
        assert len(shown(column[place])) <= 80
        if not is_broken[place]:
            plain(column).take(pa.array([place])).to_pylist()


@pytest.mark.parametrize("kind", [pa.uint64(), *TEXT_TYPES, pa.decimal128(20, 0)], ids=str)
def test_seeds_are_exact(kind: pa.DataType) -> None:
    column = pa.array([str(seed) for seed in SEEDS]).cast(kind)
    parsed, is_negative = integers(column)
    assert [int(value) for value in parsed.values] == SEEDS
    assert not parsed.is_bad.any()
    assert not is_negative.any()


@pytest.mark.parametrize("value", ["3.5", "12x", str(2**64), "1e5", "", "٣", "0x1", str(-(2**63) - 1)])
def test_what_is_no_whole_number_is_bad(value: str) -> None:
    parsed, _ = integers(pa.array([value]))
    assert parsed.is_bad.tolist() == [True]


def test_zero_with_many_decimals_is_zero() -> None:
    parsed, _ = integers(pa.array([Decimal(0)], pa.decimal128(38, 10)))
    assert (parsed.is_bad.tolist(), parsed.values.tolist()) == ([False], [0])


def test_floats_beyond_2_53_name_no_integer() -> None:
    parsed, _ = integers(pa.array(np.array([2.0**53, 2.0**53 + 2, -2.0])))
    assert parsed.is_bad.tolist() == [False, True, False]


def test_times_are_written_out_whatever_their_zone_or_range() -> None:
    assert plain(pa.array([1], pa.timestamp("s", "No/Where"))).to_pylist() == ["1970-01-01 00:00:01Z"]
    assert plain(pa.array([2**62], pa.timestamp("s"))).to_pylist() == [f"<value out of range: {2**62}>"]
    assert "out of range" in shown(pa.array([2**30], pa.date32())[0])
