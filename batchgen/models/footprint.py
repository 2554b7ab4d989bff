"""What a model takes of a device's memory: its weights by the headers of their files, what it works in by its
configuration. Needs no torch."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

from batchgen.job import Job
from batchgen.memory import Demand
from batchgen.models.checkpoints import tensors_of
from batchgen.models.contents import ModelFolder
from batchgen.models.facts import Config, Facts
from batchgen.models.generic import vae_scale

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_DECODED = 8.25
"""Of the decoder, in values of its last layers' width for each pixel. Peaks measured of eager float16 decodes are 2,060
bytes a pixel of 512x512 and 1,670 of 1024x1024, with 128 channels; of compiled ones 1,300."""
_UNET = 70.0
"""Of a UNet, in values of its first blocks for each latent that they see. A call of SD1.5 works in 26, and graphs of it
that are captured by blocks were measured to hold 70; of SDXL, captured whole, 18."""
_SEQUENCE = 60.0
"""Of a transformer, in values of its width for each token, with as much room for graphs: a call of SD3-medium works in
29, of FLUX.1 in 17."""
_UNKNOWN = 600.0
"""Bytes a pixel in half precision, of a network whose configuration says neither."""
_TEXTS = 32
"""Encoded at once on a GPU."""
_TILE = 512
"""Pixels along a side of a decoder's tile, where its configuration does not say."""
_WITH_FLOAT32 = ("T5EncoderModel", "UMT5EncoderModel")
"""Text encoders of which transformers keeps a part in float32 where the rest is in float16."""


def demand_of(folder: ModelFolder, facts: Facts, job: Job) -> Demand:
    """What the job's model needs on its device, taken for a GPU unless the job says that it is the CPU. Raises
    UsageError for weights that are not whole."""
    dtype = job.model.dtype or ("float32" if job.engine.device == "cpu" else facts.half_dtype)
    vae_dtype = job.model.vae_dtype or _vae_dtype(folder, facts, dtype)
    weights = {
        name: _weights_bytes(folder, name, vae_dtype if name == "vae" else dtype)
        for name, one in folder.components.items()
        if one.weights
    }
    network, vae = weights.pop(folder.layout.network, 0), weights.pop("vae", 0)
    configs = folder.configs
    vae_config = configs.get("vae", {})
    scale = vae_scale(vae_config)
    token_pixels, token = _token(configs.get(folder.layout.network, {}), vae_config, scale)
    value = _BYTES[dtype]
    return Demand(
        network=network,
        vae=vae,
        encoders=sum(weights.values()),
        row_pixel=value * token / token_pixels,
        row=value * token * (facts.text_length or 0) if token_pixels > scale**2 else 0.0,
        decoded_pixel=_BYTES[vae_dtype] * _DECODED * _width(vae_config),
        encoding=sum(_encoding(configs[name], facts, value) for name in weights if name in configs),
        tile=(vae_config.get("sample_size") or _TILE) ** 2,
        dtype=dtype,
        has_choices=not folder.is_generic,
    )


def _vae_dtype(folder: ModelFolder, facts: Facts, dtype: str) -> str:
    is_upcast = facts.upcasts_vae and dtype == "float16"
    return "float32" if is_upcast and folder.config("vae").get("force_upcast", True) else dtype


def _weights_bytes(folder: ModelFolder, component: str, dtype: str) -> int:
    is_mixed = dtype == "float16" and folder.components[component].classes[0] in _WITH_FLOAT32
    return sum(
        number * (4 if is_mixed and name == "wo" else _BYTES[dtype])
        for name, number in _parameters(folder)[component].items()
    )


@functools.lru_cache(maxsize=4)
def _parameters(folder: ModelFolder) -> Mapping[str, Counter[str]]:
    """Of each component, in T5's matrices `wo` and in all others."""
    found: dict[str, Counter[str]] = {name: Counter() for name in folder.components}
    for file, path in folder.paths.items():
        if path.suffix != ".safetensors":
            continue
        for name, tensor in tensors_of(path).items():
            component = _owner(folder, name) if path == folder.checkpoint else file.partition("/")[0]
            if component is not None:
                found[component]["wo" if ".wo." in name else ""] += tensor.num_elements
    return found


def _owner(folder: ModelFolder, tensor: str) -> str | None:
    """The component that a tensor of a single file is of: what is no other's is the network's; averaged weights of
    training, which lie in some, are nobody's, and so are those of a VAE in whose place the job has another."""
    if tensor.startswith("model_ema."):
        return None
    prefixes = folder.layout.single
    others = [name for name in folder.in_checkpoint - {folder.layout.network} if tensor.startswith(prefixes[name])]
    return others[0] if others else folder.layout.network


def _token(network: Config, vae: Config, scale: int) -> tuple[int, float]:
    """Pixels that the network sees as one, and the values that it works in for them."""
    if "block_out_channels" in network:
        return scale**2, _UNET * network["block_out_channels"][0]
    width = network.get("num_attention_heads", 0) * network.get("attention_head_dim", 0)
    width = width or network.get("hidden_size") or network.get("dim") or 0
    patch = network.get("patch_size") or network.get("all_patch_size", (1,))[0]
    if not (width and isinstance(patch, int)):
        return 1, _UNKNOWN / 2
    is_packed = network.get("in_channels") == 4 * vae.get("latent_channels", 0)
    return (scale * patch * (2 if is_packed else 1)) ** 2, _SEQUENCE * width


def _width(vae: Config) -> int:
    """Channels of a decoder's last blocks, by the keys that diffusers' autoencoders have."""
    widths: Any = vae.get("decoder_block_out_channels") or vae.get("block_out_channels") or (vae.get("base_dim", 128),)
    return int(widths[0])


def _encoding(config: Config, facts: Facts, value: int) -> float:
    """Bytes that a text encoder works in: attention matrices, the feed-forward layers, and the hidden states of all
    layers where families read those."""
    config = cast(Config, config.get("text_config") or config)
    is_t5 = "d_model" in config
    width = config.get("d_model") or config.get("hidden_size") or 0
    inner = config.get("d_ff") or config.get("intermediate_size") or config.get("ffn_hidden_size") or 4 * width
    heads = config.get("num_heads") or config.get("num_attention_heads") or 0
    layers = 2 if is_t5 else config.get("num_hidden_layers") or config.get("num_layers", 0)
    length = facts.text_length or 512
    return _TEXTS * length * value * (heads * length + 4 * inner + (4 + layers) * width)
