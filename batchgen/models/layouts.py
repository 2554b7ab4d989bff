"""The families' diffusers folders: which components they have, and which library classes may stand for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from batchgen.models import facts


@dataclass(frozen=True, slots=True)
class Component:
    """One subfolder of a diffusers folder."""

    library: str
    classes: tuple[str, ...]
    """Those that may be named in model_index.json; the first one that the library has loads it."""
    config: str = "config.json"
    weights: str | None = None
    """The weights' file name without variant and ending; None where there are none."""

    @property
    def is_tokenizer(self) -> bool:
        return self.config == "tokenizer_config.json"


@dataclass(frozen=True, slots=True)
class Layout:
    """A model family as a folder."""

    components: Mapping[str, Component]
    facts: Callable[[facts.Config, facts.Config, facts.Config, int], facts.Facts]
    """Of the configurations of unet, vae and scheduler, and the tokenizer's length."""
    checker: Mapping[str, Component] = field(default_factory=dict)
    """The safety checker's components, which are read only if the job asks for it; none where the family has none."""


_TOKENIZER = Component("transformers", ("CLIPTokenizer", "CLIPTokenizerFast"), "tokenizer_config.json")
_COMPONENTS: Mapping[str, Component] = {
    "unet": Component("diffusers", ("UNet2DConditionModel",), weights="diffusion_pytorch_model"),
    "vae": Component("diffusers", ("AutoencoderKL",), weights="diffusion_pytorch_model"),
    "text_encoder": Component("transformers", ("CLIPTextModel",), weights="model"),
    "tokenizer": _TOKENIZER,
    "scheduler": Component("diffusers", facts.SCHEDULERS, "scheduler_config.json"),
}
_COMPONENTS_XL: Mapping[str, Component] = {
    **_COMPONENTS,
    "text_encoder_2": Component("transformers", ("CLIPTextModelWithProjection",), weights="model"),
    "tokenizer_2": _TOKENIZER,
}
_CHECKER: Mapping[str, Component] = {
    "safety_checker": Component("stable_diffusion", ("StableDiffusionSafetyChecker",), weights="model"),
    # The one that resizes by Pillow first: by torchvision, where that is installed, other pixels would come out.
    "feature_extractor": Component(
        "transformers",
        ("CLIPImageProcessorPil", "CLIPImageProcessor", "CLIPImageProcessorFast", "CLIPFeatureExtractor"),
        "preprocessor_config.json",
    ),
}

FAMILIES: Mapping[str, Layout] = {
    "StableDiffusionPipeline": Layout(_COMPONENTS, facts.stable_diffusion, _CHECKER),
    "StableDiffusionXLPipeline": Layout(_COMPONENTS_XL, facts.stable_diffusion_xl),
}
"""By the pipeline class that model_index.json names."""
