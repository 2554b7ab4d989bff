"""The kernels of scaled dot-product attention."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.nn import attention as torch_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from batchgen.errors import UsageError

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash3": SDPBackend.FLASH_ATTENTION,
}
_FALLBACKS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""For shapes that the chosen kernel does not take, such as the VAE's one head of 512."""


def present() -> tuple[str, ...]:
    """The backends that this installation has: FlashAttention 3 is a package of its own, which torch can put in the
    place of its FlashAttention 2."""
    has_flash3 = hasattr(torch_attention, "activate_flash_attention_impl") and (
        importlib.util.find_spec("flash_attn_interface") is not None
    )
    return tuple(name for name in BACKENDS if name != "flash3" or has_flash3)


@contextmanager
def attention(name: str | None, device: torch.device) -> Iterator[None]:
    """Prefer a backend for the time of the block; None and the CPU leave torch its choice."""
    if name is None or device.type != "cuda":
        yield
        return
    backends = list(dict.fromkeys([BACKENDS[name], *_FALLBACKS]))
    with _flash3() if name == "flash3" else sdpa_kernel(backends, set_priority=True):
        yield


@contextmanager
def _flash3() -> Iterator[None]:
    if "flash3" not in present():
        raise UsageError(
            "engine.attention = 'flash3' needs the package flash_attn_3 and a torch that can use it, and this "
            "installation lacks one of them; install it, or take flash or cudnn"
        )
    torch_attention.activate_flash_attention_impl("FA3")
    try:
        with sdpa_kernel(_FALLBACKS, set_priority=True):
            yield
    finally:
        torch_attention.restore_flash_attention_impl()
