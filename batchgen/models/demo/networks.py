"""The demo model's pipeline: small networks of Stable Diffusion's kinds, made, opened and saved.

The VAE reduces by four, not eight, so that a picture of 64 pixels keeps its edges. The network predicts velocity
(Salimans and Ho 2022) on a schedule that ends in noise alone but for 1 % (Lin et al. 2023 say why it must), yet without
a signal of exactly zero, which several samplers divide by; steps are spaced to begin there ("trailing").
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import diffusers
import torch

from batchgen.models import demo
from batchgen.models.demo.words import trained_tokenizer

VAE: dict[str, Any] = {
    "sample_size": 64,
    "block_out_channels": [32, 48, 64],
    "down_block_types": ["DownEncoderBlock2D"] * 3,
    "up_block_types": ["UpDecoderBlock2D"] * 3,
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 8,
    "scaling_factor": 1.0,
    "force_upcast": False,
}
UNET: dict[str, Any] = {
    "sample_size": 16,
    "in_channels": 4,
    "out_channels": 4,
    "layers_per_block": 1,
    "block_out_channels": [96, 128],
    "down_block_types": ["CrossAttnDownBlock2D"] * 2,
    "up_block_types": ["CrossAttnUpBlock2D"] * 2,
    "attention_head_dim": [3, 4],
    "cross_attention_dim": 192,
    "norm_num_groups": 16,
    "use_linear_projection": True,
}
"""`attention_head_dim` is the number of heads, of 32 channels each."""
TEXT: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": demo.TEXT_LENGTH,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
SCHEDULER: dict[str, Any] = {
    "_class_name": "DPMSolverMultistepScheduler",
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.0224,
    "beta_schedule": "scaled_linear",
    "prediction_type": "v_prediction",
    "timestep_spacing": "trailing",
    "clip_sample": False,
    "set_alpha_to_one": True,
    "skip_prk_steps": True,
    "steps_offset": 1,
}


def build(texts: Iterable[str], seed: int = 0) -> Any:
    """The untrained pipeline, float32 on the CPU, with a tokenizer for the texts' words."""
    return demo.build(UNET, SCHEDULER, seed, vae=VAE, text=TEXT, words=trained_tokenizer(texts))


def open_pipeline(folder: Path) -> Any:
    """A saved pipeline in float32, to be trained on."""
    return diffusers.StableDiffusionPipeline.from_pretrained(folder, safety_checker=None).to(torch.float32)


def save_pipeline(pipeline: Any, folder: Path) -> None:
    """The pipeline's float16 weights as safetensors, with its configuration, where `from_pretrained` looks first."""
    half = {
        name: _half(part) if isinstance(part, torch.nn.Module) else part for name, part in pipeline.components.items()
    }
    diffusers.StableDiffusionPipeline(**half, requires_safety_checker=False).save_pretrained(folder)
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(SCHEDULER, indent=2) + "\n")
    for config in folder.glob("*/config.json"):
        content = json.loads(config.read_text())
        # Where a network was read from is nobody else's.
        content.pop("_name_or_path", None)
        config.write_text(json.dumps(content, indent=2) + "\n")


def _half(network: Any) -> Any:
    return copy.deepcopy(network).to("cpu", torch.float16).eval()
