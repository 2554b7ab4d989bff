"""What captured and compiled code makes, held against what eager code makes of the same."""

from __future__ import annotations

from torch import Tensor

from batchgen.errors import BatchgenError

TOLERANCES = {"eager": 1e-3, "regional": 1e-2, "compiled": 1e-2}
"""Largest deviation from eager, by kernels."""


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
