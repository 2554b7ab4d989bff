"""Tiny random pipelines in real diffusers folders, and batches to run them with."""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from PIL import Image as Picture

from batchgen.engine.engine import Engine
from batchgen.job import Job, load_job
from batchgen.models import demo
from batchgen.models.facts import OWN_UPDATE, Facts
from batchgen.pictures import read_all
from batchgen.records import Batch, Group, InitImage, Pixels, Row

torch.set_num_threads(1)
diffusers.utils.logging.set_verbosity_error()

LONG = " ".join(f"word{i}" for i in range(200))

SD1_SCHEDULER: dict[str, Any] = {
    "_class_name": "PNDMScheduler",
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "clip_sample": False,
    "num_train_timesteps": 1000,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
    "trained_betas": None,
}
SD2_SCHEDULER: dict[str, Any] = SD1_SCHEDULER | {
    "_class_name": "DDIMScheduler",
    "prediction_type": "v_prediction",
}
SD2_UNET: dict[str, Any] = demo.UNET | {"use_linear_projection": True, "attention_head_dim": [2, 4]}


SDXL_SCHEDULER: dict[str, Any] = SD1_SCHEDULER | {
    "_class_name": "EulerDiscreteScheduler",
    "interpolation_type": "linear",
    "prediction_type": "epsilon",
    "sample_max_value": 1.0,
    "timestep_spacing": "leading",
    "use_karras_sigmas": False,
}
TURBO_SCHEDULER: dict[str, Any] = SDXL_SCHEDULER | {
    "_class_name": "EulerAncestralDiscreteScheduler",
    "timestep_spacing": "trailing",
}
TEXT_2: dict[str, Any] = demo.TEXT | {"hidden_size": 48, "hidden_act": "gelu", "projection_dim": 24}
SDXL_UNET: dict[str, Any] = SD2_UNET | {
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "transformer_layers_per_block": [1, 2],
    "cross_attention_dim": demo.TEXT["hidden_size"] + TEXT_2["hidden_size"],
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 6 * 8 + TEXT_2["projection_dim"],
}
SDXL_VAE: dict[str, Any] = demo.VAE | {"scaling_factor": 0.13025}
"""Of the second text encoder, the network and the autoencoder; `force_upcast` is left to its default, true."""


def save(
    folder: Path,
    unet: dict[str, Any] = demo.UNET,
    scheduler: dict[str, Any] = SD1_SCHEDULER,
    seed: int = 1,
    uses_mask: bool = False,
) -> Path:
    """A tiny pipeline's folder; its scheduler file holds the given keys and no others."""
    made = demo.build(unet, scheduler, seed)
    if uses_mask:
        made.text_encoder.config.use_attention_mask = True
    made.save_pretrained(folder)
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    return folder


def save_xl(
    folder: Path,
    unet: dict[str, Any] = SDXL_UNET,
    scheduler: dict[str, Any] = SDXL_SCHEDULER,
    vae: dict[str, Any] = SDXL_VAE,
    zeroes_null: bool = True,
) -> Path:
    """As `save`, of SDXL. The encoders differ in width, activation and padding, so that none passes for the other."""
    tokenizer_2 = demo.tokenizer()
    tokenizer_2.pad_token = "!"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        made = diffusers.StableDiffusionXLPipeline(
            vae=diffusers.AutoencoderKL(**vae).eval(),
            text_encoder=transformers.CLIPTextModel(transformers.CLIPTextConfig(**demo.TEXT)).eval(),
            text_encoder_2=transformers.CLIPTextModelWithProjection(transformers.CLIPTextConfig(**TEXT_2)).eval(),
            tokenizer=demo.tokenizer(),
            tokenizer_2=tokenizer_2,
            unet=diffusers.UNet2DConditionModel(**unet).eval(),
            scheduler=getattr(diffusers, scheduler["_class_name"]).from_config(scheduler),
            force_zeros_for_empty_prompt=zeroes_null,
            add_watermarker=False,
        )
    made.save_pretrained(folder)
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(scheduler))
    return folder


@functools.cache
def _place() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tiny-")


def place() -> Path:
    """Where folders of this process lie."""
    return Path(_place().name)


@functools.cache
def folder(kind: str) -> Path:
    """A saved pipeline: "sd1" (epsilon, PNDM), "sd2" (v-prediction, DDIM), "lcm" (embedded guidance), "masked" (padding
    hidden from the text encoder); "sdxl" (Euler), "sdxl-turbo" (trailing Euler ancestral), "sdxl-lcm" or "sdxl-empty"
    (a null negative prompt is the empty one)."""
    if kind.startswith("sdxl"):
        unet, scheduler = {
            "sdxl-turbo": (SDXL_UNET, TURBO_SCHEDULER),
            "sdxl-lcm": (SDXL_UNET | {"time_cond_proj_dim": 16}, SDXL_SCHEDULER | {"_class_name": "LCMScheduler"}),
        }.get(kind, (SDXL_UNET, SDXL_SCHEDULER))
        return save_xl(place() / kind, unet, scheduler, zeroes_null=kind != "sdxl-empty")
    unet, scheduler = {
        "masked": (demo.UNET, SD1_SCHEDULER),
        "sd1": (demo.UNET, SD1_SCHEDULER),
        "sd2": (SD2_UNET, SD2_SCHEDULER),
        "lcm": (demo.UNET | {"time_cond_proj_dim": 16}, SD1_SCHEDULER | {"_class_name": "LCMScheduler"}),
    }[kind]
    return save(place() / kind, unet, scheduler, uses_mask=kind == "masked")


def job(path: Path | str, *overrides: str) -> Job:
    return load_job(overrides=[f"model.path={path}", "engine.device=cpu", *overrides])


@functools.cache
def engine(kind: str) -> Engine:
    return Engine(job(folder(kind)))


@functools.cache
def pipeline(kind: str) -> Any:
    """diffusers' own pipeline of the folder, the reference of every parity test."""
    return reference_pipeline(folder(kind))


def reference_pipeline(path: Path, device: str = "cpu", *, checks_safety: bool = False, **options: Any) -> Any:
    index = json.loads((path / "model_index.json").read_text())
    family = index["_class_name"]
    without: dict[str, Any] = {name: None for name, entry in index.items() if entry == [None, None]}
    if family == "StableDiffusionXLPipeline":
        without["add_watermarker"] = False
    if family == "StableDiffusionPipeline" and not checks_safety:
        without["safety_checker"] = None
    made = diffusers.DiffusionPipeline.from_pretrained(path, **without, **options)
    made.set_progress_bar_config(disable=True)
    made.own_scheduler = made.scheduler
    return made.to(device)


def row(index: int = 0, **values: Any) -> Row:
    """A row of 64 x 64 with everything given a value."""
    defaults: dict[str, Any] = {
        "index": index,
        "id": str(index),
        "image_number": 0,
        "prompt": f"a cat, number {index}",
        "negative_prompt": None,
        "width": 64,
        "height": 64,
        "steps": 3,
        "guidance_scale": 5.0,
        "sampler": "ddim",
        "seed": 100 + index,
    }
    return Row(**(defaults | values))


def batch(rows: Sequence[Row], facts: Facts, size: int | None = None, lengths: tuple[int, int] | None = None) -> Batch:
    """The batch as a planner would key it; `lengths` are those of its texts, where they follow the prompts."""
    first = rows[0]
    form = facts.sampler_facts(first.sampler).form
    own: dict[str, Any] = {}
    if form == OWN_UPDATE:
        own = {"sampler": first.sampler, "steps": first.steps, "skipped": facts.skips(first)}
    is_guided = facts.guides(first)
    text, negative = lengths or (facts.text_length, None)
    group = Group(first.width, first.height, is_guided, text, form, **own, negative_length=negative)
    return Batch(0, size or len(rows), group, tuple(rows))


def never() -> bool:
    return False


def denoise(made: Engine, rows: Sequence[Row], size: int | None = None) -> torch.Tensor:
    asked = batch(rows, made.facts, size)
    return made.denoise(asked, made.conditioning(asked), never, pictures_of(rows))[0]


def pictures_of(rows: Sequence[Row]) -> dict[int, Pixels]:
    """The rows' init images, all of which are good."""
    return {index: one for index, one in read_all(rows).items() if isinstance(one, np.ndarray)}


def reference(pipe: Any, row: Row, facts: Facts, output_type: str = "latent") -> Any:
    """What diffusers' pipeline makes of this one row."""
    own, sampler = pipe.own_scheduler, facts.sampler_facts(row.sampler)
    if sampler.scheduler == type(own).__name__ and not sampler.options:
        pipe.scheduler = copy.deepcopy(own)
    else:
        pipe.scheduler = getattr(diffusers, sampler.scheduler).from_config(own.config, **sampler.options)
    call, begins = beginning(pipe, row)
    return call(
        prompt=row.prompt,
        negative_prompt=row.negative_prompt,
        **begins,
        num_inference_steps=row.steps,
        guidance_scale=row.guidance_scale,
        generator=torch.Generator("cpu").manual_seed(row.seed),
        output_type=output_type,
    ).images


@functools.cache
def init_image(number: int, width: int = 80, height: int = 56, suffix: str = ".png") -> InitImage:
    """A picture with edges, colours and noise of its own, in a file."""
    random = np.random.default_rng(number)
    pixels = np.zeros((height, width, 3), np.uint8)
    for top, left in random.integers(0, min(width, height) - 8, (12, 2)):
        pixels[top : top + 24, left : left + 24] = random.integers(0, 256, 3)
    path = place() / f"init-{number}-{width}x{height}{suffix}"
    Picture.fromarray(pixels | random.integers(0, 16, pixels.shape, np.uint8)).save(path)
    return InitImage(hashlib.sha256(path.read_bytes()).hexdigest(), str(path), path.name)


def beginning(pipe: Any, row: Row) -> tuple[Any, dict[str, Any]]:
    """diffusers' pipeline that a row is for, and what it is told of the row's size and init image: the pipelines from
    an image of Stable Diffusion and SDXL make it in its own size, and are given it in the row's."""
    size = {"width": row.width, "height": row.height}
    if row.init is None:
        return pipe, size
    made = diffusers.AutoPipelineForImage2Image.from_pipe(pipe)
    made.set_progress_bar_config(disable=True)
    picture = diffusers.utils.load_image(row.init.file)
    if "width" not in inspect.signature(made.__call__).parameters:
        picture, size = made.image_processor.resize(picture, row.height, row.width), {}
    return made, {"image": picture, "strength": row.strength, **size}


def difference(left: torch.Tensor, right: torch.Tensor) -> float:
    """The largest deviation, relative to the largest value."""
    return float((left - right).abs().max() / right.abs().max())


def psnr(left: np.ndarray, right: np.ndarray) -> float:
    """Peak signal-to-noise ratio of two uint8 pictures, in dB."""
    error = np.mean((left.astype(float) - right.astype(float)) ** 2)
    return float(10 * np.log10(255**2 / max(error, 1e-9)))
