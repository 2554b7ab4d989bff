"""File names from row ids.

Injective, also where the file system folds case or normalises Unicode: a name is lower-case ASCII, and every
id that is not already such a name carries a hash of its exact bytes. No dot, so that tar readers, which cut a
member's name at its first dot, see the whole stem. The prompt takes no part.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata

_SAFE = re.compile(r"[a-z0-9]+(?:[-_][a-z0-9]+)*")
_MAX_SAFE_CHARS = 100
_MAX_SLUG_CHARS = 40
_DEVICES = frozenset(
    ["con", "prn", "aux", "nul", *(f"{port}{digit}" for port in ("com", "lpt") for digit in range(10))]
)
"""Names that Windows keeps for devices, whatever their extension."""

EXTENSIONS = {"png": "png", "jpeg": "jpg", "webp": "webp"}
"""By `[output] image`."""


def file_stem(row_id: str, image_number: int) -> str:
    """The file name, without extension, of a row's image: at most 112 characters of `[a-z0-9_-]`.

    A safe id never holds "--" and a hash is longer than any image number, so no two rows meet.
    """
    base = row_id if _is_safe(row_id) else f"{_slug(row_id)}--{_digest(row_id)}"
    return f"{base}--{image_number}" if image_number else base


def published_name(part: str, container: str, file: str) -> str:
    """An image's path under the run directory; `container` is "" for a folder, else ".tar" or ".parquet"."""
    return f"data/{part}{container}/{file}"


def _is_safe(row_id: str) -> bool:
    return len(row_id) <= _MAX_SAFE_CHARS and row_id not in _DEVICES and _SAFE.fullmatch(row_id) is not None


def _slug(row_id: str) -> str:
    ascii_text = unicodedata.normalize("NFKD", row_id[:200]).encode("ascii", "ignore").decode().lower()
    words = re.sub(r"[^a-z0-9]+", "-", ascii_text).strip("-")
    return words[:_MAX_SLUG_CHARS].rstrip("-") or "id"


def _digest(row_id: str) -> str:
    return hashlib.blake2b(row_id.encode(), digest_size=16).hexdigest()
