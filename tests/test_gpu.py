"""The engine on a CUDA device, against diffusers on the same device. Run by hand: pytest -m gpu."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from batchgen.engine.engine import Engine
from batchgen.records import Image, Row
from tests import tiny

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"


@functools.cache
def engine(kind: str, dtype: str) -> Engine:
    return Engine(tiny.job(tiny.folder(kind), f"engine.device={DEVICE}", f"model.dtype={dtype}"))


@functools.cache
def pipeline(kind: str, dtype: str) -> Any:
    return tiny.reference_pipeline(tiny.folder(kind), DEVICE, torch_dtype=getattr(torch, dtype))


def rows(sampler: str, steps: tuple[int, ...] = (4, 9, 6)) -> list[Row]:
    prompts = ("a red cube", tiny.LONG, "")
    return [
        tiny.row(i, sampler=sampler, prompt=prompts[i], steps=steps[i], guidance_scale=2.0 + 2.3 * i, seed=7 + i)
        for i in range(3)
    ]


SAMPLERS = ["ddim", "pndm", "euler", "euler_ancestral", "heun", "deis", "dpmpp_2m", "dpmpp_2m_karras"]
OWN = ["UniPCMultistepScheduler", "DDPMScheduler"]


def batch_of(sampler: str) -> list[Row]:
    return rows(sampler, (5, 5, 5)) if sampler in OWN else rows(sampler)


@pytest.mark.parametrize("sampler", [*SAMPLERS, *OWN])
@pytest.mark.parametrize("kind", ["sd1", "sd2", "sdxl"])
def test_float32_latents(kind: str, sampler: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With TF32 off on both sides: it rounds to ten bits, and differently for different batch sizes."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    made = engine(kind, "float32")
    latents = tiny.denoise(made, batch_of(sampler))
    assert latents.device == torch.device(DEVICE)
    for i, row in enumerate(batch_of(sampler)):
        wanted = tiny.reference(pipeline(kind, "float32"), row, made.facts)[0]
        assert tiny.difference(latents[i], wanted) < 1e-4


@pytest.mark.parametrize("sampler", [*SAMPLERS, *OWN])
@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
def test_float16_pixels(kind: str, sampler: str) -> None:
    made = engine(kind, "float16")
    outcomes = made.submit(tiny.batch(batch_of(sampler), made.facts), tiny.never)()
    for row, outcome in zip(batch_of(sampler), outcomes, strict=True):
        assert isinstance(outcome, Image)
        wanted = np.asarray(tiny.reference(pipeline(kind, "float16"), row, made.facts, "pil")[0])
        assert tiny.psnr(outcome.pixels, wanted) >= 40


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("sampler", ["euler_ancestral", "pndm", "UniPCMultistepScheduler"])
def test_twice_the_same_bits(dtype: str, sampler: str) -> None:
    made = engine("sd1", dtype)
    first, second = (made.submit(tiny.batch(batch_of(sampler), made.facts), tiny.never)() for _ in range(2))
    for one, two in zip(first, second, strict=True):
        assert isinstance(one, Image)
        assert isinstance(two, Image)
        assert np.array_equal(one.pixels, two.pixels)


def test_noise_is_that_of_the_cpu() -> None:
    row = tiny.row(seed=2**63 + 5)
    drawn = [
        made.model.noise(row, torch.Generator("cpu").manual_seed(row.seed))
        for made in (engine("sd1", "float32"), tiny.engine("sd1"))
    ]
    assert torch.equal(*drawn)


def test_defaults_are_the_first_gpu_and_half_precision() -> None:
    made = Engine(tiny.load_job(overrides=["model.path=demo"]))
    assert made.device == torch.device("cuda:0")
    assert made.model.dtype == torch.float16
    assert made.versions["device"] == torch.cuda.get_device_name(0)
