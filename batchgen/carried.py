"""The manifest's own columns where a reader cannot hold their Arrow type: as text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import pyarrow as pa

from batchgen.columns import plain

Column: TypeAlias = "pa.Array | pa.ChunkedArray"


def is_readable(kind: pa.DataType) -> bool:
    """Whether `datasets` reads the type from Parquet: it knows no maps and no extension types."""
    return not holds(kind, _is_unknown)


def is_folder_readable(kind: pa.DataType) -> bool:
    """Whether `datasets` reads the type from an image folder's table.

    It takes that table apart into Python objects: integers above 2^63 - 1 overflow, nanoseconds are cut off,
    and a struct's field "file_name" is opened as an image.
    """
    return not holds(kind, lambda part: _is_unknown(part) or _is_unsafe_as_object(part))


def as_text(column: Column) -> Column:
    """A column as strings, nulls kept: text itself, numbers and dates as Arrow writes them, bytes in
    hexadecimal, everything nested as JSON, in which numbers that are not finite are texts."""
    if isinstance(column, pa.ChunkedArray):
        return pa.chunked_array([as_text(chunk) for chunk in column.chunks], pa.string())
    if not isinstance(column.type, pa.BaseExtensionType):
        column = plain(column)
    if pa.types.is_nested(column.type) or _is_unknown(column.type) or _is_binary(column.type):
        return pa.array([_text(value) for value in column.to_pylist()], pa.string())
    return column.cast(pa.string())


def as_texts(column: Column) -> list[str | None]:
    """`as_text` as Python strings."""
    texts: list[str | None] = as_text(column).to_pylist()
    return texts


def holds(kind: pa.DataType, test: Callable[[pa.DataType], bool]) -> bool:
    """Whether a type or one within it passes a test."""
    if test(kind):
        return True
    if pa.types.is_dictionary(kind):
        return holds(kind.value_type, test)
    return any(holds(kind.field(i).type, test) for i in range(kind.num_fields))


def _is_unknown(kind: pa.DataType) -> bool:
    return bool(pa.types.is_map(kind)) or isinstance(kind, pa.BaseExtensionType)


def _is_unsafe_as_object(kind: pa.DataType) -> bool:
    is_nanoseconds = pa.types.is_timestamp(kind) and kind.unit == "ns"
    return bool(pa.types.is_uint64(kind) or pa.types.is_struct(kind) or is_nanoseconds)


def _is_binary(kind: pa.DataType) -> bool:
    return "binary" in str(kind)


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list | dict):
        return json.dumps(_as_json(value), ensure_ascii=False, default=_text)
    return str(value)


def _as_json(value: Any) -> Any:
    """A value without the numbers that JSON has no word for."""
    if isinstance(value, dict):
        return {name: _as_json(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
