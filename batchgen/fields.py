"""What values of a job's keys may be: types that pydantic checks, and the words in which it refuses."""

from __future__ import annotations

import datetime
import math
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from batchgen.wording import num_bytes

PositiveInt = Annotated[int, Field(ge=1, lt=2**31)]
Few = Annotated[int, Field(ge=1, le=4096)]
"""Rows of a batch, or threads."""
Seconds = Annotated[float, Field(gt=0, le=1e9)]


def _one_line(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError("it must be one line of printable characters")
    return text


def _time(value: object) -> object:
    """TOML reads 04:00:00 as a time of day, and 30 as a number."""
    if isinstance(value, datetime.time) and not value.microsecond:
        return value.isoformat()
    return str(value) if type(value) is int else value


def _is_time(text: str) -> str:
    if not re.fullmatch(r"[0-9]+|[0-9]+:[0-9]{2}(:[0-9]{2})?|[0-9]+-[0-9]+(:[0-9]{2}){0,2}", text):
        raise ValueError("Slurm takes minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]]")
    return text


def _memory(value: object) -> object:
    """A number without its unit is told as a text that lacks it."""
    return str(value) if type(value) in (int, float) else value


def _is_memory(text: str) -> str:
    num_bytes(text)
    return text


def _is_scalar(value: object) -> object:
    is_number = isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value))
    if not is_number and not isinstance(value, str):
        raise ValueError("it must be a text, a finite number, true or false")
    return value


Given = Annotated[str, Field(min_length=1)]
Scalar = Annotated[Any, AfterValidator(_is_scalar)]
Line = Annotated[str, AfterValidator(_one_line)]
Memory = Annotated[str, BeforeValidator(_memory), AfterValidator(_is_memory)]
Lines = Annotated[tuple[Line, ...], Field(strict=False)]
Time = Annotated[str, BeforeValidator(_time), AfterValidator(_is_time)]
