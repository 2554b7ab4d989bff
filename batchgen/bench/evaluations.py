"""One bucket's model evaluation and decode, set up outside any run, to be counted, timed and profiled."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from batchgen.bench.workload import Wanted
from batchgen.engine.attention import attention
from batchgen.engine.compiling import Compiler
from batchgen.engine.denoise import Lanes, load_lanes, step
from batchgen.engine.engine import Engine
from batchgen.models.family import Conditioning, Family, Network
from batchgen.models.transfer import Mark
from batchgen.records import Batch, Bucket, Group, Row

STEPS = 20
MATMUL_SIDE = 8192
_CPU_MATMUL_SIDE = 512
_MATMULS = 20


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A batch that stands before its first step."""

    model: Family
    bucket: Bucket
    lanes: Lanes
    conditioning: Conditioning

    def step(self, network: Network) -> None:
        """One denoising step, in place."""
        step(self.model, network, self.lanes, self.conditioning)

    def told(self, compiler: Compiler, kernels: str) -> Evaluation:
        """The same for the network in these kernels."""
        return dataclasses.replace(self, conditioning=compiler.told(kernels, self.conditioning))

    def decode(self, decoder: Network, size: int) -> Tensor:
        """Images `[size, 3, H, W]`."""
        return self.model.decode(decoder, self.lanes.latents[:1].expand(size, -1, -1, -1).contiguous())

    def start(self) -> list[Tensor]:
        """A copy of all that a step changes or reads of the lanes."""
        return [tensor.clone() for tensor in self.lanes.tensors()]

    def restart(self, start: Sequence[Tensor]) -> None:
        """Write a copy back."""
        for mine, value in zip(self.lanes.tensors(), start, strict=True):
            mine.copy_(value)


def evaluation(engine: Engine, size: int, width: int, height: int, guidance: float, sampler: str) -> Evaluation:
    """A full batch of `size` rows of 20 steps."""
    batch = batch_of(engine, size, width, height, guidance, sampler, STEPS)
    with torch.inference_mode():
        lanes = load_lanes(engine.model, batch.rows, engine.tables(batch.rows))
        return Evaluation(engine.model, Bucket(batch.group, size), lanes, engine.conditioning(batch))


def batch_of(engine: Engine, size: int, width: int, height: int, guidance: float, sampler: str, steps: int) -> Batch:
    """A batch as a plan would hold it."""
    facts = engine.facts
    form = facts.sampler_facts(sampler).form
    row = Row(0, "0", 0, "a picture", None, width, height, steps, guidance, sampler, 0, facts.true_cfg_scale)
    group = Group(width, height, facts.guides(row), facts.text_length, form)
    rows = [dataclasses.replace(row, index=i, id=str(i), prompt=f"picture {i:03}", seed=i) for i in range(size)]
    return Batch(0, size, group, tuple(rows))


@torch.inference_mode()
def median_s(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median seconds of a call: of the device where it is a GPU, whose queue is kept filled."""
    call()
    Mark(device).wait()
    if device.type == "cuda":
        marks = [Mark(device)]
        for _ in range(repeats):
            call()
            marks.append(Mark(device))
        marks[-1].wait()
        return statistics.median(end.seconds_since(start) for start, end in pairwise(marks))
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


@torch.inference_mode()
def count_flops(engine: Engine, width: int, height: int, guidance: float, sampler: str) -> tuple[int, int]:
    """Floating-point operations of one row's evaluation (guidance doubling included) and of one decode, as
    torch.utils.flop_counter counts them: matrix products, convolutions and attention."""
    one = evaluation(engine, 1, width, height, guidance, sampler)
    counted = []
    for call in (lambda: one.step(one.model.network), lambda: one.decode(one.model.decoder, 1)):
        with attention("flash", engine.device), FlopCounterMode(display=False) as counter:
            call()
        counted.append(counter.get_total_flops())
    return counted[0], counted[1]


def total_flops(engine: Engine, wanted: Sequence[Wanted]) -> int:
    """Of all rows: every evaluation and decode, padding and idle rows not counted."""
    known: dict[tuple[int, int, bool], tuple[int, int]] = {}
    total = 0
    for row in wanted:
        key = (row.width, row.height, not engine.facts.has_true_cfg and engine.facts.is_guided(row.guidance_scale))
        if key not in known:
            known[key] = count_flops(engine, row.width, row.height, row.guidance_scale, row.sampler)
        step_flops, decode_flops = known[key]
        total += engine.facts.sampler_facts(row.sampler).evaluations(row.steps) * step_flops + decode_flops
    return total


def matmul_flops_per_s(device: torch.device) -> float:
    """What a large square matrix product reaches: 8192 in float16 on a GPU, 512 in float32 on a CPU."""
    is_cuda = device.type == "cuda"
    side, dtype = (MATMUL_SIDE, torch.float16) if is_cuda else (_CPU_MATMUL_SIDE, torch.float32)
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return float(2 * side**3 / median_s(lambda: left @ right, device, _MATMULS))
