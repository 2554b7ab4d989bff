"""Pipelines of real architectures with random weights: timing depends on the shapes, hardly on the values."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import Tensor

from batchgen.errors import BatchgenError
from batchgen.models import demo

_CLIP_L: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "hidden_act": "quick_gelu",
    "projection_dim": 768,
}
_CLIP_BIG_G: Mapping[str, Any] = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "hidden_act": "gelu",
    "projection_dim": 1280,
}
_SD_UNET: Mapping[str, Any] = {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8}
"""Beside diffusers' defaults, which are those of Stable Diffusion 1."""
_SDXL_UNET: Mapping[str, Any] = {
    "sample_size": 128,
    "block_out_channels": [320, 640, 1280],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "attention_head_dim": [5, 10, 20],
    "cross_attention_dim": 2048,
    "transformer_layers_per_block": [1, 2, 10],
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
_VAE: Mapping[str, Any] = {
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
    "latent_channels": 4,
}
_EULER: Mapping[str, Any] = demo.SCHEDULER | {"_class_name": "EulerDiscreteScheduler", "timestep_spacing": "leading"}
_PIXEL_STD = 0.4
"""Of decoded images, whose range is -1 to 1: contrast, and little of it cut off."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """A pipeline's classes and configurations."""

    pipeline: str
    unet: Mapping[str, Any]
    vae: Mapping[str, Any]
    texts: tuple[Mapping[str, Any], ...]
    """One or two CLIP text encoders; the second has a projection."""
    scheduler: Mapping[str, Any]
    side: int
    """Width and height that it was made for."""
    divisor: int
    """Between the 40 sizes of the mixed workload and this one's."""
    steps: int = 20
    guidance: float = 7.5
    mixed_steps: tuple[int, int] = (20, 50)


ARCHITECTURES: Mapping[str, Architecture] = {
    "sd15": Architecture("StableDiffusionPipeline", _SD_UNET, _VAE, (_CLIP_L,), demo.SCHEDULER, 512, 2),
    "sdxl": Architecture(
        "StableDiffusionXLPipeline",
        _SDXL_UNET,
        {**_VAE, "sample_size": 1024, "scaling_factor": 0.13025},
        (_CLIP_L, _CLIP_BIG_G),
        _EULER,
        1024,
        1,
        guidance=8.0,
    ),
    "tiny": Architecture(
        "StableDiffusionPipeline",
        demo.UNET,
        demo.VAE,
        (demo.TEXT,),
        demo.SCHEDULER,
        64,
        8,
        steps=3,
        mixed_steps=(2, 5),
    ),
}


def ensure_folder(name: str, parent: Path, device: torch.device, upcasts: bool, say: Callable[[str], None]) -> Path:
    """The architecture's pipeline in a folder under `parent`, built unless it is there: float16 safetensors on a GPU,
    float32 on a CPU. `upcasts`: its VAE asks to be run in float32. Raises BatchgenError if its pictures are none."""
    folder = parent / f"{name}{'-upcast' if upcasts else ''}"
    if (folder / "model_index.json").is_file():
        return folder
    say(f"building {name} with random weights in {folder}")
    pipeline = _build(ARCHITECTURES[name], device, upcasts)
    with torch.inference_mode():
        _scale(pipeline, ARCHITECTURES[name], device)
    unfinished = folder.with_name(f"{folder.name}.part")
    pipeline.save_pretrained(unfinished, safe_serialization=True)
    scheduler = unfinished / "scheduler" / "scheduler_config.json"
    scheduler.write_text(json.dumps(dict(ARCHITECTURES[name].scheduler)))
    return unfinished.rename(folder)


def _build(wanted: Architecture, device: torch.device, upcasts: bool) -> Any:
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(0)
        parts: dict[str, Any] = {
            "unet": diffusers.UNet2DConditionModel(**wanted.unet),
            "vae": diffusers.AutoencoderKL(**wanted.vae, force_upcast=upcasts),
            "text_encoder": _text(transformers.CLIPTextModel, wanted.texts[0]),
        }
        if len(wanted.texts) == 2:
            parts["text_encoder_2"] = _text(transformers.CLIPTextModelWithProjection, wanted.texts[1])
    parts = {key: part.to(dtype).eval() for key, part in parts.items()}
    if len(wanted.texts) == 2:
        parts["tokenizer_2"] = demo.tokenizer()
    else:
        parts |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    scheduler = getattr(diffusers, wanted.scheduler["_class_name"]).from_config(dict(wanted.scheduler))
    return getattr(diffusers, wanted.pipeline)(tokenizer=demo.tokenizer(), scheduler=scheduler, **parts)


def _text(cls: Any, config: Mapping[str, Any]) -> Any:
    """A text encoder that finds the end of a text by the tokenizer's own end token."""
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    return cls(transformers.CLIPTextConfig(**({"max_position_embeddings": demo.TEXT_LENGTH} | ends | dict(config))))


def _scale(pipeline: Any, wanted: Architecture, device: torch.device) -> None:
    """Give the network's predictions unit variance and the decoder's images contrast, and look at one picture."""

    def picture() -> Tensor:
        pipeline.set_progress_bar_config(disable=True)
        made: Tensor = pipeline(
            "a picture",
            num_inference_steps=2,
            width=wanted.side,
            height=wanted.side,
            generator=torch.Generator("cpu").manual_seed(0),
            output_type="latent",
        ).images
        decoder = pipeline.vae.float() if pipeline.vae.config.force_upcast else pipeline.vae
        images: Tensor = decoder.decode(made.to(decoder.dtype) / decoder.config.scaling_factor).sample
        pipeline.vae.to(pipeline.unet.dtype)
        return images.float()

    deviations: list[float] = []
    hook = pipeline.unet.conv_out.register_forward_hook(
        lambda _, __, made: deviations.append(float(made.float().std()))
    )
    pipeline.to(device)
    images = picture()
    hook.remove()
    _multiply(pipeline.unet.conv_out, 1 / deviations[0])
    images = picture()
    _multiply(pipeline.vae.decoder.conv_out, _PIXEL_STD / float(images.std()))
    images = picture()
    if not (bool(images.isfinite().all()) and 0.1 < float(images.std()) < 2):
        raise BatchgenError(f"the random pipeline's pictures are none: their deviation is {float(images.std()):.3g}")


def _multiply(layer: Any, factor: float) -> None:
    layer.weight.mul_(factor)
    layer.bias.mul_(factor)
