"""What a job puts in the place of a model's own components: another VAE, another scheduler. No torch."""

from __future__ import annotations

import ast
import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchgen.errors import UsageError
from batchgen.models import signatures
from batchgen.models.layouts import Component
from batchgen.models.reading import absolute, read_json
from batchgen.weights import Model
from batchgen.wording import first_line, listed

_CONFIG, _INDEX, _SCHEDULER = "config.json", "model_index.json", "scheduler_config.json"
_FILES = (_CONFIG, "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model-*-of-*.safetensors")
_FILES_OF_VAE = (*_FILES, "diffusion_pytorch_model.safetensors.index.json")

_OF_LATENTS = {"latent_channels": 4, "scaling_factor": 0.18215, "shift_factor": None}
"""Keys of a VAE's configuration that say what latents it is for, with the defaults of AutoencoderKL."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """Where what stands in the place of a model's own lies."""

    vae: Path | None = None
    """Its folder."""
    scheduler_file: Path | None = None
    scheduler: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Keys over the scheduler's configuration, its class among them."""

    @property
    def has_scheduler(self) -> bool:
        return bool(self.scheduler_file or self.scheduler)

    def identity(self) -> dict[str, str]:
        """What files do not tell."""
        return {"scheduler": json.dumps(self.scheduler, sort_keys=True)} if self.scheduler else {}

    def check(self, model: str, components: Mapping[str, Component], path: Path, *, is_generic: bool) -> None:
        """Raises UsageError for what does not fit a model folder's components; of a generic family's scheduler nothing
        is known."""
        for name, is_given in (("vae", self.vae is not None), ("scheduler", self.has_scheduler)):
            if is_given and name not in components:
                raise UsageError(f"model.{name} has no effect on model {model!r}, which has none; leave it out")
        if self.vae is not None:
            self._check_vae(model, components["vae"], path)
        if self.has_scheduler:
            told = read_json(self.scheduler_file or path / "scheduler" / _SCHEDULER) | dict(self.scheduler)
            cls = told.get("_class_name")
            if not is_generic and cls not in components["scheduler"].classes:
                raise UsageError(
                    f"model.scheduler: {cls} does not run in the pipeline of model {model!r}; allowed is "
                    f"{', '.join(components['scheduler'].classes)}"
                )
            self._check_options(str(cls))

    def _check_options(self, cls: str) -> None:
        keys = signatures.scheduler_keys(cls)
        for key, value in self.scheduler.items():
            if key == "_class_name":
                continue
            if key not in keys:
                near = difflib.get_close_matches(key, keys, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"it has {listed(list(keys))}"
                raise UsageError(f"model.scheduler_options: {cls} of diffusers has no {key}; {hint}")
            if not signatures.fits(value, annotation := keys[key]):
                allowed = "" if annotation is None else ast.unparse(annotation)
                raise UsageError(
                    f"model.scheduler_options: {key} = {value!r} is not what {cls} of diffusers takes there, which is "
                    f"{allowed}"
                )

    def _check_vae(self, model: str, component: Component, path: Path) -> None:
        assert self.vae is not None
        ours, theirs = read_json(self.vae / _CONFIG), read_json(path / "vae" / _CONFIG)
        found = ours.get("_class_name")
        if found not in component.classes:
            raise UsageError(
                f"model.vae: {self.vae} is of class {found!r}; allowed is {' or '.join(component.classes)}"
            )
        for key, default in _OF_LATENTS.items():
            mine, wanted = (one.get(key, default) for one in (ours, theirs))
            if mine != wanted:
                raise UsageError(
                    f"model.vae: {self.vae} is for other latents than model {model!r}: its {key} is {mine}, and that "
                    f"of the model's own VAE {wanted}; name a VAE of this kind of model"
                )


NOTHING = Replaced()


def replaced(model: Model) -> Replaced:
    """What the job's model has in the place of its own. Raises UsageError for what is not here; no network is asked."""
    options = dict(model.scheduler_options)
    file = None
    if model.scheduler is not None:
        file, cls = _scheduler(model.scheduler)
        options = {"_class_name": cls, **options} if file is None else options
    return Replaced(None if model.vae is None else _vae_folder(model.vae), file, options)


def located(model: Model) -> Model:
    """The same model for processes that start in another folder."""
    told = {key: getattr(model, key) for key in ("vae", "scheduler")}
    paths = {key: Path(value).expanduser() for key, value in told.items() if value is not None}
    return model.model_copy(update={key: str(absolute(path)) for key, path in paths.items() if path.exists()})


def fetch(model: Model) -> None:
    """Fetch a VAE that lies on the hub. Raises UsageError for one that is not to be had."""
    from huggingface_hub import snapshot_download

    if model.vae is None or Path(model.vae).expanduser().exists():
        return
    patterns = [*_FILES_OF_VAE, *(f"vae/{name}" for name in _FILES_OF_VAE)]
    try:
        snapshot_download(model.vae, allow_patterns=patterns)
    except Exception as error:  # which ones there are differs between the hub package's versions
        raise UsageError(
            f"model.vae = {model.vae!r} could not be fetched: {first_line(error)}; check its name and the network"
        ) from None


def _scheduler(name: str) -> tuple[Path | None, str]:
    """The configuration's file, or the class."""
    path = Path(name).expanduser()
    if path.exists():
        found = (one for one in (path, path / _SCHEDULER, path / "scheduler" / _SCHEDULER) if one.is_file())
        file = next(found, None)
        if file is None:
            raise UsageError(f"model.scheduler: folder {path} holds no {_SCHEDULER}; name the file")
        if "_class_name" not in read_json(file):
            raise UsageError(f"model.scheduler: {file} has no _class_name, so it is no {_SCHEDULER} of diffusers")
        return absolute(file), ""
    if not re.fullmatch(r"\w+Scheduler", name):
        raise UsageError(
            f"model.scheduler = {name!r} is neither a file or folder here nor the class of a diffusers scheduler, such "
            "as LCMScheduler; check its name"
        )
    return None, name


def _vae_folder(name: str) -> Path:
    """The folder that holds the VAE's own files."""
    place = Path(name).expanduser()
    place = place if place.is_dir() else _cached(name)
    place = place / "vae" if (place / _INDEX).is_file() else place
    if not (place / _CONFIG).is_file():
        place = place / "vae" if (place / "vae" / _CONFIG).is_file() else place
    if not (place / _CONFIG).is_file():
        inside = listed(sorted(one.name for one in place.iterdir())[:5]) if place.is_dir() else "nothing"
        raise UsageError(f"model.vae: {place} has no {_CONFIG}, so it is no VAE's folder; it holds {inside}")
    return place.resolve() if not place.is_symlink() else place


def _cached(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except Exception as error:  # which ones there are differs between the hub package's versions
        raise UsageError(
            f"model.vae = {name!r} is neither a folder here nor in the hub's cache ({first_line(error)}); fetch it "
            "once, where there is a network: batchgen prefetch and the job file"
        ) from None
