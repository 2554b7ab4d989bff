"""Another VAE, another scheduler and its options: what does not fit or has no effect is refused, as early as can be."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import diffusers
import pytest

from batchgen.engine.whole import open_model
from batchgen.errors import UsageError
from batchgen.models import facts, signatures
from batchgen.models.folder import facts_of
from tests import families, runs, tiny

SPACING = "Literal['linspace', 'leading', 'trailing']"


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("timestep_spacin = 'x'", "PNDMScheduler of diffusers has no timestep_spacin; did you mean 'timestep_spacing'"),
        ("zzz = 1", "has no zzz; it has num_train_timesteps, beta_start"),
        ("timestep_spacing = 'x'", f"timestep_spacing = 'x' is not what PNDMScheduler of .*, which is {SPACING}"),
        ("set_alpha_to_one = 'no'", "set_alpha_to_one = 'no' is not what .* takes there, which is bool"),
        ("num_train_timesteps = 'x'", "num_train_timesteps = 'x' is not what .* takes there, which is int"),
        ("num_train_timesteps = -5", "scheduler_options: num_train_timesteps = -5 must be a whole number from 1 on"),
        ("steps_offset = 1.5", "steps_offset = 1.5 is not what .* takes there, which is int"),
        ("trained_betas = 0.1", "trained_betas = 0.1 is not what"),
        ("_class_name = 'os'", "model.scheduler: os does not run in the pipeline"),
    ],
)
def test_options_that_a_scheduler_does_not_take_are_refused_while_planning(options: str, why: str) -> None:
    why = why.replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(UsageError, match=why):
        facts_of(tiny.job(families.folder("sd1"), f"model.scheduler_options={{{options}}}").model)


def test_a_scheduler_file_whose_numbers_are_none_is_refused_while_planning(tmp_path: Path) -> None:
    file = tmp_path / "scheduler_config.json"
    for value in (0, "x", None):
        file.write_text(json.dumps(tiny.SD1_SCHEDULER | {"num_train_timesteps": value}))
        with pytest.raises(UsageError, match=rf"{file}: num_train_timesteps = .* must be a whole number from 1 on"):
            facts_of(tiny.job(families.folder("sd1"), f"model.scheduler={file}").model)


def test_diffusers_own_configurations_fit_what_their_classes_are_said_to_take() -> None:
    """What is given by default must be allowed, whatever the annotations say."""
    for name in facts.SCHEDULERS:
        if name == "LMSDiscreteScheduler":
            continue
        keys = signatures.scheduler_keys(name)
        config: dict[str, Any] = dict(getattr(diffusers, name)().config)
        for key, value in config.items():
            if key in keys and isinstance(value, str | float | int):
                annotation = keys[key]
                assert signatures.fits(value, annotation), (name, key, annotation and ast.unparse(annotation))


@pytest.mark.parametrize(
    ("scheduler", "options", "why"),
    [
        ("DDIMScheduler", "clip_sample = true", "clip_sample = True has no effect: .* sets it to False; leave it out"),
        ("PNDMScheduler", "steps_offset = 0", "steps_offset = 0 has no effect: .* sets it to 1; leave it out"),
        ("PNDMScheduler", "beta_start = 1.0", "PNDMScheduler cannot be used as the job gives it: .* NaN or Inf"),
        ("LCMScheduler", "prediction_type = 'foo'", "(is not what|cannot be used as)"),
    ],
)
def test_options_that_are_undone_or_that_no_step_can_be_made_with(scheduler: str, options: str, why: str) -> None:
    """They are refused before a row is tried, not for each row."""
    words = (f"model.scheduler={scheduler}", f"model.scheduler_options={{{options}}}")
    with pytest.raises(UsageError, match=why):
        open_model(tiny.job(families.folder("sd1"), *words), None)


@pytest.mark.parametrize("kind", ["sd1", "sdxl", "sd3", "flux"])
def test_options_that_have_an_effect_are_taken(kind: str) -> None:
    options = "shift = 2.0" if kind in ("sd3", "flux") else "beta_end = 0.013"
    open_model(tiny.job(families.folder(kind), f"model.scheduler_options={{{options}}}"), None)


def test_a_vae_for_other_latents_is_refused(tmp_path: Path) -> None:
    """SDXL's has the class and the channels of Stable Diffusion's, and would decode its latents to noise."""
    for vae, why in (
        (tiny.folder("sdxl"), "its scaling_factor is 0.13025, and that of the model's own VAE 0.18215"),
        (families.folder("sd3"), "its scaling_factor is 1.5, and"),
    ):
        with pytest.raises(UsageError, match=why):
            facts_of(tiny.job(tiny.folder("sd1"), f"model.vae={vae}").model)


def test_a_scheduler_whose_package_is_missing_is_refused_row_by_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's own, which a row without a sampler takes."""
    monkeypatch.setattr(facts, "find_spec", lambda name: None)
    told = ("--model", tiny.folder("sd1"), "--set", "model.scheduler=LMSDiscreteScheduler")
    for column in ({}, {"sampler": ["euler", None]}):
        source = runs.manifest(tmp_path / "m.parquet", {"prompt": ["a", "b"], **column})
        ended = runs.batchgen("plan", source, *told)
        assert ended.code == 2
        assert "row 1: sampler = 'LMSDiscreteScheduler' needs the package scipy, which is not installed" in ended.err
        assert ("row 0: sampler" in ended.err) == (not column)
