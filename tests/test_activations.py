"""A linear layer and its GELU as one operator, against the two."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.activations import GELU
from diffusers.models.attention import FeedForward
from torch import nn

from batchgen.engine.activations import FusedGELU, linear_gelu, with_fused_gelu
from batchgen.engine.compiling import twin_of


@pytest.mark.parametrize(
    ("device", "dtype", "bound"),
    [
        ("cpu", torch.float32, 0.0),
        pytest.param("cuda", torch.float32, 1e-5, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float16, 1e-3, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, 8e-3, marks=pytest.mark.gpu),
    ],
    ids=str,
)
@torch.inference_mode()
def test_it_is_diffusers_layer(device: str, dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(0)
    layer = GELU(48, 96, approximate="tanh").to(device, dtype)
    values = torch.randn(3, 5, 7, 48, device=device).to(dtype)
    wanted = layer(values)
    (made,) = [one(values) for one in with_fused_gelu(nn.Sequential(layer))]  # type: ignore[union-attr]
    assert type(layer) is FusedGELU
    assert made.dtype == dtype
    assert made.shape == wanted.shape
    assert float((made - wanted).float().abs().max()) <= bound * float(wanted.float().abs().max())


def test_it_is_an_operator_as_torch_wants_them() -> None:
    values, weight, bias = torch.randn(2, 3, 8), torch.randn(16, 8), torch.randn(16)
    torch.library.opcheck(linear_gelu, (values, weight, bias))


def test_only_a_tanh_gelu_with_a_bias_is_fused_and_only_in_a_twin() -> None:
    module = nn.ModuleList(
        [FeedForward(8, activation_fn="gelu-approximate"), FeedForward(8, activation_fn="gelu"), FeedForward(8)]
    )
    module.append(FeedForward(8, activation_fn="gelu-approximate", bias=False))
    twin = twin_of(module)
    fused = [[type(one) for one in of.modules()].count(FusedGELU) for of in (*module, *twin.children())]
    assert fused == [0, 0, 0, 0, 1, 0, 0, 0]


@torch.inference_mode()
def test_compiled_for_any_shape() -> None:
    torch._dynamo.reset()
    layer = GELU(8, 16, approximate="tanh")
    compiled = torch.compile(with_fused_gelu(nn.Sequential(layer)), fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in [(2, 3, 8), (4, 5, 8), (6, 8)]:
        values = torch.randn(shape)
        assert torch.equal(compiled(values), nn.functional.gelu(layer.proj(values), approximate="tanh"))
