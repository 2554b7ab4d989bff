"""The Stable Diffusion 1.x/2.x family, a `batchgen.models.family.Family`.

Each function does what diffusers' StableDiffusionPipeline does at that point, for a batch whose rows differ
in prompt, seed, guidance scale and timestep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import diffusers
import torch
import transformers
from diffusers.utils.torch_utils import randn_tensor
from safetensors import SafetensorError
from torch import Tensor

from batchgen.errors import UsageError
from batchgen.models.family import Conditioning, Encoded, Network, doubled, guide
from batchgen.models.folder import ModelFolder
from batchgen.models.transfer import to_device
from batchgen.records import Row


class StableDiffusion:
    """A loaded pipeline on one device."""

    def __init__(self, pipeline: Any, device: torch.device) -> None:
        pipeline.to(device)
        self.device = device
        self.dtype: torch.dtype = pipeline.unet.dtype
        self.tokenizer = pipeline.tokenizer
        self.scheduler = pipeline.scheduler
        self.network: torch.nn.Module = pipeline.unet
        self.vae: torch.nn.Module = pipeline.vae
        self.encoders: Sequence[torch.nn.Module] = (pipeline.text_encoder,)
        self.decoder: Network = pipeline.vae.decode
        self._pipeline = pipeline

    def texts(self, rows: Sequence[Row], is_guided: bool) -> list[str]:
        """A null negative prompt is this family's "": diffusers encodes the empty string for it."""
        negatives = [row.negative_prompt or "" for row in rows] if is_guided else []
        return negatives + [row.prompt for row in rows]

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Each text's embedding `[L, D]`."""
        tokens = self.tokenizer(
            list(texts),
            padding="max_length",
            max_length=self.tokenizer.model_max_length,
            truncation=True,
            return_tensors="pt",
        ).to(self.device)
        encoder = self._pipeline.text_encoder
        mask = tokens.attention_mask if getattr(encoder.config, "use_attention_mask", False) else None
        embeddings = encoder(tokens.input_ids, attention_mask=mask)[0].to(self.dtype)
        return [(embedding,) for embedding in embeddings]

    def conditioning(self, rows: Sequence[Row], is_guided: bool, encoded: Mapping[str, Encoded]) -> Conditioning:
        """Inputs: `encoder_hidden_states` `[B or 2B, L, D]`, and `timestep_cond` `[B, E]`, the embedded guidance scale,
        where the network is guidance-distilled (LCM)."""
        guidance = torch.tensor([row.guidance_scale for row in rows], dtype=torch.float32)
        inputs = {"encoder_hidden_states": torch.stack([encoded[text][0] for text in self.texts(rows, is_guided)])}
        size = self._pipeline.unet.config.time_cond_proj_dim
        if size is not None:
            embedded = self._pipeline.get_guidance_scale_embedding(guidance - 1, embedding_dim=size)
            inputs["timestep_cond"] = to_device(embedded.to(self.dtype), self.device)
        return Conditioning(to_device(guidance, self.device), is_guided, inputs)

    def noise(self, row: Row, generator: torch.Generator) -> Tensor:
        """As Family.noise."""
        scale = self._pipeline.vae_scale_factor
        shape = (1, self._pipeline.unet.config.in_channels, row.height // scale, row.width // scale)
        noise: Tensor = randn_tensor(shape, generator=generator, dtype=self.dtype)
        return noise

    def predict(self, network: Network, latents: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        """As Family.predict."""
        is_guided = conditioning.is_guided
        prediction = network(
            doubled(latents, is_guided), doubled(timesteps, is_guided), return_dict=False, **conditioning.inputs
        )[0]
        return guide(prediction, conditioning)

    def decode(self, decoder: Network, latents: Tensor) -> Tensor:
        """As Family.decode, in the latents' dtype."""
        images: Tensor = decoder(latents / self._pipeline.vae.config.scaling_factor, return_dict=False)[0]
        return images

    def decode_float32(self, latents: Tensor) -> Tensor:
        """`decode` with the VAE in float32 for this once: half precision can overflow in it."""
        vae = self._pipeline.vae
        vae.to(torch.float32)
        try:
            return self.decode(self.decoder, latents.float())
        finally:
            vae.to(self.dtype)


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
