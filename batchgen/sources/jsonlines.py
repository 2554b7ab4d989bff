"""JSON lines: an object a line, its values exact (integers to 2^64-1, nested values too).

Read twice: once for the type of each column, once for the rows, so that memory stays flat.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from batchgen.errors import UsageError
from batchgen.sources import cells
from batchgen.sources.base import Faults, Record, chunks, lines, shorten

Object: TypeAlias = Record[dict[str, Any]]


@dataclass(slots=True)
class JsonLines:
    """A jsonl file."""

    path: Path
    names: list[str] = field(init=False)
    _types: dict[str, pa.DataType] = field(init=False, default_factory=dict)
    _as_text: set[str] = field(init=False, default_factory=set)
    """Columns of lists or objects that no Arrow type holds exactly: carried as JSON text."""

    def __post_init__(self) -> None:
        for record in self._objects():
            for name, value in record.values.items():
                self._types[name] = self._widened(name, value, record.line)
        self._as_text |= {name for name, kind in self._types.items() if _has_empty_struct(kind)}
        self.names = list(self._types)

    def batches(self, renamed: Mapping[str, str], notes: list[str]) -> Iterator[pa.RecordBatch]:
        faults = Faults(str(self.path))
        schema = pa.schema([(renamed[name], self._type(name, renamed[name])) for name in self.names])
        for chunk in chunks(self._objects()):
            arrays = [self._array(name, schema.field(renamed[name]), chunk, faults) for name in self.names]
            yield pa.record_batch(arrays, schema=schema)
        faults.raise_if_any()
        notes += self._notes(renamed)

    def _notes(self, renamed: Mapping[str, str]) -> Iterator[str]:
        for name in self.names:
            if name in self._as_text and renamed[name] not in cells.TYPES:
                yield f"column {name} holds lists or objects of no one type: it is carried as JSON text"
        num_blank = sum(not line.strip() for line in lines(self.path))
        if num_blank:
            yield f"blank lines that are no rows: {num_blank}"

    def _objects(self) -> Iterator[Object]:
        for number, line in enumerate(lines(self.path), start=1):
            if line.strip():
                yield Record(number, _parsed(line, f"{self.path}, line {number}"), len(line))

    def _widened(self, name: str, value: object, line: int) -> pa.DataType:
        known = self._types.get(name, _NULL)
        if known is _SCALARS.get(type(value)):
            return known
        try:
            return _merged(known, _type_of(value))
        except ValueError as error:
            if name in cells.TYPES:
                return known
            if isinstance(value, list | dict) and not _is_scalar(known):
                self._as_text.add(name)
                return known if pa.types.is_nested(known) else pa.struct([])
            raise UsageError(
                f"{self.path}, line {line}: column {name} is {shorten(value)}, {error}; a column holds "
                "values of one type"
            ) from None

    def _type(self, name: str, new_name: str) -> pa.DataType:
        if new_name in cells.TYPES:
            return cells.TYPES[new_name]
        is_text = name in self._as_text or pa.types.is_null(self._types[name])
        return pa.string() if is_text else self._types[name]

    def _array(self, name: str, wanted: pa.Field, chunk: list[Object], faults: Faults) -> pa.Array:
        values = [record.values.get(name) for record in chunk]
        check = self._check(name, wanted.name)
        try:
            return pa.array([check(value) for value in values], wanted.type)
        except (ValueError, TypeError, OverflowError) as error:
            whole, num_before = error, faults.count
        for record, value in zip(chunk, values, strict=True):
            try:
                pa.array([check(value)], wanted.type)
            except (ValueError, TypeError, OverflowError) as error:
                faults.add(record.line, f"column {wanted.name} is {shorten(value)}; {error}")
        if faults.count == num_before:
            raise UsageError(f"{faults.where}: column {wanted.name} cannot be read as {wanted.type}: {whole}")
        return pa.nulls(len(values), wanted.type)

    def _check(self, name: str, new_name: str) -> Callable[[object], object]:
        if new_name in cells.TYPES:
            return cells.checker(new_name)
        return _json_text if name in self._as_text else _same


_NULL = pa.null()
_SCALARS = {bool: pa.bool_(), float: pa.float64(), str: pa.string(), type(None): _NULL}


def _json_text(value: object) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False)


def _is_scalar(kind: pa.DataType) -> bool:
    return not (pa.types.is_nested(kind) or pa.types.is_null(kind))


def _same(value: object) -> object:
    return value


def _parsed(line: str, where: str) -> dict[str, Any]:
    try:
        value = _DECODER.decode(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{where} is not JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} cannot be taken: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f'{where} is {shorten(value)}; every line must be one object, like {{"prompt": "a cat"}}')
    return value


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    "".join(found).encode()  # a half of a surrogate pair is no text that Parquet can hold
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twin!r} stands twice in one object")
    return found


def _refused(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON number; write null")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is beyond a double's range")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_without_twins, parse_constant=_refused, parse_float=_finite)


def _type_of(value: object) -> pa.DataType:
    if (scalar := _SCALARS.get(type(value))) is not None:
        return scalar
    match value:
        case int():
            return _type_of_int(value)
        case list():
            return pa.list_(reduce(_merged, map(_type_of, value), _NULL))
        case dict():
            return pa.struct([(name, _type_of(item)) for name, item in value.items()])
        case _:
            raise AssertionError(type(value))


def _type_of_int(value: int) -> pa.DataType:
    if -(2**63) <= value < 2**63:
        return pa.int64()
    if 0 <= value < 2**64:
        return pa.uint64()
    raise ValueError("an integer outside -2^63 to 2^64-1")


def _merged(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """The type that holds both exactly; whether each value fits is checked when the array is made."""
    if one is other or one == other or pa.types.is_null(other):
        return one
    if pa.types.is_null(one):
        return other
    if pa.types.is_integer(one) and pa.types.is_integer(other):
        return pa.uint64()
    if _is_number(one) and _is_number(other):
        return pa.float64()
    if pa.types.is_list(one) and pa.types.is_list(other):
        return pa.list_(_merged(one.value_type, other.value_type))
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        return _merged_structs(one, other)
    raise ValueError(f"of type {other} where lines before have {one}")


def _merged_structs(one: pa.StructType, other: pa.StructType) -> pa.StructType:
    types = {item.name: item.type for item in one}
    for item in other:
        types[item.name] = _merged(types.get(item.name, pa.null()), item.type)
    return pa.struct(list(types.items()))


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _has_empty_struct(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind):
        return _has_empty_struct(kind.value_type)
    if pa.types.is_struct(kind):
        return kind.num_fields == 0 or any(_has_empty_struct(item.type) for item in kind)
    return False
