"""Each row of a mixed batch equals diffusers' own pipeline, called for that row alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from batchgen.models import facts
from batchgen.records import Image, Row
from tests import tiny

AFFINE = [*facts.SAMPLERS, "DDPMScheduler", "own"]
OWN = ["UniPCMultistepScheduler", "LCMScheduler", "KDPM2AncestralDiscreteScheduler"]
OTHERS = [
    "DDIMParallelScheduler",
    "DDPMParallelScheduler",
    "DPMSolverSinglestepScheduler",
    "KDPM2DiscreteScheduler",
    "SASolverScheduler",
    "TCDScheduler",
]
TOLERANCE = 1e-4


def mixed(sampler: str, is_guided: bool, steps: tuple[int, ...] = (2, 5, 3, 5)) -> list[Row]:
    """Four rows that differ in everything that a batch may mix."""
    scales = (1.5, 7.3, 4.0, 12.0) if is_guided else (1.0, 0.0, 1.0, 0.5)
    prompts = ("a red cube", tiny.LONG, "", "🐉 龍 é")
    negatives = (None, "", "blurry, ugly", tiny.LONG)
    seeds = (0, 2**32 + 7, 2**64 - 1, 12)
    return [
        tiny.row(
            i,
            sampler=sampler,
            prompt=prompts[i],
            negative_prompt=negatives[i],
            guidance_scale=scales[i],
            seed=seeds[i],
            steps=steps[i],
        )
        for i in range(4)
    ]


def worst(kind: str, rows: list[Row]) -> float:
    engine = tiny.engine(kind)
    latents = tiny.denoise(engine, rows)
    wanted = [tiny.reference(tiny.pipeline(kind), row, engine.facts)[0] for row in rows]
    return max(tiny.difference(latents[i], wanted[i]) for i in range(len(rows)))


@pytest.mark.parametrize("is_guided", [True, False], ids=["guided", "unguided"])
@pytest.mark.parametrize("sampler", AFFINE)
@pytest.mark.parametrize("kind", ["sd1", "sd2", "sdxl"])
def test_affine_samplers(kind: str, sampler: str, is_guided: bool) -> None:
    name = tiny.engine(kind).facts.sampler if sampler == "own" else sampler
    assert tiny.engine(kind).facts.sampler_facts(name).form != facts.OWN_UPDATE
    assert worst(kind, mixed(name, is_guided)) < TOLERANCE


@pytest.mark.parametrize("sampler", OWN)
@pytest.mark.parametrize("kind", ["sd1", "sd2", "sdxl"])
def test_samplers_that_run_their_own_update(kind: str, sampler: str) -> None:
    assert tiny.engine(kind).facts.sampler_facts(sampler).form == facts.OWN_UPDATE
    assert worst(kind, mixed(sampler, True, (4, 4, 4, 4))) < TOLERANCE


@pytest.mark.parametrize("sampler", OTHERS)
def test_every_other_scheduler_of_the_list(sampler: str) -> None:
    assert worst("sd1", mixed(sampler, True, (4, 4, 4, 4))[:2]) < TOLERANCE


@pytest.mark.parametrize("sampler", [*AFFINE, *OWN, *OTHERS])
def test_every_sampler_from_an_image(sampler: str) -> None:
    """Rows of several strengths; those of a scheduler that steps the batch itself have one, of one step count."""
    name = tiny.engine("sd2").facts.sampler if sampler == "own" else sampler
    is_own = tiny.engine("sd2").facts.sampler_facts(name).form == facts.OWN_UPDATE
    rows = mixed(name, True, (4, 4, 4, 4) if is_own else (4, 3, 3, 3))[:2]
    strengths = (0.8, 0.8) if is_own else (0.5, 1.0)
    begun = [
        dataclasses.replace(row, init=tiny.init_image(i), strength=strength)
        for i, (row, strength) in enumerate(zip(rows, strengths, strict=True))
    ]
    assert worst("sd2", begun) < TOLERANCE


def test_the_lists_above_name_every_scheduler() -> None:
    affine = {facts.samplers_of(tiny.SD1_SCHEDULER)[name].scheduler for name in AFFINE if name != "own"}
    assert affine | {*OWN, *OTHERS, "LMSDiscreteScheduler"} == set(facts.SCHEDULERS)


def test_clipping_ddim_runs_its_own_update(tmp_path: Path) -> None:
    """DDIMScheduler clips by default, and a folder whose file does not say so gets that default."""
    scheduler = {key: value for key, value in tiny.SD1_SCHEDULER.items() if key != "clip_sample"}
    folder = tiny.save(tmp_path / "clips", scheduler=scheduler)
    engine = tiny.Engine(tiny.job(folder))
    pipe = tiny.reference_pipeline(folder)
    rows = [
        dataclasses.replace(row, guidance_scale=3.0 + i)
        for i, row in enumerate(mixed("DDIMScheduler", True, (4, 4, 4, 4)))
    ]
    assert engine.facts.sampler_facts("DDIMScheduler").form == facts.OWN_UPDATE
    latents = tiny.denoise(engine, rows)
    for i, row in enumerate(rows):
        assert tiny.difference(latents[i], tiny.reference(pipe, row, engine.facts)[0]) < TOLERANCE
    clipped = tiny.difference(latents, tiny.denoise(tiny.engine("sd1"), rows))
    assert clipped > 100 * TOLERANCE, "the same rows with clip_sample off must differ"


@pytest.mark.parametrize("sampler", ["euler", "dpmpp_2m"])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_few_steps(sampler: str, steps: int) -> None:
    assert worst("sd1", mixed(sampler, True, (steps,) * 4)[:2]) < TOLERANCE


@pytest.mark.parametrize("sampler", [name for name in facts.SAMPLERS if name not in ("euler", "dpmpp_2m")])
def test_one_step(sampler: str) -> None:
    assert worst("sd2", mixed(sampler, True, (1,) * 4)[:2]) < TOLERANCE


def test_samplers_of_one_form_share_a_batch() -> None:
    rows = [
        dataclasses.replace(row, sampler=sampler)
        for row, sampler in zip(mixed("heun", True), ("heun", "deis", "dpmpp_2m", "dpmpp_2m_karras"), strict=True)
    ]
    assert worst("sd1", rows) < TOLERANCE


def test_embedded_guidance() -> None:
    """A guidance-distilled network is told the scale instead of running twice."""
    engine = tiny.engine("lcm")
    assert not engine.facts.is_guided(7.5)
    assert worst("lcm", mixed("LCMScheduler", True, (4, 4, 4, 4))) < TOLERANCE
    assert worst("lcm", mixed("ddim", True)) < TOLERANCE


def test_text_encoder_with_an_attention_mask() -> None:
    assert worst("masked", mixed("ddim", True)) < TOLERANCE
    rows = mixed("ddim", True)
    masked, unmasked = (tiny.denoise(tiny.engine(kind), rows) for kind in ("masked", "sd1"))
    assert tiny.difference(masked[0], unmasked[0]) > 10 * TOLERANCE


def test_sizes_that_are_no_square() -> None:
    rows = [dataclasses.replace(row, width=72, height=120) for row in mixed("euler", True)]
    assert worst("sd1", rows) < TOLERANCE


@pytest.mark.parametrize("sampler", ["pndm", "euler_ancestral"])
def test_pixels(sampler: str) -> None:
    engine = tiny.engine("sd1")
    rows = mixed(sampler, True)
    outcomes = engine.submit(tiny.batch(rows, engine.facts), tiny.never)()
    for row, outcome in zip(rows, outcomes, strict=True):
        assert isinstance(outcome, Image)
        wanted = np.asarray(tiny.reference(tiny.pipeline("sd1"), row, engine.facts, "pil")[0])
        assert np.abs(outcome.pixels.astype(int) - wanted.astype(int)).max() <= 1


class TestThatParityCanFail:
    """Mistakes that an engine of this kind makes; each must be far outside the tolerance."""

    def mistaken(self, change) -> float:
        engine = tiny.engine("sd1")
        rows = mixed("euler_ancestral", True)
        latents = tiny.denoise(engine, change(rows))
        wanted = [tiny.reference(tiny.pipeline("sd1"), row, engine.facts)[0] for row in rows]
        return min(tiny.difference(latents[i], wanted[i]) for i in range(len(rows)))

    def test_nothing_changed(self) -> None:
        assert self.mistaken(lambda rows: rows) < TOLERANCE

    @pytest.mark.parametrize(
        "changed",
        ["seed", "steps", "guidance_scale", "prompt"],
    )
    def test_a_neighbours_value(self, changed: str) -> None:
        def shift(rows: list[Row]) -> list[Row]:
            values = [getattr(row, changed) for row in rows]
            turned = values[-1:] + values[:-1]
            return [dataclasses.replace(row, **{changed: value}) for row, value in zip(rows, turned, strict=True)]

        assert self.mistaken(shift) > 10 * TOLERANCE

    def test_swapped_guidance_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = type(tiny.engine("sd1").model)
        right = model.conditioning

        def swapped(self, rows, is_guided, encoded):
            made = right(self, rows, is_guided, encoded)
            turned = made.inputs["encoder_hidden_states"].roll(len(rows), 0)
            return dataclasses.replace(made, inputs={**made.inputs, "encoder_hidden_states": turned})

        monkeypatch.setattr(model, "conditioning", swapped)
        assert self.mistaken(lambda rows: rows) > 10 * TOLERANCE
