"""What planning must know of the transformers that match flows, without torch."""

from __future__ import annotations

from collections.abc import Mapping

from batchgen.errors import UsageError
from batchgen.models.facts import Config, Facts, SamplerFacts
from batchgen.models.lengths import Lengths

SCHEDULERS = ("FlowMatchEulerDiscreteScheduler",)
"""Those that the pipelines of these families are made for."""
_EULER = SamplerFacts(SCHEDULERS[0], form="x,e")
EULER: Mapping[str, SamplerFacts] = {"euler": _EULER, SCHEDULERS[0]: _EULER}
"""The one sampler of flow matching, by its names."""
SD3_T5_LENGTH, FLUX_T5_LENGTH = 256, 512
"""Tokens of T5 that StableDiffusion3Pipeline and FluxPipeline take by default."""
FLUX2_LENGTH = 512
"""Tokens of Qwen3 that Flux2KleinPipeline takes by default; the next, those of the chat before the prompt."""
_BEFORE_PROMPT = 3
QWEN_LENGTHS = Lengths(
    tuple(range(1, 513)),
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
    skipped=34,
    shared=(64, 128, 256, 512),
)
"""QwenImagePipeline's: a text's own. Nothing in its network depends on padding that it is told to look past."""
Z_LENGTHS = Lengths(tuple(range(32, 513, 32)))
"""Those that ZImageTransformer2DModel pads texts to by tokens that it looks at, up to the most of ZImagePipeline."""
COGVIEW_LENGTHS = Lengths(tuple(range(16, 1025, 16)), "{}")
"""Those that CogView4Pipeline pads texts to by tokens that its network looks at, up to the most it takes by default;
the next, tokens that its tokenizer puts before a text."""
_BEFORE_TEXT = 2
_FLUX_SIDE = 128
"""Latents along a side, where nobody says."""
_Z_SIDE = 1024
"""Pixels."""


def stable_diffusion_3(configs: Mapping[str, Config], clip_length: int) -> Facts:
    """Facts of a Stable Diffusion 3 or 3.5 folder from its configuration files, by component. Raises UsageError for a
    scheduler whose noise no row's seed decides."""
    check_scheduler(configs["scheduler"])
    network, scale = configs["transformer"], vae_scale(configs["vae"])
    multiple = scale * network.get("patch_size", 2)
    side = network.get("sample_size", 128) * scale
    has_t5 = "text_encoder_3" in configs
    return Facts(
        family="stable-diffusion-3",
        size_multiple=multiple,
        min_size=multiple,
        width=side,
        height=side,
        steps=28,
        guidance_scale=7.0,
        sampler=SCHEDULERS[0],
        text_length=clip_length + SD3_T5_LENGTH,
        samplers=EULER,
        max_steps=configs["scheduler"].get("num_train_timesteps", 1000),
        max_size=network.get("pos_embed_max_size", 96) * multiple,
        prompt_tokens=SD3_T5_LENGTH - 1 if has_t5 else clip_length - 2,
        tokenizer="tokenizer_3" if has_t5 else "tokenizer",
        strength=0.6,
        makes_cut_step=True,
    )


def flux(configs: Mapping[str, Config], clip_length: int) -> Facts:
    """As `stable_diffusion_3`, of a FLUX.1 folder."""
    check_scheduler(configs["scheduler"])
    scale = vae_scale(configs["vae"])
    is_distilled = configs["transformer"].get("guidance_embeds", False)
    return Facts(
        family="flux",
        size_multiple=2 * scale,
        min_size=2 * scale,
        width=_FLUX_SIDE * scale,
        height=_FLUX_SIDE * scale,
        steps=28,
        guidance_scale=3.5 if is_distilled else 0.0,
        sampler=SCHEDULERS[0],
        text_length=FLUX_T5_LENGTH,
        samplers=EULER,
        guiding="true_cfg_scale",
        true_cfg_scale=1.0,
        needs_negative=True,
        strength=0.6,
        makes_cut_step=True,
        takes_guidance_scale=is_distilled,
        half_dtype="bfloat16",
        max_steps=configs["scheduler"].get("num_train_timesteps", 1000),
        prompt_tokens=FLUX_T5_LENGTH - 1,
        tokenizer="tokenizer_2",
    )


def flux2_klein(configs: Mapping[str, Config], clip_length: int) -> Facts:
    """As `stable_diffusion_3`, of a FLUX.2 klein folder."""
    check_scheduler(configs["scheduler"])
    scale = vae_scale(configs["vae"])
    is_distilled = configs["model_index.json"].get("is_distilled", False)
    return Facts(
        family="flux2-klein",
        size_multiple=2 * scale,
        min_size=2 * scale,
        width=_FLUX_SIDE * scale,
        height=_FLUX_SIDE * scale,
        steps=50,
        guidance_scale=0.0 if is_distilled else 4.0,
        sampler=SCHEDULERS[0],
        text_length=FLUX2_LENGTH,
        samplers=EULER,
        guided_above=None if is_distilled else 1.0,
        takes_negative=False,
        takes_guidance_scale=not is_distilled,
        half_dtype="bfloat16",
        max_steps=configs["scheduler"].get("num_train_timesteps", 1000),
        prompt_tokens=FLUX2_LENGTH - _BEFORE_PROMPT,
    )


def qwen_image(configs: Mapping[str, Config], clip_length: int) -> Facts:
    """As `stable_diffusion_3`, of a Qwen-Image folder."""
    check_scheduler(configs["scheduler"])
    scale = 2 ** len(configs["vae"].get("temperal_downsample", (False, True, True)))
    return Facts(
        family="qwen-image",
        size_multiple=2 * scale,
        min_size=2 * scale,
        width=_FLUX_SIDE * scale,
        height=_FLUX_SIDE * scale,
        steps=50,
        guidance_scale=0.0,
        sampler=SCHEDULERS[0],
        text_length=QWEN_LENGTHS.allowed[-1],
        samplers=EULER,
        guiding="true_cfg_scale",
        true_cfg_scale=4.0,
        needs_negative=True,
        takes_guidance_scale=False,
        half_dtype="bfloat16",
        max_steps=configs["scheduler"].get("num_train_timesteps", 1000),
        prompt_tokens=QWEN_LENGTHS.allowed[-1],
        lengths=QWEN_LENGTHS,
    )


def z_image(configs: Mapping[str, Config], clip_length: int) -> Facts:
    """As `stable_diffusion_3`, of a Z-Image folder."""
    check_scheduler(configs["scheduler"])
    scale = vae_scale(configs["vae"])
    return Facts(
        family="z-image",
        size_multiple=2 * scale,
        min_size=2 * scale,
        width=_Z_SIDE,
        height=_Z_SIDE,
        steps=50,
        guidance_scale=5.0,
        sampler=SCHEDULERS[0],
        text_length=Z_LENGTHS.allowed[-1],
        samplers=EULER,
        guided_above=0.0,
        half_dtype="bfloat16",
        max_steps=configs["scheduler"].get("num_train_timesteps", 1000),
        max_size=2 * scale * min(configs["transformer"].get("axes_lens", (1024, 512, 512))[1:]),
        prompt_tokens=Z_LENGTHS.allowed[-1] - _BEFORE_PROMPT,
        lengths=Z_LENGTHS,
    )


def chroma(configs: Mapping[str, Config], clip_length: int) -> Facts:
    """As `stable_diffusion_3`, of a Chroma folder."""
    check_scheduler(configs["scheduler"])
    scale = vae_scale(configs["vae"])
    return Facts(
        family="chroma",
        size_multiple=2 * scale,
        min_size=2 * scale,
        width=_FLUX_SIDE * scale,
        height=_FLUX_SIDE * scale,
        steps=35,
        guidance_scale=5.0,
        sampler=SCHEDULERS[0],
        text_length=FLUX_T5_LENGTH,
        samplers=EULER,
        half_dtype="bfloat16",
        max_steps=configs["scheduler"].get("num_train_timesteps", 1000),
        prompt_tokens=FLUX_T5_LENGTH - 1,
    )


def cogview4(configs: Mapping[str, Config], clip_length: int) -> Facts:
    """As `stable_diffusion_3`, of a CogView4 folder."""
    check_scheduler(configs["scheduler"])
    network, scale = configs["transformer"], vae_scale(configs["vae"])
    side = network.get("sample_size", 128) * scale
    return Facts(
        family="cogview-4",
        size_multiple=2 * scale,
        min_size=2 * scale,
        width=side,
        height=side,
        steps=50,
        guidance_scale=5.0,
        sampler=SCHEDULERS[0],
        text_length=COGVIEW_LENGTHS.allowed[-1],
        samplers=EULER,
        half_dtype="bfloat16",
        max_steps=configs["scheduler"].get("num_train_timesteps", 1000),
        prompt_tokens=COGVIEW_LENGTHS.allowed[-1] - _BEFORE_TEXT,
        lengths=COGVIEW_LENGTHS,
    )


def check_scheduler(scheduler: Config) -> None:
    """Raises UsageError for a scheduler that draws step noise: diffusers' pipelines of these families give it no
    generator."""
    if scheduler.get("stochastic_sampling"):
        raise UsageError(
            "the model folder's scheduler has stochastic_sampling, whose noise no seed decides in diffusers' pipeline "
            "of this family; set it to false in scheduler/scheduler_config.json"
        )


def vae_scale(vae: Config) -> int:
    """Pixels of an image along a side of each latent."""
    return int(2 ** (len(vae.get("block_out_channels", (64,))) - 1))
