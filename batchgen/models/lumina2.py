"""The Lumina-Image 2.0 family (Qin et al. 2025), a `batchgen.models.family.Family`.

Each function does what diffusers' Lumina2Pipeline does at that point, for a batch whose rows differ in prompt, seed,
guidance scale and timestep. The network looks past padding, but an image's places begin where its text ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import diffusers
import torch
from diffusers.models.transformers.transformer_lumina2 import Lumina2TransformerBlock
from torch import Tensor, nn
from torch.nn.functional import pad

from batchgen.models.contents import ModelFolder
from batchgen.models.dit import DiffusionTransformer
from batchgen.models.dit_facts import LUMINA_LENGTH, with_system_prompt
from batchgen.models.family import Conditioning, Encoded, Network, Schedule, as_long, doubled, guide
from batchgen.models.flow import PATCH, FlowMatching, from_patches, grid, patches
from batchgen.models.latent import tokens
from batchgen.models.loading import load_components

_ANGLES = ("text_angles", "row_angles", "column_angles")
"""The rotations of places along each axis, by Su et al. 2021."""


class Batched(nn.Module):
    """A Lumina2Transformer2DModel for a batch in tensors: its own call puts each image behind the last token of its
    text, by a length that a captured step cannot know. Here all images lie behind the padding, which is looked past."""

    def __init__(self, transformer: Any, device: torch.device) -> None:
        super().__init__()
        self.transformer = transformer
        for name, angles in zip(_ANGLES, transformer.rope_embedder.freqs_cis, strict=True):
            # diffusers has them in twice the width, and multiplies by them what was float32.
            self.register_buffer(name, angles.to(device, torch.complex64), persistent=False)

    def forward(self, latents: Tensor, times: Tensor, text: Tensor, is_text: Tensor) -> Tensor:
        """The prediction `[B, C, h, w]` for latents at times `[B]` from 0 (noise) to 1, told texts `[B, L, D]` of
        which some tokens are none, `[B, L]`."""
        network, length = self.transformer, text.shape[1]
        height, width = latents.shape[2:]
        time, caption = network.time_caption_embed(latents, times, text)
        image = network.x_embedder(patches(latents))
        places = _places(is_text, height // PATCH, width // PATCH)
        angles = torch.cat([getattr(self, name)[places[..., axis]] for axis, name in enumerate(_ANGLES)], dim=-1)

        for layer in network.context_refiner:
            caption = layer(caption, is_text, angles[:, :length])
        for layer in network.noise_refiner:
            image = layer(image, None, angles[:, length:], time)
        both, is_seen = torch.cat([caption, image], dim=1), pad(is_text, (0, image.shape[1]), value=True)
        for layer in network.layers:
            both = layer(both, is_seen, angles, time)
        return from_patches(network.norm_out(both[:, length:], time), height, width)


class Lumina2(DiffusionTransformer, FlowMatching):
    """A loaded pipeline on one device."""

    def __init__(self, pipeline: Any, device: torch.device) -> None:
        blocks = (Lumina2TransformerBlock,)
        super().__init__(pipeline, pipeline.transformer, (pipeline.text_encoder,), device, blocks)
        self.network = Batched(pipeline.transformer, device)
        self.tokenizer.padding_side = "right"

    def _prompt(self, text: str) -> str:
        return with_system_prompt(text)

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Each text's embedding `[L, D]`, the text encoder's last but one hidden states, and mask `[L]`."""
        (encoder,) = self.encoders
        ids, mask = tokens(self.tokenizer, texts, self.device, LUMINA_LENGTH)
        output = encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
        return list(zip(output.hidden_states[-2].to(self.dtype), mask.bool(), strict=True))

    def schedule(self, width: int, height: int, steps: int) -> Schedule:
        """As Family.schedule: diffusers' pipeline counts the latents' channels for patches."""
        return Schedule(self._shift(self.channels), is_even=True)

    def predict(self, network: Network, latents: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        """As Family.predict; the network's time runs from noise to image, and so does what it predicts. A guided
        prediction is as long as the prompt's own in each line of the latents, by diffusers' `cfg_normalization`."""
        is_guided = conditioning.is_guided
        times = 1 - timesteps / self.scheduler.config.num_train_timesteps
        both = network(
            doubled(latents, is_guided),
            doubled(times, is_guided),
            *(conditioning.inputs[name] for name in self.encodings),
        )
        prediction = guide(both, conditioning)
        return -as_long(prediction, both[len(latents) :]) if is_guided else -prediction


def _places(is_text: Tensor, height: int, width: int) -> Tensor:
    """Of each token of texts `[B, L]` its number, 0 and 0; then of each patch the number of tokens of its text, its row
    and its column: `[B, L + N, 3]`, made on the device."""
    batch, length = is_text.shape
    text = pad(torch.arange(length, device=is_text.device)[:, None], (0, 2)).expand(batch, -1, -1)
    sides = grid(height, width, is_text.device).expand(batch, -1, -1)
    behind = is_text.sum(1)[:, None, None].expand(-1, height * width, 1)
    return torch.cat([text, torch.cat([behind, sides], dim=-1)], dim=1)


def load(folder: ModelFolder, dtype: torch.dtype, vae_dtype: torch.dtype | None, device: torch.device) -> Lumina2:
    """Load a checked folder. Raises UsageError as `load_components`."""
    return Lumina2(diffusers.Lumina2Pipeline(**load_components(folder, dtype, vae_dtype or dtype)), device)
