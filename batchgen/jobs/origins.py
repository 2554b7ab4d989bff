"""Where each value of a job comes from: its default, the job file, an option, or the model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchgen.job import Job

if TYPE_CHECKING:
    from batchgen.models.facts import Facts

DEFAULT, MODEL = "default", "the model's own"


@dataclass(frozen=True, slots=True)
class Value:
    """A key of a job. One that nothing has set is None, unless the model has a value of its own for it."""

    table: str
    key: str
    value: Any
    origin: str
    """`DEFAULT`, `MODEL`, the job file's path, or the option that gave it."""

    def line(self) -> str:
        """As TOML; what is unset is a comment."""
        if self.value is None:
            return f"# {self.key} is unset"
        key = _key(self.key)
        # What a model has of its own is not the job's to say again.
        return f"{'# ' if self.origin == MODEL else ''}{key} = {toml(self.value)}"


def values(job: Job, origins: Mapping[str, str], facts: Facts | None = None) -> Iterator[Value]:
    """Every key of a job. `origins` names what gave those that are not defaults, by `table.key`; with the model's
    facts, what its family takes where nothing is said."""
    for table, content in job.model_dump(mode="json").items():
        for key, value in content.items():
            origin = origins.get(f"{table}.{key}", DEFAULT)
            if value is None and facts is not None and table == "sampling" and key in facts.columns:
                own = getattr(facts, key, None)
                yield Value(table, key, own, DEFAULT if own is None else MODEL)
            else:
                yield Value(table, key, value, origin)


def shown(found: list[Value]) -> str:
    """As a job file that gives the same job, each line with its origin."""
    width = min(48, max(len(one.line()) for one in found))
    lines: list[str] = []
    table = ""
    for one in found:
        if one.table != table:
            table = one.table
            lines += ["", f"[{table}]"]
        lines.append(f"{one.line():<{width}}  # {one.origin}")
    return "\n".join(lines[1:])


def facts_of_values(found: list[Value]) -> dict[str, dict[str, dict[str, Any]]]:
    """The same for programs: value and origin, by table and key."""
    tables: dict[str, dict[str, dict[str, Any]]] = {}
    for one in found:
        tables.setdefault(one.table, {})[one.key] = {"value": one.value, "from": one.origin}
    return tables


def toml(value: Any) -> str:
    """A value as TOML, without the keys that are None. JSON's texts, numbers and lists are TOML's, but for one
    character that TOML wants escaped."""
    if isinstance(value, Mapping):
        pairs = [f"{_key(key)} = {toml(one)}" for key, one in value.items() if one is not None]
        return f"{{ {', '.join(pairs)} }}" if pairs else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return name if name.replace("_", "").isalnum() and name.isascii() else toml(name)
