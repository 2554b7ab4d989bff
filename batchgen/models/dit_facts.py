"""What planning must know of the diffusion transformers that attend to a text of fixed length, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from batchgen.models.facts import Config, Facts, SamplerFacts, samplers_of
from batchgen.models.flow_facts import vae_scale

ALPHA_LENGTH, SIGMA_LENGTH = 120, 300
"""Tokens of T5 that PixArtAlphaPipeline and PixArtSigmaPipeline take by default."""
_DENOISED_LAST = ("LCMScheduler",)
"""Schedulers whose only step PixArtAlphaPipeline can make: it asks for the denoised latents beside the next."""


def plain(text: str) -> str:
    """A text in lower case without blanks around it, as diffusers' pipelines that can clean captions leave it where
    they do not."""
    return text.lower().strip()


def pixart_sigma(configs: Mapping[str, Config], clip_length: int) -> Facts:
    """Facts of a PixArt-Sigma folder from its configuration files, by component."""
    network, scale = configs["transformer"], vae_scale(configs["vae"])
    multiple = scale * network.get("patch_size", 2)
    side = network.get("sample_size", 128) * scale
    return Facts(
        family="pixart-sigma",
        size_multiple=multiple,
        min_size=multiple,
        width=side,
        height=side,
        steps=20,
        guidance_scale=4.5,
        sampler=str(configs["scheduler"]["_class_name"]),
        text_length=SIGMA_LENGTH,
        samplers=samplers_of(configs["scheduler"]),
        max_steps=configs["scheduler"].get("num_train_timesteps", 1000),
        prompt_tokens=SIGMA_LENGTH - 1,
        reads=plain,
    )


def pixart_alpha(configs: Mapping[str, Config], clip_length: int) -> Facts:
    """As `pixart_sigma`, of a PixArt-alpha folder."""
    found = pixart_sigma(configs, clip_length)
    return replace(
        found,
        family="pixart-alpha",
        text_length=ALPHA_LENGTH,
        samplers={name: _of_more_steps(one) for name, one in found.samplers.items()},
        prompt_tokens=ALPHA_LENGTH - 1,
    )


def _of_more_steps(sampler: SamplerFacts) -> SamplerFacts:
    if sampler.scheduler in _DENOISED_LAST:
        return sampler
    return replace(sampler, makes=lambda steps: steps > 1 and sampler.makes(steps))
