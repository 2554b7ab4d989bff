"""How messages show what is long."""

from __future__ import annotations

import re
from collections.abc import Sequence


def shorten(text: str, most: int = 80) -> str:
    """A text of at most `most` characters: what is left out is "…"."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def first_line(error: BaseException) -> str:
    """The first line of what an error says that is not empty, with the next one where it only announces that; else its
    name."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        return f"{lines[0]} {lines[1].removesuffix('.')}"
    return lines[0] if lines else type(error).__name__


def listed(names: Sequence[str], count: int | None = None) -> str:
    """The first names of `count` (else of all), at most 30, and the number of the others: "a, b and 3 more"."""
    shown = names[:30]
    others = (len(names) if count is None else count) - len(shown)
    return ", ".join(shown) + (f" and {others:,} more" if others > 0 else "")


def with_more(lines: Sequence[str], count: int) -> list[str]:
    """The first lines of `count`, and where there are others, a line that says how many."""
    return [*lines, f"  … and {count - len(lines)} more"] if count > len(lines) else list(lines)


def counted(number: int, noun: str) -> str:
    """A number of things for a sentence: "1 row", "2 rows"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def num_bytes(text: str) -> int:
    """What "24GB", "1.5 GB" or "40GiB" says. Raises ValueError for anything else."""
    found = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*([MGT])(i?)B?\s*", text, re.IGNORECASE)
    if not found or not float(found[1]):
        raise ValueError('a size is a number and a unit, such as "24GB" or "40GiB"')
    unit = (1024 if found[3] else 1000) ** ("KMGT".index(found[2].upper()) + 1)
    return int(float(found[1]) * unit)


def sized(num_bytes: float) -> str:
    """A number of bytes in the unit that fits it: "512 bytes", "12 KB", "1.5 TB"."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
