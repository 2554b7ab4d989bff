"""Compiled kernels in two ways: a network as a whole for one shape, or its blocks by themselves for every shape.

Blocks ("regional compilation") are compiled once a process; the whole is faster by some percent, and compiled again for
every bucket. One H200, torch 2.11, Stable Diffusion 1.5, 64 rows of the network at 512×512: eager 186 ms, blocks 138 ms
after 60 s of compiling, whole 128 ms after 50 s.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from batchgen.engine.activations import with_fused_gelu
from batchgen.engine.crossing import projected, taking_projected
from batchgen.engine.norms import by_channels
from batchgen.models.family import Conditioning, Family, Network

KERNELS = ("eager", "regional", "compiled")
SETTLING_ROWS = 8
"""Rows of the call that settles the code of blocks."""
SETTLING_IMAGES = 2
_OF_WHOLES: Mapping[str, Any] = {"triton.multi_kernel": 1}
"""Options of Inductor: each normalisation by the faster of two kernels, one of which holds a whole token. Unasked it
takes the other from 1,025 channels on, which was found to be half as fast (SDXL's 1,280 in float16, one H200, torch
2.11)."""
_IMAGE_DIMS = 4
MAX_FORMS = 64
"""Of one block's code: a form for each pair of channel counts, and again for a single row."""


def mode_of(mode: str) -> tuple[str, bool]:
    """A mode's kernels (eager, regional or compiled), and whether it is captured."""
    kernels = mode.removesuffix("graph").removesuffix("+")
    return kernels or "eager", mode.endswith("graph")


def mode_named(kernels: str, *, is_captured: bool) -> str:
    """The mode of these kernels, captured or not."""
    if not is_captured:
        return kernels
    return "graph" if kernels == "eager" else f"{kernels}+graph"


def doing(mode: str) -> str:
    """What it takes to make a bucket ready for a mode, in a word."""
    kernels, is_captured = mode_of(mode)
    return " and ".join([*(["compiling"] if kernels != "eager" else []), *(["capturing"] if is_captured else [])])


class Compiler:
    """What was compiled for one model."""

    def __init__(self, model: Family) -> None:
        self._model = model
        self._blocks: dict[str, Any] = {}
        """Twins whose blocks are compiled, by name; likewise the next, which are compiled as a whole."""
        self._wholes: dict[str, nn.Module] = {}
        self._has_whole = False

    def network(self, kernels: str, conditioning: Conditioning) -> Network:
        """The model's network in the given kernels. Blocks are compiled here, the whole by its first call."""
        if kernels == "eager":
            return self._model.network
        if kernels == "compiled":
            return self._whole("network", self._model.network, lambda twin: twin)
        side = self._model.sample_side
        settling = _settling(conditioning)

        def call(twin: Any) -> object:
            latents = settling.guidance.new_zeros((SETTLING_ROWS, self._model.channels, side, side))
            timesteps = torch.zeros_like(settling.guidance)
            return self._model.predict(twin, latents.to(self._model.dtype), timesteps, settling)

        twin: Network = self._regional("network", self._model.network, call)
        return twin

    def told(self, kernels: str, conditioning: Conditioning) -> Conditioning:
        """A batch's conditioning as the network in these kernels takes it."""
        return projected(self._model.network, conditioning) if kernels == "compiled" else conditioning

    def decoder(self, kernels: str) -> Network:
        """The model's decoder, likewise."""
        if kernels == "eager":
            return self._model.decoder
        if kernels == "compiled":
            return self._whole("vae", self._model.vae, lambda twin: twin.decode)
        side, device = self._model.sample_side, self._model.device

        def call(twin: Any) -> object:
            latents = torch.zeros((SETTLING_IMAGES, self._model.channels, side, side), device=device)
            return self._model.decode(twin.decode, latents)

        decode: Network = self._regional("vae", self._model.vae, call).decode
        return decode

    def forget_shapes(self) -> None:
        """Drop code that serves one shape only: what is kept for a network is limited."""
        if self._has_whole:
            torch._dynamo.reset()
            self._blocks.clear()
            self._has_whole = False

    def _whole(self, name: str, module: nn.Module, part: Callable[[Any], Network]) -> Network:
        self._has_whole = True
        if name not in self._wholes:
            self._wholes[name] = taking_projected(twin_of(module))
        twin = part(self._wholes[name])
        compiled: Network = torch.compile(twin, fullgraph=True, dynamic=False, options=dict(_OF_WHOLES))
        return compiled

    def _regional(self, name: str, module: nn.Module, settle: Callable[[Any], object]) -> Any:
        """The module's twin with compiled blocks. Its code depends on the shapes of the first call, so that is always
        the same one: pixels must not depend on which bucket came first."""
        if name not in self._blocks:
            twin = twin_of(module)
            for block in twin.modules():
                if isinstance(block, self._model.blocks):
                    # Inductor gives up channels-last order for dynamic shapes unless it is told not to.
                    block.compile(fullgraph=True, dynamic=True, options={"force_layout_optimization": True})
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_FORMS)
            # Else a width that happens to equal the height in this call would be taken to equal it always.
            torch.fx.experimental._config.use_duck_shape = False
            settle(twin)
            self._blocks[name] = twin
        return self._blocks[name]


def twin_of(module: nn.Module) -> nn.Module:
    """A module of its own over the same weights, to be compiled."""
    shared = {id(one): one for one in chain(module.parameters(), module.buffers())}
    return with_fused_gelu(by_channels(copy.deepcopy(module, shared)))


def order_by_channels(module: nn.Module) -> None:
    """Lay the weights out as compiled kernels want them, channels last: all that have two spatial dimensions, which
    those of a VAE made for films have not."""
    for one in chain(module.parameters(), module.buffers()):
        if one.ndim == _IMAGE_DIMS:
            one.data = one.data.contiguous(memory_format=torch.channels_last)


def _settling(conditioning: Conditioning) -> Conditioning:
    """The first row of a batch SETTLING_ROWS times, unguided."""

    def repeated(one: torch.Tensor) -> torch.Tensor:
        return one[:1].repeat(SETTLING_ROWS, *[1] * (one.ndim - 1))

    inputs = {name: repeated(one) for name, one in conditioning.inputs.items()}
    return Conditioning(repeated(conditioning.guidance), False, inputs)
