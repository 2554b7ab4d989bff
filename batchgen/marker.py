"""`_SUCCESS`, written last: the plan that a finished run stands for, and what its tables and its card must be."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from batchgen.rundir import RunDirectory

SUCCESS = "_SUCCESS"


def put_marker(run: RunDirectory, facts: Mapping[str, Any], names: Iterable[str]) -> None:
    """Put the marker, with size and sha256 of the run directory's files of these names; one that says the same is left
    as it is."""
    content = {**facts, "files": {name: list(run.files.digest(run.path / name)) for name in names}}
    if _read(run) == content:
        return
    # Renamed over the old one: a finisher that wakes late must not take a good marker away, if only for a moment.
    temp = run.root / f"marker.{secrets.token_hex(4)}.tmp"
    run.files.write(temp, json.dumps(content).encode())
    run.files.replace(temp, run.path / SUCCESS)


def is_finished(run: RunDirectory) -> bool:
    """Whether the marker is there, and each file that it names has the size that it names."""
    files = (_read(run) or {}).get("files")
    if not isinstance(files, dict):
        return False
    found = {name: run.files.stat(run.path / name) for name in files}
    return {name: one and one.size for name, one in found.items()} == {name: one[0] for name, one in files.items()}


def damaged(run: RunDirectory) -> Iterator[tuple[str, str]]:
    """Files that are not as the marker has them, and what is wrong. None where there is no marker."""
    for name, (size, sha256) in ((_read(run) or {}).get("files") or {}).items():
        if run.files.stat(run.path / name) is None:
            yield name, "missing"
        elif run.files.digest(run.path / name) != (size, sha256):
            yield name, "altered: its sha256 is another one"


def _read(run: RunDirectory) -> dict[str, Any] | None:
    """None if there is none that can be read."""
    try:
        content = json.loads(run.files.read(run.path / SUCCESS) or b"")
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
