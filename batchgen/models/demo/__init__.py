"""The bundled model "demo": a small Stable Diffusion pipeline that knows emoji and shapes, trained by `train.py`.

Beside it, a tiny untrained pipeline of the same kind, made in code, for tests and benches: its pictures are noise, but
everything about it is real: prompt, negative prompt, seed, steps, guidance and sampler all change them. Torch is
imported only when that one is built.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

WEIGHTS = Path(__file__).parent / "weights"
"""The trained pipeline, a diffusers folder."""
STEPS, GUIDANCE = 12, 3.0
"""What is taken where neither manifest nor job says anything."""
NOTE = "the demo model is small, for trying and testing: it draws emoji and shapes; name a model with --model"
TEXT_LENGTH = 77

UNET: dict[str, Any] = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "layers_per_block": 1,
    "block_out_channels": [32, 64],
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "attention_head_dim": 4,
    "cross_attention_dim": 32,
    "norm_num_groups": 8,
}
VAE: dict[str, Any] = {
    "block_out_channels": [16, 16, 16, 16],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 1,
    "latent_channels": 4,
    "norm_num_groups": 8,
}
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": TEXT_LENGTH,
    "vocab_size": 514,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
SCHEDULER: dict[str, Any] = {
    "_class_name": "PNDMScheduler",
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "clip_sample": False,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
}


def tokenizer() -> Any:
    """A CLIP tokenizer of the byte alphabet without merges: one token a byte, so it takes any UTF-8."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    alphabet = sorted(ByteLevel.alphabet())
    words = ["<|startoftext|>", "<|endoftext|>", *alphabet, *(letter + "</w>" for letter in alphabet)]
    vocabulary = {word: number for number, word in enumerate(words)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=TEXT_LENGTH)


def build(
    unet: dict[str, Any] = UNET,
    scheduler: dict[str, Any] = SCHEDULER,
    seed: int = 0,
    *,
    vae: dict[str, Any] = VAE,
    text: dict[str, Any] = TEXT,
    words: Any = None,
) -> Any:
    """The pipeline of these networks, float32 on the CPU, its weights drawn from the seed; `words` is its tokenizer, by
    default `tokenizer`'s, and says how many the text encoder knows."""
    import diffusers
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel

    words = tokenizer() if words is None else words
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return diffusers.StableDiffusionPipeline(
            vae=diffusers.AutoencoderKL(**vae).eval(),
            text_encoder=CLIPTextModel(CLIPTextConfig(**{**text, "vocab_size": len(words)})).eval(),
            tokenizer=words,
            unet=diffusers.UNet2DConditionModel(**unet).eval(),
            scheduler=getattr(diffusers, scheduler["_class_name"]).from_config(scheduler),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
