"""Single files in the key layout of Stable Diffusion's authors, written from tiny pipelines: what diffusers converts
when it reads one, undone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}
_UNET = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}
_OPEN_CLIP = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "self_attn.out_proj": "attn.out_proj",
}


def write(pipeline: Any, path: Path, leave_out: str = "-") -> Path:
    """A pipeline of SD1 or SDXL as one file, but for the tensors whose names begin so."""
    is_xl = hasattr(pipeline, "text_encoder_2")
    tensors = {
        **{f"model.diffusion_model.{key}": one for key, one in _unet(pipeline.unet)},
        **{f"first_stage_model.{key}": one for key, one in _vae(pipeline.vae)},
        **_clip(pipeline.text_encoder, "conditioner.embedders.0." if is_xl else "cond_stage_model."),
    }
    if is_xl:
        tensors |= {f"conditioner.embedders.1.model.{key}": one for key, one in _open_clip(pipeline.text_encoder_2)}
    kept = {name: one.clone() for name, one in tensors.items() if not name.startswith(leave_out)}
    save_file(kept, path, metadata={"format": "pt"})
    return path


def _unet(unet: Any) -> Iterator[tuple[str, Tensor]]:
    layers = unet.config.layers_per_block
    for key, tensor in unet.state_dict().items():
        if found := re.fullmatch(r"(down|up)_blocks\.(\d+)\.(resnets|attentions)\.(\d+)\.(.*)", key):
            side, block, kind, layer, rest = found[1], int(found[2]), found[3], int(found[4]), found[5]
            place = (layers + 1) * block + layer + (side == "down")
            name = f"{'input' if side == 'down' else 'output'}_blocks.{place}.{int(kind == 'attentions')}."
            yield name + (_renamed(rest, _RESNET) if kind == "resnets" else rest), tensor
        elif found := re.fullmatch(r"down_blocks\.(\d+)\.downsamplers\.0\.conv\.(.*)", key):
            yield f"input_blocks.{(layers + 1) * (int(found[1]) + 1)}.0.op.{found[2]}", tensor
        elif found := re.fullmatch(r"up_blocks\.(\d+)\.upsamplers\.0\.(.*)", key):
            block = int(found[1])
            place = 2 if hasattr(unet.up_blocks[block], "attentions") else 1
            yield f"output_blocks.{(layers + 1) * block + layers}.{place}.{found[2]}", tensor
        elif found := re.fullmatch(r"mid_block\.(resnets|attentions)\.(\d+)\.(.*)", key):
            is_resnet = found[1] == "resnets"
            place = 2 * int(found[2]) + (not is_resnet)
            yield f"middle_block.{place}.{_renamed(found[3], _RESNET) if is_resnet else found[3]}", tensor
        else:
            yield _renamed(key, _UNET), tensor


def _vae(vae: Any) -> Iterator[tuple[str, Tensor]]:
    last = len(vae.config.block_out_channels) - 1
    for key, tensor in vae.state_dict().items():
        key = key.replace("conv_norm_out", "norm_out").replace("conv_shortcut", "nin_shortcut")
        if found := re.fullmatch(r"(.*)\.mid_block\.attentions\.0\.(.*)", key):
            is_matrix = tensor.ndim == 2
            name = f"{found[1]}.mid.attn_1.{_renamed(found[2], _ATTENTION)}"
            yield name, tensor[:, :, None, None] if is_matrix else tensor
            continue
        key = re.sub(r"mid_block\.resnets\.(\d)", lambda hit: f"mid.block_{int(hit[1]) + 1}", key)
        key = re.sub(r"down_blocks\.(\d)", r"down.\1", key)
        key = re.sub(r"up_blocks\.(\d)", lambda hit: f"up.{last - int(hit[1])}", key)
        key = key.replace("resnets", "block").replace("downsamplers.0", "downsample")
        yield key.replace("upsamplers.0", "upsample"), tensor


def _clip(encoder: Any, prefix: str) -> dict[str, Tensor]:
    keys = {key.removeprefix("text_model."): tensor for key, tensor in encoder.state_dict().items()}
    return {f"{prefix}transformer.text_model.{key}": tensor for key, tensor in keys.items()}


def _open_clip(encoder: Any) -> Iterator[tuple[str, Tensor]]:
    state = encoder.state_dict()
    yield "positional_embedding", state["text_model.embeddings.position_embedding.weight"]
    yield "token_embedding.weight", state["text_model.embeddings.token_embedding.weight"]
    yield "text_projection", state["text_projection.weight"].T.contiguous()
    for kind in ("weight", "bias"):
        yield f"ln_final.{kind}", state[f"text_model.final_layer_norm.{kind}"]
    for layer in range(encoder.config.num_hidden_layers):
        before, after = f"text_model.encoder.layers.{layer}.", f"transformer.resblocks.{layer}."
        for kind in ("weight", "bias"):
            parts = [state[f"{before}self_attn.{one}_proj.{kind}"] for one in "qkv"]
            yield f"{after}attn.in_proj_{kind}", torch.cat(parts)
            for name, other in _OPEN_CLIP.items():
                yield f"{after}{other}.{kind}", state[f"{before}{name}.{kind}"]


def _renamed(key: str, names: Mapping[str, str]) -> str:
    """The key with its beginning renamed."""
    for name, other in names.items():
        if key.startswith(f"{name}."):
            return other + key.removeprefix(name)
    return key
