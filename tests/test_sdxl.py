"""What SDXL has beyond Stable Diffusion, against diffusers' own pipeline. Its samplers stand in test_parity.py."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch

from batchgen.engine.engine import Engine
from batchgen.errors import UsageError
from batchgen.models import unet_facts
from batchgen.models.folder import facts_of
from batchgen.records import Image, Pixels, Row
from batchgen.weights import Model
from tests import runs, tiny
from tests.test_parity import TOLERANCE, mixed, worst


def pictures(engine: Engine, rows: Sequence[Row]) -> list[Pixels]:
    outcomes = engine.submit(tiny.batch(rows, engine.facts), tiny.never)()
    return [outcome.pixels for outcome in outcomes if isinstance(outcome, Image)]


def folder(place: Path, unet: Mapping[str, object] | None = None, **vae: object) -> Path:
    return tiny.save_xl(place, tiny.SDXL_UNET | dict(unet or {}), vae=tiny.SDXL_VAE | vae)


@pytest.mark.parametrize(("width", "height", "is_guided"), [(64, 96, True), (96, 64, False)])
def test_sizes_that_are_no_square(width: int, height: int, is_guided: bool) -> None:
    rows = [dataclasses.replace(row, width=width, height=height) for row in mixed("euler", is_guided)]
    assert worst("sdxl", rows) < TOLERANCE


@pytest.mark.parametrize("sampler", ["EulerAncestralDiscreteScheduler", "euler", "LCMScheduler"])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_turbo(sampler: str, steps: int) -> None:
    """A few steps without guidance, on the folder's own trailing timesteps; mixed guidance scales up to 1."""
    assert tiny.engine("sdxl-turbo").facts.sampler == "EulerAncestralDiscreteScheduler"
    assert worst("sdxl-turbo", mixed(sampler, False, (steps,) * 4)) < TOLERANCE


def test_turbo_with_guidance_and_mixed_steps() -> None:
    assert worst("sdxl-turbo", mixed("EulerAncestralDiscreteScheduler", True, (1, 2, 3, 4))) < TOLERANCE


def test_embedded_guidance() -> None:
    """A guidance-distilled network is told the scale instead of running twice."""
    assert not tiny.engine("sdxl-lcm").facts.is_guided(7.5)
    assert worst("sdxl-lcm", mixed("LCMScheduler", True, (4, 4, 4, 4))) < TOLERANCE
    assert worst("sdxl-lcm", mixed("ddim", True)) < TOLERANCE


class TestNegativePrompts:
    """Case 11: a null negative prompt is the folder's no-negative conditioning, "" is a text."""

    rows = tuple(tiny.row(i, seed=3, prompt="a boat", negative_prompt=text) for i, text in enumerate((None, "", "x")))

    def test_null_is_not_the_empty_text(self) -> None:
        assert worst("sdxl", list(self.rows)) < TOLERANCE
        null, empty, text = tiny.denoise(tiny.engine("sdxl"), self.rows)
        assert tiny.difference(null, empty) > 10 * TOLERANCE
        assert tiny.difference(empty, text) > 10 * TOLERANCE

    def test_null_is_the_empty_text_where_the_folder_says_so(self) -> None:
        assert worst("sdxl-empty", list(self.rows)) < TOLERANCE
        null, empty, _ = tiny.denoise(tiny.engine("sdxl-empty"), self.rows)
        assert tiny.difference(null, empty) < TOLERANCE

    def test_mixed_with_long_ones(self) -> None:
        assert worst("sdxl-empty", mixed("euler", True)) < TOLERANCE

    def test_nothing_is_encoded_for_zeros(self) -> None:
        texts = {kind: tiny.engine(kind).model.texts(self.rows, True) for kind in ("sdxl", "sdxl-empty")}
        assert texts["sdxl"] == ["", "x", "a boat", "a boat", "a boat"]
        assert texts["sdxl-empty"] == ["", "", "x", "a boat", "a boat", "a boat"]
        assert tiny.engine("sdxl").model.texts(self.rows[:1], False) == ["a boat"]


class TestConditioning:
    def test_shapes(self) -> None:
        rows = [tiny.row(i, width=64, height=96) for i in range(3)]
        engine = tiny.engine("sdxl")
        for guidance_scale, num in ((5.0, 6), (1.0, 3)):
            batch = tiny.batch([dataclasses.replace(row, guidance_scale=guidance_scale) for row in rows], engine.facts)
            inputs = engine.conditioning(batch).inputs
            assert {name: tuple(one.shape) for name, one in inputs.items()} == {
                "encoder_hidden_states": (num, 77, 80),
                "text_embeds": (num, 24),
                "time_ids": (num, 6),
            }
            assert inputs["time_ids"].tolist() == [[96, 64, 0, 0, 96, 64]] * num

    @pytest.mark.parametrize("name", ["encoder_hidden_states", "text_embeds", "time_ids"])
    def test_every_input_counts(self, name: str) -> None:
        """So that parity would miss none of them."""
        engine = tiny.engine("sdxl")
        batch = tiny.batch(mixed("euler", True), engine.facts)
        right = engine.conditioning(batch)
        changed = right.inputs[name].roll(1, -1)
        wrong = dataclasses.replace(right, inputs={**right.inputs, name: changed})
        latents = [engine.denoise(batch, one, tiny.never)[0] for one in (right, wrong)]
        for i in range(4):
            assert tiny.difference(latents[1][i], latents[0][i]) > 10 * TOLERANCE

    def test_captured_steps_follow_every_input(self) -> None:
        """Case 35: two batches through one bucket, which differ in everything that a batch may mix."""
        engine = Engine(tiny.job(tiny.folder("sdxl"), "engine.mode=graph"))
        first = mixed("euler", True)
        second = [
            dataclasses.replace(
                row, prompt=f"another {i}", negative_prompt="x" * i or None, seed=i, guidance_scale=9 - i
            )
            for i, row in enumerate(first)
        ]
        for rows in (first, second, first):
            latents = tiny.denoise(engine, rows)
            for made, row in zip(latents, rows, strict=True):
                wanted = tiny.reference(tiny.pipeline("sdxl"), row, engine.facts)[0]
                assert tiny.difference(made, wanted) < TOLERANCE
        assert [capture.mode for capture in engine.steps.captures] == ["graph"]


class TestVae:
    """Pixels against diffusers; force_upcast, latents' mean and deviation, and `model.vae_dtype`."""

    @pytest.mark.parametrize("is_upcast", [True, False], ids=["upcast", "not upcast"])
    def test_float16_is_near_diffusers(self, tmp_path: Path, is_upcast: bool) -> None:
        place = folder(tmp_path / "model", force_upcast=is_upcast)
        engine = Engine(tiny.job(place, "model.dtype=float16"))
        assert engine.model.vae.dtype == (torch.float32 if is_upcast else torch.float16)
        pipe = tiny.reference_pipeline(place, torch_dtype=torch.float16)
        rows = [tiny.row(i, sampler="euler", steps=2 + i, negative_prompt=(None, "x")[i]) for i in range(2)]
        for row, made in zip(rows, pictures(engine, rows), strict=True):
            assert tiny.psnr(made, np.asarray(tiny.reference(pipe, row, engine.facts, "pil")[0])) >= 40

    @pytest.mark.parametrize(
        "vae",
        [
            {"latents_mean": [0.5, -1.0, 0.0, 2.0], "latents_std": [1.0, 4.0, 7.0, 0.5]},
            {"latents_mean": [0.5, -1.0, 0.0, 2.0]},
            {},
        ],
        ids=["mean and deviation", "mean only", "neither"],
    )
    def test_pixels(self, tmp_path: Path, vae: dict[str, object]) -> None:
        place = folder(tmp_path / "model", **vae)
        engine, pipe = Engine(tiny.job(place)), tiny.reference_pipeline(place)
        rows = mixed("euler_ancestral", True)[:2]
        for row, made in zip(rows, pictures(engine, rows), strict=True):
            wanted = np.asarray(tiny.reference(pipe, row, engine.facts, "pil")[0])
            assert np.abs(made.astype(int) - wanted.astype(int)).max() <= 1

    @pytest.mark.parametrize(
        ("kind", "dtype", "vae_dtype", "wanted"),
        [
            ("sdxl", "float16", None, torch.float32),
            ("sdxl", "float16", "float16", torch.float16),
            ("sdxl", "float16", "bfloat16", torch.bfloat16),
            ("sdxl", "bfloat16", None, torch.bfloat16),
            ("sdxl", "float32", None, torch.float32),
            ("sd1", "float16", None, torch.float16),
            ("sd1", "float16", "float32", torch.float32),
            ("demo", "float32", "float16", torch.float16),
        ],
    )
    def test_dtype(self, kind: str, dtype: str, vae_dtype: str | None, wanted: torch.dtype) -> None:
        """The VAE's own, from loading on and after a second chance; the network's and the latents' are the model's."""
        options = [f"model.dtype={dtype}", *([f"model.vae_dtype={vae_dtype}"] if vae_dtype else [])]
        engine = Engine(tiny.job("demo" if kind == "demo" else tiny.folder(kind), *options))
        assert engine.model.vae.dtype == wanted
        assert engine.versions["dtype"] == dtype
        row = tiny.row(steps=1)
        latents = tiny.denoise(engine, [row])
        assert latents.dtype == getattr(torch, dtype)
        with torch.inference_mode():
            assert engine.model.decode(engine.model.decoder, latents).dtype == wanted
            again = engine.model.decode_float32(latents)
        assert again.dtype == torch.float32
        assert engine.model.vae.dtype == wanted
        again = ((again[0] / 2 + 0.5).clamp(0, 1).permute(1, 2, 0) * 255).numpy()
        assert tiny.psnr(pictures(engine, [row])[0], again) >= (25 if wanted == torch.bfloat16 else 40)

    def test_a_dtype_without_effect_is_refused(self) -> None:
        with pytest.raises(UsageError, match=r"model\.vae_dtype = 'float16' has no effect on model 'pattern'"):
            facts_of(Model(path="pattern", vae_dtype="float16"))


def test_a_run(tmp_path: Path) -> None:
    """Through the command line: guided and unguided rows, every kind of negative prompt, defaults, two sizes."""
    rows = [
        {"id": "a", "prompt": "a red cube", "negative_prompt": None, "guidance_scale": 5.0, "width": 64},
        {"id": "b", "prompt": "a red cube", "negative_prompt": "", "guidance_scale": 5.0, "width": 96},
        {"id": "c", "prompt": tiny.LONG, "negative_prompt": "blurry", "guidance_scale": None, "width": None},
        {"id": "d", "prompt": "", "negative_prompt": None, "guidance_scale": 0.0, "width": 64},
        {"id": "e", "prompt": "x", "negative_prompt": None, "guidance_scale": 1.0, "width": 96},
    ]
    rows = [row | {"steps": 1 + i, "seed": 5} for i, row in enumerate(rows)]
    source, out = runs.manifest(tmp_path / "m.parquet", rows), tmp_path / "out"
    ended = runs.run(source, out, "--set", "engine.device=cpu", model=tiny.folder("sdxl-turbo"))
    assert ended.code == 0, ended.err
    assert ended.closing_line.split()[0] == "5"
    engine, pipe = tiny.engine("sdxl-turbo"), tiny.pipeline("sdxl-turbo")
    for given, line in zip(rows, runs.metadata(out), strict=True):
        row = tiny.row(
            prompt=given["prompt"],
            negative_prompt=given["negative_prompt"],
            guidance_scale=5.0 if given["guidance_scale"] is None else given["guidance_scale"],
            width=given["width"] or 64,
            steps=given["steps"],
            seed=5,
            sampler="EulerAncestralDiscreteScheduler",
        )
        made = np.asarray(PIL.Image.open(out / line["file_name"]))
        wanted = np.asarray(tiny.reference(pipe, row, engine.facts, "pil")[0])
        assert np.abs(made.astype(int) - wanted.astype(int)).max() <= 1
        assert (line["tokens_dropped"] > 0) == (given["prompt"] == tiny.LONG)
    said = runs.run(source, out, "--set", "model.vae_dtype=float16", model=tiny.folder("sdxl-turbo"))
    assert said.code == 2
    assert 'model.vae_dtype: null there, "float16" now' in said.err


def test_a_folder_without_its_second_encoder(tmp_path: Path) -> None:
    place = Path(shutil.copytree(tiny.folder("sdxl"), tmp_path / "model"))
    (place / "text_encoder_2/model.safetensors").unlink()
    ended = runs.run(runs.prompts(tmp_path / "m.parquet", 2), tmp_path / "out", model=place)
    assert ended.code == 2
    assert ended.err.strip().endswith("text_encoder_2 lacks model.safetensors; download it again, whole")
    assert not (tmp_path / "out").exists()


def test_facts_of_a_folder() -> None:
    found = facts_of(Model(path=str(tiny.folder("sdxl"))))
    assert (found.family, found.sampler, found.text_length) == ("stable-diffusion-xl", "EulerDiscreteScheduler", 77)
    assert json.loads((tiny.folder("sdxl") / "vae/config.json").read_text())["force_upcast"] is True
    vae = {"block_out_channels": [1] * 4}
    base = unet_facts.stable_diffusion_xl({"sample_size": 128}, vae, tiny.SDXL_SCHEDULER, 77)
    assert (base.width, base.height, base.size_multiple, base.steps, base.guidance_scale) == (1024, 1024, 8, 50, 5.0)
