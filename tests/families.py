"""Tiny random pipelines of every family, in real diffusers folders, and what diffusers' own pipeline makes of a row."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import string
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import pyarrow as pa
import sentencepiece
import torch
import transformers
from diffusers.pipelines.kolors import ChatGLMModel, ChatGLMTokenizer
from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

from batchgen import sharing
from batchgen.engine.whole import open_model
from batchgen.models import demo
from batchgen.models.dit_facts import sana_instruction
from batchgen.models.tokens import lengths_of
from batchgen.records import Batch, Row
from batchgen.weights import Model
from tests import tiny

FLOW_SCHEDULER: dict[str, Any] = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "num_train_timesteps": 1000,
    "shift": 3.0,
}
SHIFTING_SCHEDULER: dict[str, Any] = FLOW_SCHEDULER | {
    "use_dynamic_shifting": True,
    "base_image_seq_len": 4,
    "max_image_seq_len": 64,
    "max_shift": 1.15,
}
FLOW_VAE: dict[str, Any] = demo.VAE | {
    "latent_channels": 4,
    "scaling_factor": 1.5,
    "shift_factor": 0.06,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
CLIP: dict[str, Any] = demo.TEXT | {"projection_dim": 16}
T5: dict[str, Any] = {
    "vocab_size": 128,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
    "decoder_start_token_id": 0,
}
SD3: dict[str, Any] = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "caption_projection_dim": 32,
    "joint_attention_dim": T5["d_model"],
    "pooled_projection_dim": CLIP["projection_dim"] + tiny.TEXT_2["projection_dim"],
    "pos_embed_max_size": 16,
}
SD35: dict[str, Any] = SD3 | {"qk_norm": "rms_norm", "dual_attention_layers": [0]}
FLUX: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": T5["d_model"],
    "pooled_projection_dim": CLIP["hidden_size"],
    "guidance_embeds": True,
    "axes_dims_rope": (4, 6, 6),
}


def t5_tokenizer() -> Any:
    """A T5 tokenizer of single characters."""
    pieces = ["<pad>", "</s>", "<unk>", "▁", *map(chr, range(33, 127))]
    return transformers.T5Tokenizer(vocab=[(piece, -1.0) for piece in pieces], extra_ids=0, model_max_length=512)


def t5() -> Any:
    return transformers.T5EncoderModel(transformers.T5Config(**T5)).eval()


def clip(config: Mapping[str, Any], *, projects: bool = True) -> Any:
    cls = transformers.CLIPTextModelWithProjection if projects else transformers.CLIPTextModel
    return cls(transformers.CLIPTextConfig(**config)).eval()


def scheduler(config: Mapping[str, Any]) -> Any:
    return getattr(diffusers, config["_class_name"]).from_config(dict(config))


def sd3(transformer: Mapping[str, Any], schedule: Mapping[str, Any], *, has_t5: bool) -> Any:
    return diffusers.StableDiffusion3Pipeline(
        transformer=diffusers.SD3Transformer2DModel(**transformer).eval(),
        scheduler=scheduler(schedule),
        vae=diffusers.AutoencoderKL(**FLOW_VAE).eval(),
        text_encoder=clip(CLIP),
        tokenizer=demo.tokenizer(),
        text_encoder_2=clip(tiny.TEXT_2),
        tokenizer_2=demo.tokenizer(),
        text_encoder_3=t5() if has_t5 else None,
        tokenizer_3=t5_tokenizer() if has_t5 else None,
    )


def flux(transformer: Mapping[str, Any], schedule: Mapping[str, Any]) -> Any:
    return diffusers.FluxPipeline(
        transformer=diffusers.FluxTransformer2DModel(**transformer).eval(),
        scheduler=scheduler(schedule),
        vae=diffusers.AutoencoderKL(**FLOW_VAE).eval(),
        text_encoder=clip(CLIP, projects=False),
        tokenizer=demo.tokenizer(),
        text_encoder_2=t5(),
        tokenizer_2=t5_tokenizer(),
    )


PIXART: dict[str, Any] = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 8,
    "num_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": 4,
    "cross_attention_dim": 48,
    "caption_channels": T5["d_model"],
}
CHROMA: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": T5["d_model"],
    "axes_dims_rope": (4, 6, 6),
    "approximator_num_channels": 8,
    "approximator_hidden_dim": 32,
    "approximator_layers": 1,
}


def pixart(cls: Any, transformer: Mapping[str, Any], **options: Any) -> Any:
    return cls(
        transformer=diffusers.PixArtTransformer2DModel(**transformer).eval(),
        scheduler=scheduler(tiny.SD1_SCHEDULER | {"_class_name": "DPMSolverMultistepScheduler"}),
        vae=diffusers.AutoencoderKL(**demo.VAE).eval(),
        text_encoder=t5(),
        tokenizer=t5_tokenizer(),
        **options,
    )


def pag() -> Any:
    return pixart(diffusers.PixArtSigmaPAGPipeline, PIXART, pag_applied_layers="blocks.1")


GEMMA: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}
SANA: dict[str, Any] = {
    "sample_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 8,
    "cross_attention_dim": 16,
    "caption_channels": GEMMA["hidden_size"],
}
SANA_SCHEDULER: dict[str, Any] = {
    "_class_name": "DPMSolverMultistepScheduler",
    "use_flow_sigmas": True,
    "flow_shift": 3.0,
    "prediction_type": "flow_prediction",
}
DC: dict[str, Any] = {
    "latent_channels": 4,
    "attention_head_dim": 2,
    "encoder_block_out_channels": (4,) * 6,
    "decoder_block_out_channels": (4,) * 6,
    "encoder_block_types": ("ResBlock",) * 5 + ("EfficientViTBlock",),
    "decoder_block_types": ("ResBlock",) * 5 + ("EfficientViTBlock",),
    "encoder_layers_per_block": (1,) * 6,
    "decoder_layers_per_block": (1,) * 6,
    "encoder_qkv_multiscales": ((),) * 5 + ((5,),),
    "decoder_qkv_multiscales": ((),) * 5 + ((5,),),
    "scaling_factor": 0.4,
}


def gemma_tokenizer() -> Any:
    """A Gemma tokenizer of single bytes, one word, and the lines of Sana's instructions but the last."""
    special = ("<pad>", "<eos>", "<bos>", "<unk>", "<mask>")
    pieces = [*special, "▁", "▁a", *map(chr, range(33, 127)), *(f"<0x{byte:02X}>" for byte in range(128, 256))]
    made = transformers.GemmaTokenizer(
        vocab={piece: number for number, piece in enumerate(pieces)}, merges=[("▁", "a")], add_bos_token=True
    )
    made.add_tokens(sana_instruction().split("\n")[:-1])
    return made


def sana(schedule: Mapping[str, Any]) -> Any:
    return diffusers.SanaPipeline(
        transformer=diffusers.SanaTransformer2DModel(**SANA).eval(),
        scheduler=scheduler(schedule),
        vae=diffusers.AutoencoderDC(**DC).eval(),
        text_encoder=transformers.Gemma2Model(transformers.Gemma2Config(**GEMMA)).eval(),
        tokenizer=gemma_tokenizer(),
    )


LUMINA: dict[str, Any] = {
    "sample_size": 8,
    "in_channels": 4,
    "hidden_size": 32,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "multiple_of": 16,
    "axes_dim_rope": (4, 2, 2),
    "axes_lens": (300, 64, 64),
    "cap_feat_dim": GEMMA["hidden_size"],
}


def lumina() -> Any:
    return diffusers.Lumina2Pipeline(
        transformer=diffusers.Lumina2Transformer2DModel(**LUMINA).eval(),
        scheduler=scheduler(SHIFTING_SCHEDULER),
        vae=diffusers.AutoencoderKL(**FLOW_VAE).eval(),
        text_encoder=transformers.Gemma2Model(transformers.Gemma2Config(**GEMMA)).eval(),
        tokenizer=gemma_tokenizer(),
    )


AURA: dict[str, Any] = {
    "sample_size": 128,
    "in_channels": 4,
    "num_mmdit_layers": 2,
    "num_single_dit_layers": 1,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "joint_attention_dim": T5["d_model"],
    "caption_projection_dim": 64,
    "pos_embed_max_size": 4096,
}


def llama_tokenizer() -> Any:
    """A Llama tokenizer of single characters, which ends texts as T5's does."""
    pieces = ["<pad>", "</s>", "<unk>", "<s>", "▁", *map(chr, range(33, 127))]
    return transformers.LlamaTokenizer(
        vocab={piece: number for number, piece in enumerate(pieces)},
        merges=[],
        pad_token="<pad>",
        add_bos_token=False,
        add_eos_token=True,
    )


def aura() -> Any:
    return diffusers.AuraFlowPipeline(
        transformer=diffusers.AuraFlowTransformer2DModel(**AURA).eval(),
        scheduler=scheduler(FLOW_SCHEDULER),
        vae=diffusers.AutoencoderKL(**demo.VAE).eval(),
        text_encoder=transformers.UMT5EncoderModel(transformers.UMT5Config(**T5)).eval(),
        tokenizer=llama_tokenizer(),
    )


HUNYUAN: dict[str, Any] = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "hidden_size": 32,
    "num_layers": 4,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "cross_attention_dim": 16,
    "cross_attention_dim_t5": T5["d_model"],
    "pooled_projection_dim": 16,
}
BERT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": HUNYUAN["cross_attention_dim"],
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
DDPM: dict[str, Any] = tiny.SD2_SCHEDULER | {"_class_name": "DDPMScheduler", "timestep_spacing": "leading"}


def bert_tokenizer() -> Any:
    """A BERT tokenizer of single letters."""
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    letters = [*"abcdefghijklmnopqrstuvwxyz0123456789"]
    pieces = [*special, *letters, *(f"##{letter}" for letter in letters)]
    return transformers.BertTokenizer(vocab={piece: number for number, piece in enumerate(pieces)})


def hunyuan() -> Any:
    return diffusers.HunyuanDiTPipeline(
        transformer=diffusers.HunyuanDiT2DModel(**HUNYUAN).eval(),
        scheduler=scheduler(DDPM),
        vae=diffusers.AutoencoderKL(**demo.VAE).eval(),
        text_encoder=transformers.BertModel(transformers.BertConfig(**BERT)).eval(),
        tokenizer=bert_tokenizer(),
        text_encoder_2=t5(),
        tokenizer_2=t5_tokenizer(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


CHATGLM: dict[str, Any] = {
    "num_layers": 3,
    "padded_vocab_size": 400,
    "hidden_size": 32,
    "ffn_hidden_size": 24,
    "kv_channels": 8,
    "num_attention_heads": 4,
    "seq_length": 256,
    "multi_query_attention": True,
    "multi_query_group_num": 2,
    "add_qkv_bias": True,
    "original_rope": True,
}
KOLORS: dict[str, Any] = tiny.SDXL_UNET | {
    "cross_attention_dim": 24,
    "encoder_hid_dim": CHATGLM["hidden_size"],
    "encoder_hid_dim_type": "text_proj",
    "projection_class_embeddings_input_dim": 6 * 8 + CHATGLM["hidden_size"],
}
KOLORS_SCHEDULER: dict[str, Any] = tiny.SDXL_SCHEDULER | {"beta_end": 0.014, "num_train_timesteps": 1100}


def chatglm_tokenizer() -> Any:
    """A ChatGLM tokenizer of single letters, and bytes of others."""
    file = tiny.place() / "tokenizer.model"
    with file.open("wb") as model:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([tiny.LONG, string.ascii_letters, "a red cube, blurry and ugly"]),
            model_writer=model,
            model_type="char",
            vocab_size=350,
            hard_vocab_limit=False,
            byte_fallback=True,
            minloglevel=2,
        )
    return ChatGLMTokenizer(str(file))


def kolors() -> Any:
    encoder = ChatGLMModel(ChatGLMConfig(**CHATGLM)).eval()
    for one in encoder.parameters():  # They are left as memory was.
        torch.nn.init.normal_(one, mean=float(one.ndim == 1), std=0.2)
    return diffusers.KolorsPipeline(
        unet=diffusers.UNet2DConditionModel(**KOLORS).eval(),
        scheduler=scheduler(KOLORS_SCHEDULER),
        vae=diffusers.AutoencoderKL(**tiny.SDXL_VAE).eval(),
        text_encoder=encoder,
        tokenizer=chatglm_tokenizer(),
    )


def chroma() -> Any:
    return diffusers.ChromaPipeline(
        transformer=diffusers.ChromaTransformer2DModel(**CHROMA).eval(),
        scheduler=scheduler(FLOW_SCHEDULER),
        vae=diffusers.AutoencoderKL(**FLOW_VAE).eval(),
        text_encoder=t5(),
        tokenizer=t5_tokenizer(),
    )


BRIA: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": T5["d_model"],
    "axes_dims_rope": [4, 6, 6],
}


def bria() -> Any:
    """A pipeline that no family of its own knows."""
    return diffusers.BriaPipeline(
        transformer=diffusers.BriaTransformer2DModel(**BRIA).eval(),
        scheduler=scheduler(SHIFTING_SCHEDULER),
        vae=diffusers.AutoencoderKL(**FLOW_VAE).eval(),
        text_encoder=t5(),
        tokenizer=t5_tokenizer(),
    )


QWEN_TEXT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "bos_token_id": None,
    "eos_token_id": None,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]},
}
QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 16,
}
QWEN_IMAGE: dict[str, Any] = {
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": QWEN_TEXT["hidden_size"],
    "axes_dims_rope": (8, 4, 4),
}
QWEN_VAE: dict[str, Any] = {
    "base_dim": 8,
    "z_dim": 4,
    "dim_mult": [1, 2, 2, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
    "latents_mean": [0.1, 0.0, -0.1, 0.2],
    "latents_std": [1.0, 1.5, 0.8, 1.2],
}


def qwen_tokenizer() -> Any:
    """A Qwen tokenizer of single bytes."""
    words = [*sorted(ByteLevel.alphabet()), "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return transformers.Qwen2Tokenizer(
        vocab={word: number for number, word in enumerate(words)},
        merges=[],
        pad_token="<|endoftext|>",
        model_max_length=2048,
        additional_special_tokens=words[-2:],
    )


def qwen_image() -> Any:
    config = transformers.Qwen2_5_VLConfig(text_config=QWEN_TEXT, vision_config=QWEN_VISION)
    return diffusers.QwenImagePipeline(
        transformer=diffusers.QwenImageTransformer2DModel(**QWEN_IMAGE).eval(),
        scheduler=scheduler(SHIFTING_SCHEDULER),
        vae=diffusers.AutoencoderKLQwenImage(**QWEN_VAE).eval(),
        text_encoder=transformers.Qwen2_5_VLForConditionalGeneration(config).eval(),
        tokenizer=qwen_tokenizer(),
    )


Z_IMAGE: dict[str, Any] = {
    "in_channels": 4,
    "dim": 32,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "cap_feat_dim": QWEN_TEXT["hidden_size"],
    "axes_dims": [8, 4, 4],
    "axes_lens": [1024, 64, 64],
}


def z_image() -> Any:
    text = {**QWEN_TEXT, "head_dim": 8, "rope_parameters": None}
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = CHAT
    transformer = diffusers.ZImageTransformer2DModel(**Z_IMAGE).eval()
    for token in (transformer.x_pad_token, transformer.cap_pad_token):
        torch.nn.init.normal_(token)
    return diffusers.ZImagePipeline(
        transformer=transformer,
        scheduler=scheduler(SHIFTING_SCHEDULER),
        vae=diffusers.AutoencoderKL(**FLOW_VAE).eval(),
        text_encoder=transformers.Qwen3Model(transformers.Qwen3Config(**text)).eval(),
        tokenizer=tokenizer,
    )


GLM: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "pad_token_id": 256,
    "initializer_range": 1.0,
}
COGVIEW: dict[str, Any] = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "text_embed_dim": GLM["hidden_size"],
    "time_embed_dim": 16,
    "condition_dim": 8,
    "rope_axes_dim": (16, 16),
}
COGVIEW_SCHEDULER: dict[str, Any] = SHIFTING_SCHEDULER | {
    "base_shift": 0.25,
    "max_shift": 0.75,
    "time_shift_type": "linear",
}


def glm_tokenizer() -> Any:
    """A GLM tokenizer of single bytes, which begins texts with two tokens of its own."""
    own = ["<|endoftext|>", "[gMASK]", "<sop>"]
    words = [*sorted(ByteLevel.alphabet()), *own]
    made = Tokenizer(BPE({word: number for number, word in enumerate(words)}, []))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made.decoder = ByteLevelDecoder()
    made.post_processor = TemplateProcessing("[gMASK] <sop> $A", special_tokens=[("[gMASK]", 257), ("<sop>", 258)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=own[0], additional_special_tokens=own[1:], padding_side="left"
    )


def cogview() -> Any:
    return diffusers.CogView4Pipeline(
        transformer=diffusers.CogView4Transformer2DModel(**COGVIEW).eval(),
        scheduler=scheduler(COGVIEW_SCHEDULER),
        vae=diffusers.AutoencoderKL(**FLOW_VAE).eval(),
        text_encoder=transformers.GlmModel(transformers.GlmConfig(**GLM)).eval(),
        tokenizer=glm_tokenizer(),
    )


FLUX2: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 3 * QWEN_TEXT["hidden_size"],
    "axes_dims_rope": (4, 4, 4, 4),
    "guidance_embeds": False,
}
FLUX2_VAE: dict[str, Any] = {
    **{name: value for name, value in FLOW_VAE.items() if name not in ("scaling_factor", "shift_factor")},
    "use_quant_conv": True,
    "use_post_quant_conv": True,
}
CHAT = (
    "{% for one in messages %}<|im_start|>{{ one.role }}\n{{ one.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


def flux2(*, is_distilled: bool) -> Any:
    text = {**QWEN_TEXT, "num_hidden_layers": 28, "head_dim": 8, "rope_parameters": None}
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = CHAT
    vae = diffusers.AutoencoderKLFlux2(**FLUX2_VAE).eval()
    vae.bn.running_mean.uniform_(-0.2, 0.2)
    vae.bn.running_var.uniform_(0.5, 1.5)
    return diffusers.Flux2KleinPipeline(
        transformer=diffusers.Flux2Transformer2DModel(**FLUX2).eval(),
        scheduler=scheduler(SHIFTING_SCHEDULER),
        vae=vae,
        text_encoder=transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**text)).eval(),
        tokenizer=tokenizer,
        is_distilled=is_distilled,
    )


BUILT: Mapping[str, Callable[[], Any]] = {
    "sd3": lambda: sd3(SD3, FLOW_SCHEDULER, has_t5=True),
    "sd3.5": lambda: sd3(SD35, SHIFTING_SCHEDULER, has_t5=False),
    "flux": lambda: flux(FLUX, SHIFTING_SCHEDULER),
    "klein": lambda: flux2(is_distilled=True),
    "klein-base": lambda: flux2(is_distilled=False),
    "bria": bria,
    "pag": pag,
    "pixart": lambda: pixart(diffusers.PixArtSigmaPipeline, PIXART),
    "pixart-alpha": lambda: pixart(diffusers.PixArtAlphaPipeline, PIXART | {"sample_size": 128}),
    "sana": lambda: sana(SANA_SCHEDULER),
    "sana-euler": lambda: sana(FLOW_SCHEDULER),
    "lumina": lumina,
    "aura": aura,
    "hunyuan": hunyuan,
    "kolors": kolors,
    "qwen": qwen_image,
    "z-image": z_image,
    "cogview": cogview,
    "chroma": chroma,
    "schnell": lambda: flux(FLUX | {"guidance_embeds": False}, FLOW_SCHEDULER | {"shift": 1.0}),
}
"""Pipelines that a seed draws, by kind."""


@functools.cache
def folder(kind: str) -> Path:
    """A saved pipeline of a kind: one of BUILT, or of `tiny.folder`."""
    if kind not in BUILT:
        return tiny.folder(kind)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = BUILT[kind]()
        _enliven(made)
    place = tiny.place() / kind
    made.save_pretrained(place)
    return place


def network(pipeline: Any) -> Any:
    """What predicts."""
    return pipeline.unet if hasattr(pipeline, "unet") else pipeline.transformer


def _enliven(pipeline: Any) -> None:
    """Fresh transformers answer with noise that is hardly moved by text and time: give their modulation some weight."""
    parts = ("norm", "embed", "_mod", "txt_in", "caption", "attn2", "time_step")
    parts += tuple(f"joint_transformer_blocks.{number}.attn.add_v" for number in range(2))
    for name, one in network(pipeline).named_parameters():
        if one.ndim > 1 and any(part in name for part in parts):
            torch.nn.init.normal_(one, std=0.2)


@functools.cache
def engine(kind: str, mode: str = "eager") -> Any:
    """What makes the rows of a kind: an Engine, or a WholePipeline."""
    return open_model(tiny.job(folder(kind), f"engine.mode={mode}"), None)


def batches(kind: str, rows: Sequence[Row]) -> list[Batch]:
    """The rows in batches as a planner would key them: one, unless their texts have several lengths."""
    known = engine(kind).facts
    measure = lengths_of(Model(path=str(folder(kind))), known)
    if measure is None:
        return [tiny.batch(rows, known)]
    prompts, negatives = (
        measure(pa.array([getattr(row, name) for row in rows], pa.string())) for name in ("prompt", "negative_prompt")
    )
    negatives *= [known.guides(row) for row in rows]
    found: dict[tuple[int, int], list[Row]] = {}
    for row, lengths in zip(rows, zip(prompts.tolist(), negatives.tolist(), strict=True), strict=True):
        found.setdefault(lengths, []).append(row)
    return [tiny.batch(some, known, lengths=lengths) for lengths, some in found.items()]


def padded(kind: str, rows: Sequence[Row]) -> Batch:
    """The rows in one batch, their texts padded to lengths that all share."""
    known, apart = engine(kind).facts, [batch.group for batch in batches(kind, rows)]
    longest = max(one.text_length for one in apart), max(one.negative_length or 0 for one in apart)
    one = tiny.batch(rows, known, lengths=longest)
    assert known.lengths is not None
    return dataclasses.replace(one, group=sharing.padded(one.group, known.lengths.shared))


@functools.cache
def pipeline(kind: str) -> Any:
    return tiny.reference_pipeline(folder(kind))


def reference(kind: str, row: Row, output_type: str = "pil") -> Any:
    """What diffusers' own pipeline makes of a row alone."""
    pipe = pipeline(kind)
    own: dict[str, Any] = {} if row.true_cfg_scale is None else {"true_cfg_scale": row.true_cfg_scale}
    # Its state is of the row before.
    pipe.scheduler = scheduler(json.loads((folder(kind) / "scheduler" / "scheduler_config.json").read_text()))
    taken = inspect.signature(pipe.__call__).parameters
    own |= {name: False for name in ("use_resolution_binning", "clean_caption") if name in taken}
    if kind != "qwen":
        own["guidance_scale"] = row.guidance_scale
    if row.negative_prompt is not None:
        own["negative_prompt"] = row.negative_prompt
    call, begins = tiny.beginning(pipe, row)
    return call(
        prompt=row.prompt,
        **begins,
        num_inference_steps=row.steps,
        generator=torch.Generator("cpu").manual_seed(row.seed),
        output_type=output_type,
        **own,
    ).images[0]


def latents(kind: str, row: Row) -> torch.Tensor:
    """`reference` before the decoder, `[C, h, w]`."""
    made: torch.Tensor = reference(kind, row, "latent")
    if not isinstance(pipeline(kind), diffusers.FluxPipeline):
        return made
    unpacked: torch.Tensor = diffusers.FluxPipeline._unpack_latents(made[None], row.height, row.width, 8)
    return unpacked[0]
