"""Group normalisation channel by channel, against torch's own in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from batchgen.engine.compiling import twin_of
from batchgen.engine.norms import ChannelwiseGroupNorm, by_channels


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2, 64, 16, 24), (3, 32, 40), (1, 320, 1, 1)], ids=str)
@torch.inference_mode()
def test_it_is_as_near_to_the_truth_as_torchs_own(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """With channels far apart in mean and spread, which must not cancel each other out."""
    random = torch.Generator().manual_seed(0)
    own = nn.GroupNorm(32, shape[1], eps=1e-6)
    own.weight.copy_(torch.randn(shape[1], generator=random))
    own.bias.copy_(torch.randn(shape[1], generator=random))
    own = own.to(dtype)
    apart = (1, shape[1], *[1] * (len(shape) - 2))
    spread, offset = torch.rand(apart, generator=random), 50 * torch.randn(apart, generator=random)
    values = (spread * torch.randn(shape, generator=random) + offset).to(dtype)
    weight, bias = own.weight.double(), own.bias.double()
    wanted = nn.functional.group_norm(values.double(), 32, weight, bias, own.eps)

    def error(made: torch.Tensor) -> float:
        return float((made.double() - wanted).norm() / wanted.norm())

    before = error(own(values))
    made = by_channels(own)(values)
    assert type(own) is ChannelwiseGroupNorm
    assert made.dtype == dtype
    assert made.shape == shape
    assert error(made) < 4 * before + 1e-6


@pytest.mark.parametrize("outlier", [100.0, 1e4, 6e4])
@torch.inference_mode()
def test_a_first_value_far_from_its_channel(outlier: float) -> None:
    """It is what moments are taken about."""
    values = torch.randn(1, 64, 32, 32, generator=torch.Generator().manual_seed(0))
    values[:, :, 0, 0] = outlier
    wanted = nn.functional.group_norm(values.double(), 32)
    made = by_channels(nn.GroupNorm(32, 64))(values).double()
    for part in (slice(None), slice(1, None)):
        assert (made - wanted)[:, :, part].norm() < 2e-4 * wanted[:, :, part].norm()


@torch.inference_mode()
def test_without_weights() -> None:
    values = torch.randn(2, 8, 5, 5)
    own = nn.GroupNorm(4, 8, affine=False)
    wanted = own(values)
    assert torch.allclose(by_channels(own)(values), wanted, atol=1e-6)


def test_a_twin_has_it_over_the_same_weights_and_the_module_does_not() -> None:
    module = nn.Sequential(nn.Conv2d(3, 8, 1), nn.GroupNorm(4, 8))
    twin = twin_of(module)
    assert [type(one) for one in module] == [nn.Conv2d, nn.GroupNorm]
    assert [type(one) for one in twin.children()] == [nn.Conv2d, ChannelwiseGroupNorm]
    assert all(mine is its for mine, its in zip(module.parameters(), twin.parameters(), strict=True))
