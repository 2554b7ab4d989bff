"""The components of a checked diffusers folder, loaded by their own libraries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import diffusers
import torch
import transformers
from diffusers.pipelines import stable_diffusion
from safetensors import SafetensorError

from batchgen.errors import UsageError
from batchgen.models.folder import ModelFolder
from batchgen.models.layouts import Component
from batchgen.wording import first_line

_LIBRARIES: Mapping[str, Any] = {
    "diffusers": diffusers,
    "transformers": transformers,
    "stable_diffusion": stable_diffusion,
}
"""By the names that model_index.json has for them."""


def load_components(folder: ModelFolder, dtype: torch.dtype, vae_dtype: torch.dtype) -> dict[str, Any]:
    """Every component of a checked folder by its name: safetensors only, no remote code.

    Raises UsageError for weights that cannot be read or that do not fill the network, or if a package is lacking.
    """
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    try:
        return {
            name: _load(folder, name, component, vae_dtype if name == "vae" else dtype)
            for name, component in folder.components.items()
        }
    except ImportError as error:
        raise UsageError(
            f"model {folder.name!r} needs a package that is not installed: {first_line(error)}; for a tokenizer that "
            "comes as a .model file: pip install sentencepiece protobuf"
        ) from None
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UsageError(f"model {folder.name!r} cannot be loaded from {folder.path}: {error}") from error


def vae_dtype_of(folder: ModelFolder, dtype: torch.dtype, vae_dtype: torch.dtype | None) -> torch.dtype:
    """The VAE's dtype. With none given for it, that of a float16 model is float32 if its configuration says that it
    overflows in float16 (`force_upcast`)."""
    is_upcast = dtype == torch.float16 and folder.config("vae").get("force_upcast", True)
    return vae_dtype or (torch.float32 if is_upcast else dtype)


def _load(folder: ModelFolder, name: str, component: Component, dtype: torch.dtype) -> Any:
    place = folder.path / name
    if name == "scheduler":
        return getattr(diffusers, folder.config(name)["_class_name"]).from_pretrained(place)
    library = _LIBRARIES[component.library]
    cls = next(getattr(library, one) for one in component.classes if hasattr(library, one))
    if component.weights is None:
        return cls.from_pretrained(place)
    network, info = cls.from_pretrained(
        place,
        variant=folder.variant,
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
        **{"torch_dtype" if library is diffusers else "dtype": dtype},
    )
    missing = sorted(info["missing_keys"])
    if missing:
        raise UsageError(
            f"model folder {folder.path}: the weights of {name} lack {len(missing)} of the network's "
            f"tensors, the first being {missing[0]!r}; download or convert the folder again"
        )
    return network.eval()
