"""The kernels of scaled dot-product attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
_FALLBACKS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""For shapes that the chosen kernel does not take, such as the VAE's one head of 512."""


@contextmanager
def attention(name: str | None, device: torch.device) -> Iterator[None]:
    """Prefer a backend for the time of the block; None and the CPU leave torch its choice."""
    if name is None or device.type != "cuda":
        with nullcontext():
            yield
        return
    backends = list(dict.fromkeys([BACKENDS[name], *_FALLBACKS]))
    with sdpa_kernel(backends, set_priority=True):
        yield
