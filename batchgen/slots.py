"""What a write-once slot holds: JSON that begins with its putter's token and ends with a hash of the rest, so that a
damaged slot is never read as another one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

NO_SLOT = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What comes of reading bytes that are no slot's content."""
_DIGITS = 16


def sealed(token: str, fields: Mapping[str, Any]) -> bytes:
    """The content of a slot."""
    content = {"token": token, **fields}
    return json.dumps({**content, "check": _check(content)}, ensure_ascii=False).encode()


def unsealed(content: bytes) -> dict[str, Any]:
    """The fields of a slot. Raises one of `NO_SLOT` for anything that `sealed` has not written."""
    fields: dict[str, Any] = json.loads(content)
    check = fields.pop("check")
    if check != _check(fields):
        raise ValueError("its bytes are not those that were written")
    del fields["token"]
    return fields


def _check(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:_DIGITS]
