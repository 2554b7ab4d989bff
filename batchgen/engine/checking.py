"""What captured and compiled code makes, held against what eager code makes of the same."""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen.errors import BatchgenError

COMPILED_TOLERANCE = 1e-2
"""Largest deviation of compiled code in float16. Sound code deviates by 3.5e-3 to 4.5e-3 (SD1.5 and SDXL, one H200,
torch 2.11, after two steps); twice that is no reason to do without it."""


class Refused(BatchgenError):
    """The result deviates from eager."""


def deviation_of(made: Tensor, wanted: Tensor) -> float:
    """The worst row's ‖made - wanted‖ / ‖wanted‖ of `[B, C, h, w]`; NaN if there is any in either."""
    difference = (made.float() - wanted.float()).flatten(1).norm(dim=1)
    return float((difference / wanted.float().flatten(1).norm(dim=1)).max())


def allowed(kernels: str, dtype: torch.dtype) -> float:
    """The largest deviation. A graph replays eager's own kernels, so its bits are the same; compiled code rounds
    elsewhere, and a dtype's rounding is as coarse as its mantissa is short (FLUX in bfloat16: 1.5e-2, its VAE
    2.2e-2)."""
    coarser = torch.finfo(dtype).eps / torch.finfo(torch.float16).eps
    return 0.0 if kernels == "eager" else COMPILED_TOLERANCE * max(1.0, coarser)


def check(made: Tensor, wanted: Tensor, kernels: str, dtype: torch.dtype) -> float:
    """The deviation of what code in a dtype has made. Raises Refused above what is allowed."""
    deviation, most = deviation_of(made, wanted), allowed(kernels, dtype)
    if not deviation <= most:
        raise Refused(f"its result deviates from eager by {deviation:.1e}; allowed is {most:.1g}")
    return deviation
