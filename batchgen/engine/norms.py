"""Group normalisation in the order that compiled kernels do fast.

The statistics of a group of channels lie scattered in channels-last memory, and Inductor's kernels gather them slowly.
Here they are taken of each channel by itself, over neighbouring addresses, and then put together.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_FIRST_SPATIAL = 2
"""Dimension, after batch and channels."""


class ChannelwiseGroupNorm(nn.GroupNorm):
    """Wu and He 2018, with a group's variance as the mean of its channels' plus that of their means."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `[B, C, H, W]` or `[B, C, L]`; the arithmetic is in float32."""
        values = input.float()
        groups = len(values), self.num_groups, -1
        variance, mean = torch.var_mean(values, tuple(range(_FIRST_SPATIAL, values.ndim)), correction=0)
        between, centre = torch.var_mean(mean.view(groups), 2, correction=0, keepdim=True)
        scale = (variance.view(groups).mean(2, keepdim=True) + between + self.eps).rsqrt()

        def per_channel(one: Tensor) -> Tensor:
            return one.expand_as(mean.view(groups)).reshape(*mean.shape, *[1] * (values.ndim - _FIRST_SPATIAL))

        normalized = (values - per_channel(centre)) * per_channel(scale)
        if self.affine:
            weight, bias = (one.float().view(1, self.num_groups, -1) for one in (self.weight, self.bias))
            normalized = normalized * per_channel(weight) + per_channel(bias)
        return normalized.to(input.dtype)


def by_channels(module: nn.Module) -> nn.Module:
    """The module itself, whose group normalisations become channelwise ones."""
    for one in module.modules():
        if type(one) is nn.GroupNorm:
            one.__class__ = ChannelwiseGroupNorm
    return module
