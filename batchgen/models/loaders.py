"""The families whose steps the engine runs: what loads each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from batchgen.models import (
    aura,
    chroma,
    cogview4,
    flux,
    flux2,
    hunyuan,
    kolors,
    lumina2,
    pixart,
    qwen_image,
    sana,
    sd,
    sd3,
    sdxl,
    z_image,
)
from batchgen.models.contents import ModelFolder
from batchgen.models.family import Family

LOADERS: Mapping[str, Callable[[ModelFolder, torch.dtype, torch.dtype | None, torch.device], Family]] = {
    "StableDiffusionPipeline": sd.load,
    "StableDiffusionXLPipeline": sdxl.load,
    "StableDiffusion3Pipeline": sd3.load,
    "FluxPipeline": flux.load,
    "Flux2KleinPipeline": flux2.load,
    "QwenImagePipeline": qwen_image.load,
    "ChromaPipeline": chroma.load,
    "ZImagePipeline": z_image.load,
    "CogView4Pipeline": cogview4.load,
    "PixArtAlphaPipeline": pixart.load_alpha,
    "PixArtSigmaPipeline": pixart.load_sigma,
    "SanaPipeline": sana.load,
    "AuraFlowPipeline": aura.load,
    "HunyuanDiTPipeline": hunyuan.load,
    "KolorsPipeline": kolors.load,
    "Lumina2Pipeline": lumina2.load,
}
"""What loads a folder, by the pipeline class that it names."""
