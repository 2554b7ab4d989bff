"""The components of a checked diffusers folder, loaded by their own libraries."""

from __future__ import annotations

import inspect
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
from batchgen.models.reading import read_json

_LIBRARIES: Mapping[str, Any] = {
    "diffusers": diffusers,
    "transformers": transformers,
    "stable_diffusion": stable_diffusion,
}
"""By the names that model_index.json has for them."""


def load_components(folder: ModelFolder, dtype: torch.dtype, vae_dtype: torch.dtype) -> dict[str, Any]:
    """Every component of a checked folder by its name: safetensors only, no remote code.

    Raises UsageError for weights that cannot be read or that do not fill the network.
    """
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    try:
        return {
            name: _load(folder, name, component, vae_dtype if name == "vae" else dtype)
            for name, component in folder.components.items()
        }
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UsageError(f"model {folder.name!r} cannot be loaded from {folder.path}: {error}") from error


def load_scheduler(folder: ModelFolder) -> Any:
    """The folder's scheduler, or the job's: one of another class takes the configuration over as `from_config` does."""
    own = read_json(folder.file("scheduler/scheduler_config.json"))
    made = getattr(diffusers, own["_class_name"]).from_config(own)
    options = dict(folder.replaced.scheduler)
    if not options:
        return made
    cls = options.pop("_class_name", own["_class_name"])
    changed = getattr(diffusers, cls).from_config(made.config, **options)
    idle = [name for name in options if name not in inspect.signature(type(changed).__init__).parameters]
    if idle:
        raise UsageError(f"model.scheduler_options: {cls} of diffusers has no {', '.join(idle)}; leave it out")
    return changed


def load_replaced(folder: ModelFolder, dtype: torch.dtype) -> dict[str, Any]:
    """The components that the job puts in the place of the folder's own. Raises UsageError as `load_components`."""
    found: dict[str, Any] = {}
    if folder.replaced.vae is not None:
        found["vae"] = _load(folder, "vae", folder.components["vae"], dtype)
    if folder.replaced.scheduler_file or folder.replaced.scheduler:
        found["scheduler"] = load_scheduler(folder)
    return found


def _load(folder: ModelFolder, name: str, component: Component, dtype: torch.dtype) -> Any:
    place = folder.place(name)
    if name == "scheduler":
        return load_scheduler(folder)
    library = _LIBRARIES[component.library]
    cls = next(getattr(library, one) for one in component.classes if hasattr(library, one))
    if component.weights is None:
        return cls.from_pretrained(place)
    network, info = cls.from_pretrained(
        place,
        variant=folder.variant_of(name),
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
