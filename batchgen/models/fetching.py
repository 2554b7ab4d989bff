"""A job's model fetched: all files that a run reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from batchgen.errors import UsageError
from batchgen.models import hub, lora_files, replacing
from batchgen.models.contents import ModelFolder
from batchgen.models.folder import BUILT_IN, configuration, find_model, identity, is_hub_id
from batchgen.weights import Model


@dataclass(frozen=True, slots=True)
class Fetched:
    """A model that is here, whole."""

    folder: ModelFolder
    num_files: int
    num_bytes: int
    note: str


def fetch_model(model: Model, *, has_checker: bool = False) -> Fetched:
    """Fetch a hub id, or make sure of a local folder, with its other VAE and its LoRAs, and hash what a run would.
    Raises UsageError for a model that is not to be had, not complete or not understood."""
    if model.path == "pattern" or (model.path in BUILT_IN and not (model.loras or model.vae)):
        raise UsageError(f"model {model.path!r} is built in; there is nothing to fetch")
    file = Path(model.path).expanduser()
    single = file if file.is_file() and model.config is not None else None
    source = configuration(model) if single else model
    note = hub.fetch(source, has_checker=has_checker, checkpoint=single) if is_hub_id(source) else ""
    replacing.fetch(model)
    loras = list(lora_files.fetch(model))
    folder = find_model(model, has_checker=has_checker)
    identity(model, has_checker=has_checker)
    sizes = [path.stat().st_size for path in (*folder.paths.values(), *loras)]
    return Fetched(folder, len(sizes), sum(sizes), note)
