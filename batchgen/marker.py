"""`_SUCCESS`, written last: the plan that a finished run stands for, and what its tables and its card must be."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from batchgen.balance import Balance
from batchgen.owners import mark, this_process
from batchgen.rundir import RunDirectory
from batchgen.slots import NO_SLOT, sealed, unsealed

SUCCESS = "_SUCCESS"
CARD = "README.md"


def put_marker(run: RunDirectory, facts: Mapping[str, Any], files: Mapping[str, tuple[int, str]]) -> None:
    """Put the marker, with size and sha256 of the run directory's files by name; one that says the same is left as it
    is."""
    content = {**facts, "files": {name: list(one) for name, one in files.items()}}
    if read_marker(run) == content:
        return
    # Renamed over the old one: a finisher that wakes late must not take a good marker away, if only for a moment.
    token = secrets.token_hex(8)
    temp = run.root / f"marker.{token}.{mark(this_process())}.tmp"
    run.files.write(temp, sealed(token, content))
    run.files.replace(temp, run.path / SUCCESS)


def remove_marker(run: RunDirectory) -> None:
    """Take the marker away, if it is there; a crash does not bring it back."""
    run.files.remove(run.path / SUCCESS)
    run.files.sync_folder(run.path)


def is_finished(run: RunDirectory, balance: Balance | None = None, *, reads_all: bool = False) -> bool:
    """Whether the marker is there, stands for the highest plan and, where that is given, for how the run stands, and
    each file that it names has the size that it names; with `reads_all` also the sha256, for a finalizer may have put
    its own there and died: one that knows fewer plans, after an append, or one after the directory was renamed, whose
    name only the card holds."""
    marker = read_marker(run)
    if marker is None or marker.get("plan") != run.index().number:
        return False
    if balance is not None and not stands_for(marker, balance):
        return False
    files = _files(marker)
    if any(_size(run, name) != size for name, (size, _) in files.items()):
        return False
    read = files if marker["plan"] else {name: one for name, one in files.items() if name == CARD}
    return not reads_all or not any(_damaged(run, read))


def is_marked(run: RunDirectory) -> bool:
    """Whether a marker that can be read stands for the highest plan."""
    marker = read_marker(run)
    return marker is not None and marker.get("plan") == run.index().number


def stands_for(marker: Mapping[str, Any], balance: Balance) -> bool:
    """Whether a marker was put for rows that stand so."""
    counts = all(marker.get(name) == getattr(balance, name) for name in ("done", "failed", "rejected"))
    return counts and not balance.outstanding


def _size(run: RunDirectory, name: str) -> int | None:
    found = run.files.stat(run.path / name)
    return found.size if found else None


def _files(marker: Mapping[str, Any]) -> Mapping[str, tuple[int, str]]:
    return {name: (int(size), str(sha256)) for name, (size, sha256) in marker["files"].items()}


def damaged(run: RunDirectory) -> Iterator[tuple[str, str]]:
    """Files that are not as the marker has them, the marker itself too, and what is wrong. None where there is no
    marker."""
    marker = read_marker(run)
    if marker is None and run.files.stat(run.path / SUCCESS) is not None:
        yield SUCCESS, "unreadable: the tables that it stands for are written again"
    yield from _damaged(run, _files(marker) if marker else {})


def _damaged(run: RunDirectory, files: Mapping[str, tuple[int, str]]) -> Iterator[tuple[str, str]]:
    for name, (size, sha256) in files.items():
        found = _size(run, name)
        if found is None:
            yield name, "missing"
        elif found != size or run.files.digest(run.path / name) != (size, sha256):
            yield name, "altered: its sha256 is another one"


def read_marker(run: RunDirectory) -> dict[str, Any] | None:
    """Its facts and files; None if there is none that can be read."""
    try:
        content = unsealed(run.files.read(run.path / SUCCESS) or b"")
        leads_out = any(".." in Path(name).parts or Path(name).is_absolute() for name in _files(content))
        return None if leads_out else content
    except NO_SLOT:
        return None
