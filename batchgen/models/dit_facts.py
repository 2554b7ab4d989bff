"""What planning must know of the diffusion transformers that attend to a text of fixed length, without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from batchgen.errors import UsageError
from batchgen.models.facts import Config, Facts, SamplerFacts, samplers_of
from batchgen.models.flow_facts import EULER, SCHEDULERS, check_scheduler, vae_scale
from batchgen.models.signatures import parameters

ALPHA_LENGTH, SIGMA_LENGTH = 120, 300
"""Tokens of T5 that PixArtAlphaPipeline and PixArtSigmaPipeline take by default."""
AURA_LENGTH = 256
"""Likewise AuraFlowPipeline."""
_AURA_SIDE = 128
"""Latents along a side, whatever the network's configuration says."""
HUNYUAN_LENGTHS = (77, 256)
"""Tokens of CLIP and of T5 that HunyuanDiTPipeline takes."""
SANA_LENGTH = 300
"""Tokens of Gemma that the network is told; of the next, those that are the instructions' last and first."""
_OF_INSTRUCTION = 2
SANA_SCHEDULERS = ("DPMSolverMultistepScheduler", "FlowMatchEulerDiscreteScheduler")
LUMINA_LENGTH = 256
"""Tokens of Gemma that Lumina2Pipeline takes by default, those of the next included."""
LUMINA_SYSTEM = (
    "You are an assistant designed to generate superior images with the superior degree of image-text alignment based "
    "on textual prompts or user prompts."
)
"""What it puts before each prompt, but not before negative ones."""
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


def hunyuan_dit(configs: Mapping[str, Config], clip_length: int) -> Facts:
    """As `pixart_sigma`, of a HunyuanDiT folder."""
    return replace(
        pixart_sigma(configs, clip_length),
        family="hunyuan-dit",
        steps=50,
        guidance_scale=5.0,
        text_length=sum(HUNYUAN_LENGTHS),
        prompt_tokens=HUNYUAN_LENGTHS[1] - 1,
        tokenizer="tokenizer_2",
        reads=str,
    )


def sana(configs: Mapping[str, Config], clip_length: int) -> Facts:
    """As `pixart_sigma`, of a Sana folder. Raises UsageError for a scheduler that SanaPipeline cannot run."""
    scheduler, network, vae = (configs[name] for name in ("scheduler", "transformer", "vae"))
    own = str(scheduler["_class_name"])
    if own != SANA_SCHEDULERS[0]:
        check_unshifted(scheduler)
    scale = 2 ** (len(vae.get("encoder_block_out_channels", (0,) * 6)) - 1)
    multiple = scale * network.get("patch_size", 1)
    side = network.get("sample_size", 32) * scale
    solvers = {name: one for name, one in samplers_of(scheduler).items() if name in ("dpmpp_2m", SANA_SCHEDULERS[0])}
    return Facts(
        family="sana",
        size_multiple=multiple,
        min_size=multiple,
        width=side,
        height=side,
        steps=20,
        guidance_scale=4.5,
        sampler=own,
        text_length=SANA_LENGTH,
        samplers=solvers if own == SANA_SCHEDULERS[0] else EULER,
        half_dtype="bfloat16",
        max_steps=scheduler.get("num_train_timesteps", 1000),
        prompt_tokens=SANA_LENGTH - _OF_INSTRUCTION,
        reads=with_instruction,
        reads_negative=plain,
    )


def aura_flow(configs: Mapping[str, Config], clip_length: int) -> Facts:
    """As `pixart_sigma`, of an AuraFlow folder. Raises UsageError for a scheduler that AuraFlowPipeline cannot run."""
    check_unshifted(configs["scheduler"])
    network, scale = configs["transformer"], vae_scale(configs["vae"])
    multiple = scale * network.get("patch_size", 2)
    return Facts(
        family="aura-flow",
        size_multiple=multiple,
        min_size=multiple,
        width=_AURA_SIDE * scale,
        height=_AURA_SIDE * scale,
        steps=50,
        guidance_scale=3.5,
        sampler=SCHEDULERS[0],
        text_length=AURA_LENGTH,
        samplers=EULER,
        max_steps=configs["scheduler"].get("num_train_timesteps", 1000),
        max_size=math.isqrt(network.get("pos_embed_max_size", 1024)) * multiple,
        prompt_tokens=AURA_LENGTH - 1,
        upcasts_vae=True,
    )


def lumina2(configs: Mapping[str, Config], clip_length: int) -> Facts:
    """As `pixart_sigma`, of a Lumina-Image 2.0 folder."""
    check_scheduler(configs["scheduler"])
    network, scale = configs["transformer"], vae_scale(configs["vae"])
    multiple = scale * network.get("patch_size", 2)
    side = network.get("sample_size", 128) * scale
    return Facts(
        family="lumina-2",
        size_multiple=multiple,
        min_size=multiple,
        width=side,
        height=side,
        steps=30,
        guidance_scale=4.0,
        sampler=SCHEDULERS[0],
        text_length=LUMINA_LENGTH,
        samplers=EULER,
        half_dtype="bfloat16",
        max_steps=configs["scheduler"].get("num_train_timesteps", 1000),
        max_size=multiple * min(network.get("axes_lens", (300, 512, 512))[1:]),
        prompt_tokens=LUMINA_LENGTH - 1,
        reads=with_system_prompt,
        reads_negative=str,
        is_added_within=True,
    )


def sana_instruction() -> str:
    """What SanaPipeline puts before each prompt by default. Raises UsageError without diffusers."""
    taken = parameters("SanaPipeline")
    assert taken is not None, "diffusers has had it since 0.32"
    return "\n".join(taken["complex_human_instruction"])


def with_instruction(text: str) -> str:
    """A prompt as SanaPipeline's tokenizer is given it."""
    return sana_instruction() + plain(text)


def with_system_prompt(text: str) -> str:
    """A prompt as Lumina2Pipeline's tokenizer is given it."""
    return f"{LUMINA_SYSTEM} <Prompt Start> {text}"


def check_unshifted(scheduler: Config) -> None:
    """Raises UsageError for a flow-matching scheduler that the family's pipeline cannot run: as `check_scheduler`, and
    one that shifts by the image's size, which it is not told."""
    check_scheduler(scheduler)
    if scheduler.get("use_dynamic_shifting"):
        raise UsageError(
            "the model folder's scheduler has use_dynamic_shifting, but diffusers' pipeline of this family tells it no "
            "size; set it to false in scheduler/scheduler_config.json"
        )
