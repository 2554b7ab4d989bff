"""Latent diffusion (Rombach et al. 2022) with a UNet and a KL autoencoder: what the Stable Diffusion families share."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import diffusers
import torch
import transformers
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.pipelines import stable_diffusion
from diffusers.utils.torch_utils import randn_tensor
from safetensors import SafetensorError
from torch import Tensor

from batchgen.errors import UsageError
from batchgen.models.family import Conditioning, Network, doubled, guide
from batchgen.models.folder import ModelFolder
from batchgen.models.layouts import Component
from batchgen.models.safety import SafetyChecker
from batchgen.models.transfer import to_device
from batchgen.records import Row

_LIBRARIES: Mapping[str, Any] = {
    "diffusers": diffusers,
    "transformers": transformers,
    "stable_diffusion": stable_diffusion,
}
"""By the names that model_index.json has for them."""


class LatentDiffusion:
    """A loaded pipeline on one device; the families add how texts condition it."""

    def __init__(self, pipeline: Any, encoders: Sequence[torch.nn.Module], device: torch.device) -> None:
        pipeline.to(device)
        self.device = device
        self.dtype: torch.dtype = pipeline.unet.dtype
        self.tokenizer = pipeline.tokenizer
        self.scheduler = pipeline.scheduler
        self.network: torch.nn.Module = pipeline.unet
        self.vae: Any = pipeline.vae
        self.encoders = encoders
        self.decoder: Network = pipeline.vae.decode
        self.blocks: tuple[type[torch.nn.Module], ...] = (ResnetBlock2D, Transformer2DModel)
        self.channels: int = pipeline.unet.config.in_channels
        self.sample_side: int = pipeline.unet.config.sample_size
        self.checker: SafetyChecker | None = None
        self._pipeline = pipeline

    def noise(self, row: Row, generator: torch.Generator) -> Tensor:
        """As Family.noise."""
        scale = self._pipeline.vae_scale_factor
        shape = (1, self.channels, row.height // scale, row.width // scale)
        noise: Tensor = randn_tensor(shape, generator=generator, dtype=self.dtype)
        return noise

    def predict(self, network: Network, latents: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        """As Family.predict."""
        is_guided = conditioning.is_guided
        arguments = self._arguments(conditioning.inputs)
        prediction = network(
            doubled(latents, is_guided), doubled(timesteps, is_guided), return_dict=False, **arguments
        )[0]
        return guide(prediction, conditioning)

    def decode(self, decoder: Network, latents: Tensor) -> Tensor:
        """As Family.decode, in the VAE's dtype, whatever the latents' is."""
        images: Tensor = decoder(self._unscaled(latents.to(self._pipeline.vae.dtype)), return_dict=False)[0]
        return images

    def decode_float32(self, latents: Tensor) -> Tensor:
        """`decode` by a copy of the VAE in float32, for this once: half precision can overflow in it. The VAE itself
        must stay where captured graphs read it."""
        vae = copy.deepcopy(self._pipeline.vae).to(torch.float32)
        images: Tensor = vae.decode(self._unscaled(latents.float()), return_dict=False)[0]
        return images

    def _arguments(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """The conditioning's inputs as the network takes them."""
        return inputs

    def _unscaled(self, latents: Tensor) -> Tensor:
        """The VAE's own latents of the network's, which have unit variance."""
        scaling_factor: float = self._pipeline.vae.config.scaling_factor
        return latents / scaling_factor

    def _with_guidance(self, rows: Sequence[Row], is_guided: bool, inputs: Mapping[str, Tensor]) -> Conditioning:
        """Conditioning with the rows' guidance scales: to a guidance-distilled network (LCM; Meng et al. 2023) they
        are one more input, `timestep_cond` `[B, E]`."""
        guidance = torch.tensor([row.guidance_scale for row in rows], dtype=torch.float32)
        size = self._pipeline.unet.config.time_cond_proj_dim
        if size is not None:
            embedded = self._pipeline.get_guidance_scale_embedding(guidance - 1, embedding_dim=size)
            inputs = {**inputs, "timestep_cond": to_device(embedded.to(self.dtype), self.device)}
        return Conditioning(to_device(guidance, self.device), is_guided, inputs)


def tokens(tokenizer: Any, texts: Sequence[str], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token numbers and attention mask, each `[B, L]`: padded to the tokenizer's length, and cut to it."""
    made = tokenizer(
        list(texts), padding="max_length", max_length=tokenizer.model_max_length, truncation=True, return_tensors="pt"
    )
    return to_device(made.input_ids, device), to_device(made.attention_mask, device)


def load_components(folder: ModelFolder, dtype: torch.dtype, vae_dtype: torch.dtype) -> dict[str, Any]:
    """Every component of a checked folder by its name: safetensors only, no remote code.

    Raises UsageError for weights that cannot be read or that do not fill the network.
    """
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    try:
        return {
            name: _load(folder, name, component, vae_dtype if name == "vae" else dtype)
            for name, component in folder.components.items()
        }
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UsageError(f"model {folder.name!r} cannot be loaded from {folder.path}: {error}") from error


def _load(folder: ModelFolder, name: str, component: Component, dtype: torch.dtype) -> Any:
    place = folder.path / name
    if name == "scheduler":
        return getattr(diffusers, folder.config(name)["_class_name"]).from_pretrained(place)
    library = _LIBRARIES[component.library]
    cls = next(getattr(library, one) for one in component.classes if hasattr(library, one))
    if component.weights is None:
        return cls.from_pretrained(place)
    network, info = cls.from_pretrained(
        place,
        variant=folder.variant,
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
        **{"torch_dtype" if library is diffusers else "dtype": dtype},
    )
    missing = sorted(info["missing_keys"])
    if missing:
        raise UsageError(
            f"model folder {folder.path}: the weights of {name} lack {len(missing)} of the network's "
            f"tensors, the first being {missing[0]!r}; download or convert the folder again"
        )
    return network.eval()
