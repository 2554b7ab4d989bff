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
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor, nn
from torch.nn.functional import pad

from batchgen.models.contents import ModelFolder
from batchgen.models.family import Conditioning, Network, Schedule
from batchgen.models.flow_facts import Z_LENGTHS
from batchgen.models.loading import load_components
from batchgen.models.varying import MASK, NEGATIVE, PROMPT, VaryingText
from batchgen.records import Row

_PATCH = 2
"""Latents along a side of each patch of the network's sequence."""
_LAYERS = f"{_PATCH}-1"
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
        network, size = self.transformer, latents.shape
        height, width = size[2] // _PATCH, size[3] // _PATCH
        time = network.t_embedder(times * network.t_scale).type_as(latents)

        patches = _patches(latents)
        num = patches.shape[1]
        image = network.all_x_embedder[_LAYERS](pad(patches, (0, 0, 0, -num % SEQ_MULTI_OF)))
        image = torch.cat([image[:, :num], network.x_pad_token.expand(size[0], image.shape[1] - num, -1)], dim=1)
        caption = torch.where(is_text[:, :, None], network.cap_embedder(text), network.cap_pad_token)
        places = _places(text.shape[1], height, width, latents.device)
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
        return _latents(predicted, height, width)


class ZImage(VaryingText):
    """A loaded pipeline on one device. Its latents stay in float32."""

    lengths = Z_LENGTHS
    looks_past = False

    def __init__(self, pipeline: Any, device: torch.device) -> None:
        blocks = (ZImageTransformerBlock,)
        super().__init__(pipeline, pipeline.transformer, (pipeline.text_encoder,), device, blocks)
        self.network = Batched(pipeline.transformer)
        self.tokenizer.padding_side = "right"

    def embed(self, ids: Tensor, mask: Tensor) -> Tensor:
        """As VaryingText.embed: the text encoder's last but one hidden states."""
        (encoder,) = self.encoders
        output = encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
        hidden: Tensor = output.hidden_states[-2]
        return hidden

    def schedule(self, width: int, height: int, steps: int) -> Schedule:
        """As Family.schedule."""
        side = self.pixels_per_latent * _PATCH
        return Schedule(self._shift((height // side) * (width // side)), is_even=True)

    def noise(self, row: Row, generator: torch.Generator) -> Tensor:
        """As Family.noise, in float32 whatever the network's dtype."""
        scale = self.pixels_per_latent
        shape = (1, self.channels, row.height // scale, row.width // scale)
        noise: Tensor = randn_tensor(shape, generator=generator, dtype=torch.float32)
        return noise

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


def _patches(latents: Tensor) -> Tensor:
    """`[B, C, h, w]` to `[B, h/2 * w/2, 4 C]`."""
    batch, channels, height, width = latents.shape
    cut = latents.view(batch, channels, height // _PATCH, _PATCH, width // _PATCH, _PATCH)
    return cut.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


def _latents(patches: Tensor, height: int, width: int) -> Tensor:
    """The reverse of `_patches`, of so many patches along the sides."""
    apart = patches.reshape(len(patches), height, width, _PATCH, _PATCH, -1)
    return apart.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)


def _places(length: int, height: int, width: int, device: torch.device) -> Tensor:
    """Of each token of a text its number from 1, 0 and 0; then of each patch the number after the text, its row and its
    column: `[L + N, 3]`, made on the device."""
    text = torch.arange(1, length + 1, device=device)[:, None]
    sides = (torch.arange(side, device=device) for side in (height, width))
    grid = torch.stack(torch.meshgrid(*sides, indexing="ij"), dim=-1).flatten(0, 1)
    return torch.cat([pad(text, (0, 2)), pad(grid, (1, 0), value=length + 1)])


def load(folder: ModelFolder, dtype: torch.dtype, vae_dtype: torch.dtype | None, device: torch.device) -> ZImage:
    """Load a checked folder. Raises UsageError as `load_components`."""
    return ZImage(diffusers.ZImagePipeline(**load_components(folder, dtype, vae_dtype or dtype)), device)
