"""Keys and values of the text, computed once a batch: the network predicts what it predicts from the text."""

from __future__ import annotations

import dataclasses
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

from batchgen.engine.compiling import Compiler
from batchgen.engine.crossing import TEXT, Taken, projected, projections
from batchgen.engine.engine import Engine
from batchgen.generator import Context
from tests import tiny

KINDS = ["sd1", "sd2", "lcm", "sdxl", "sdxl-lcm"]


def engine_of(kind: str, mode: str) -> Engine:
    return Engine(tiny.job(tiny.folder(kind), f"engine.mode={mode}"), Context(lambda text: None))


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile leaves code as it is."""
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_a_networks_blocks_take_their_own(kind: str, uncompiled: None) -> None:
    model = engine_of(kind, "eager").model
    rows = [tiny.row(i, prompt=f"cat {i}", negative_prompt="x" * i) for i in range(3)]
    is_guided = "lcm" not in kind
    texts = model.texts(rows, is_guided)
    group = tiny.batch(rows, engine_of(kind, "eager").facts).group
    conditioning = model.conditioning(rows, group, dict(zip(texts, model.encode(texts), strict=True)))
    latents, timesteps = torch.randn(3, model.channels, 8, 8), torch.tensor([1.0, 500.0, 999.0])
    wanted = model.predict(model.network, latents, timesteps, conditioning)
    compiler = Compiler(model)
    twin: Any = compiler.network("compiled", conditioning)
    told = compiler.told("compiled", conditioning)
    layers = projections(model.network)
    num_blocks = sum(name.endswith("attn2") for name, _ in model.network.named_modules())
    assert len(layers) == 2 * num_blocks > 0
    assert told.inputs[TEXT].shape[-1] == sum(one.out_features for one in layers)
    assert sum(isinstance(one, Taken) for one in twin.modules()) == len(layers)
    assert not any(isinstance(one, Taken) for one in model.network.modules())
    assert tiny.difference(model.predict(twin, latents, timesteps, told), wanted) < 1e-5
    turned = dataclasses.replace(told, inputs={**told.inputs, TEXT: told.inputs[TEXT].roll(1, 0)})
    assert tiny.difference(model.predict(twin, latents, timesteps, turned), wanted) > 1e-4
    assert compiler.network("compiled", conditioning) is twin
    assert compiler.told("eager", conditioning) is compiler.told("regional", conditioning) is conditioning


@pytest.mark.parametrize("mode", ["compiled", "compiled+graph"])
@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
def test_every_row_is_told_its_own_text(kind: str, mode: str, uncompiled: None) -> None:
    """In batch after batch of one capture, and when it takes another's lane."""
    eager, made = engine_of(kind, "eager"), engine_of(kind, mode)
    for batch in range(3):
        rows = [tiny.row(i, prompt=f"cat {batch} {i}", seed=i, steps=2 + i, guidance_scale=5.0) for i in range(5)]
        assert tiny.difference(tiny.denoise(made, rows, 2), tiny.denoise(eager, rows, 2)) < 1e-5
    assert [one.mode for one in made.steps.captures] == [mode]


def test_a_network_that_reads_the_text_elsewhere_too_gets_the_text() -> None:
    small = {**tiny.demo.UNET, "encoder_hid_dim": 24, "encoder_hid_dim_type": "text_proj"}
    mapped = diffusers.UNet2DConditionModel(**small)
    pooled = diffusers.UNet2DConditionModel(
        **tiny.demo.UNET, addition_embed_type="text", addition_embed_type_num_heads=4
    )
    assert projections(mapped) == projections(pooled) == projections(nn.Linear(2, 2)) == []
    conditioning: Any = object()
    assert projected(mapped, conditioning) is conditioning


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_for_real() -> None:
    eager, made = engine_of("sd1", "eager"), engine_of("sd1", "compiled+graph")
    rows = [tiny.row(i, prompt=f"cat {i}", seed=i, steps=2 + i) for i in range(3)]
    assert tiny.difference(tiny.denoise(made, rows), tiny.denoise(eager, rows)) < 1e-4
    assert [one.mode for one in made.steps.captures] == ["compiled+graph"]
