"""The CogView4 family (Zhipu AI 2025), a `batchgen.models.family.Family`.

Each function does what diffusers' CogView4Pipeline does at that point, for a batch whose rows differ in prompt, seed,
guidance scale and timestep. Text encoder and network look at the padding before each text, by which it comes to a
multiple of 16 tokens, so rows of a batch share that length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import diffusers
import torch
from diffusers.models.transformers.transformer_cogview4 import CogView4TransformerBlock
from diffusers.pipelines.cogview4.pipeline_cogview4 import calculate_shift
from torch import Tensor

from batchgen.models.contents import ModelFolder
from batchgen.models.family import Conditioning, Encoded, Network, Schedule, guide
from batchgen.models.flow_facts import COGVIEW_LENGTHS
from batchgen.models.latent import tokens
from batchgen.models.loading import load_components
from batchgen.models.transfer import to_device
from batchgen.models.varying import NEGATIVE, PROMPT, VaryingText
from batchgen.records import Row


class CogView4(VaryingText):
    """A loaded pipeline on one device."""

    lengths = COGVIEW_LENGTHS
    looks_past = False

    def __init__(self, pipeline: Any, device: torch.device) -> None:
        blocks = (CogView4TransformerBlock,)
        super().__init__(pipeline, pipeline.transformer, (pipeline.text_encoder,), device, blocks)
        self.tokenizer.padding_side = "right"
        self._noise_dtype = torch.float32

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Each text's embedding `[L, D]`, that of the padding before it included: the text encoder's last but one
        hidden states. No token sees a later one, so what fills the chunk up behind a text changes nothing."""
        (encoder,) = self.encoders
        ids, mask = tokens(self.tokenizer, texts, torch.device("cpu"), self.lengths.allowed[-1])
        counts = mask.sum(1).numpy()
        lengths = self.lengths.of(counts)
        padded = torch.stack([one.roll(n) for one, n in zip(ids, (lengths - counts).tolist(), strict=True)])
        output = encoder(input_ids=to_device(padded, self.device), output_hidden_states=True, use_cache=False)
        embeddings = output.hidden_states[-2].to(self.dtype)
        return [(one[:length].clone(),) for one, length in zip(embeddings, lengths.tolist(), strict=True)]

    def schedule(self, width: int, height: int, steps: int) -> Schedule:
        """As Family.schedule."""
        return Schedule(self._shift(self._num_patches(width, height)), is_whole=True)

    def _shift(self, num_patches: int) -> float | None:
        """As FlowMatching._shift, by the square root of the number."""
        config: Any = self.scheduler.config
        if not config.use_dynamic_shifting:
            return None
        return float(calculate_shift(num_patches, config.base_image_seq_len, config.base_shift, config.max_shift))

    def noise(self, row: Row, generator: torch.Generator) -> Tensor:
        """As Family.noise, drawn in float32, and then in the dtype that the scheduler leaves latents in."""
        return super().noise(row, generator).to(self.dtype)

    def predict(self, network: Network, latents: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        """As Family.predict; the network is told that the image was never resized or cropped."""
        sides = [side * self.pixels_per_latent for side in latents.shape[2:]]
        size = torch.stack([torch.full_like(timesteps, side, dtype=self.dtype) for side in sides], dim=1)
        # Its own call makes them on the host, from where a capture can copy nothing.
        with latents.device:
            places = self._pipeline.transformer.rope(latents)

        def told(text: str) -> Tensor:
            predicted: Tensor = network(
                hidden_states=latents,
                encoder_hidden_states=conditioning.inputs[text],
                timestep=timesteps,
                original_size=size,
                target_size=size,
                crop_coords=torch.zeros_like(size),
                image_rotary_emb=places,
                return_dict=False,
            )[0]
            return predicted

        texts = (NEGATIVE, PROMPT) if conditioning.is_guided else (PROMPT,)
        return guide(torch.cat([told(text) for text in texts]), conditioning)

    def _unscaled(self, latents: Tensor) -> Tensor:
        """As LatentDiffusion._unscaled: diffusers' pipeline leaves the mean of all channels out."""
        scaling_factor: float = self.vae.config.scaling_factor
        return latents / scaling_factor


def load(folder: ModelFolder, dtype: torch.dtype, vae_dtype: torch.dtype | None, device: torch.device) -> CogView4:
    """Load a checked folder. Raises UsageError as `load_components`."""
    return CogView4(diffusers.CogView4Pipeline(**load_components(folder, dtype, vae_dtype or dtype)), device)
