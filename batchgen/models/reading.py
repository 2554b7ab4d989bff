"""Files of models: where they are, and the JSON of some."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from batchgen.errors import UsageError


def absolute(path: Path) -> Path:
    """A path that is good in any folder, links on the way followed. A file keeps its own name: in the hub's cache that
    is a link's, and what it leads to has no ending."""
    return path.resolve() if path.is_dir() else path.parent.resolve() / path.name


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises UsageError if it is not there or not JSON."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"model file {path} cannot be read: {error}; fetch or copy it again") from None
    if not isinstance(content, dict):
        raise UsageError(f"model file {path} holds no JSON object; fetch or copy it again")
    return content
