"""CUDA graphs: a call recorded once and replayed without Python, in static buffers.

On a device without graphs the recorded call is the call itself, so that all else about capture is the same there.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WARM_UPS = 3
"""Calls before a capture: they load kernels, pick algorithms and fill workspaces, which must not happen in one."""


class GraphPool:
    """The memory that the graphs of one group share, on a stream of its own."""

    num_graphs: int
    """Captures since it was last cleared; one that failed has left memory to give back too."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._device = device
        self.num_graphs = 0
        if self._is_cuda:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()

    def capture(self, call: Callable[[], None]) -> Callable[[], None]:
        """Record a call that reads and writes only tensors that stay where they are. It is run WARM_UPS times first, so
        whatever it advances has to be loaded again afterwards."""
        self.num_graphs += 1
        if not self._is_cuda:
            for _ in range(WARM_UPS):
                call()
            return call
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                call()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # thread_local: the threads that write images may call CUDA meanwhile. The outer block comes back to the
        # caller's stream, which a capture that fails does not.
        with (
            torch.cuda.stream(torch.cuda.current_stream(self._device)),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            call()
        return graph.replay

    def clear(self) -> None:
        """Give the memory of graphs that nobody holds any more back to the device."""
        self.num_graphs = 0
        if self._is_cuda:
            torch.cuda.synchronize(self._device)
            gc.collect()
            torch.cuda.empty_cache()
            self._pool = torch.cuda.graph_pool_handle()


@dataclass(frozen=True, slots=True)
class Static:
    """Tensors that a graph reads: their content changes, they do not."""

    tensors: Sequence[Tensor]

    def load(self, values: Sequence[Tensor]) -> None:
        """Overwrite all of them."""
        for mine, value in zip(self.tensors, values, strict=True):
            mine.copy_(value)


def reserved_bytes(device: torch.device) -> int:
    """What the process holds of the device's memory, 0 on the CPU."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def device_bytes(device: torch.device) -> int | None:
    """The GPU's memory, None on the CPU."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None
