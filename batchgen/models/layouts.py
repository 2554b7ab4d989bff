"""The families' diffusers folders: which components they have, and which library classes may stand for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from batchgen.models import dit_facts, facts, flow_facts, unet_facts


@dataclass(frozen=True, slots=True)
class Component:
    """One subfolder of a diffusers folder."""

    library: str
    classes: tuple[str, ...]
    """Those that may be named in model_index.json; the first one that the library has loads it."""
    config: str = "config.json"
    weights: str | None = None
    """The weights' file name without variant and ending; None where there are none."""
    is_optional: bool = False
    """Whether a folder may be without it, which model_index.json then says."""
    vocabulary: str | None = None
    """The only file that a tokenizer reads its vocabulary from; None where that may be one of several kinds."""

    @property
    def module(self) -> str:
        """Where Python has its classes: a library, or a part of diffusers that belongs to one pipeline."""
        if self.library in ("diffusers", "transformers"):
            return self.library
        part = f"diffusers.pipelines.{self.library}"
        return f"{part}.tokenizer" if self.is_tokenizer else part

    @property
    def is_tokenizer(self) -> bool:
        return self.config == "tokenizer_config.json"

    @property
    def is_clip_tokenizer(self) -> bool:
        """Whether the tokenizer's own length is the one that prompts are padded to."""
        return self.classes[0] == "CLIPTokenizer"


@dataclass(frozen=True, slots=True)
class Layout:
    """A model family as a folder."""

    components: Mapping[str, Component]
    facts: Callable[[Mapping[str, facts.Config], int], facts.Facts]
    """Of the components' configurations, by name, with model_index.json under its own, and the CLIP tokenizers'
    length."""
    network: str = "unet"
    """The component that predicts."""
    single: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """How the names of each component's tensors begin in a single file as the model's authors publish it; empty where
    such files are not read."""
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
_TOKENIZER_T5 = Component("transformers", ("T5Tokenizer", "T5TokenizerFast"), "tokenizer_config.json", is_optional=True)
_COMPONENTS_3: Mapping[str, Component] = {
    "transformer": Component("diffusers", ("SD3Transformer2DModel",), weights="diffusion_pytorch_model"),
    "vae": _COMPONENTS["vae"],
    "text_encoder": _COMPONENTS_XL["text_encoder_2"],
    "tokenizer": _TOKENIZER,
    "text_encoder_2": _COMPONENTS_XL["text_encoder_2"],
    "tokenizer_2": _TOKENIZER,
    "text_encoder_3": Component("transformers", ("T5EncoderModel",), weights="model", is_optional=True),
    "tokenizer_3": _TOKENIZER_T5,
    "scheduler": Component("diffusers", flow_facts.SCHEDULERS, "scheduler_config.json"),
}
_COMPONENTS_FLUX: Mapping[str, Component] = {
    "transformer": Component("diffusers", ("FluxTransformer2DModel",), weights="diffusion_pytorch_model"),
    "vae": _COMPONENTS["vae"],
    "text_encoder": _COMPONENTS["text_encoder"],
    "tokenizer": _TOKENIZER,
    "text_encoder_2": replace(_COMPONENTS_3["text_encoder_3"], is_optional=False),
    "tokenizer_2": replace(_TOKENIZER_T5, is_optional=False),
    "scheduler": _COMPONENTS_3["scheduler"],
}
_COMPONENTS_FLUX2: Mapping[str, Component] = {
    "transformer": Component("diffusers", ("Flux2Transformer2DModel",), weights="diffusion_pytorch_model"),
    "vae": Component("diffusers", ("AutoencoderKLFlux2",), weights="diffusion_pytorch_model"),
    # Loaded without the layer that makes words of hidden states, which would take gigabytes.
    "text_encoder": Component("transformers", ("Qwen3Model", "Qwen3ForCausalLM"), weights="model"),
    "tokenizer": Component("transformers", ("Qwen2Tokenizer", "Qwen2TokenizerFast"), "tokenizer_config.json"),
    "scheduler": _COMPONENTS_3["scheduler"],
}
_COMPONENTS_QWEN: Mapping[str, Component] = {
    "transformer": Component("diffusers", ("QwenImageTransformer2DModel",), weights="diffusion_pytorch_model"),
    "vae": Component("diffusers", ("AutoencoderKLQwenImage",), weights="diffusion_pytorch_model"),
    "text_encoder": Component("transformers", ("Qwen2_5_VLForConditionalGeneration",), weights="model"),
    "tokenizer": _COMPONENTS_FLUX2["tokenizer"],
    "scheduler": _COMPONENTS_3["scheduler"],
}
_COMPONENTS_Z: Mapping[str, Component] = {
    "transformer": Component("diffusers", ("ZImageTransformer2DModel",), weights="diffusion_pytorch_model"),
    "vae": _COMPONENTS["vae"],
    "text_encoder": _COMPONENTS_FLUX2["text_encoder"],
    "tokenizer": _COMPONENTS_FLUX2["tokenizer"],
    "scheduler": _COMPONENTS_3["scheduler"],
}
_COMPONENTS_COGVIEW: Mapping[str, Component] = {
    "transformer": Component("diffusers", ("CogView4Transformer2DModel",), weights="diffusion_pytorch_model"),
    "vae": _COMPONENTS["vae"],
    "text_encoder": Component("transformers", ("GlmModel",), weights="model"),
    # The second is transformers' own name for the first by now.
    "tokenizer": Component("transformers", ("PreTrainedTokenizerFast", "TokenizersBackend"), "tokenizer_config.json"),
    "scheduler": _COMPONENTS_3["scheduler"],
}
_COMPONENTS_CHROMA: Mapping[str, Component] = {
    "transformer": Component("diffusers", ("ChromaTransformer2DModel",), weights="diffusion_pytorch_model"),
    "vae": _COMPONENTS["vae"],
    "text_encoder": _COMPONENTS_FLUX["text_encoder_2"],
    "tokenizer": _COMPONENTS_FLUX["tokenizer_2"],
    "scheduler": _COMPONENTS_3["scheduler"],
}
_COMPONENTS_PIXART: Mapping[str, Component] = {
    # Folders of the hub name the class that it was before it had one of its own.
    "transformer": Component(
        "diffusers", ("PixArtTransformer2DModel", "Transformer2DModel"), weights="diffusion_pytorch_model"
    ),
    "vae": _COMPONENTS["vae"],
    "text_encoder": _COMPONENTS_FLUX["text_encoder_2"],
    "tokenizer": _COMPONENTS_FLUX["tokenizer_2"],
    "scheduler": _COMPONENTS["scheduler"],
}
_COMPONENTS_SANA: Mapping[str, Component] = {
    "transformer": Component("diffusers", ("SanaTransformer2DModel",), weights="diffusion_pytorch_model"),
    "vae": Component("diffusers", ("AutoencoderDC",), weights="diffusion_pytorch_model"),
    "text_encoder": Component("transformers", ("Gemma2Model",), weights="model"),
    "tokenizer": Component("transformers", ("GemmaTokenizer", "GemmaTokenizerFast"), "tokenizer_config.json"),
    "scheduler": Component("diffusers", dit_facts.SANA_SCHEDULERS, "scheduler_config.json"),
}
_COMPONENTS_LUMINA: Mapping[str, Component] = {
    **_COMPONENTS_SANA,
    "transformer": Component("diffusers", ("Lumina2Transformer2DModel",), weights="diffusion_pytorch_model"),
    "vae": _COMPONENTS["vae"],
    "scheduler": _COMPONENTS_3["scheduler"],
}
_COMPONENTS_AURA: Mapping[str, Component] = {
    "transformer": Component("diffusers", ("AuraFlowTransformer2DModel",), weights="diffusion_pytorch_model"),
    "vae": _COMPONENTS["vae"],
    "text_encoder": Component("transformers", ("UMT5EncoderModel",), weights="model"),
    "tokenizer": Component("transformers", ("LlamaTokenizer", "LlamaTokenizerFast"), "tokenizer_config.json"),
    "scheduler": _COMPONENTS_3["scheduler"],
}
_COMPONENTS_HUNYUAN: Mapping[str, Component] = {
    "transformer": Component("diffusers", ("HunyuanDiT2DModel",), weights="diffusion_pytorch_model"),
    "vae": _COMPONENTS["vae"],
    "text_encoder": Component("transformers", ("BertModel",), weights="model"),
    "tokenizer": Component("transformers", ("BertTokenizer", "BertTokenizerFast"), "tokenizer_config.json"),
    "text_encoder_2": _COMPONENTS_FLUX["text_encoder_2"],
    "tokenizer_2": replace(_COMPONENTS_FLUX["tokenizer_2"], classes=(*_TOKENIZER_T5.classes, "MT5Tokenizer")),
    "scheduler": _COMPONENTS["scheduler"],
}
_COMPONENTS_KOLORS: Mapping[str, Component] = {
    **{name: _COMPONENTS[name] for name in ("unet", "vae", "scheduler")},
    "text_encoder": Component("kolors", ("ChatGLMModel",), weights="model"),
    "tokenizer": Component("kolors", ("ChatGLMTokenizer",), "tokenizer_config.json", vocabulary="tokenizer.model"),
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


_LDM = {"unet": ("model.diffusion_model.",), "vae": ("first_stage_model.", "vae.")}
_FLOW = {
    "vae": _LDM["vae"],
    "text_encoder": ("text_encoders.clip_l.",),
    "text_encoder_2": ("text_encoders.clip_g.",),
    "text_encoder_3": ("text_encoders.t5xxl.",),
}
_SINGLE = {**_LDM, "text_encoder": ("cond_stage_model.",)}
_SINGLE_XL = {
    **_LDM,
    "text_encoder": ("conditioner.embedders.0.transformer.",),
    "text_encoder_2": ("conditioner.embedders.1.model.",),
}
_SINGLE_3 = {**_FLOW, "transformer": ("model.diffusion_model.joint_blocks.", "joint_blocks.")}
_SINGLE_FLUX = {
    "transformer": ("model.diffusion_model.double_blocks.", "double_blocks."),
    "vae": _LDM["vae"],
    "text_encoder": _FLOW["text_encoder"],
    "text_encoder_2": _FLOW["text_encoder_3"],
}
_SINGLE_FLUX2 = {
    "transformer": ("model.diffusion_model.single_stream_modulation.", "single_stream_modulation."),
}


def _of_unet(known: Callable[..., facts.Facts]) -> Callable[[Mapping[str, facts.Config], int], facts.Facts]:
    return lambda configs, length: known(configs["unet"], configs["vae"], configs["scheduler"], length)


FAMILIES: Mapping[str, Layout] = {
    "StableDiffusionPipeline": Layout(
        _COMPONENTS, _of_unet(unet_facts.stable_diffusion), single=_SINGLE, checker=_CHECKER
    ),
    "StableDiffusionXLPipeline": Layout(_COMPONENTS_XL, _of_unet(unet_facts.stable_diffusion_xl), single=_SINGLE_XL),
    "StableDiffusion3Pipeline": Layout(_COMPONENTS_3, flow_facts.stable_diffusion_3, "transformer", _SINGLE_3),
    "FluxPipeline": Layout(_COMPONENTS_FLUX, flow_facts.flux, "transformer", _SINGLE_FLUX),
    "Flux2KleinPipeline": Layout(_COMPONENTS_FLUX2, flow_facts.flux2_klein, "transformer", _SINGLE_FLUX2),
    "QwenImagePipeline": Layout(_COMPONENTS_QWEN, flow_facts.qwen_image, "transformer"),
    "ChromaPipeline": Layout(_COMPONENTS_CHROMA, flow_facts.chroma, "transformer"),
    "ZImagePipeline": Layout(_COMPONENTS_Z, flow_facts.z_image, "transformer"),
    "CogView4Pipeline": Layout(_COMPONENTS_COGVIEW, flow_facts.cogview4, "transformer"),
    "PixArtAlphaPipeline": Layout(_COMPONENTS_PIXART, dit_facts.pixart_alpha, "transformer"),
    "PixArtSigmaPipeline": Layout(_COMPONENTS_PIXART, dit_facts.pixart_sigma, "transformer"),
    "SanaPipeline": Layout(_COMPONENTS_SANA, dit_facts.sana, "transformer"),
    "AuraFlowPipeline": Layout(_COMPONENTS_AURA, dit_facts.aura_flow, "transformer"),
    "HunyuanDiTPipeline": Layout(_COMPONENTS_HUNYUAN, dit_facts.hunyuan_dit, "transformer"),
    "KolorsPipeline": Layout(_COMPONENTS_KOLORS, unet_facts.kolors),
    "Lumina2Pipeline": Layout(_COMPONENTS_LUMINA, dit_facts.lumina2, "transformer"),
}
"""By the pipeline class that model_index.json names."""
