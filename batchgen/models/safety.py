"""The safety checker that comes with Stable Diffusion checkpoints (diffusers' StableDiffusionSafetyChecker).

CLIP embeds an image; its cosine with each of some fixed concepts is held against that concept's own threshold. An image
that is near one of the special care concepts is judged more strictly (Rando et al. 2022, "Red-Teaming the Stable
Diffusion Safety Filter").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from diffusers.pipelines.stable_diffusion.safety_checker import cosine_distance
from torch import Tensor

from batchgen.errors import UsageError
from batchgen.records import Pixels
from batchgen.wording import listed

STRICTER = 0.01
"""What a special care concept adds to all scores."""

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Finding:
    """What the checker says of one image."""

    concepts: dict[int, float]
    """Scores by the numbers of the concepts that it shows: how far each cosine is above its threshold."""
    is_strict: bool
    """Whether a special care concept made the checker stricter."""

    def __str__(self) -> str:
        shown = listed([f"concept {number} by {score:.3f}" for number, score in self.concepts.items()])
        strictly = f" (with {STRICTER} added for a special care concept)" if self.is_strict else ""
        return (
            f"the safety checker flags the image: its score exceeds the threshold of {shown}{strictly}; another seed "
            "or prompt makes another image"
        )


class SafetyChecker:
    """A checkpoint's checker and image processor. Raises UsageError for two that do not fit each other."""

    def __init__(self, network: Any, processor: Any) -> None:
        self._network = network
        self._processor = processor
        self._special_care = _floats(network.special_care_embeds_weights)
        self._concepts = _floats(network.concept_embeds_weights)
        """The concepts' thresholds."""
        side = network.config.vision_config.image_size
        made = tuple(self.prepare([np.zeros((64, 96, 3), np.uint8)]).shape[1:])
        if made != (3, side, side):
            raise UsageError(
                f"the model's feature_extractor makes images of shape {made}, and its safety_checker reads "
                f"{(3, side, side)}; take both folders from one checkpoint"
            )

    def prepare(self, pictures: Sequence[Pixels]) -> Tensor:
        """The network's input `[B, 3, S, S]` float32, on the host, of pictures of any sizes."""
        made = self._processor(list(pictures), input_data_format="channels_last", return_tensors="pt")
        inputs: Tensor = made["pixel_values"]
        return inputs

    def cosines(self, prepared: Tensor) -> Tensor:
        """Cosines `[B, C]` float32 of images `[B, 3, S, S]` with the special care concepts, then with the others."""
        network = self._network
        embeddings = network.visual_projection(network.vision_model(prepared.to(network.dtype))[1])
        both = [cosine_distance(embeddings, one) for one in (network.special_care_embeds, network.concept_embeds)]
        return torch.cat(both, dim=1).float()

    def judge(self, cosines: Floats) -> Finding | None:
        """What an image's cosines `[C]` say; None where nothing is wrong. As StableDiffusionSafetyChecker.forward,
        which rounds scores to three digits."""
        special, others = np.split(cosines, [len(self._special_care)])
        is_strict = bool((_scores(special, self._special_care) > 0).any())
        scores = _scores(others, self._concepts, STRICTER if is_strict else 0.0)
        concepts = {number: float(scores[number]) for number in np.flatnonzero(scores > 0).tolist()}
        return Finding(concepts, is_strict) if concepts else None


def _floats(values: Tensor) -> Floats:
    made: Floats = values.detach().cpu().float().numpy()
    return made


def _scores(cosines: Floats, thresholds: Floats, adjustment: float = 0.0) -> Floats:
    scores: Floats = np.round(cosines - thresholds + np.float32(adjustment), 3)
    return scores
