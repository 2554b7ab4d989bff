"""The FLUX.2 klein family (Black Forest Labs 2026), a `batchgen.models.family.Family`.

Each function does what diffusers' Flux2KleinPipeline does at that point, for a batch whose rows differ in prompt, seed,
guidance scale and timestep. Latents `[B, C, h, w]` are those of the network: each holds 2 by 2 of the VAE's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import diffusers
import torch
from diffusers.models.transformers.transformer_flux2 import Flux2SingleTransformerBlock, Flux2TransformerBlock
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from torch import Tensor
from torch.nn.functional import pad

from batchgen.models.contents import ModelFolder
from batchgen.models.family import Conditioning, Encoded, Network, Schedule, doubled, guide
from batchgen.models.flow import grid
from batchgen.models.flow_facts import FLUX2_LENGTH
from batchgen.models.latent import LatentDiffusion, tokens
from batchgen.models.loading import load_components
from batchgen.records import Group, Row

_PATCH = 2
"""The VAE's latents along a side of one of the network's."""
_LAYERS = (9, 18, 27)
"""Of the text encoder, whose hidden states are the embedding side by side."""


class Flux2Klein(LatentDiffusion):
    """A loaded pipeline on one device."""

    def __init__(self, pipeline: Any, device: torch.device) -> None:
        blocks = (Flux2TransformerBlock, Flux2SingleTransformerBlock)
        super().__init__(pipeline, pipeline.transformer, (pipeline.text_encoder,), device, blocks)
        self.sample_side = pipeline.default_sample_size // _PATCH
        self.pixels_per_latent = _PATCH * pipeline.vae_scale_factor
        norm = pipeline.vae.bn
        self._mean = norm.running_mean[:, None, None]
        self._std = (norm.running_var[:, None, None] + pipeline.vae.config.batch_norm_eps).sqrt()

    def texts(self, rows: Sequence[Row], is_guided: bool) -> list[str]:
        """The negative prompt is always ""."""
        return [""] * (len(rows) if is_guided else 0) + [row.prompt for row in rows]

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Each text's embedding `[L, 3 D]`, of the prompt as a user's message in a chat."""
        chats = [
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
            for text in texts
        ]
        ids, mask = tokens(self.tokenizer, chats, self.device, FLUX2_LENGTH)
        (encoder,) = self.encoders
        output = encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
        embeddings = torch.cat([output.hidden_states[layer] for layer in _LAYERS], dim=-1).to(self.dtype)
        return [(embedding,) for embedding in embeddings]

    def conditioning(self, rows: Sequence[Row], group: Group, encoded: Mapping[str, Encoded]) -> Conditioning:
        """Inputs: `encoder_hidden_states` `[B or 2B, L, 3 D]`."""
        embeddings = torch.stack([encoded[text][0] for text in self.texts(rows, group.is_guided)])
        scales = self._scales([row.guidance_scale for row in rows])
        return Conditioning(scales, group.is_guided, {"encoder_hidden_states": embeddings})

    def schedule(self, width: int, height: int, steps: int) -> Schedule:
        """As Family.schedule."""
        shift = None
        if self.scheduler.config.use_dynamic_shifting:
            num_latents = (height // self.pixels_per_latent) * (width // self.pixels_per_latent)
            shift = compute_empirical_mu(image_seq_len=num_latents, num_steps=steps)
        return Schedule(shift, is_even=True)

    def predict(self, network: Network, latents: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        """As Family.predict; the network is given its latents as a sequence, each with its place."""
        is_guided, text = conditioning.is_guided, conditioning.inputs["encoder_hidden_states"]
        sequence = doubled(latents, is_guided).flatten(2).permute(0, 2, 1)
        prediction = network(
            hidden_states=sequence,
            timestep=doubled(timesteps, is_guided).to(latents.dtype) / 1000,
            guidance=None,
            txt_ids=pad(torch.arange(text.shape[1], device=text.device)[:, None], (3, 0)),
            img_ids=_places(latents),
            return_dict=False,
            **conditioning.inputs,
        )[0]
        return guide(prediction.permute(0, 2, 1).unflatten(2, latents.shape[2:]), conditioning)

    def _unscaled(self, latents: Tensor) -> Tensor:
        """As LatentDiffusion._unscaled: by the running statistics of the VAE's batch normalisation, then taken apart to
        `[B, C/4, 2 h, 2 w]`."""
        scaled = latents * self._std.to(latents.dtype) + self._mean.to(latents.dtype)
        apart: Tensor = diffusers.Flux2KleinPipeline._unpatchify_latents(scaled)
        return apart


def _places(latents: Tensor) -> Tensor:
    """Of each latent of `[B, C, h, w]`: 0, its row, its column and 0, `[h * w, 4]`."""
    return pad(grid(latents.shape[2], latents.shape[3], latents.device), (1, 1))


def load(folder: ModelFolder, dtype: torch.dtype, vae_dtype: torch.dtype | None, device: torch.device) -> Flux2Klein:
    """Load a checked folder. Raises UsageError as `load_components`."""
    parts = load_components(folder, dtype, vae_dtype or dtype)
    is_distilled = folder.index.get("is_distilled", False)
    return Flux2Klein(diffusers.Flux2KleinPipeline(**parts, is_distilled=is_distilled), device)
