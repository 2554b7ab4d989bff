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
        spatial = tuple(range(_FIRST_SPATIAL, values.ndim))
        # Moments about some value of the channel: about zero, a mean far from it would swallow the variance.
        near = values
        for dim in spatial:
            near = near.narrow(dim, 0, 1)
        mean, square = (values - near).mean(spatial), (values - near).square().mean(spatial)
        groups = len(values), self.num_groups, -1
        variance = (square - mean.square()).clamp_min(0).view(groups).mean(2, keepdim=True)
        between, centre = torch.var_mean((mean + near.flatten(1)).view(groups), 2, correction=0, keepdim=True)
        factor = (variance + between + self.eps).rsqrt().expand(mean.view(groups).shape)
        offset = -centre * factor
        if self.affine:
            weight, bias = (one.float().view(1, self.num_groups, -1) for one in (self.weight, self.bias))
            factor, offset = factor * weight, offset * weight + bias
        # One tensor of both: else Inductor computes them anew for every value.
        factor, offset = torch.stack((factor, offset)).view(2, *mean.shape, *[1] * len(spatial)).unbind()
        return (values * factor + offset).to(input.dtype)


def by_channels(module: nn.Module) -> nn.Module:
    """The module itself, whose group normalisations become channelwise ones."""
    for one in module.modules():
        if type(one) is nn.GroupNorm:
            one.__class__ = ChannelwiseGroupNorm
    return module
