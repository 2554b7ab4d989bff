"""A row's parameters as the Stable Diffusion web UI writes them: what its tab "PNG Info", and many other tools, read.

The form is that of AUTOMATIC1111/stable-diffusion-webui (`modules/processing.py`, `create_infotext`, read by
`modules/infotext_utils.py`): the prompt, a line that begins with "Negative prompt: " if there is one, and a last line
of `Name: value` pairs. It has no escapes for prompts: their lines lose blanks at both ends, and one that begins with
"Negative prompt:" is read as that. The exact parameters are in the chunk that `codec` writes beside it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

KEYWORD = "parameters"
"""Of the PNG text chunk."""

_SAMPLERS: Mapping[str, tuple[str, str | None]] = {
    "ddim": ("DDIM", None),
    "pndm": ("PLMS", None),
    "euler": ("Euler", None),
    "euler_ancestral": ("Euler a", None),
    "heun": ("Heun", None),
    "dpmpp_2m": ("DPM++ 2M", None),
    "dpmpp_2m_karras": ("DPM++ 2M", "Karras"),
    "DDIMScheduler": ("DDIM", None),
    "PNDMScheduler": ("PLMS", None),
    "EulerDiscreteScheduler": ("Euler", None),
    "EulerAncestralDiscreteScheduler": ("Euler a", None),
    "HeunDiscreteScheduler": ("Heun", None),
    "KDPM2DiscreteScheduler": ("DPM2", None),
    "KDPM2AncestralDiscreteScheduler": ("DPM2 a", None),
    "LCMScheduler": ("LCM", None),
    "LMSDiscreteScheduler": ("LMS", None),
    "UniPCMultistepScheduler": ("UniPC", None),
}
"""Our samplers' names there, with the schedule type. Others have none and keep ours."""


def infotext(parameters: Mapping[str, Any]) -> str:
    """The text of a row's parameters (`metadata.parameters`)."""
    negative = parameters["negative_prompt"]
    lines = [parameters["prompt"]]
    lines += [f"Negative prompt: {negative}"] if negative else []
    lines += [", ".join(f"{name}: {_quoted(value)}" for name, value in _pairs(parameters).items() if value is not None)]
    return "\n".join(lines)


def _pairs(parameters: Mapping[str, Any]) -> dict[str, str | None]:
    sampler, schedule = _SAMPLERS.get(parameters["sampler"], (parameters["sampler"], None))
    guidance, true_scale = parameters["guidance_scale"], parameters.get("true_cfg_scale")
    strength = parameters.get("strength")
    return {
        "Steps": str(parameters["steps"]),
        "Sampler": sampler,
        "Schedule type": schedule,
        "CFG scale": _number(guidance if true_scale is None else true_scale),
        "Distilled CFG Scale": None if true_scale is None else _number(guidance),
        "Denoising strength": None if strength is None else _number(strength),
        "Seed": parameters["seed"],
        "Size": f"{parameters['width']}x{parameters['height']}",
        "Model": parameters["model"],
        "RNG": "CPU",
    }


def _number(value: float) -> str:
    return repr(value).removesuffix(".0")


def _quoted(value: str) -> str:
    """As it is, or as a JSON string where it holds a separator of the form or begins like one."""
    is_plain = value == value.strip() and not any(mark in value for mark in ',:\n"')
    return value if is_plain else json.dumps(value, ensure_ascii=False)
