"""Random LoRA files as peft and diffusers write them, and pipelines of diffusers with their layers at work."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.utils import get_peft_model_state_dict

from batchgen.models import demo
from tests import families, tiny

FILE = "pytorch_lora_weights.safetensors"
_LAYERS = {"unet": ["to_q", "to_v", "conv1", "ff.net.2"], "transformer": ["to_q", "to_v", "to_out.0"]}
_OF_TEXTS = ["q_proj", "v_proj", "fc1"]


def _wrap(pipeline: Any, seed: int, *, with_texts: bool) -> None:
    """Put random adapters, at work with scale 1.5, into a pipeline's networks."""
    for name in pipeline._lora_loadable_modules:
        network = getattr(pipeline, name, None)
        if network is None or (name not in _LAYERS and not with_texts):
            continue
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = LoraConfig(r=2, lora_alpha=3, target_modules=_LAYERS.get(name, _OF_TEXTS), init_lora_weights=False)
            inject_adapter_in_model(config, network, "default")
            for parameter_name, parameter in network.named_parameters():
                if "lora_" in parameter_name:
                    torch.nn.init.normal_(parameter, std=0.15)


@functools.cache
def pipeline(kind: str, seed: int, *, with_texts: bool = True) -> Any:
    """diffusers' own pipeline with a random LoRA's layers in its networks: the reference."""
    made = tiny.reference_pipeline(demo.WEIGHTS if kind == "demo" else families.folder(kind))
    _wrap(made, seed, with_texts=with_texts)
    return made


@functools.cache
def file(kind: str, seed: int, *, with_texts: bool = True) -> Path:
    """The same LoRA as diffusers' pipeline saves it."""
    made = pipeline(kind, seed, with_texts=with_texts)
    layers, metadata = {}, {}
    for name in _wrapped(made):
        network = getattr(made, name)
        layers[f"{name}_lora_layers"] = get_peft_model_state_dict(network, adapter_name="default")
        metadata[f"{name}_lora_adapter_metadata"] = network.peft_config["default"].to_dict()
    folder = tiny.place() / f"lora-{kind}-{seed}-{with_texts}"
    type(made).save_lora_weights(folder, **layers, **metadata)
    return folder / FILE


def _wrapped(made: Any) -> list[str]:
    networks = {name: getattr(made, name, None) for name in made._lora_loadable_modules}
    return [name for name, network in networks.items() if hasattr(network, "peft_config")]
