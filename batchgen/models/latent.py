"""Latent diffusion (Rombach et al. 2022): what families share that work in the latent space of a KL autoencoder."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.resnet import ResnetBlock2D
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from batchgen.models.family import UNSHIFTED, Network, Schedule
from batchgen.models.safety import SafetyChecker
from batchgen.models.transfer import to_device
from batchgen.records import Pixels, Row

_SIDE = 128
"""Latents along a side, where neither network nor pipeline says."""


class LatentDiffusion:
    """A loaded pipeline on one device; the families add how texts condition it and what its network predicts."""

    def __init__(
        self,
        pipeline: Any,
        network: Any,
        encoders: Sequence[torch.nn.Module],
        device: torch.device,
        blocks: tuple[type[torch.nn.Module], ...],
    ) -> None:
        pipeline.to(device)
        self.device = device
        self.dtype: torch.dtype = network.dtype
        self.tokenizer = pipeline.tokenizer
        self.scheduler = pipeline.scheduler
        self.network: torch.nn.Module = network
        self.vae: Any = pipeline.vae
        self.encoders = encoders
        self.decoder: Network = pipeline.vae.decode
        self.blocks: tuple[type[torch.nn.Module], ...] = (ResnetBlock2D, *blocks)
        self.channels: int = network.config.in_channels
        side: int | None = getattr(network.config, "sample_size", None)
        default: int = getattr(pipeline, "default_sample_size", _SIDE)
        self.sample_side: int = side or default
        self.pixels_per_latent: int = pipeline.vae_scale_factor
        """Along a side."""
        self.checker: SafetyChecker | None = None
        self._noise_dtype: torch.dtype = network.dtype
        self._pipeline = pipeline

    @property
    def pipeline(self) -> Any:
        """As Family.pipeline."""
        return self._pipeline

    def schedule(self, width: int, height: int, steps: int) -> Schedule:
        """As Family.schedule."""
        return UNSHIFTED

    def noise(self, row: Row, generator: torch.Generator) -> Tensor:
        """As Family.noise."""
        scale = self.pixels_per_latent
        shape = (1, self.channels, row.height // scale, row.width // scale)
        noise: Tensor = randn_tensor(shape, generator=generator, dtype=self._noise_dtype)
        return noise

    def encode_image(self, pixels: Pixels, generator: torch.Generator) -> Tensor:
        """As Family.encode_image, in the VAE's dtype."""
        image = to_device(torch.from_numpy(pixels), self.device).permute(2, 0, 1)[None].float()
        found = self.vae.encode((2.0 * (image / 255.0) - 1.0).to(self.vae.dtype)).latent_dist
        noise = randn_tensor(found.mean.shape, generator=generator, dtype=found.parameters.dtype)
        return self._scaled((found.mean + found.std * to_device(noise, self.device)).to(self.dtype))

    def decode(self, decoder: Network, latents: Tensor) -> Tensor:
        """As Family.decode, in the VAE's dtype, whatever the latents' is."""
        images: Tensor = decoder(self._unscaled(latents.to(self.vae.dtype)), return_dict=False)[0]
        return images

    def decode_float32(self, latents: Tensor) -> Tensor:
        """`decode` by a copy of the VAE in float32, for this once: half precision can overflow in it. The VAE itself
        must stay where captured graphs read it."""
        vae = copy.deepcopy(self.vae).to(torch.float32)
        images: Tensor = vae.decode(self._unscaled(latents.float()), return_dict=False)[0]
        return images

    def _unscaled(self, latents: Tensor) -> Tensor:
        """The VAE's own latents of the network's, which have unit variance."""
        scaling_factor: float = self.vae.config.scaling_factor
        return latents / scaling_factor

    def _scaled(self, latents: Tensor) -> Tensor:
        """The network's latents of the VAE's own: the reverse of `_unscaled`."""
        scaling_factor: float = self.vae.config.scaling_factor
        return latents * scaling_factor

    def _scales(self, values: Sequence[float]) -> Tensor:
        """Something of each row `[B]`, float32, on the device."""
        return to_device(torch.tensor(values, dtype=torch.float32), self.device)


def tokens(
    tokenizer: Any, texts: Sequence[str], device: torch.device, length: int | None = None
) -> tuple[Tensor, Tensor]:
    """Token numbers and attention mask, each `[B, L]`: padded and cut to a length, by default the tokenizer's own."""
    made = tokenizer(
        list(texts),
        padding="max_length",
        max_length=length or tokenizer.model_max_length,
        truncation=True,
        return_tensors="pt",
    )
    return to_device(made.input_ids, device), to_device(made.attention_mask, device)
