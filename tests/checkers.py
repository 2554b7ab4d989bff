"""Tiny safety checkers in real diffusers folders, their thresholds between the pictures that are to be told apart."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import PIL.Image
import torch
import transformers
from diffusers.pipelines.stable_diffusion.safety_checker import StableDiffusionSafetyChecker

from batchgen.engine.engine import Engine
from batchgen.models.safety import SafetyChecker
from batchgen.records import Image, Pixels, Row
from tests import tiny

SIDE = 32
_VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
_TEXT = {**_VISION, "vocab_size": 514, "bos_token_id": 0, "eos_token_id": 1}


def network(seed: int = 0) -> Any:
    """A checker of random weights that flags nothing: no cosine exceeds its thresholds."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vision = {**_VISION, "image_size": SIDE, "patch_size": 8, "initializer_range": 1.0}
        made = StableDiffusionSafetyChecker(
            transformers.CLIPConfig(text_config=_TEXT, vision_config=vision, projection_dim=12)
        ).eval()
        torch.nn.init.normal_(made.visual_projection.weight)
        torch.nn.init.normal_(made.concept_embeds)
        torch.nn.init.normal_(made.special_care_embeds)
    return made


def processor(side: int = SIDE) -> Any:
    """diffusers' own for a checker of this size, by Pillow whatever is installed."""
    cls = getattr(transformers, "CLIPImageProcessorPil", transformers.CLIPImageProcessor)
    return cls(size={"shortest_edge": side}, crop_size={"height": side, "width": side})


def pooled(made: Any, pictures: Sequence[Pixels]) -> torch.Tensor:
    """What the vision model says of each picture, `[B, D]`."""
    inputs = processor()([PIL.Image.fromarray(one) for one in pictures], return_tensors="pt")["pixel_values"]
    told: torch.Tensor = made.vision_model(inputs)[1]
    return told


@torch.no_grad()
def that_flags(pictures: Sequence[Pixels], unsafe: Sequence[int], special: Sequence[int] = ()) -> Any:
    """A checker that flags those of the given pictures that are named, each for a concept of its own; those in
    `special` only because a special care concept makes it stricter."""
    made = network()
    told = pooled(made, pictures)
    # What they have in common is not looked at, so that these few pictures lie far apart.
    common = torch.nn.functional.normalize(told.mean(0), dim=0)
    made.visual_projection.weight -= (made.visual_projection.weight @ common)[:, None] * common
    all_of_them = torch.nn.functional.normalize(made.visual_projection(told))
    for number, one in enumerate(unsafe):
        others = torch.cat([all_of_them[:one], all_of_them[one + 1 :]])
        direction, cosines = _apart(all_of_them[one], others)
        middle = (cosines[0] + cosines[1:].max()) / 2
        made.concept_embeds.data[number] = direction
        made.concept_embeds_weights.data[number] = cosines[0] + 0.005 if one in special else middle
        if one in special:
            made.special_care_embeds.data[0] = direction
            made.special_care_embeds_weights.data[0] = middle
    return made


def _apart(one: torch.Tensor, others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A direction in which an embedding is far from all others, and the cosines, its own first."""
    direction = torch.nn.functional.normalize(one - others.mean(0), dim=0)
    return direction, torch.cat([one[None], others]) @ direction


def add(folder: Path, made: Any, target: Path) -> Path:
    """A copy of an sd1 folder with a checker in it, as diffusers saves it."""
    parts = diffusers.StableDiffusionPipeline.from_pretrained(folder, safety_checker=None).components
    parts |= {"safety_checker": made, "feature_extractor": processor()}
    diffusers.StableDiffusionPipeline(**parts).save_pretrained(target)
    shutil.copy(folder / "scheduler" / "scheduler_config.json", target / "scheduler" / "scheduler_config.json")
    return target


ROWS = tuple(tiny.row(i, prompt=prompt, steps=2) for i, prompt in enumerate(("a cube", "a fox", "", "a sea", "b", "c")))
UNSAFE = (1, 4, 5)
SPECIAL = (4,)


def images(engine: Engine, rows: Sequence[Row]) -> list[Pixels]:
    outcomes = engine.submit(tiny.batch(rows, engine.facts), tiny.never)()
    assert all(isinstance(one, Image) for one in outcomes)
    return [one.pixels for one in outcomes if isinstance(one, Image)]


@functools.cache
def _place() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="checkers-")


@functools.cache
def folder(*options: str) -> Path:
    """An sd1 folder whose checker flags the rows UNSAFE of ROWS, as an engine of these options makes them: another
    dtype's noise can be another picture."""
    made = that_flags(images(Engine(tiny.job(tiny.folder("sd1"), *options)), ROWS), UNSAFE, SPECIAL)
    return add(tiny.folder("sd1"), made, Path(_place().name) / f"safe-{len(list(Path(_place().name).iterdir()))}")


@functools.cache
def engine() -> Engine:
    """The engine of that folder, with its checker."""
    return Engine(tiny.job(folder(), "engine.safety_checker=true"))


def checker() -> SafetyChecker:
    found = engine().model.checker
    assert found is not None
    return found


def noise(num: int, width: int = 64, height: int = 64) -> list[Pixels]:
    random = np.random.default_rng(1)
    return [random.integers(0, 256, (height, width, 3), np.uint8) for _ in range(num)]
