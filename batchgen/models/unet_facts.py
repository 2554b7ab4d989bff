"""What planning must know of latent diffusion by a UNet, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from batchgen.errors import UsageError
from batchgen.models.facts import SCHEDULERS, Config, Facts, SamplerFacts, samplers_of

KOLORS_LENGTH = 256
"""Tokens of ChatGLM that KolorsPipeline takes by default, its two markers among them."""


def stable_diffusion(unet: Config, vae: Config, scheduler: Config, text_length: int) -> Facts:
    """Facts of a Stable Diffusion 1.x or 2.x folder from its configuration files.

    Raises UsageError if the folder's own scheduler is none that this family can run.
    """
    return _latent_diffusion(unet, vae, scheduler, text_length, samplers_of(scheduler, stops_clipping=True))


def stable_diffusion_xl(unet: Config, vae: Config, scheduler: Config, text_length: int) -> Facts:
    """As `stable_diffusion`, of an SDXL folder."""
    found = _latent_diffusion(unet, vae, scheduler, text_length, samplers_of(scheduler), default_sample=128)
    return replace(found, family="stable-diffusion-xl", guidance_scale=5.0, strength=0.3, upcasts_vae=True)


def kolors(configs: Mapping[str, Config], clip_length: int) -> Facts:
    """As `stable_diffusion`, of a Kolors folder, from its configuration files by component. Raises UsageError, too, for
    one whose null negative prompts diffusers cannot make."""
    if configs["model_index.json"].get("force_zeros_for_empty_prompt"):
        raise UsageError(
            "the model folder's model_index.json has force_zeros_for_empty_prompt, with which diffusers' "
            "KolorsPipeline fails for each guided row without a negative prompt; set it to false there"
        )
    unet, vae, scheduler = (configs[name] for name in ("unet", "vae", "scheduler"))
    found = _latent_diffusion(unet, vae, scheduler, KOLORS_LENGTH, samplers_of(scheduler), default_sample=128)
    return replace(found, family="kolors", guidance_scale=5.0, strength=None, upcasts_vae=True)


def _latent_diffusion(
    unet: Config,
    vae: Config,
    scheduler: Config,
    text_length: int,
    samplers: Mapping[str, SamplerFacts],
    default_sample: int = 64,
) -> Facts:
    own = scheduler.get("_class_name")
    if own not in samplers:
        raise UsageError(
            f"the model folder's scheduler is {own!r}, which does not run in a Stable Diffusion "
            f"pipeline here; known: {', '.join(SCHEDULERS)}; change scheduler/scheduler_config.json"
        )
    scale = 2 ** (len(vae.get("block_out_channels", (64,))) - 1)
    sample = unet.get("sample_size") or default_sample
    height, width = (sample, sample) if isinstance(sample, int) else sample
    return Facts(
        family="stable-diffusion",
        size_multiple=max(8, scale),
        min_size=64,
        width=width * scale,
        height=height * scale,
        steps=50,
        guidance_scale=7.5,
        sampler=str(own),
        text_length=text_length,
        samplers=samplers,
        guided_above=None if unet.get("time_cond_proj_dim") is not None else 1.0,
        max_steps=scheduler.get("num_train_timesteps", 1000),
        prompt_tokens=text_length - 2,
        strength=0.8,
    )
