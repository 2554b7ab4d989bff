"""Model folders: found, checked for completeness, and identified, without torch.

A model is a diffusers folder of a known family, on disk or on the Hugging Face hub. Only safetensors weights
and library classes are taken: no pickles, no code from the folder.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from batchgen.errors import UsageError
from batchgen.filesystem import resumable
from batchgen.models import demo, facts, hashes, lora_files, replacing, signatures
from batchgen.models.completeness import CONVERT, UNCHECKED, checked
from batchgen.models.contents import ModelFolder, read_of
from batchgen.models.hub import cached
from batchgen.models.reading import absolute, read_json
from batchgen.models.replacing import replaced
from batchgen.weights import Model

BUILT_IN = ("demo", "pattern")


def find_model(model: Model, *, has_checker: bool = False) -> ModelFolder:
    """The job's model folder, with its safety checker if the job has one, in the hub's cache if it is an id of it; no
    network is asked.

    Raises UsageError if it is nowhere, not complete, of another family, or asks for code of its own.
    """
    return checked(replace(_place(model, has_checker), replaced=replaced(model)))


def _place(model: Model, has_checker: bool, single: Model | None = None) -> ModelFolder:
    """Where the model lies, or the configuration of a single file, unchecked."""
    local = demo.WEIGHTS if model.path == "demo" else Path(model.path).expanduser()
    with resumable(local):
        is_folder, is_file = local.is_dir(), local.is_file()
    if is_file:
        return _of_single_file(model, absolute(local), has_checker)
    _refuse_idle(model, ("config",), "only a single .safetensors file takes its configuration from elsewhere")
    if is_folder:
        _refuse_idle(model, ("revision",), "a local folder has no revisions")
        return ModelFolder(model.path, absolute(local), model.variant, None, (), has_checker)
    if not is_hub_id(model):
        near = [one for one in difflib.get_close_matches(model.path, BUILT_IN, n=1) if one != model.path]
        hint = f"did you mean {near[0]!r}?" if near else "name a diffusers folder or a hub id like owner/name"
        raise UsageError(f"there is no model folder {model.path!r} and none built in by that name; {hint}")
    place = cached(model, has_checker=has_checker, single=single)
    return ModelFolder(model.path, place, model.variant, place.name, (), has_checker)


def _of_single_file(model: Model, file: Path, has_checker: bool) -> ModelFolder:
    """The folder of the configuration, with the single file's weights."""
    if file.suffix != ".safetensors":
        raise UsageError(
            f"model {model.path!r} is a single file, and no .safetensors file: others are pickles, which can run code; "
            f"take it as .safetensors, or {CONVERT}"
        )
    if model.config is None:
        raise UsageError(
            f"model {model.path!r} is a single file, which has neither its configuration nor its tokenizers; set "
            "model.config to a diffusers folder or a fetched hub id of the same architecture, such as "
            '"stable-diffusion-v1-5/stable-diffusion-v1-5" or "stabilityai/stable-diffusion-xl-base-1.0"; or '
            f"{CONVERT}"
        )
    return replace(_place(configuration(model), has_checker, model), name=model.path, checkpoint=file)


def configuration(model: Model) -> Model:
    """The model that a single file takes its configuration from."""
    assert model.config is not None
    return model.model_copy(update={"path": model.config, "config": None})


def is_hub_id(model: Model) -> bool:
    """Whether the job's model is neither built in nor a local path."""
    is_named = re.fullmatch(r"[\w.-]+/[\w.-]+", model.path) is not None and model.path[0] not in "./~"
    return is_named and not Path(model.path).exists()


def located(model: Model) -> Model:
    """The same model for processes that start in another folder."""
    given = {"path": model.path, "config": model.config}
    local = {
        key: str(absolute(path))
        for key, name in given.items()
        if name is not None and name not in BUILT_IN and (path := Path(name).expanduser()).exists()
    }
    return lora_files.located(replacing.located(model)).model_copy(update=local)


def pinned(model: Model) -> Model:
    """The same model for other processes: of a hub id, the commit that this one has found."""
    if model.path in BUILT_IN:
        return model
    commit = find_model(model).commit
    return model.model_copy(update={"revision": commit}) if commit else model


def facts_of(model: Model, *, has_checker: bool = False) -> facts.Facts:
    """What planning must know of the job's model. Raises UsageError as `find_model` does, and for a key of `[model]`
    that would have no effect."""
    if has_checker and model.path in BUILT_IN:
        raise UsageError(f"model {model.path!r} has no safety checker; {UNCHECKED}")
    if model.path == "pattern":
        if model.variant != "faults":
            _refuse_idle(model, ("variant",), 'the pattern model knows only "faults", which obeys fault prompts')
        keys = ("revision", "dtype", "vae_dtype", "vae", "scheduler", "scheduler_options", "loras")
        _refuse_idle(model, keys, "the pattern model has no weights")
        return facts.PATTERN
    if model.path == "demo":
        _refuse_idle(model, ("revision", "variant"), "the demo model is built in and has no other")
    folder = find_model(model, has_checker=has_checker)
    if model.loras and not signatures.takes_loras(folder.family):
        _refuse_idle(model, ("loras",), f"{folder.family} of the installed diffusers takes no LoRAs")
    lora_files.lora_sets(model)
    with read_of(folder.path):
        found = folder.layout.facts(folder.configs, 0 if folder.is_generic else _text_length(folder))
    if model.path == "demo":
        return replace(found, steps=demo.STEPS, guidance_scale=demo.GUIDANCE, note=demo.NOTE)
    return found


def _text_length(folder: ModelFolder) -> int:
    """Tokens that CLIP encoders pad and cut a prompt to. Raises UsageError where the tokenizers do not say or do not
    agree."""
    lengths: dict[str, int] = {}
    for file in (f"{name}/{one.config}" for name, one in folder.components.items() if one.is_clip_tokenizer):
        length = read_json(folder.path / file).get("model_max_length")
        if not isinstance(length, int) or length > 10_000:
            raise UsageError(f"{folder.path}/{file} lacks model_max_length, usually 77")
        lengths[file] = length
    if len(set(lengths.values())) > 1:
        told = " and ".join(f"{length} in {file}" for file, length in lengths.items())
        raise UsageError(f"model folder {folder.path}: model_max_length is {told}; one length is needed, usually 77")
    return lengths.get("tokenizer/tokenizer_config.json", 0)


def _refuse_idle(model: Model, keys: Iterable[str], reason: str) -> None:
    for key in keys:
        value = getattr(model, key)
        if value not in (None, {}):
            raise UsageError(f"model.{key} = {value!r} has no effect on model {model.path!r}: {reason}; leave it out")


def identity(model: Model, *, has_checker: bool = False) -> dict[str, str]:
    """What tells this model's images from another's: versions, or the hash of every file that matters."""
    if model.path == "pattern":
        return {"pattern": "1"}
    folder = find_model(model, has_checker=has_checker)
    commit = {"commit": folder.commit} if folder.commit else {}
    files = {name: hashes.sha256(path) for name, path in folder.paths.items()}
    return commit | files | folder.replaced.identity() | lora_files.identity(model)


def architecture(model: Model) -> str:
    """A short name for what decides a model's speed and memory: its networks' shapes and its dtype, not its weights."""
    configs = []
    if model.path != "pattern":
        folder = find_model(model)
        known = folder.configs
        configs = list(known.values()) if folder.is_generic else [known[folder.layout.network], known["vae"]]
    content = json.dumps([model.path if not configs else "", configs, model.dtype, model.vae_dtype], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]
