"""Model folders checked: all is there that its family reads, and nothing that runs code of its own."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

from batchgen.errors import UsageError
from batchgen.models import generic, signatures
from batchgen.models.contents import ModelFolder
from batchgen.models.hub import prefetch_command
from batchgen.models.layouts import FAMILIES, Component
from batchgen.models.reading import read_json
from batchgen.weights import Model
from batchgen.wording import listed

_VARIANT = re.compile(r"(?:diffusion_pytorch_)?model\.([^.]+?)(?:-\d+-of-\d+)?\.safetensors")
_VOCABULARIES = ("vocab.json", "tokenizer.json", "vocab.txt", "spiece.model", "tokenizer.model")
"""Files of a tokenizer, one of which it needs."""
_PICKLES = ("*.bin", "*.ckpt", "*.pt", "*.pth")
CONVERT = (
    "convert it once with its pipeline class in diffusers (StableDiffusionPipeline, StableDiffusionXLPipeline): "
    '.from_pretrained("OLD").save_pretrained("NEW"), or .from_single_file for a single checkpoint file'
)
UNCHECKED = (
    "leave engine.safety_checker out, or name a Stable Diffusion folder whose model_index.json has a safety_checker "
    "and a feature_extractor"
)


def checked(folder: ModelFolder) -> ModelFolder:
    """The folder with its files listed, once nothing is missing. Raises UsageError, which says what is."""
    path = folder.path
    if not (path / "model_index.json").is_file():
        raise UsageError(f"model folder {path} has no model_index.json, so it is no diffusers folder; {CONVERT}")
    family = folder.index.get("_class_name")
    if family not in FAMILIES:
        _check_pipeline(folder, str(family))
    if folder.has_checker:
        _check_checker(folder)
    if folder.checkpoint is not None:
        _check_checkpoint(folder)
    components = folder.components
    for name, component in components.items():
        _check_class(folder, name, component)
    files = ["model_index.json"]
    if folder.is_generic:
        files += generic.texts(path, components)
    else:
        files += [f"{name}/{component.config}" for name, component in components.items()]
    for file in files:
        if not folder.file(file).is_file():
            raise UsageError(f"model folder {path} lacks {file}; {_again(folder)}")
    folder.replaced.check(folder.name, components, path, is_generic=folder.is_generic)
    weights: list[str] = []
    for name, component in components.items():
        if component.is_tokenizer and not folder.is_generic:
            files += _tokenizer_files(path, name, component)
        if component.weights is not None and name not in folder.in_checkpoint:
            weights += _weight_files(folder, name, component)
    if folder.variant and not any(f".{folder.variant}" in Path(name).name for name in weights):
        found = listed(weights) if weights else f"all are in {folder.checkpoint}"
        raise UsageError(
            f"model folder {path} has no weights of model.variant = {folder.variant!r}: {found}; leave it out"
        )
    return replace(folder, files=tuple(sorted({*files, *weights})))


def _check_checkpoint(folder: ModelFolder) -> None:
    """Raises UsageError for a single file of a family whose single files are not read, or of another family."""
    layout = folder.layout
    if not layout.single:
        known = [name for name, one in FAMILIES.items() if one.single]
        raise UsageError(
            f"model.config names a {folder.family}, whose single files are not read here; known: {listed(known)}; "
            f"{CONVERT}"
        )
    if layout.network not in folder.in_checkpoint:
        wanted = " or ".join(f"{one}…" for one in layout.single[layout.network])
        raise UsageError(
            f"{folder.checkpoint} holds no tensor {wanted}, so it is no single file of a {folder.family}, which "
            f"{folder.path} is; set model.config to a folder or hub id of the file's own family, or, if the file is no "
            "whole model (a LoRA, a VAE), name a model here"
        )


def _check_pipeline(folder: ModelFolder, family: str) -> None:
    """Raises UsageError for a pipeline that makes no images of text, or with components that are not diffusers'."""
    reason = signatures.refusal(family)
    if reason:
        raise UsageError(
            f"model {folder.name!r} is of family {family!r}, {reason}; known families: {', '.join(FAMILIES)}, and any "
            "pipeline of diffusers that makes images of text"
        )
    for name, component in folder.components.items():
        if not signatures.is_part(component.library):
            raise UsageError(
                f"model folder {folder.path}: model_index.json gives {name} as "
                f"{[component.library, *component.classes]!r}; code that comes with a model is never run"
            )
        if not (folder.path / name).is_dir():
            raise UsageError(f"model folder {folder.path} lacks {name}/; {_again(folder)}")


def _check_checker(folder: ModelFolder) -> None:
    if not folder.layout.checker:
        raise UsageError(
            f"model {folder.name!r} is of family {folder.family!r}, which has no safety checker; {UNCHECKED}"
        )
    entry = folder.index.get("safety_checker")
    if entry in (None, [None, None]):
        raise UsageError(
            f"model folder {folder.path} comes without safety checker: model_index.json gives safety_checker as "
            f"{entry!r}; {UNCHECKED}"
        )


def _check_class(folder: ModelFolder, name: str, component: Component) -> None:
    entry, library = folder.index.get(name), component.library
    if not (isinstance(entry, list) and len(entry) == 2 and entry[0] == library and entry[1] in component.classes):
        raise UsageError(
            f"model folder {folder.path}: model_index.json gives {name} as {entry!r}; allowed is "
            f"{library}'s {' or '.join(component.classes)}; code that comes with a model is never run"
        )


def _tokenizer_files(path: Path, name: str, component: Component) -> list[str]:
    allowed = (component.vocabulary,) if component.vocabulary else _VOCABULARIES
    vocabularies = [file for file in allowed if (path / name / file).is_file()]
    if not vocabularies:
        raise UsageError(f"model folder {path} lacks {name}/{f' or {name}/'.join(allowed)}")
    if "tokenizer.json" in vocabularies:
        # It holds all that a .model file does, and is what is read.
        vocabularies = [file for file in vocabularies if not file.endswith(".model")]
    others = ("merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
    found = vocabularies + [file for file in others if (path / name / file).is_file()]
    return [f"{name}/{file}" for file in found]


def _weight_files(folder: ModelFolder, name: str, component: Component) -> list[str]:
    """The component's weights, in the job's variant if it has them so: one file, or an index and the shards it
    names. Where both are there, diffusers reads the shards, and transformers the one file."""
    place, stem = folder.place(name), component.weights
    for dotted in (f".{folder.variant}", "") if folder.variant else ("",):
        kinds = [f"{stem}{dotted}.safetensors", f"{stem}.safetensors.index{dotted}.json"]
        for file in reversed(kinds) if component.library == "diffusers" else kinds:
            if (place / file).is_file():
                shards = _shards(folder, place, file) if file.endswith(".json") else []
                return [f"{name}/{one}" for one in (file, *shards)]
    raise UsageError(_no_weights(folder, place, f"{stem}.safetensors"))


def _shards(folder: ModelFolder, place: Path, index: str) -> list[str]:
    """The shards that an index names. Raises UsageError, which names those that are not there."""
    told = read_json(place / index).get("weight_map")
    if not (isinstance(told, dict) and told and all(isinstance(one, str) for one in told.values())):
        raise UsageError(
            f"model file {place / index} has no weight_map that names files, so it is no index of weights; "
            f"{_again(folder)}"
        )
    shards = sorted(set(told.values()))
    lost = [one for one in shards if not (place / one).is_file()]
    if lost:
        raise UsageError(
            f"model folder {place} lacks {listed(lost)}, of the {len(shards)} files that {index} names; "
            f"{_again(folder)}"
        )
    return shards


def _again(folder: ModelFolder) -> str:
    """What to do about a folder that is not whole."""
    if folder.commit is None:
        return "download it again, whole"
    if folder.checkpoint is not None:
        return "fetch what model.config names again, by batchgen prefetch and the same keys"
    model = Model(path=folder.name, variant=folder.variant)
    return f"fetch it again: {prefetch_command(model, has_checker=folder.has_checker)}"


def _no_weights(folder: ModelFolder, place: Path, wanted: str) -> str:
    others = sorted(file.name for file in place.glob("*.safetensors") if file.is_file())
    pickles = sorted(file.name for pattern in _PICKLES for file in place.glob(pattern))
    if folder.checkpoint is not None:
        return (
            f"{folder.checkpoint} holds no weights of {place.name}, and {place} lacks {wanted}; set model.config to a "
            "folder or hub id that has them"
        )
    if others:
        variants = sorted({found[1] for name in others if (found := _VARIANT.fullmatch(name))})
        choice = " or ".join(f"model.variant = {json.dumps(one)}" for one in variants) or "model.variant"
        return f"{place} lacks {wanted} but has {listed(others)}; set {choice}"
    if pickles:
        return f"{place} has only {listed(pickles)}, pickles, which can run code; {CONVERT}"
    return f"{place} lacks {wanted}; {_again(folder)}"
