"""The columns that batchgen knows: their types, and how one value of a source becomes one of the manifest.

Nothing is rounded, cut or guessed: a value that is not exactly of its column's type raises ValueError, whose
message is the rule. Sizes and counts may end in ".0", as programs write them that keep gaps in a column of
numbers; a seed may not, for it may have been rounded on the way.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from batchgen.columns import is_text

TYPES: Mapping[str, pa.DataType] = {
    "prompt": pa.string(),
    "negative_prompt": pa.string(),
    "sampler": pa.string(),
    "lora": pa.string(),
    "width": pa.int32(),
    "height": pa.int32(),
    "steps": pa.int32(),
    "num_images": pa.int32(),
    "seed": pa.uint64(),
    "guidance_scale": pa.float64(),
    "true_cfg_scale": pa.float64(),
    "image": pa.string(),
    "strength": pa.float64(),
}
"""Columns with a type of their own; every other column keeps the source's."""

_INT = re.compile(r"([+-]?[0-9]+)(\.0+)?")
_SEED = re.compile(r"([+-]?[0-9]+)")
_FLOAT = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_DERIVED = -1
"""The seed that stands for "derive one", as null does."""

_INT_RULE = "a whole number of 32 bits is needed, or nothing for the default"
_SEED_RULE = "a whole number from 0 to 2^64-1 is needed, or -1 or nothing for a derived seed"
_FLOAT_RULE = "a finite decimal number is needed, or nothing for the default"
_TEXT_RULE = "a text or null is needed"


def parser(name: str) -> Callable[[str], object] | None:
    """How a cell of a text table becomes a value of column `name`; None where it stays the text it is."""
    kind = TYPES.get(name, pa.string())
    if name == "image":
        return _parse_path
    if kind == pa.string():
        return None
    if kind == pa.float64():
        return _parse_float
    return _parse_seed if name == "seed" else _parse_int


def checker(name: str) -> Callable[[object], object]:
    """How a JSON value becomes a value of the known column `name`."""
    kind = TYPES[name]
    if kind == pa.string():
        return _check_text
    if kind == pa.float64():
        return _check_float
    return _check_seed if name == "seed" else _check_int


def settle(name: str, array: pa.Array) -> pa.Array:
    """An Arrow column of a data set as the known column `name`. Raises ValueError if a value is not exact."""
    wanted = TYPES[name]
    found = array.type
    if pa.types.is_null(found):
        return array.cast(wanted)
    if wanted == pa.string():
        if not is_text(found):
            raise ValueError(f"{_TEXT_RULE}, the column is of type {found}")
        return array.cast(wanted)
    if not (pa.types.is_integer(found) or (pa.types.is_floating(found) and name != "seed")):
        raise ValueError(f"a column of numbers is needed, it is of type {found}")
    if name == "seed" and pa.types.is_signed_integer(found):
        array = pc.if_else(pc.equal(array, _DERIVED), None, array)
    return array.cast(wanted)


def _parse_path(cell: str) -> str | None:
    return cell or None


def _parse_int(cell: str) -> int | None:
    return _check_int(_integer(cell, _INT, _INT_RULE)) if cell else None


def _parse_seed(cell: str) -> int | None:
    return _check_seed(_integer(cell, _SEED, _SEED_RULE)) if cell else None


def _parse_float(cell: str) -> float | None:
    if not cell:
        return None
    if not _FLOAT.fullmatch(cell.strip(" ")):
        raise ValueError(_FLOAT_RULE)
    return _check_float(float(cell))


def _integer(cell: str, pattern: re.Pattern[str], rule: str) -> int:
    found = pattern.fullmatch(cell.strip(" "))
    # Python refuses to read numbers of thousands of digits; none of them is in range anyway.
    if not found or len(found[1]) > 40:
        raise ValueError(rule)
    return int(found[1])


def _check_int(value: object) -> int | None:
    if value is None:
        return None
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or not -(2**31) <= value < 2**31:
        raise ValueError(_INT_RULE)
    return value


def _check_seed(value: object) -> int | None:
    if value is None or (type(value) is int and value == _DERIVED):
        return None
    if type(value) is not int or not 0 <= value < 2**64:
        raise ValueError(_SEED_RULE)
    return value


def _check_float(value: object) -> float | None:
    if value is None:
        return None
    if type(value) is int and abs(value) <= 2**53:
        return float(value)
    if type(value) is not float or not math.isfinite(value):
        raise ValueError(_FLOAT_RULE)
    return value


def _check_text(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError(_TEXT_RULE)
    return value
