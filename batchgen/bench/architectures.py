"""The architectures that benches build pipelines of: what their published configuration files say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
_SD3_NETWORK: Mapping[str, Any] = {
    "sample_size": 128,
    "num_layers": 24,
    "num_attention_heads": 24,
    "caption_projection_dim": 1536,
    "pos_embed_max_size": 192,
}
"""Beside diffusers' defaults; likewise the next."""
_FLUX_NETWORK: Mapping[str, Any] = {"guidance_embeds": True}
_FLOW_VAE: Mapping[str, Any] = {
    **_VAE,
    "sample_size": 1024,
    "latent_channels": 16,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
_SMALL_T5: Mapping[str, Any] = {
    "vocab_size": 128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 1024,
    "num_layers": 1,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
    "decoder_start_token_id": 0,
}
"""As wide as T5-XXL, and of one layer."""
_FLOW: Mapping[str, Any] = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0}
_SHIFTED_FLOW: Mapping[str, Any] = {
    **_FLOW,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}
_TINY_FLOW_VAE: Mapping[str, Any] = {**demo.VAE, "latent_channels": 16, "scaling_factor": 1.5, "shift_factor": 0.1}
_TINY_CLIP: Mapping[str, Any] = demo.TEXT | {"projection_dim": 32}
_TINY_T5: Mapping[str, Any] = {**_SMALL_T5, "d_model": 64, "d_ff": 64, "num_heads": 2, "d_kv": 16}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A pipeline's classes and configurations."""

    pipeline: str
    network: Mapping[str, Any]
    vae: Mapping[str, Any]
    texts: tuple[Mapping[str, Any] | None, ...]
    """The text encoders in their order; None is one that the pipeline may be without."""
    scheduler: Mapping[str, Any]
    side: int
    """Width and height that it was made for."""
    divisor: int
    """Between the 40 sizes of the mixed workload and this one's."""
    steps: int = 20
    guidance: float = 7.5
    mixed_steps: tuple[int, int] = (20, 50)
    half_dtype: str = "float16"
    """What its weights are published in."""


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
    "sd3": Architecture(
        "StableDiffusion3Pipeline",
        _SD3_NETWORK,
        {**_FLOW_VAE, "scaling_factor": 1.5305, "shift_factor": 0.0609},
        (_CLIP_L, _CLIP_BIG_G, None),
        _FLOW,
        1024,
        1,
        steps=28,
        guidance=7.0,
    ),
    "flux": Architecture(
        "FluxPipeline",
        _FLUX_NETWORK,
        {**_FLOW_VAE, "scaling_factor": 0.3611, "shift_factor": 0.1159},
        (_CLIP_L, _SMALL_T5),
        _SHIFTED_FLOW,
        1024,
        1,
        steps=28,
        guidance=3.5,
        half_dtype="bfloat16",
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
    "tiny-sd3": Architecture(
        "StableDiffusion3Pipeline",
        {
            "sample_size": 8,
            "num_layers": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 4,
            "caption_projection_dim": 32,
            "joint_attention_dim": 64,
            "pooled_projection_dim": 64,
            "pos_embed_max_size": 64,
        },
        _TINY_FLOW_VAE,
        (_TINY_CLIP, _TINY_CLIP, None),
        _FLOW,
        64,
        4,
        steps=3,
        guidance=7.0,
        mixed_steps=(2, 5),
    ),
    "tiny-flux": Architecture(
        "FluxPipeline",
        {
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 64,
            "pooled_projection_dim": 32,
            "axes_dims_rope": (4, 6, 6),
            "guidance_embeds": True,
        },
        _TINY_FLOW_VAE,
        (demo.TEXT, _TINY_T5),
        _SHIFTED_FLOW,
        64,
        4,
        steps=3,
        guidance=3.5,
        mixed_steps=(2, 5),
        half_dtype="bfloat16",
    ),
}
"""`sd15`, `sdxl`, `sd3` (SD3-medium without its T5 encoder) and `flux` (FLUX.1-dev with a text encoder of one layer in
T5-XXL's place) have networks and decoders of full size; the others are there to be tried on a CPU."""
