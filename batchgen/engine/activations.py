"""A linear layer and the GELU after it in one kernel: cuBLASLt applies it to what it holds in registers, where
Inductor would write the layer's output to memory and read it again."""

from __future__ import annotations

import torch
from diffusers.models.activations import GELU
from torch import Tensor, nn
from torch.nn import functional


@torch.library.custom_op("batchgen::linear_gelu", mutates_args=())
def linear_gelu(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`[..., D]` to `[..., E]`: GELU in its tanh approximation (Hendrycks and Gimpel 2016) of a linear layer.

    An operator of its own, since Inductor takes torch's fused one apart.
    """
    if not input.is_cuda:  # There the fused one's GELU is the exact one.
        return functional.gelu(functional.linear(input, weight, bias), approximate="tanh")
    rows: Tensor = torch._addmm_activation(bias, input.flatten(0, -2), weight.t(), use_gelu=True)
    return rows.view(*input.shape[:-1], -1)


@linear_gelu.register_fake
def _(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return input.new_empty((*input.shape[:-1], weight.shape[0]))


class FusedGELU(GELU):  # type: ignore[misc]
    """Diffusers' layer of the two."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`[..., D]` to `[..., E]`."""
        made: Tensor = linear_gelu(hidden_states, self.proj.weight, self.proj.bias)
        return made


def with_fused_gelu(module: nn.Module) -> nn.Module:
    """The module itself, whose linear layers with a tanh GELU after them become fused ones."""
    for one in module.modules():
        if type(one) is GELU and one.approximate == "tanh" and getattr(one.proj, "bias", None) is not None:
            one.__class__ = FusedGELU
    return module
