"""Pipelines of real architectures with random weights: timing depends on the shapes, hardly on the values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import Tensor

from batchgen.bench.architectures import ARCHITECTURES, Architecture
from batchgen.errors import BatchgenError
from batchgen.models import demo
from batchgen.models.layouts import FAMILIES, Layout

_PIXEL_STD = 0.4
"""Of decoded images, whose range is -1 to 1: contrast, and little of it cut off."""
_T5_LENGTH = 512


def ensure_folder(name: str, parent: Path, device: torch.device, upcasts: bool, say: Callable[[str], None]) -> Path:
    """The architecture's pipeline in a folder under `parent`, built unless it is there: safetensors in half precision
    on a GPU, float32 on a CPU. `upcasts`: its VAE asks to be run in float32. Raises BatchgenError if its pictures are
    none."""
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


def network_of(pipeline: Any) -> str:
    """The name of the component that predicts."""
    return FAMILIES[type(pipeline).__name__].network


def _build(wanted: Architecture, device: torch.device, upcasts: bool) -> Any:
    layout = FAMILIES[wanted.pipeline]
    dtype = getattr(torch, wanted.half_dtype) if device.type == "cuda" else torch.float32
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), torch.device(device):
        torch.manual_seed(0)
        networks = {
            layout.network: _made(layout, layout.network, wanted.network),
            "vae": _made(layout, "vae", {**wanted.vae, "force_upcast": upcasts}),
            **dict(_texts(layout, wanted)),
        }
    parts: dict[str, Any] = {name: one and one.to(dtype).eval() for name, one in networks.items()}
    parts |= _tokenizers(layout, networks)
    if layout.checker:
        parts |= {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    scheduler = getattr(diffusers, wanted.scheduler["_class_name"]).from_config(dict(wanted.scheduler))
    return getattr(diffusers, wanted.pipeline)(scheduler=scheduler, **parts)


def _made(layout: Layout, name: str, config: Mapping[str, Any]) -> Any:
    return getattr(diffusers, layout.components[name].classes[0])(**config)


def _texts(layout: Layout, wanted: Architecture) -> Iterator[tuple[str, Any]]:
    """The text encoders. A CLIP one finds the end of a text by the tokenizer's own end token."""
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    names = [name for name in layout.components if name.startswith("text_encoder")]
    for name, config in zip(names, wanted.texts, strict=True):
        cls = layout.components[name].classes[0]
        if config is None:
            yield name, None
        elif cls == "T5EncoderModel":
            yield name, transformers.T5EncoderModel(transformers.T5Config(**config))
        else:
            told = {"max_position_embeddings": demo.TEXT_LENGTH} | ends | dict(config)
            yield name, getattr(transformers, cls)(transformers.CLIPTextConfig(**told))


def _tokenizers(layout: Layout, networks: Mapping[str, Any]) -> dict[str, Any]:
    """A tokenizer for each text encoder; None for one that is not there."""
    makers = {True: demo.tokenizer, False: t5_tokenizer}
    names = {name: one for name, one in layout.components.items() if one.is_tokenizer}
    return {
        name: None if networks[name.replace("tokenizer", "text_encoder")] is None else makers[one.is_clip_tokenizer]()
        for name, one in names.items()
    }


def t5_tokenizer() -> Any:
    """A T5 tokenizer of single characters, of ASCII alone."""
    pieces = ["<pad>", "</s>", "<unk>", "▁", *map(chr, range(ord("!"), 127))]
    vocabulary = [(piece, -1.0) for piece in pieces]
    return transformers.T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=_T5_LENGTH)


def _scale(pipeline: Any, wanted: Architecture, device: torch.device) -> None:
    """Give the network's predictions unit variance and the decoder's images contrast, and look at one picture."""
    network = getattr(pipeline, network_of(pipeline))
    last = network.conv_out if hasattr(network, "conv_out") else network.proj_out

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
        if hasattr(pipeline, "_unpack_latents"):
            made = pipeline._unpack_latents(made, wanted.side, wanted.side, pipeline.vae_scale_factor)
        decoder = pipeline.vae.float() if pipeline.vae.config.force_upcast else pipeline.vae
        latents = made.to(decoder.dtype) / decoder.config.scaling_factor + (decoder.config.shift_factor or 0.0)
        images: Tensor = decoder.decode(latents).sample
        pipeline.vae.to(network.dtype)
        return images.float()

    deviations: list[float] = []
    hook = last.register_forward_hook(lambda _, __, made: deviations.append(float(made.float().std())))
    pipeline.to(device)
    images = picture()
    hook.remove()
    _multiply(last, 1 / deviations[0])
    images = picture()
    _multiply(pipeline.vae.decoder.conv_out, _PIXEL_STD / float(images.std()))
    images = picture()
    if not (bool(images.isfinite().all()) and 0.1 < float(images.std()) < 2):
        raise BatchgenError(f"the random pipeline's pictures are none: their deviation is {float(images.std()):.3g}")


def _multiply(layer: Any, factor: float) -> None:
    layer.weight.mul_(factor)
    layer.bias.mul_(factor)
