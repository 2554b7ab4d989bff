"""Every family against diffusers' own pipeline: one table, a row a family."""

from __future__ import annotations

import dataclasses
import fnmatch
import inspect
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchgen.errors import UsageError
from batchgen.models import hub
from batchgen.models.folder import facts_of, find_model
from batchgen.records import Image, Row
from batchgen.weights import Model
from tests import families, tiny

PROMPTS = ("a red cube", tiny.LONG, "", "🐉 龍 é")
NEGATIVES = (None, "", "blurry, ugly", "a word")
SEEDS = (0, 2**32 + 7, 2**64 - 1, 12)
STEPS = (2, 4, 3, 4)
GUIDED = (1.5, 7.3, 4.0, 3.0)
PLAIN = (1.0, 0.0, 1.0, 0.5)
WIDE: Mapping[str, int] = {"width": 96, "height": 64}

TABLE: Mapping[str, Mapping[str, Any]] = {
    "sd1": {"sampler": "PNDMScheduler"},
    "sdxl": {"sampler": "EulerDiscreteScheduler"},
    "sd3": {"sampler": "euler"},
    "sd3.5": {"sampler": "euler", **WIDE},
    "flux": {"sampler": "euler", **WIDE},
    "schnell": {"sampler": "euler", "guidance_scale": 0.0},
    "klein": {"sampler": "euler", "guidance_scale": 0.0},
    "klein-base": {"sampler": "euler", **WIDE},
    "pixart": {"sampler": "DPMSolverMultistepScheduler", **WIDE},
    "qwen": {"sampler": "FlowMatchEulerDiscreteScheduler", "guidance_scale": 0.0},
}
"""What the rows of a family's batch have in common."""


def mixed(kind: str, *, is_guided: bool = True) -> list[Row]:
    """Four rows that differ in everything that a batch may mix."""
    known = families.engine(kind).facts
    scales = GUIDED if is_guided else PLAIN
    negatives = ("", *NEGATIVES[1:]) if known.needs_negative else NEGATIVES
    return [
        tiny.row(
            i,
            prompt=PROMPTS[i],
            negative_prompt=negatives[i] if is_guided and known.takes_negative else None,
            seed=SEEDS[i],
            steps=STEPS[i],
            **{"guidance_scale": 3.0 + i, known.guiding: scales[i], **TABLE[kind]},
        )
        for i in range(4)
    ]


def deviation(kind: str, rows: list[Row], mode: str = "eager") -> list[int]:
    """The largest deviation of each row's pixels from diffusers', of 255."""
    engine = families.engine(kind, mode)
    outcomes = engine.submit(tiny.batch(rows, engine.facts), tiny.never)()
    found = []
    for row, outcome in zip(rows, outcomes, strict=True):
        assert isinstance(outcome, Image), outcome
        wanted = np.asarray(families.reference(kind, row))
        found.append(int(np.abs(outcome.pixels.astype(int) - wanted.astype(int)).max()))
    return found


@pytest.mark.parametrize("is_guided", [True, False], ids=["guided", "unguided"])
@pytest.mark.parametrize("kind", TABLE)
def test_every_row_is_what_diffusers_makes_of_it_alone(kind: str, is_guided: bool) -> None:
    rows, known = mixed(kind, is_guided=is_guided), families.engine(kind).facts
    assert max(deviation(kind, rows)) <= 1
    changes = {
        "prompt": {"prompt": "another"},
        "seed": {"seed": 5},
        "steps": {"steps": 5},
        "guidance": {known.guiding: 2.5} if is_guided and known.guided_above is not None else {},
        "distilled": {"guidance_scale": 9.0} if known.has_true_cfg and known.takes_guidance_scale else {},
        "negative": {"negative_prompt": "another"} if is_guided and "negative_prompt" in known.columns else {},
    }
    first = np.asarray(families.reference(kind, rows[0]), int)
    for name, change in changes.items():
        other = np.asarray(families.reference(kind, dataclasses.replace(rows[0], **change)), int)
        assert not change or np.abs(first - other).max() > 3, f"{name} hardly changes the picture"


@pytest.mark.parametrize("kind", ["sd3", "sd3.5", "flux", "klein-base"])
def test_captured_steps(kind: str) -> None:
    assert max(deviation(kind, mixed(kind), "graph")) <= 1
    assert [capture.mode for capture in families.engine(kind, "graph").steps.captures] == ["graph"]


@pytest.mark.parametrize("mode", ["compiled", "regional+graph"])
def test_compiled_steps(mode: str) -> None:
    engine, rows = families.engine("sd3", mode), mixed("sd3")
    latents = tiny.denoise(engine, rows)
    assert [capture.mode for capture in engine.steps.captures] == [mode]
    for row, made in zip(rows, latents, strict=True):
        assert tiny.difference(made, families.latents("sd3", row)) < 1e-4


def test_sizes_shift_the_schedule_of_a_folder_that_says_so() -> None:
    engine = families.engine("sd3.5")
    small, large = (engine.tables([tiny.row(width=side, height=64, sampler="euler")])[0] for side in (64, 128))
    assert not torch.equal(small.timesteps, large.timesteps)
    fixed = families.engine("sd3")
    small, large = (fixed.tables([tiny.row(width=side, height=64, sampler="euler")])[0] for side in (64, 128))
    assert small is large


@pytest.mark.parametrize("variant", [None, "fp16"])
@pytest.mark.parametrize("kind", ["sd3", "sd3.5", "flux", "klein"])
def test_what_is_fetched_from_the_hub_is_what_is_read(tmp_path: Path, kind: str, variant: str | None) -> None:
    families.pipeline(kind).save_pretrained(tmp_path, variant=variant, max_shard_size="20KB")
    patterns = list(hub.file_patterns(variant))
    files = find_model(Model(path=str(tmp_path), variant=variant)).files
    for file in files:
        assert any(fnmatch.fnmatch(file, pattern) for pattern in patterns), file
    assert any("-of-" in file for file in files)
    assert kind != "klein" or "tokenizer/chat_template.jinja" in files


@pytest.mark.parametrize("kind", ["sd3", "sd3.5", "flux", "schnell", "klein", "klein-base"])
def test_defaults_are_the_pipelines_own(kind: str) -> None:
    known, pipe = families.engine(kind).facts, families.pipeline(kind)
    defaults = {name: one.default for name, one in inspect.signature(type(pipe).__call__).parameters.items()}
    assert known.steps == defaults["num_inference_steps"]
    assert known.guidance_scale == (defaults["guidance_scale"] if known.takes_guidance_scale else 0.0)
    assert known.width == known.height == pipe.default_sample_size * pipe.vae_scale_factor
    assert known.sampler == type(pipe.own_scheduler).__name__
    row = tiny.row(prompt=tiny.LONG, negative_prompt=None, sampler="euler", width=64, height=64)
    engine = families.engine(kind)
    asked = tiny.batch([row], known)
    (text,) = {one.shape[1] for name, one in engine.conditioning(asked).inputs.items() if one.ndim == 3}
    assert known.text_length == text
    (count,) = engine._count(asked)
    assert count.read == known.prompt_tokens
    assert count.dropped > 0


def test_step_noise_that_no_seed_decides_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(families.folder("flux"), tmp_path / "model"))
    file = folder / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"stochastic_sampling": True}))
    with pytest.raises(UsageError, match="stochastic_sampling, whose noise no seed decides"):
        facts_of(Model(path=str(folder)))
