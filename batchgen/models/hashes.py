"""SHA-256 of large files, remembered per user by path, size and time of change."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import tempfile
from pathlib import Path

_log = logging.getLogger(__name__)


def cache_dir() -> Path:
    """`$BATCHGEN_CACHE`, else `batchgen` in the user's cache folder (XDG base directory specification)."""
    own = os.environ.get("BATCHGEN_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchgen"


def sha256(path: Path) -> str:
    """Hex digest of a file; a hub cache's blobs of large files carry theirs as their name."""
    blob = path.resolve()
    if blob.parent.name == "blobs" and re.fullmatch(r"[0-9a-f]{64}", blob.name):
        return blob.name
    stat = blob.stat()
    stamp = [stat.st_size, stat.st_mtime_ns]
    known = _read()
    entry = known.get(str(blob))
    if entry is not None and entry[:2] == stamp:
        return str(entry[2])
    with blob.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    _write(_read() | {str(blob): [*stamp, digest]})
    return digest


def _file() -> Path:
    return cache_dir() / "sha256.json"


def _read() -> dict[str, list[int | str]]:
    try:
        content = json.loads(_file().read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        _log.warning("hash cache %s cannot be read and is made anew: %s", _file(), error)
        return {}
    return content if isinstance(content, dict) else {}


def _write(known: dict[str, list[int | str]]) -> None:
    """Replace the cache as a whole; a process that loses an entry to another only hashes again."""
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=_file().parent, delete=False, encoding="utf-8", suffix=".tmp"
        ) as file:
            json.dump(known, file)
        os.replace(file.name, _file())
    except OSError as error:
        _log.warning("hash cache %s cannot be written, so weights are hashed at every start: %s", _file(), error)
