"""What tells the rows of a manifest from those of a frozen plan: added, removed and changed ones, for a person."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.columns import plain
from batchgen.identity import row_digests
from batchgen.metadata import CARRIED
from batchgen.wording import listed, shorten

SHOWN = 5
ROWS_ADDED = "rows added"
_KEY = ("id", "image_number")
_NOT_ASKED = frozenset(
    {"position", "group", "batch", "batch_size", "init_image", "init_file", "init_offset", "init_bytes"}
)
"""Columns of a plan that say where a row lies, not what it is."""

Tables = Callable[[], Iterator[pa.Table]]
"""Rows as a plan holds them, in tables, from their beginning at every call."""
U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Per row 64 bits of a hash of its key and of all that is asked of it: enough for a message."""

    keys: U64
    contents: U64


def row_differences(there: Tables, now: Tables) -> list[str]:
    """One line per kind of difference, with the first ids, and one per changed row; none if all rows are equal."""
    theirs, ours = _digested(there()), _digested(now())
    added = ours.keys[~np.isin(ours.keys, theirs.keys)]
    removed = theirs.keys[~np.isin(theirs.keys, ours.keys)]
    changed = _changed(theirs, ours)
    old = _rows(there, np.concatenate([removed[:SHOWN], changed[:SHOWN]]))
    new = _rows(now, np.concatenate([added[:SHOWN], changed[:SHOWN]]))
    lines = [_counted("rows removed", removed, old), _counted(ROWS_ADDED, added, new)]
    lines.append(_counted("rows changed", changed, new))
    lines += [_change(old[key], new[key]) for key in changed[:SHOWN].tolist()]
    return [line for line in lines if line]


def _digested(tables: Iterator[pa.Table]) -> _Rows:
    keys, contents = [np.zeros(0, np.uint64)], [np.zeros(0, np.uint64)]
    for table in tables:
        keys.append(_digest(table, list(_KEY)))
        contents.append(_digest(table, [name for name in table.schema.names if name not in _NOT_ASKED]))
    return _Rows(np.concatenate(keys), np.concatenate(contents))


def _digest(table: pa.Table, names: list[str]) -> U64:
    columns = {name: table[name].combine_chunks() for name in names}
    return row_digests(columns, table.num_rows, {}).high


def _changed(theirs: _Rows, ours: _Rows) -> U64:
    """Keys of rows that both have, with another content, in the order of ours."""
    _, place, their_place = np.intersect1d(ours.keys, theirs.keys, return_indices=True)
    is_changed = ours.contents[place] != theirs.contents[their_place]
    changed: U64 = ours.keys[np.sort(place[is_changed])]
    return changed


def _rows(tables: Tables, keys: U64) -> dict[int, dict[str, Any]]:
    """The rows of some keys."""
    found: dict[int, dict[str, Any]] = {}
    for table in tables() if len(keys) else ():
        here = _digest(table, list(_KEY))
        places = np.flatnonzero(np.isin(here, keys))
        columns = {name: plain(table[name].take(places).combine_chunks()).to_pylist() for name in table.schema.names}
        lines = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
        found |= zip(here[places].tolist(), lines, strict=True)
    return found


def _counted(what: str, keys: U64, rows: dict[int, dict[str, Any]]) -> str:
    if not len(keys):
        return ""
    shown = [_name(rows[key]) for key in keys[:SHOWN].tolist()]
    return f"{what}: {len(keys)} ({listed(shown, len(keys))})"


def _change(old: dict[str, Any], new: dict[str, Any]) -> str:
    names = [name for name in old | new if name not in _NOT_ASKED and repr(old.get(name)) != repr(new.get(name))]
    changes = [
        f"{name.removeprefix(CARRIED)} {_shown(old.get(name))} there, {_shown(new.get(name))} now" for name in names
    ]
    return f"row {_name(new)}: {'; '.join(changes)}"


def _name(row: dict[str, Any]) -> str:
    number = f" image {row['image_number']}" if row["image_number"] else ""
    return f"{_shown(row['id'])}{number}"


def _shown(value: Any) -> str:
    return shorten(repr(value), 60)
