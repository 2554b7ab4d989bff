"""The Qwen-Image family (Qwen team 2025), a `batchgen.models.family.Family`.

Each function does what diffusers' QwenImagePipeline does at that point, for a batch whose rows differ in prompt, seed,
guidance and timestep. Rows of a batch share the length of their texts, or have them padded to one and looked past.
"""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers import QwenImagePipeline
from diffusers.models.transformers.transformer_qwenimage import (
    QwenDoubleStreamAttnProcessor2_0,
    QwenImageTransformerBlock,
)
from torch import Tensor

from batchgen.models.contents import ModelFolder
from batchgen.models.family import Conditioning, Network, as_long, guide
from batchgen.models.flow import PATCH
from batchgen.models.flow_facts import QWEN_LENGTHS
from batchgen.models.loading import load_components
from batchgen.models.varying import MASK, NEGATIVE, PROMPT, VaryingText


class LookingPast:
    """diffusers' attention of this network, told here which tokens of texts are none: the network, if told that, would
    copy a number to the device at every step, and nothing can be copied while steps are captured."""

    def __init__(self) -> None:
        self._own = QwenDoubleStreamAttnProcessor2_0()

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: None = None,
        attention_mask: None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        is_text: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The images' tokens `[B, N, C]` and the texts' `[B, L, C]`, of which `is_text` `[B, L]`, if any are none."""
        made: tuple[Tensor, Tensor] = self._own(
            attn, hidden_states, encoder_hidden_states, is_text, image_rotary_emb=image_rotary_emb
        )
        return made


class QwenImage(VaryingText):
    """A loaded pipeline on one device."""

    lengths = QWEN_LENGTHS
    looks_past = True

    def __init__(self, pipeline: Any, device: torch.device) -> None:
        blocks = (QwenImageTransformerBlock,)
        super().__init__(pipeline, pipeline.transformer, (pipeline.text_encoder,), device, blocks)
        self.tokenizer.padding_side = "right"
        for block in pipeline.transformer.transformer_blocks:
            block.attn.set_processor(LookingPast())
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
            is_text = inputs.get(text + MASK)
            predicted: Tensor = network(
                hidden_states=patches,
                timestep=timesteps.to(latents.dtype) / 1000,
                encoder_hidden_states=inputs[text],
                img_shapes=shapes,
                attention_kwargs=None if is_text is None else {"is_text": is_text},
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
