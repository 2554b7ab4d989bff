"""Copies between host and device that nobody waits for."""

from __future__ import annotations

import time

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy of a host tensor on the device. On a GPU it is queued behind the work there, from pinned memory: a copy
    from ordinary memory would wait until the device is idle."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, complete once the device has come to the end of what is queued now."""
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class Mark:
    """A place in the device's queue that one can wait for."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.Event | None = None
        self._clock_s = time.perf_counter()
        if device.type == "cuda":
            self._event = torch.Event(device, enable_timing=True, blocking=True)
            self._event.record()

    def wait(self) -> None:
        """Return once the device has come here."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        """Device time between two marks that it has passed; on the CPU, where nothing is queued, the host's."""
        if self._event is None or earlier._event is None:
            return self._clock_s - earlier._clock_s
        return float(earlier._event.elapsed_time(self._event)) / 1000
