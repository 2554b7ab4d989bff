"""What was found, and what to do about it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from batchgen.wording import counted

State = Literal["ok", "note", "amiss"]
AMISS_CODE = 3
"""Exit code where something would keep a run from its end."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    name: str
    state: State
    """amiss: it keeps a run from its end, or from the GPU that is there; note: it need not."""
    found: str
    advice: str = ""
    """What to do; "" where it is ok."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The same in figures, for programs."""


def exit_code(findings: Sequence[Finding]) -> int:
    """0, or `AMISS_CODE`."""
    return AMISS_CODE if any(one.state == "amiss" for one in findings) else 0


def text(findings: Sequence[Finding], width: int) -> str:
    """A line for each, with its advice below, in lines of at most `width`; and how many are amiss."""
    wide = max(len(one.name) for one in findings)
    lines = [line for one in findings for line in _lines(one, wide, width)]
    num = sum(one.state == "amiss" for one in findings)
    return "\n".join([*lines, "", f"{counted(num, 'thing')} amiss" if num else "nothing amiss"])


def facts(findings: Sequence[Finding]) -> dict[str, Any]:
    """The same for programs."""
    return {"is_fit": not exit_code(findings), "findings": [asdict(one) for one in findings]}


def _lines(one: Finding, wide: int, width: int) -> list[str]:
    head, below = f"{one.state:<5}  {one.name:<{wide}}  ", " " * (wide + 9)
    lines = textwrap.wrap(one.found, width, initial_indent=head, subsequent_indent=below, break_on_hyphens=False)
    if one.advice:
        start = f"{below}→ "
        lines += textwrap.wrap(
            one.advice, width, initial_indent=start, subsequent_indent=f"{below}  ",
            break_on_hyphens=False, break_long_words=False,
        )  # fmt: skip
    return lines
