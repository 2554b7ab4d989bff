"""The Qwen-Image family (Qwen team 2025), a `batchgen.models.family.Family`.

Each function does what diffusers' QwenImagePipeline does at that point, for a batch whose rows differ in prompt, seed,
guidance and timestep. Texts are not padded: rows of a batch share their length.
"""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers import QwenImagePipeline
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock
from torch import Tensor

from batchgen.models.contents import ModelFolder
from batchgen.models.family import Conditioning, Network, as_long, guide
from batchgen.models.flow import PATCH
from batchgen.models.flow_facts import QWEN_LENGTHS
from batchgen.models.loading import load_components
from batchgen.models.varying import NEGATIVE, PROMPT, VaryingText


class QwenImage(VaryingText):
    """A loaded pipeline on one device."""

    lengths = QWEN_LENGTHS

    def __init__(self, pipeline: Any, device: torch.device) -> None:
        blocks = (QwenImageTransformerBlock,)
        super().__init__(pipeline, pipeline.transformer, (pipeline.text_encoder,), device, blocks)
        self.tokenizer.padding_side = "right"
        self.channels = pipeline.transformer.config.in_channels // PATCH**2
        config = pipeline.vae.config
        self._mean, self._std = (
            torch.tensor(values, device=device)[:, None, None, None]
            for values in (config.latents_mean, config.latents_std)
        )

    def embed(self, ids: Tensor, mask: Tensor) -> Tensor:
        """As VaryingText.embed: the text encoder's last hidden states, without its vocabulary's logits."""
        (encoder,) = self.encoders
        model: Any = encoder.model
        hidden: Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        return hidden

    def predict(self, network: Network, latents: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        """As Family.predict; the network is given its sequence of patches."""
        size, scale, inputs = latents.shape, self.pixels_per_latent, conditioning.inputs
        patches = QwenImagePipeline._pack_latents(latents, *size)
        shapes = [[(1, size[2] // PATCH, size[3] // PATCH)]] * size[0]

        def told(text: str) -> Tensor:
            predicted: Tensor = network(
                hidden_states=patches,
                timestep=timesteps.to(latents.dtype) / 1000,
                encoder_hidden_states=inputs[text],
                img_shapes=shapes,
                return_dict=False,
            )[0]
            return predicted

        prediction = told(PROMPT)
        if conditioning.is_guided:
            guided = guide(torch.cat([told(NEGATIVE), prediction]), conditioning)
            prediction = as_long(guided, prediction)
        unpacked: Tensor = QwenImagePipeline._unpack_latents(prediction, size[2] * scale, size[3] * scale, scale)
        return unpacked[:, :, 0]

    def decode(self, decoder: Network, latents: Tensor) -> Tensor:
        """As Family.decode: the VAE's films have one frame."""
        return super().decode(decoder, latents)[:, :, 0]

    def decode_float32(self, latents: Tensor) -> Tensor:
        """As Family.decode_float32."""
        return super().decode_float32(latents)[:, :, 0]

    def _unscaled(self, latents: Tensor) -> Tensor:
        """As LatentDiffusion._unscaled, `[B, C, 1, h, w]`: by the mean and deviation of each channel."""
        return latents[:, :, None] / (1.0 / self._std.to(latents.dtype)) + self._mean.to(latents.dtype)


def load(folder: ModelFolder, dtype: torch.dtype, vae_dtype: torch.dtype | None, device: torch.device) -> QwenImage:
    """Load a checked folder. Raises UsageError as `load_components`."""
    return QwenImage(diffusers.QwenImagePipeline(**load_components(folder, dtype, vae_dtype or dtype)), device)
