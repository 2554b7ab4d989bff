"""The Stable Diffusion 1.x/2.x family: text to conditioning, noise, prediction and pixels.

Each function does what diffusers' StableDiffusionPipeline does at that point, for a batch whose rows differ
in prompt, seed, guidance scale and timestep. h and w are height and width over the VAE's scale (8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from diffusers.utils.torch_utils import randn_tensor
from safetensors import SafetensorError
from torch import Tensor

from batchgen.errors import UsageError
from batchgen.models.folder import ModelFolder
from batchgen.records import Pixels, Row

_ENCODE_BATCH = 8
"""Prompts encoded at once, always padded to this, so that a row's bits do not depend on its neighbours."""


@dataclass(frozen=True, slots=True)
class Conditioning:
    """What the network is told beside latents and timestep."""

    embeddings: Tensor
    """`[B, L, D]`, or `[2B, L, D]` where the batch is guided: the negative prompts', then the prompts'."""
    guidance: Tensor
    """`[B]` float32: guidance scale."""
    timestep_cond: Tensor | None
    """`[B, E]`: the embedded guidance scale of a guidance-distilled network (LCM)."""


class StableDiffusion:
    """A loaded pipeline on one device."""

    def __init__(self, pipeline: Any, device: torch.device) -> None:
        self.device = device
        self.dtype: torch.dtype = pipeline.unet.dtype
        self.tokenizer = pipeline.tokenizer
        self.scheduler = pipeline.scheduler
        self._pipeline = pipeline.to(device)
        self._scale: int = pipeline.vae_scale_factor

    def encode(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Each distinct text's embedding `[L, D]`."""
        distinct = list(dict.fromkeys(texts))
        embeddings: dict[str, Tensor] = {}
        for start in range(0, len(distinct), _ENCODE_BATCH):
            chunk = distinct[start : start + _ENCODE_BATCH]
            padded = chunk + [""] * (_ENCODE_BATCH - len(chunk))
            embeddings |= zip(chunk, self._encode_chunk(padded), strict=False)
        return embeddings

    def _encode_chunk(self, texts: list[str]) -> Tensor:
        tokens = self.tokenizer(
            texts,
            padding="max_length",
            max_length=self.tokenizer.model_max_length,
            truncation=True,
            return_tensors="pt",
        ).to(self.device)
        encoder = self._pipeline.text_encoder
        mask = tokens.attention_mask if getattr(encoder.config, "use_attention_mask", False) else None
        embeddings: Tensor = encoder(tokens.input_ids, attention_mask=mask)[0]
        return embeddings.to(self.dtype)

    def conditioning(self, rows: Sequence[Row], is_guided: bool) -> Conditioning:
        """A null negative prompt is this family's "": diffusers encodes the empty string for it."""
        prompts = [row.prompt for row in rows]
        negatives = [row.negative_prompt or "" for row in rows] if is_guided else []
        encoded = self.encode(negatives + prompts)
        guidance = torch.tensor([row.guidance_scale for row in rows], dtype=torch.float32)
        return Conditioning(
            embeddings=torch.stack([encoded[text] for text in negatives + prompts]),
            guidance=guidance.to(self.device),
            timestep_cond=self._timestep_cond(guidance),
        )

    def _timestep_cond(self, guidance: Tensor) -> Tensor | None:
        size = self._pipeline.unet.config.time_cond_proj_dim
        if size is None:
            return None
        embedding: Tensor = self._pipeline.get_guidance_scale_embedding(guidance - 1, embedding_dim=size)
        return embedding.to(self.device, self.dtype)

    def noise(self, row: Row, generator: torch.Generator) -> Tensor:
        """A row's next unit noise `[1, C, h, w]`, on the CPU, from its own generator as diffusers draws it."""
        channels = self._pipeline.unet.config.in_channels
        shape = (1, channels, row.height // self._scale, row.width // self._scale)
        noise: Tensor = randn_tensor(shape, generator=generator, dtype=self.dtype)
        return noise

    def predict(self, latents: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        """The guided prediction `[B, C, h, w]` for latents `[B, C, h, w]` at timesteps `[B]`.

        Classifier-free guidance (Ho and Salimans 2022, equation 6, in diffusers' scale): the network runs on
        the batch twice and the difference is weighted by each row's own scale.
        """
        is_guided = len(conditioning.embeddings) > len(latents)
        copies = 2 if is_guided else 1
        prediction: Tensor = self._pipeline.unet(
            torch.cat([latents] * copies),
            torch.cat([timesteps] * copies),
            encoder_hidden_states=conditioning.embeddings,
            timestep_cond=conditioning.timestep_cond,
            return_dict=False,
        )[0]
        if not is_guided:
            return prediction
        negative, positive = prediction.chunk(2)
        scale = conditioning.guidance[:, None, None, None]
        return negative + (scale * (positive - negative)).to(prediction.dtype)

    def decode(self, latents: Tensor) -> Tensor:
        """Images `[B, 3, H, W]`, about -1 to 1, of latents `[B, C, h, w]`, in the latents' dtype."""
        vae = self._pipeline.vae
        images: Tensor = vae.decode(latents / vae.config.scaling_factor, return_dict=False)[0]
        return images

    def decode_float32(self, latents: Tensor) -> Tensor:
        """`decode` with the VAE in float32 for this once: half precision can overflow in it."""
        vae = self._pipeline.vae
        vae.to(torch.float32)
        try:
            return self.decode(latents.float())
        finally:
            vae.to(self.dtype)


def to_pixels(images: Tensor) -> Pixels:
    """uint8 `[B, H, W, 3]` of images `[B, 3, H, W]`, rounded as diffusers' image processor rounds."""
    unit = (images * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).float()
    pixels: Pixels = (unit * 255).round().to(torch.uint8).cpu().numpy().astype(np.uint8, copy=False)
    return pixels


def load(folder: ModelFolder, dtype: torch.dtype, device: torch.device) -> StableDiffusion:
    """Load a checked folder: safetensors only, no remote code, no safety checker.

    Raises UsageError for weights that cannot be read or that do not fill the network.
    """
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    scheduler = getattr(diffusers, folder.config("scheduler")["_class_name"])
    try:
        pipeline = diffusers.StableDiffusionPipeline(
            vae=_weights(diffusers.AutoencoderKL, folder, "vae", torch_dtype=dtype),
            text_encoder=_weights(transformers.CLIPTextModel, folder, "text_encoder", dtype=dtype),
            tokenizer=transformers.CLIPTokenizer.from_pretrained(folder.path / "tokenizer"),
            unet=_weights(diffusers.UNet2DConditionModel, folder, "unet", torch_dtype=dtype),
            scheduler=scheduler.from_pretrained(folder.path / "scheduler"),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UsageError(f"model {folder.name!r} cannot be loaded from {folder.path}: {error}") from error
    return StableDiffusion(pipeline, device)


def _weights(cls: Any, folder: ModelFolder, component: str, **dtype: torch.dtype) -> Any:
    network, info = cls.from_pretrained(
        folder.path / component,
        variant=folder.variant,
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
        **dtype,
    )
    missing = sorted(info["missing_keys"])
    if missing:
        raise UsageError(
            f"model folder {folder.path}: the weights of {component} lack {len(missing)} of the network's "
            f"tensors, the first being {missing[0]!r}; download or convert the folder again"
        )
    return network.eval()
