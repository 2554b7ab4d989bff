"""The HunyuanDiT family (Li et al. 2024), a `batchgen.models.family.Family`.

Each function does what diffusers' HunyuanDiTPipeline does at that point with `use_resolution_binning=False`, for a
batch whose rows differ in prompt, seed, guidance scale and timestep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import diffusers
import torch
from diffusers.models.embeddings import get_2d_rotary_pos_embed
from diffusers.models.transformers.hunyuan_transformer_2d import HunyuanDiTBlock
from diffusers.pipelines.hunyuandit.pipeline_hunyuandit import get_resize_crop_region_for_grid
from torch import Tensor

from batchgen.models.contents import ModelFolder
from batchgen.models.dit import DiffusionTransformer
from batchgen.models.dit_facts import HUNYUAN_LENGTHS
from batchgen.models.family import Encoded
from batchgen.models.loading import load_components
from batchgen.models.transfer import to_device
from batchgen.records import Row

_ORIGINAL = (1024, 1024)
"""Height and width before resizing, by diffusers' default; the next, latents along a side whose places are trained."""
_BASE = 64


class HunyuanDiT(DiffusionTransformer):
    """A loaded pipeline on one device."""

    encodings = ("encoder_hidden_states", "text_embedding_mask", "encoder_hidden_states_t5", "text_embedding_mask_t5")

    def __init__(self, pipeline: Any, device: torch.device) -> None:
        encoders = (pipeline.text_encoder, pipeline.text_encoder_2)
        super().__init__(pipeline, pipeline.transformer, encoders, device, (HunyuanDiTBlock,))
        self.tokenizer = pipeline.tokenizer_2

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Each text's CLIP embedding `[77, D]` with its mask, and its T5 embedding `[256, E]` with its own."""
        tokenizers = (self._pipeline.tokenizer, self.tokenizer)
        of_each = zip(self.encoders, tokenizers, HUNYUAN_LENGTHS, strict=True)
        made = [one for encoder, *by in of_each for one in self._encoded(encoder, by[0], texts, by[1])]
        return list(zip(*made, strict=True))

    def _sizes(self, rows: Sequence[Row]) -> Mapping[str, Tensor]:
        """`image_meta_size` `[B, 6]`: height and width before resizing, height and width, crop top and left."""
        sizes = [(*_ORIGINAL, row.height, row.width, 0, 0) for row in rows]
        return {"image_meta_size": to_device(torch.tensor(sizes, dtype=self.dtype), self.device)}

    def _told(self, timesteps: Tensor) -> Tensor:
        return timesteps.to(self.dtype)

    def _arguments(self, inputs: Mapping[str, Tensor], latents: Tensor) -> Mapping[str, Any]:
        """With the one style there is, and each patch's place."""
        style = torch.zeros(len(inputs["image_meta_size"]), dtype=torch.int64, device=latents.device)
        return {**inputs, "style": style, "image_rotary_emb": self._places(latents)}

    def _places(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine `[h/2 * w/2, D]` of each patch, as if the image were resized to the base size (Su et al.
        2021), made on the device, since a capture can copy nothing there."""
        network = self._pipeline.transformer
        patch = network.config.patch_size
        grid = latents.shape[2] // patch, latents.shape[3] // patch
        region = get_resize_crop_region_for_grid(grid, _BASE // patch)
        places: tuple[Tensor, Tensor] = get_2d_rotary_pos_embed(
            network.inner_dim // network.num_heads, region, grid, device=latents.device, output_type="pt"
        )
        return places


def load(folder: ModelFolder, dtype: torch.dtype, vae_dtype: torch.dtype | None, device: torch.device) -> HunyuanDiT:
    """Load a checked folder. Raises UsageError as `load_components`."""
    without = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    parts = load_components(folder, dtype, vae_dtype or dtype)
    return HunyuanDiT(diffusers.HunyuanDiTPipeline(**parts, **without), device)
