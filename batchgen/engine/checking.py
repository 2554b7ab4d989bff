"""What captured and compiled code makes, held against what eager code makes of the same."""

from __future__ import annotations

from torch import Tensor

from batchgen.errors import BatchgenError

TOLERANCES = {"eager": 0.0, "regional": 1e-2, "compiled": 1e-2}
"""Largest deviation from eager, by kernels. A graph replays eager's own kernels, so its bits are the same. Sound
compiled code deviates by 3.5e-3 to 4.5e-3 in float16 (SD1.5 and SDXL, one H200, torch 2.11, after two steps); twice
that is no reason to do without it."""


class Refused(BatchgenError):
    """The result deviates from eager."""


def deviation_of(made: Tensor, wanted: Tensor) -> float:
    """The worst row's ‖made - wanted‖ / ‖wanted‖ of `[B, C, h, w]`; NaN if there is any in either."""
    difference = (made.float() - wanted.float()).flatten(1).norm(dim=1)
    return float((difference / wanted.float().flatten(1).norm(dim=1)).max())


def check(made: Tensor, wanted: Tensor, kernels: str) -> float:
    """The deviation. Raises Refused above the tolerance."""
    deviation = deviation_of(made, wanted)
    if not deviation <= TOLERANCES[kernels]:
        raise Refused(f"its result deviates from eager by {deviation:.1e}; allowed is {TOLERANCES[kernels]}")
    return deviation
