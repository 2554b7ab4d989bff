"""Which rows of a table are meant: conditions such as `steps>=30`, ids, and words of the prompt."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from batchgen.carried import as_text
from batchgen.columns import is_text
from batchgen.errors import UsageError
from batchgen.wording import listed

Mask: TypeAlias = "pa.Array | pa.ChunkedArray"
_COMPARE: dict[str, Callable[..., Mask]] = {
    "=": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_CONDITION = re.compile("(?P<column>.+?)(?P<operator><=|>=|!=|=|<|>|~)(?P<value>.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Condition:
    """One column held against one value."""

    column: str
    operator: str
    """=, !=, <, <=, >, >=, or ~: contains the text, whatever its case."""
    value: str


@dataclass(frozen=True, slots=True)
class Selection:
    """Rows that pass all of it; without anything, all rows."""

    conditions: tuple[Condition, ...] = ()
    ids: tuple[str, ...] = ()
    """Of any of these ids, if there are some."""

    @property
    def columns(self) -> set[str]:
        """That must be read to decide."""
        return {one.column for one in self.conditions} | ({"id"} if self.ids else set())

    def check(self, schema: pa.Schema) -> None:
        """Raises UsageError for a column that is not there, or a value that is none of its column's."""
        for one in self.conditions:
            _mask(schema.empty_table(), one)

    def of(self, table: pa.Table) -> pa.Table:
        """The rows that pass, in the table's order. Raises as `check`."""
        for one in self.conditions:
            table = table.filter(_mask(table, one))
        return table.filter(pc.is_in(table["id"], pa.array(self.ids, pa.string()))) if self.ids else table


def condition(text: str) -> Condition:
    """A condition as it is written: `steps>=30`, `sampler=heun`, `prompt~red fox`. Raises UsageError."""
    found = _CONDITION.fullmatch(text)
    if found is None:
        raise UsageError(
            f"--where {text!r} is no condition: it takes a column, one of = != < <= > >= ~, and a value, such as "
            "steps>=30 or prompt~fox"
        )
    column, operator, value = found.group("column", "operator", "value")
    return Condition(column.strip(), operator, value.strip())


def selection(conditions: Sequence[str], ids: Sequence[str]) -> Selection:
    """What the command line names. Raises UsageError."""
    return Selection(tuple(map(condition, conditions)), tuple(ids))


def _mask(table: pa.Table, one: Condition) -> Mask:
    """True where a row passes; a null passes nothing."""
    if one.column not in table.schema.names:
        near = difflib.get_close_matches(one.column, table.schema.names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {listed(table.schema.names)}"
        raise UsageError(f"--where: there is no column {one.column!r}; {hint}")
    column = table[one.column]
    if one.operator == "~":
        return pc.match_substring(as_text(column), one.value, ignore_case=True)
    if is_text(column.type):
        return _COMPARE[one.operator](as_text(column), pa.scalar(one.value))
    try:
        value = pa.scalar(one.value).cast(column.type)
        return _COMPARE[one.operator](column, value)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise UsageError(
            f"--where: {one.value!r} is no value of the column {one.column!r}, whose type is {column.type}"
        ) from None
