"""New job files: every key with its meaning, as `all.toml` has them, and a family's own values, as its file has them.

The `.toml` files beside this one are the only list of keys with words about them, and of what suits a family.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
_ALL = "all"
_LINE = re.compile(r"(?P<unset># )?(?P<key>\w+) = (?P<value>.*?)(?:\s+# (?P<comment>.*))?")
_COMMENTS_AT = 33


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of a job file that has a key."""

    table: str
    key: str
    value: str
    """As TOML."""
    comment: str
    is_set: bool
    """False for one that is commented out."""

    def line(self, *, is_set: bool) -> str:
        assignment = f"{'' if is_set else '# '}{self.key} = {self.value}"
        return f"{assignment:<{_COMMENTS_AT - 1}} # {self.comment}" if self.comment else assignment


def families() -> list[str]:
    """Those for which there is a file."""
    return sorted(path.stem for path in HERE.glob("*.toml") if path.stem != _ALL)


def new_file(family: str) -> str:
    """A job file for a family: its own values, and all other keys commented out, each with its default and meaning."""
    own_text = _text(family)
    own = {(one.table, one.key): one for one in _lines(own_text) if isinstance(one, Entry)}
    title = next(line for line in own_text.splitlines() if line.startswith("# "))
    lines = [title, '# Keys behind "# " are not set: they stand there with their default, or with an example.', ""]
    for one in _lines(_text(_ALL).partition("\n\n")[2]):
        if isinstance(one, str):
            lines.append(one)
        elif mine := own.get((one.table, one.key)):
            comment = mine.comment or one.comment
            lines.append(Entry(one.table, one.key, mine.value, comment, is_set=True).line(is_set=True))
        else:
            lines.append(one.line(is_set=False))
    return "\n".join(lines) + "\n"


def _text(name: str) -> str:
    return (HERE / f"{name}.toml").read_text(encoding="utf-8")


def _lines(text: str) -> Iterator[Entry | str]:
    table = ""
    for line in text.splitlines():
        if line.startswith("["):
            table = line[1 : line.index("]")]
        found = _LINE.fullmatch(line) if table else None
        if found is None:
            yield line
        else:
            yield Entry(table, found["key"], found["value"], found["comment"] or "", not found["unset"])
