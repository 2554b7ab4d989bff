"""The torch-free tables say what diffusers' real schedulers do."""

from __future__ import annotations

import copy
import inspect
import itertools
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from diffusers.schedulers.scheduling_utils import KarrasDiffusionSchedulers, SchedulerMixin

from batchgen.engine.samplers import NotAffineError, Samplers, begin, probe, step_arguments
from batchgen.errors import UsageError
from batchgen.models import facts, unet_facts
from tests import tiny

WIDEST = ("x", "x1", "e", "e1", "e2", "e3", "z")

SCHEDULERS: dict[str, dict[str, Any]] = {
    "sd1": tiny.SD1_SCHEDULER,
    "sd2": tiny.SD2_SCHEDULER,
    "bare pndm": {"_class_name": "PNDMScheduler"},
    "bare ddim": {"_class_name": "DDIMScheduler"},
    "clipping ddim": {"_class_name": "DDIMScheduler", "clip_sample": True},
    "clipping heun": {"_class_name": "HeunDiscreteScheduler", "clip_sample": True},
    "clip key in another class": {"_class_name": "EulerDiscreteScheduler", "clip_sample": True},
    "thresholding": {"_class_name": "DDIMScheduler", "thresholding": True},
    "third order": {"_class_name": "DPMSolverMultistepScheduler", "solver_order": 3},
    "sde": {"_class_name": "DPMSolverMultistepScheduler", "algorithm_type": "sde-dpmsolver++"},
    "deis": {"_class_name": "DEISMultistepScheduler", "solver_order": 1, "algorithm_type": "deis"},
    "trailing v": tiny.SD2_SCHEDULER | {"timestep_spacing": "trailing", "rescale_betas_zero_snr": False},
    "unipc": {"_class_name": "UniPCMultistepScheduler", "prediction_type": "epsilon"},
}


def samplers(scheduler: dict[str, Any]) -> Samplers:
    """The samplers as a loaded pipeline has them: with what the pipeline corrects in its own scheduler."""
    pipe = tiny.demo.build(scheduler=scheduler)
    found = unet_facts.stable_diffusion(tiny.demo.UNET, tiny.demo.VAE, scheduler, 77)
    return Samplers(pipe.scheduler, found)


NEEDS_SCIPY = {"LMSDiscreteScheduler"}
IMPOSSIBLE = {
    "sde": {"DEISMultistepScheduler", "SASolverScheduler"},
    "deis": {"DPMSolverMultistepScheduler", "DPMSolverSinglestepScheduler", "SASolverScheduler"},
}
"""What diffusers itself refuses to make of such a folder."""
NEVER_AFFINE = {"DDIMScheduler", "PNDMScheduler", "HeunDiscreteScheduler"}
"""Without a form, these have no table in any form. (A third order solver has one, but for epsilon only.)"""


def samplers_xl(scheduler: dict[str, Any]) -> Samplers:
    """As `samplers`; SDXL's pipeline corrects nothing."""
    found = unet_facts.stable_diffusion_xl(tiny.SDXL_UNET, tiny.SDXL_VAE, scheduler, 77)
    return Samplers(getattr(diffusers, scheduler["_class_name"]).from_config(scheduler), found)


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_forms_and_evaluations(kind: str) -> None:
    """A form means that the probe finds a table in it, no form that there is none in any form."""
    check_forms_and_evaluations(kind, samplers(SCHEDULERS[kind]))


@pytest.mark.parametrize("kind", ["turbo", "bare ddim", "clip key in another class"])
def test_forms_and_evaluations_of_sdxl(kind: str) -> None:
    scheduler = tiny.TURBO_SCHEDULER if kind == "turbo" else SCHEDULERS[kind]
    check_forms_and_evaluations(kind, samplers_xl(scheduler))


def check_forms_and_evaluations(kind: str, made: Samplers) -> None:
    names = {*facts.SAMPLERS, *facts.SCHEDULERS} - NEEDS_SCIPY - IMPOSSIBLE.get(kind, set())
    for name, steps in itertools.product(sorted(names), (1, 2, 5, 9)):
        known = made._facts.sampler_facts(name)
        if known.scheduler == "PNDMScheduler" and not known.form and steps < 4:
            continue  # diffusers' Runge-Kutta start takes four steps
        assert known.evaluations(steps) == len(made.scheduler(name, steps).timesteps), (name, steps)
        if known.form:
            assert made.table(name, steps).num_evaluations == known.evaluations(steps), (name, steps)
        elif known.scheduler in NEVER_AFFINE:
            with pytest.raises(NotAffineError):
                probe(lambda name=name, steps=steps: made.scheduler(name, steps), WIDEST)


@pytest.mark.parametrize("spacing", ["leading", "linspace", "trailing"])
def test_evaluations_of_any_step_count(spacing: str) -> None:
    scheduler = tiny.SD1_SCHEDULER | {"timestep_spacing": spacing}
    made = samplers(scheduler)
    for cls in (*facts._AFFINE, "KDPM2DiscreteScheduler"):
        for steps in (*range(1, 150, 3), 61, 103, 121, 122, 999, 1000):
            wanted = len(made.scheduler(cls, steps).timesteps)
            assert made._facts.sampler_facts(cls).evaluations(steps) == wanted, (cls, steps)


@pytest.mark.parametrize(
    "named",
    [
        {},
        *({"timestep_spacing": "leading", "steps_offset": offset} for offset in (0, 1, 2)),
        {"timestep_spacing": "linspace"},
        {"timestep_spacing": "trailing", "steps_offset": 1},
        {"timestep_spacing": "leading", "steps_offset": 1, "use_karras_sigmas": True},
        {"timestep_spacing": "linspace", "use_karras_sigmas": True},
    ],
)
def test_the_step_counts_that_a_sampler_makes(named: dict[str, Any]) -> None:
    """Run through by diffusers' scheduler: no error, and something finite comes out."""
    config = {"num_train_timesteps": 24, "original_inference_steps": 20, "beta_schedule": "scaled_linear", **named}
    config["clip_sample"], karras = False, "use_karras_sigmas" in named
    known = facts.samplers_of({"_class_name": "DDIMScheduler", **config})
    for name in known.keys() - NEEDS_SCIPY - ({"KDPM2AncestralDiscreteScheduler"} if karras else set()):
        sampler = known[name]
        template = getattr(diffusers, sampler.scheduler).from_config(config, **sampler.options)
        for steps in (1, 3, 4, 12, 20, 21, 22, 23, 24):
            assert sampler.makes(steps) == is_made(copy.deepcopy(template), steps), (name, steps)


@pytest.mark.parametrize("cls", ["LCMScheduler", "TCDScheduler", "DDIMScheduler", "DPMSolverMultistepScheduler"])
def test_the_step_counts_of_a_thousand(cls: str) -> None:
    known = facts.samplers_of({"_class_name": "PNDMScheduler", "steps_offset": 1})[cls]
    scheduler = getattr(diffusers, cls)(steps_offset=1) if "DPM" not in cls else getattr(diffusers, cls)()
    for steps in (50, 51, 999, 1000):
        assert known.makes(steps) == is_made(copy.deepcopy(scheduler), steps), steps


def is_made(scheduler: Any, steps: int) -> bool:
    arguments = step_arguments(scheduler, torch.Generator().manual_seed(0))
    try:
        scheduler.set_timesteps(steps)
        latents = torch.ones(1, 1, 1, 1) * scheduler.init_noise_sigma
        for timestep in scheduler.timesteps:
            seen = scheduler.scale_model_input(latents, timestep)
            latents = scheduler.step(0.1 * torch.ones_like(seen), timestep, latents, **arguments, return_dict=False)[0]
    except (ValueError, IndexError, AssertionError):
        return False
    return bool(torch.isfinite(latents).all())


def test_every_term_of_a_form_is_used_by_someone() -> None:
    made = samplers(tiny.SD2_SCHEDULER)
    for name in facts.SAMPLERS:
        table = made.table(name, 8)
        used = [term for i, term in enumerate(table.form) if table.coefficients[:, i].abs().max() > 1e-4]
        assert used == list(table.form), name


def test_the_list_of_schedulers_is_diffusers_own() -> None:
    """Those that declare themselves interchangeable in a pipeline, and the distilled models' two."""
    interchangeable = {entry.name for entry in KarrasDiffusionSchedulers}
    classes = [getattr(diffusers, name) for name in dir(diffusers) if name.endswith("Scheduler")]
    compatible = {
        cls.__name__
        for cls in classes
        if issubclass(cls, SchedulerMixin) and interchangeable <= {*getattr(cls, "_compatibles", ())}
    }
    left_out = {
        "CogVideoXDDIMScheduler": "of a video model",
        "CogVideoXDPMScheduler": "of a video model",
        "DPMSolverMultistepInverseScheduler": "goes from image to noise",
        "DPMSolverSDEScheduler": "draws one noise for the whole batch",
        "EDMEulerScheduler": "of models trained by EDM",
        "CosineDPMSolverMultistepScheduler": "of an audio model",
    }
    wanted = (interchangeable | compatible | {"LCMScheduler", "TCDScheduler"}) - left_out.keys()
    assert set(facts.SCHEDULERS) == wanted
    assert all(hasattr(diffusers, name) for name in facts.SCHEDULERS)


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("eular", "did you mean 'euler'"),
        ("UniPCScheduler", "UniPCMultistepScheduler"),
        ("?", "known: ddim, pndm"),
    ],
)
def test_unknown_samplers_are_refused(wrong: str, hint: str) -> None:
    with pytest.raises(UsageError, match=hint):
        facts.PATTERN.sampler_facts(wrong)


def test_a_folder_with_a_foreign_scheduler_is_refused() -> None:
    with pytest.raises(UsageError, match="FlowMatchEulerDiscreteScheduler"):
        unet_facts.stable_diffusion({}, {}, {"_class_name": "FlowMatchEulerDiscreteScheduler"}, 77)


def test_facts_follow_the_folder() -> None:
    vae = {"block_out_channels": [1, 2, 3, 4]}
    made = unet_facts.stable_diffusion({"sample_size": [96, 64]}, vae, tiny.SD2_SCHEDULER, 77)
    assert (made.height, made.width, made.size_multiple, made.sampler) == (768, 512, 8, "DDIMScheduler")
    assert [made.is_guided(scale) for scale in (-1.0, 0.0, 1.0, 1.01)] == [False, False, False, True]
    assert made.max_steps == 1000


def test_clipping_is_turned_off_by_one_pipeline_only() -> None:
    """A DDIM folder that says nothing of clipping: StableDiffusionPipeline corrects it, SDXL's does not."""
    made = unet_facts.stable_diffusion(tiny.demo.UNET, tiny.demo.VAE, SCHEDULERS["bare ddim"], 77)
    made_xl = unet_facts.stable_diffusion_xl(tiny.SDXL_UNET, tiny.SDXL_VAE, SCHEDULERS["bare ddim"], 77)
    assert made.sampler_facts("DDIMScheduler").form == "x,e"
    assert made_xl.sampler_facts("DDIMScheduler").form == facts.OWN_UPDATE
    assert made_xl.sampler_facts("ddim").form == "x,e"


@pytest.mark.parametrize("kind", ["sd1", "sdxl", "sdxl-turbo", "sdxl-lcm"])
def test_defaults_are_the_pipelines_own(kind: str) -> None:
    found, pipe = tiny.engine(kind).facts, tiny.pipeline(kind)
    defaults = {name: one.default for name, one in inspect.signature(type(pipe).__call__).parameters.items()}
    assert (found.steps, found.guidance_scale) == (defaults["num_inference_steps"], defaults["guidance_scale"])
    assert found.width == found.height == pipe.unet.config.sample_size * pipe.vae_scale_factor
    assert found.sampler == type(pipe.own_scheduler).__name__
    assert found.text_length == pipe.tokenizer.model_max_length
    for scale in (-1.0, 0.0, 1.0, 1.01, 5.0):
        pipe._guidance_scale = scale
        assert found.is_guided(scale) == pipe.do_classifier_free_guidance


def test_planning_needs_no_torch() -> None:
    program = (
        "import sys; import batchgen.models.facts, batchgen.models.folder, batchgen.models.tokens;"
        "from batchgen.job import Model; from batchgen.models.folder import facts_of, identity;"
        "facts_of(Model(path='demo')); identity(Model(path='pattern'));"
        "sys.exit(bool({'torch', 'diffusers', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("pipeline", "known"),
    [
        (diffusers.StableDiffusionImg2ImgPipeline, facts.PATTERN),
        (diffusers.StableDiffusionXLImg2ImgPipeline, facts.PATTERN),
        (diffusers.FluxImg2ImgPipeline, replace(facts.PATTERN, makes_cut_step=True)),
        (diffusers.StableDiffusion3Img2ImgPipeline, replace(facts.PATTERN, makes_cut_step=True)),
    ],
)
def test_strength_leaves_the_steps_that_diffusers_leaves(pipeline: Any, known: facts.Facts) -> None:
    for steps, hundredths in itertools.product((1, 2, 3, 7, 20, 28, 50, 999), range(1, 101)):
        strength = hundredths / 100
        scheduler = SimpleNamespace(timesteps=torch.arange(steps), order=1)
        left = pipeline.get_timesteps(SimpleNamespace(scheduler=scheduler), steps, strength, "cpu")[0]
        assert steps - int(known.skipped(steps, strength)) == len(left), (steps, strength)


@pytest.mark.parametrize("name", ["euler", "heun", "pndm", "dpmpp_2m_karras", "KDPM2DiscreteScheduler"])
def test_evaluations_after_skipped_steps(name: str) -> None:
    made = samplers(tiny.SD1_SCHEDULER)
    for steps, skipped in ((1, 0), (5, 0), (5, 2), (9, 8)):
        found = begin(made.scheduler(name, steps), skipped)
        assert made._facts.sampler_facts(name).evaluations_after(steps, skipped) == len(found)
