"""What planning must know of a model without torch: a table per family, and the JSON files of a model folder.

A test holds each entry equal to what the family does with its real scheduler objects.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np

from batchgen.errors import UsageError
from batchgen.models.lengths import Lengths
from batchgen.records import Row

OWN_UPDATE = ""
"""The form of a sampler that is no affine map per evaluation: it runs its own update, one (sampler, steps) at
a time."""

Config = Mapping[str, Any]
"""A component's JSON file in a diffusers folder."""


@dataclass(frozen=True, slots=True)
class SamplerFacts:
    """How a sampler's name maps onto diffusers, and what its update needs."""

    scheduler: str
    """The diffusers class, built by `from_config` from the model folder's own scheduler configuration."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Configuration laid over the folder's."""
    form: str = OWN_UPDATE
    """The terms of one update, comma-separated: x (latents), x1 (previous latents), e (prediction),
    e1, e2, e3 (earlier predictions), z (the row's noise)."""
    evaluations: Callable[[int], int] = lambda steps: steps
    """Model evaluations for a step count."""
    makes: Callable[[int], bool] = lambda steps: True
    """Whether the scheduler makes a step count, of those up to the model's most."""
    needs: str = ""
    """A Python package that the scheduler imports beside diffusers' own."""
    order: int = 1
    """Timesteps that diffusers counts for one step where an init image stands for the first ones."""

    def evaluations_after(self, steps: int, skipped: int) -> int:
        """Model evaluations for a step count of which the first ones are skipped."""
        return self.evaluations(steps) - self.order * skipped


@dataclass(frozen=True, slots=True)
class Facts:
    """One model, as far as planning is concerned."""

    family: str
    size_multiple: int
    min_size: int
    width: int
    height: int
    steps: int
    guidance_scale: float
    sampler: str
    """Defaults of the family, taken where neither manifest nor job file says anything."""
    text_length: int
    """Tokens that the network is told of a prompt, padding included; the most, where `lengths` are."""
    samplers: Mapping[str, SamplerFacts]
    """By short name, and by diffusers class."""
    guided_above: float | None = 1.0
    """A row is guided if the scale in its `guiding` column exceeds this; None where no row is guided."""
    guiding: str = "guidance_scale"
    """The column whose scale weighs prompt against negative prompt: guidance_scale, or true_cfg_scale."""
    needs_negative: bool = False
    """Whether a row is guided only if it has a negative prompt, be it the empty one."""
    takes_negative: bool = True
    """Whether a guided row may say what weighs against its prompt."""
    takes_guidance_scale: bool = True
    """Whether guidance_scale has any effect."""
    needs_torch: bool = True
    max_steps: int | None = None
    """Steps that the training schedule has; more cannot be asked for."""
    note: str = ""
    """What a person should be told before using the model."""
    true_cfg_scale: float | None = None
    """The default of that column; None where the family has none."""
    is_captured: bool = True
    """Whether steps are run by the engine, compiled or captured; else by diffusers' own pipeline, row by row."""
    half_dtype: str = "float16"
    """What its network runs in on a GPU, where the job says nothing."""
    max_size: int | None = None
    """Of width and of height; None where the network sets no bound."""
    prompt_tokens: int = 0
    """That the text encoder with the longest reach reads of a prompt, its markers left out; 0 without one."""
    tokenizer: str = "tokenizer"
    """The component that counts them."""
    lengths: Lengths | None = None
    """Where the text's length follows the prompt."""
    strength: float | None = None
    """The default of that column for a row with an init image; None where the family takes no init image."""
    upcasts_vae: bool = False
    """Whether the VAE of a float16 model is float32 where its configuration says that it overflows in float16
    (`force_upcast`)."""
    makes_cut_step: bool = False
    """Whether the step that a strength falls into is made: with 0.5, one or two of three."""
    reads: Callable[[str], str] = str
    """What the tokenizer is given of a prompt; what that adds to every prompt does not count."""
    reads_negative: Callable[[str], str] | None = None
    """Likewise of a negative prompt, where that is something else."""
    is_added_within: bool = False
    """Whether what `reads` adds takes its part of `prompt_tokens`."""

    def is_guided(self, scale: float) -> bool:
        """The family's own rule for running the network twice per step, for a row with a negative prompt."""
        return self.guided_above is not None and scale > self.guided_above

    def guides(self, row: Row) -> bool:
        """Whether the network runs twice per step for a row."""
        has_negative = row.negative_prompt is not None or not self.needs_negative
        return has_negative and self.is_guided(getattr(row, self.guiding))

    @property
    def has_true_cfg(self) -> bool:
        """Whether true_cfg_scale is a column of the family's."""
        return self.true_cfg_scale is not None

    @property
    def takes_image(self) -> bool:
        """Whether a row may begin from an init image."""
        return self.strength is not None

    def skipped(self, steps: Any, strength: Any) -> Any:
        """How many of a row's steps its init image stands for, as diffusers' image-to-image pipeline of the family
        counts them; of numbers, or of arrays of them."""
        made = steps * np.minimum(strength, 1.0)
        whole = np.floor(steps - made) if self.makes_cut_step else steps - np.floor(made)
        return whole.astype(np.int64)

    def skips(self, row: Row) -> int | None:
        """`skipped` of one row; None without an init image."""
        return None if row.init is None else int(self.skipped(row.steps, row.strength))

    def evaluations(self, sampler: str, steps: int, strength: float | None) -> int:
        """Model evaluations of a row with one of `samplers`; its strength is None without an init image."""
        skipped = 0 if strength is None else int(self.skipped(steps, strength))
        return self.samplers[sampler].evaluations_after(steps, skipped)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that change an image."""
        negative = ("negative_prompt",) if self.guided_above is not None and self.takes_negative else ()
        guidance = ("guidance_scale",) if self.takes_guidance_scale else ()
        true_cfg = ("true_cfg_scale",) if self.has_true_cfg else ()
        image = ("image", "strength") if self.takes_image else ()
        return ("prompt", *negative, "width", "height", "steps", *guidance, *true_cfg, *image, "sampler", "seed")

    def sampler_facts(self, name: str) -> SamplerFacts:
        """Facts of a sampler by name. Raises UsageError, with the nearest name, if there is none."""
        if name in self.samplers:
            found = self.samplers[name]
            if found.needs and find_spec(found.needs) is None:
                raise UsageError(f"{name!r} needs the package {found.needs}, which is not installed")
            return found
        known = {_plain(known): known for known in reversed(list(self.samplers))}
        near = difflib.get_close_matches(_plain(name), known, n=1, cutoff=0.5)
        short = ", ".join(one for one in self.samplers if one in SAMPLERS)
        classes = next((one for one in reversed(list(self.samplers)) if one not in SAMPLERS), "")
        or_class = f", or a scheduler's class in diffusers, such as {classes}" if classes else ""
        takes = f"known: {short}{or_class}"
        hint = f"did you mean {known[near[0]]!r}? ({takes})" if near else takes
        raise UsageError(f"{name!r} is no sampler; {hint}")


def _plain(sampler: str) -> str:
    return sampler.lower().removesuffix("scheduler")


SAMPLERS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "ddim": ("DDIMScheduler", {"clip_sample": False}),
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True}),
    "euler": ("EulerDiscreteScheduler", {}),
    "euler_ancestral": ("EulerAncestralDiscreteScheduler", {}),
    "heun": ("HeunDiscreteScheduler", {}),
    "deis": ("DEISMultistepScheduler", {"algorithm_type": "deis"}),
    "dpmpp_2m": (
        "DPMSolverMultistepScheduler",
        {"algorithm_type": "dpmsolver++", "solver_order": 2, "use_karras_sigmas": False},
    ),
    "dpmpp_2m_karras": (
        "DPMSolverMultistepScheduler",
        {"algorithm_type": "dpmsolver++", "solver_order": 2, "use_karras_sigmas": True},
    ),
}
"""Short names: the diffusers class and what is laid over the folder's configuration. The options are those
that a latent diffusion model needs where its folder leaves them to the class: no clipping of latents, and
PNDM without its Runge-Kutta start."""

SCHEDULERS: tuple[str, ...] = (
    "DDIMParallelScheduler",
    "DDIMScheduler",
    "DDPMParallelScheduler",
    "DDPMScheduler",
    "DEISMultistepScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "EulerAncestralDiscreteScheduler",
    "EulerDiscreteScheduler",
    "HeunDiscreteScheduler",
    "KDPM2AncestralDiscreteScheduler",
    "KDPM2DiscreteScheduler",
    "LCMScheduler",
    "LMSDiscreteScheduler",
    "PNDMScheduler",
    "SASolverScheduler",
    "TCDScheduler",
    "UniPCMultistepScheduler",
)
"""Every diffusers scheduler that runs in a Stable Diffusion pipeline from text alone with each row's own
noise. Left out: inversion, other model families' own, and DPMSolverSDE, whose noise is one for a batch."""

_AFFINE: Mapping[str, tuple[str, Config]] = {
    "DDIMScheduler": ("x,e", {"clip_sample": True, "thresholding": False}),
    "DDPMScheduler": ("x,e,z", {"clip_sample": True, "thresholding": False, "variance_type": "fixed_small"}),
    "PNDMScheduler": ("x,x1,e,e1,e2,e3", {"skip_prk_steps": False}),
    "EulerDiscreteScheduler": ("x,e", {}),
    "EulerAncestralDiscreteScheduler": ("x,e,z", {}),
    "HeunDiscreteScheduler": ("x,x1,e,e1", {"clip_sample": False}),
    "DEISMultistepScheduler": ("x,x1,e,e1", {"solver_order": 2, "thresholding": False}),
    "DPMSolverMultistepScheduler": (
        "x,x1,e,e1",
        {"solver_order": 2, "thresholding": False, "algorithm_type": "dpmsolver++"},
    ),
}
"""Classes that can be affine: the form, and the class's defaults of the keys that decide whether they are."""

_NEEDS = {"LMSDiscreteScheduler": "scipy"}
_DISTILLED = {"LCMScheduler", "TCDScheduler"}
_INDEXED = {"DDIMScheduler", "DDIMParallelScheduler", "DDPMScheduler", "DDPMParallelScheduler", "PNDMScheduler"}
"""They look each timestep up in the training schedule."""
_SOLVERS = {"DEISMultistepScheduler", "DPMSolverMultistepScheduler", "SASolverScheduler", "UniPCMultistepScheduler"}
"""They divide by the distance of two timesteps."""
_OTHER_SIGMAS = (
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "use_flow_sigmas",
    "use_lu_lambdas",
)
"""Keys by which a solver places its steps by noise instead of by timestep."""
_TWICE_PER_STEP = {"HeunDiscreteScheduler", "KDPM2DiscreteScheduler", "KDPM2AncestralDiscreteScheduler"}


def samplers_of(scheduler: Config, stops_clipping: bool = False) -> dict[str, SamplerFacts]:
    """The samplers of a folder whose `scheduler_config.json` is given.

    `stops_clipping`: the family's pipeline turns clip_sample off in the folder's own scheduler, as
    StableDiffusionPipeline does.
    """
    short = {name: _sampler(scheduler, cls, options, stops_clipping) for name, (cls, options) in SAMPLERS.items()}
    return short | {cls: _sampler(scheduler, cls, {}, stops_clipping) for cls in SCHEDULERS}


def _sampler(scheduler: Config, cls: str, options: Mapping[str, object], stops_clipping: bool) -> SamplerFacts:
    form, defaults = _AFFINE.get(cls, (OWN_UPDATE, {}))
    config = _config(scheduler, cls, options, defaults, stops_clipping)
    is_affine = not (
        config.get("clip_sample")
        or config.get("thresholding")
        or config.get("skip_prk_steps") is False
        or config.get("solver_order", 2) > 2
        or str(config.get("algorithm_type")).startswith("sde")
        or str(config.get("variance_type")).startswith("learned")
    )
    evaluations = _evaluations(cls, config, scheduler)
    makes = _makes(cls, {**scheduler, **options})
    order = 2 if cls in _TWICE_PER_STEP else 1
    return SamplerFacts(cls, options, form if is_affine else OWN_UPDATE, evaluations, makes, _NEEDS.get(cls, ""), order)


def _config(scheduler: Config, cls: str, options: Config, defaults: Config, stops_clipping: bool) -> Config:
    """`from_config` in small: a key that the folder leaves out takes the target class's default.

    Where clipping is turned off in the folder's own scheduler, keys that the folder names carry that over to other
    classes, defaults do not.
    """
    named = {key: scheduler[key] for key in defaults if key in scheduler}
    is_own = cls == scheduler.get("_class_name") and not options
    if stops_clipping and ("clip_sample" in named or (is_own and "clip_sample" in defaults)):
        named["clip_sample"] = False
    return {**defaults, **named, **{key: value for key, value in options.items() if key in defaults}}


def _evaluations(cls: str, config: Config, scheduler: Config) -> Callable[[int], int]:
    train_steps = scheduler.get("num_train_timesteps", 1000)

    def timesteps(steps: int) -> int:
        """As diffusers counts them: its floating-point range is one too long for a few step counts."""
        if scheduler.get("timestep_spacing") != "trailing" or cls in _DISTILLED:
            return steps
        return len(np.arange(train_steps, 0, -train_steps / steps))

    if cls in _TWICE_PER_STEP:
        return lambda steps: 2 * timesteps(steps) - 1
    if cls == "PNDMScheduler" and config["skip_prk_steps"]:
        return lambda steps: timesteps(steps) + 1 if steps > 1 else 1
    if cls == "PNDMScheduler":
        return lambda steps: timesteps(steps) + 9
    return timesteps


def _makes(cls: str, config: Config) -> Callable[[int], bool]:
    """Where diffusers' timesteps leave the training schedule, or meet so that a solver divides by nothing."""
    train, offset = config.get("num_train_timesteps", 1000), config.get("steps_offset", 0)
    spacing = config.get("timestep_spacing", "linspace" if cls in _SOLVERS else "leading")
    if cls in _DISTILLED:
        original = config.get("original_inference_steps", 50)
        return lambda steps: steps <= original <= train
    if cls in _INDEXED:
        least = 4 if cls == "PNDMScheduler" and not config.get("skip_prk_steps", False) else 1
        return lambda steps: (
            steps >= least and (spacing != "leading" or (steps - 1) * (train // steps) + offset < train)
        )
    if cls not in _SOLVERS or spacing == "trailing" or any(config.get(key) for key in _OTHER_SIGMAS):
        return lambda steps: True
    if spacing == "linspace":
        return lambda steps: steps < train
    # The second of them must lie below the last timestep of training, which the first may be cut to.
    return lambda steps: steps < train and (steps == 1 or (steps - 1) * (train // (steps + 1)) + offset < train - 1)


PATTERN = Facts(
    family="pattern",
    size_multiple=8,
    min_size=64,
    width=64,
    height=64,
    steps=20,
    guidance_scale=7.5,
    sampler="ddim",
    text_length=0,
    samplers=samplers_of({"_class_name": "DDIMScheduler", "clip_sample": False, "skip_prk_steps": True}),
    needs_torch=False,
    max_steps=1000,
    strength=0.8,
)
"""The model without a network: planned like Stable Diffusion with its usual configuration."""
