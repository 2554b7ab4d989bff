"""How messages show what is long."""

from __future__ import annotations

from collections.abc import Sequence


def shorten(text: str, most: int = 80) -> str:
    """A text of at most `most` characters: what is left out is "…"."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def listed(names: Sequence[str], count: int) -> str:
    """The first names of `count`, and the number of the others: "a, b and 3 more"."""
    return ", ".join(names) + (f" and {count - len(names)} more" if count > len(names) else "")


def with_more(lines: Sequence[str], count: int) -> list[str]:
    """The first lines of `count`, and where there are others, a line that says how many."""
    return [*lines, f"  … and {count - len(lines)} more"] if count > len(lines) else list(lines)
