"""The components of a checked diffusers folder, loaded by their own libraries."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import diffusers
import torch
import transformers

from batchgen.errors import BatchgenError, UsageError
from batchgen.models.contents import ModelFolder
from batchgen.models.layouts import Component
from batchgen.models.packages import check_packages
from batchgen.models.reading import read_json
from batchgen.wording import first_line


def load_components(folder: ModelFolder, dtype: torch.dtype, vae_dtype: torch.dtype) -> dict[str, Any]:
    """Every component of a checked folder by its name: safetensors only, no remote code. Those that are deferred come
    first, and are empty.

    Raises UsageError for weights that cannot be read or that do not fill the network, or if a package is lacking.
    """
    check_packages(folder)
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    dtypes = dict.fromkeys(folder.components, dtype) | {"vae": vae_dtype}
    single, loaded = folder.in_checkpoint, {}
    with _errors_named(folder):
        for name in sorted(folder.components.keys() - single, key=lambda one: one not in folder.deferred):
            loaded[name] = _load(folder, name, folder.components[name], dtypes[name])
            if name in folder.deferred:
                empty(loaded[name])
        return _load_single(folder, loaded, dtypes) if single else loaded


def fill(networks: Sequence[torch.nn.Module], folder: ModelFolder, dtype: torch.dtype, device: torch.device) -> None:
    """Read the weights of the folder's text encoders, one after another, into networks that are empty. Raises
    UsageError as `load_components`."""
    with _errors_named(folder), torch.inference_mode(False):
        for network, name in zip(networks, folder.encoders, strict=True):
            read = _load(folder, name, folder.components[name], dtype)
            for mine, content in zip(network.parameters(), read.parameters(), strict=True):
                mine.data = content.data.to(device)


def empty(network: torch.nn.Module) -> None:
    """Give the memory of a network's weights back."""
    for one in network.parameters():
        one.data = torch.empty(0, dtype=one.dtype, device=one.device)


@contextmanager
def _errors_named(folder: ModelFolder) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise UsageError(f"model {folder.name!r} needs a package that is not installed: {first_line(error)}") from None
    except (BatchgenError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # The libraries raise what they like over files that are not as they should be.
        place = folder.checkpoint or folder.path
        raise UsageError(f"model {folder.name!r} cannot be loaded from {place}: {error}") from error


def vae_dtype_of(folder: ModelFolder, dtype: torch.dtype, vae_dtype: torch.dtype | None) -> torch.dtype:
    """The VAE's dtype. With none given for it, that of a float16 model is float32 if its configuration says that it
    overflows in float16 (`force_upcast`)."""
    is_upcast = dtype == torch.float16 and folder.config("vae").get("force_upcast", True)
    return vae_dtype or (torch.float32 if is_upcast else dtype)


def load_scheduler(folder: ModelFolder) -> Any:
    """The folder's scheduler, or the job's: one of another class takes the configuration over as `from_config` does."""
    own = read_json(folder.file("scheduler/scheduler_config.json"))
    made = getattr(diffusers, own["_class_name"]).from_config(own)
    options = dict(folder.replaced.scheduler)
    if not options:
        return made
    cls = options.pop("_class_name", own["_class_name"])
    return getattr(diffusers, cls).from_config(made.config, **options)


def load_pipeline(folder: ModelFolder, dtype: torch.dtype) -> Any:
    """The pipeline of a checked folder by its own loader, which is given the networks and what the job puts in the
    place of the folder's own: that loader draws weights that are missing. Raises UsageError as `load_components`."""
    libraries = ("diffusers", "transformers")
    networks = {name: one for name, one in folder.components.items() if one.weights and one.library in libraries}
    without = {name: None for name, entry in folder.index.items() if entry == [None, None]}
    check_packages(folder)
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    with _errors_named(folder):
        parts = {name: _load(folder, name, one, dtype) for name, one in networks.items()}
        if folder.replaced.has_scheduler:
            parts["scheduler"] = load_scheduler(folder)
        return getattr(diffusers, folder.family).from_pretrained(
            folder.path,
            torch_dtype=dtype,
            variant=folder.variant,
            use_safetensors=True,
            local_files_only=True,
            **without,
            **parts,
        )


def _load(folder: ModelFolder, name: str, component: Component, dtype: torch.dtype) -> Any:
    place = folder.place(name)
    if name == "scheduler":
        return load_scheduler(folder)
    cls = _class(component)
    if component.weights is None:
        return cls.from_pretrained(place)
    network, info = cls.from_pretrained(
        place,
        variant=folder.variant_of(name),
        use_safetensors=True,
        local_files_only=True,
        output_loading_info=True,
        **{"torch_dtype" if component.library == "diffusers" else "dtype": dtype},
    )
    missing = sorted(info["missing_keys"])
    if missing:
        raise UsageError(
            f"model folder {folder.path}: the weights of {name} lack {len(missing)} of the network's "
            f"tensors, the first being {missing[0]!r}; download or convert the folder again"
        )
    return network.eval()


def _load_single(folder: ModelFolder, others: dict[str, Any], dtypes: Mapping[str, torch.dtype]) -> dict[str, Any]:
    """All components: those of the single file, by the conversion that diffusers has for its pipeline, and others."""
    try:
        return _converted(folder, others, dtypes)
    except (KeyError, NotImplementedError) as error:  # what torch raises where a network is left without content
        raise UsageError(
            f"single file {folder.checkpoint} lacks tensors that {folder.path} describes; set model.config to a folder "
            "or hub id of the file's own architecture, or download the file again"
        ) from error


def _converted(folder: ModelFolder, others: dict[str, Any], dtypes: Mapping[str, torch.dtype]) -> dict[str, Any]:
    if "vae" in folder.in_checkpoint:
        # In a dtype of its own.
        others["vae"] = _class(folder.components["vae"]).from_single_file(
            str(folder.checkpoint),
            config=str(folder.path),
            subfolder="vae",
            torch_dtype=dtypes["vae"],
            local_files_only=True,
        )
    pipeline = getattr(diffusers, folder.family).from_single_file(
        str(folder.checkpoint),
        config=str(folder.path),
        torch_dtype=dtypes[folder.layout.network],
        local_files_only=True,
        **others,
    )
    return {name: getattr(pipeline, name) for name in folder.components}


def _class(component: Component) -> Any:
    library = importlib.import_module(component.module)
    return next(getattr(library, one) for one in component.classes if hasattr(library, one))
