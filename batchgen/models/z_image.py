"""The Z-Image family (Tongyi-MAI 2025), a `batchgen.models.family.Family`.

Each function does what diffusers' ZImagePipeline does at that point, for a batch whose rows differ in prompt, seed,
guidance scale and timestep. The network looks at its own padding, by which texts come to a multiple of 32 tokens; that
multiple moves the image's places, so rows of a batch share it.
"""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers.models.transformers.transformer_z_image import SEQ_MULTI_OF, ZImageTransformerBlock
from torch import Tensor, nn
from torch.nn.functional import pad

from batchgen.models.contents import ModelFolder
from batchgen.models.family import Conditioning, Network
from batchgen.models.flow import PATCH, from_patches, grid, patches
from batchgen.models.flow_facts import Z_LENGTHS
from batchgen.models.loading import load_components
from batchgen.models.varying import MASK, NEGATIVE, PROMPT, VaryingText

_LAYERS = f"{PATCH}-1"
"""The network's name for what embeds patches of that side, and of one frame."""


class Batched(nn.Module):
    """A ZImageTransformer2DModel for a batch in tensors: its own call takes lists, and pads each text by its length,
    which a captured step cannot know."""

    def __init__(self, transformer: Any) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self, latents: Tensor, times: Tensor, text: Tensor, is_text: Tensor) -> Tensor:
        """The prediction `[B, C, h, w]` for latents at times `[B]` from 0 (noise) to 1, told texts `[B, L, D]` of
        which some tokens are none, `[B, L]`."""
        network, (batch, _, height, width) = self.transformer, latents.shape
        time = network.t_embedder(times * network.t_scale).type_as(latents)

        image = patches(latents)
        num = image.shape[1]
        image = network.all_x_embedder[_LAYERS](pad(image, (0, 0, 0, -num % SEQ_MULTI_OF)))
        image = torch.cat([image[:, :num], network.x_pad_token.expand(batch, image.shape[1] - num, -1)], dim=1)
        caption = torch.where(is_text[:, :, None], network.cap_embedder(text), network.cap_pad_token)
        places = _places(text.shape[1], height // PATCH, width // PATCH, latents.device)
        angles = network.rope_embedder(pad(places, (0, 0, 0, image.shape[1] - num)))[None]
        of_text, of_image = angles[:, : text.shape[1]], angles[:, text.shape[1] :]

        for layer in network.noise_refiner:
            image = layer(image, None, of_image, time)
        for layer in network.context_refiner:
            caption = layer(caption, None, of_text)
        both, of_both = torch.cat([image, caption], dim=1), torch.cat([of_image, of_text], dim=1)
        for layer in network.layers:
            both = layer(both, None, of_both, time)
        predicted = network.all_final_layer[_LAYERS](both, c=time)[:, :num]
        return from_patches(predicted, height, width)


class ZImage(VaryingText):
    """A loaded pipeline on one device. Its latents stay in float32."""

    lengths = Z_LENGTHS
    looks_past = False

    def __init__(self, pipeline: Any, device: torch.device) -> None:
        blocks = (ZImageTransformerBlock,)
        super().__init__(pipeline, pipeline.transformer, (pipeline.text_encoder,), device, blocks)
        self.network = Batched(pipeline.transformer)
        self.tokenizer.padding_side = "right"
        self._noise_dtype = torch.float32

    def embed(self, ids: Tensor, mask: Tensor) -> Tensor:
        """As VaryingText.embed: the text encoder's last but one hidden states."""
        (encoder,) = self.encoders
        output = encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
        hidden: Tensor = output.hidden_states[-2]
        return hidden

    def predict(self, network: Network, latents: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        """As Family.predict; the network's time runs from noise to image, and so does what it predicts."""
        inputs, times = conditioning.inputs, (1000 - timesteps) / 1000

        def told(text: str) -> Tensor:
            predicted: Tensor = network(latents.to(self.dtype), times, inputs[text], inputs[text + MASK])
            return predicted.float()

        prediction = told(PROMPT)
        if conditioning.is_guided:
            scale = conditioning.guidance[:, None, None, None]
            prediction = prediction + scale * (prediction - told(NEGATIVE))
        return -prediction


def _places(length: int, height: int, width: int, device: torch.device) -> Tensor:
    """Of each token of a text its number from 1, 0 and 0; then of each patch the number after the text, its row and its
    column: `[L + N, 3]`, made on the device."""
    text = torch.arange(1, length + 1, device=device)[:, None]
    return torch.cat([pad(text, (0, 2)), pad(grid(height, width, device), (1, 0), value=length + 1)])


def load(folder: ModelFolder, dtype: torch.dtype, vae_dtype: torch.dtype | None, device: torch.device) -> ZImage:
    """Load a checked folder. Raises UsageError as `load_components`."""
    return ZImage(diffusers.ZImagePipeline(**load_components(folder, dtype, vae_dtype or dtype)), device)
