"""Model folders: found, checked for completeness, and identified, without torch.

A model is a diffusers folder of a known family, on disk or on the Hugging Face hub. Only safetensors weights
and library classes are taken: no pickles, no code from the folder.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchgen.errors import UsageError
from batchgen.filesystem import resumable
from batchgen.models import demo, facts, generic, hashes, lora_files, replacing, signatures
from batchgen.models.hub import cached, prefetch_command
from batchgen.models.layouts import FAMILIES, Component, Layout
from batchgen.models.reading import read_json
from batchgen.models.replacing import NOTHING, Replaced, replaced
from batchgen.weights import Model

BUILT_IN = ("demo", "pattern")
_PICKLES = ("*.bin", "*.ckpt", "*.pt", "*.pth")
_CONVERT = (
    "convert it once with its pipeline class in diffusers (StableDiffusionPipeline, StableDiffusionXLPipeline): "
    '.from_pretrained("OLD").save_pretrained("NEW"), or .from_single_file for a single checkpoint file'
)
_UNCHECKED = (
    "leave engine.safety_checker out, or name a Stable Diffusion folder whose model_index.json has a safety_checker "
    "and a feature_extractor"
)


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A diffusers folder that has all that its family reads."""

    name: str
    """As the job names it."""
    path: Path
    variant: str | None
    commit: str | None
    """The hub's commit; None for a local folder."""
    files: tuple[str, ...]
    """All files that decide pixels, relative to `path`."""
    has_checker: bool = False
    """Whether the safety checker is read too."""
    replaced: Replaced = NOTHING
    """What the job puts in the place of the folder's own components."""

    def place(self, component: str) -> Path:
        """The folder of a component."""
        other = self.replaced.vae if component == "vae" else None
        return other or self.path / component

    def variant_of(self, component: str) -> str | None:
        """Of the component's weights: another VAE has but one."""
        return None if component == "vae" and self.replaced.vae else self.variant

    def file(self, name: str) -> Path:
        """Where one of `files` lies."""
        component, _, rest = name.partition("/")
        if component == "scheduler" and self.replaced.scheduler_file:
            return self.replaced.scheduler_file
        return self.place(component) / rest if rest else self.path / name

    @property
    def index(self) -> dict[str, Any]:
        """What model_index.json holds: the pipeline's class and options, and each component's class."""
        return read_json(self.path / "model_index.json")

    @property
    def family(self) -> str:
        """The pipeline's class."""
        return str(self.index["_class_name"])

    @property
    def is_generic(self) -> bool:
        """Whether no family of its own knows the pipeline's class."""
        return self.family not in FAMILIES

    @property
    def layout(self) -> Layout:
        """What the folder has to hold."""
        return generic.layout(self.index) if self.is_generic else FAMILIES[self.family]

    @property
    def components(self) -> Mapping[str, Component]:
        """By their subfolders' names."""
        layout = self.layout
        wanted = {**layout.components, **layout.checker} if self.has_checker else layout.components
        return {name: one for name, one in wanted.items() if not (one.is_optional and self.lacks(name))}

    def lacks(self, component: str) -> bool:
        """Whether model_index.json says that a component is not there."""
        return self.index.get(component) in (None, [None, None])

    @property
    def configs(self) -> dict[str, dict[str, Any]]:
        """All JSON configurations that there are, by component, and model_index.json under its own name."""
        found = self.components.items()
        own = {name: self.config(name) for name, one in found if self.file(f"{name}/{one.config}").is_file()}
        return {"model_index.json": self.index, **own}

    def config(self, component: str) -> dict[str, Any]:
        """The component's JSON configuration."""
        found = read_json(self.file(f"{component}/{self.components[component].config}"))
        return {**found, **self.replaced.scheduler} if component == "scheduler" else found


def find_model(model: Model, *, has_checker: bool = False) -> ModelFolder:
    """The job's model folder, with its safety checker if the job has one, in the hub's cache if it is an id of it; no
    network is asked.

    Raises UsageError if it is nowhere, not complete, of another family, or asks for code of its own.
    """
    local = demo.WEIGHTS if model.path == "demo" else Path(model.path).expanduser()
    with resumable(local):
        is_folder = local.is_dir()
    if is_folder:
        _refuse_idle(model, ("revision",), "a local folder has no revisions")
        return _checked(ModelFolder(model.path, local.resolve(), model.variant, None, (), has_checker, replaced(model)))
    if local.is_file():
        raise UsageError(f"model {model.path!r} is a single file; a diffusers folder is needed; {_CONVERT}")
    if not is_hub_id(model):
        near = difflib.get_close_matches(model.path, BUILT_IN, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "name a diffusers folder or a hub id like owner/name"
        raise UsageError(f"there is no model folder {model.path!r} and none built in by that name; {hint}")
    place = cached(model, has_checker=has_checker)
    return _checked(ModelFolder(model.path, place, model.variant, place.name, (), has_checker, replaced(model)))


def is_hub_id(model: Model) -> bool:
    """Whether the job's model is neither built in nor a local path."""
    is_named = re.fullmatch(r"[\w.-]+/[\w.-]+", model.path) is not None and model.path[0] not in "./~"
    return is_named and not Path(model.path).exists()


def located(model: Model) -> Model:
    """The same model for processes that start in another folder."""
    path = Path(model.path).expanduser()
    is_local = model.path not in BUILT_IN and path.is_dir()
    others = lora_files.located(replacing.located(model))
    return others.model_copy(update={"path": str(path.resolve())}) if is_local else others


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
        raise UsageError(f"model {model.path!r} has no safety checker; {_UNCHECKED}")
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
    files = {name: hashes.sha256(folder.file(name)) for name in folder.files}
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


def _checked(folder: ModelFolder) -> ModelFolder:
    """The folder with its files listed, once nothing is missing."""
    path = folder.path
    if not (path / "model_index.json").is_file():
        raise UsageError(f"model folder {path} has no model_index.json, so it is no diffusers folder; {_CONVERT}")
    family = folder.index.get("_class_name")
    if family not in FAMILIES:
        _check_pipeline(folder, str(family))
    if folder.has_checker:
        _check_checker(folder)
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
    for name, component in components.items():
        if component.is_tokenizer and not folder.is_generic:
            files += _tokenizer_files(path, name)
        if component.weights is not None:
            files += _weight_files(folder, name, component.weights)
    return replace(folder, files=tuple(sorted(set(files))))


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
            f"model {folder.name!r} is of family {folder.family!r}, which has no safety checker; {_UNCHECKED}"
        )
    entry = folder.index.get("safety_checker")
    if entry in (None, [None, None]):
        raise UsageError(
            f"model folder {folder.path} comes without safety checker: model_index.json gives safety_checker as "
            f"{entry!r}; {_UNCHECKED}"
        )


def _check_class(folder: ModelFolder, name: str, component: Component) -> None:
    entry, library = folder.index.get(name), component.library
    if not (isinstance(entry, list) and len(entry) == 2 and entry[0] == library and entry[1] in component.classes):
        raise UsageError(
            f"model folder {folder.path}: model_index.json gives {name} as {entry!r}; allowed is "
            f"{library}'s {' or '.join(component.classes)}; code that comes with a model is never run"
        )


def _tokenizer_files(path: Path, component: str) -> list[str]:
    names = (
        "tokenizer.json",
        "vocab.json",
        "merges.txt",
        "special_tokens_map.json",
        "added_tokens.json",
        "chat_template.jinja",
    )
    found = [name for name in names if (path / component / name).is_file()]
    if not {"tokenizer.json", "vocab.json"} & set(found):
        raise UsageError(f"model folder {path} lacks {component}/vocab.json or {component}/tokenizer.json")
    return [f"{component}/{name}" for name in found]


def _weight_files(folder: ModelFolder, component: str, stem: str) -> list[str]:
    """The component's weights: one file, or an index and the shards it names."""
    place, variant = folder.place(component), folder.variant_of(component)
    dotted = f".{variant}" if variant else ""
    single, index = f"{stem}{dotted}.safetensors", f"{stem}.safetensors.index{dotted}.json"
    if (place / single).is_file():
        return [f"{component}/{single}"]
    if not (place / index).is_file():
        raise UsageError(_no_weights(folder, place, single))
    shards = sorted(set(read_json(place / index).get("weight_map", {}).values()))
    for shard in shards:
        if not (place / shard).is_file():
            raise UsageError(f"model folder {place} lacks {shard}, which {index} names; {_again(folder)}")
    return [f"{component}/{name}" for name in (index, *shards)]


def _again(folder: ModelFolder) -> str:
    """What to do about a folder that is not whole."""
    if folder.commit is None:
        return "download it again, whole"
    model = Model(path=folder.name, variant=folder.variant)
    return f"fetch it again: {prefetch_command(model, has_checker=folder.has_checker)}"


def _no_weights(folder: ModelFolder, place: Path, wanted: str) -> str:
    others = sorted(file.name for file in place.glob("*.safetensors"))
    pickles = sorted(file.name for pattern in _PICKLES for file in place.glob(pattern))
    if others:
        return f"{place} lacks {wanted} but has {', '.join(others)}; set model.variant to choose among them"
    if pickles:
        return f"{place} has only {', '.join(pickles)}, pickles, which can run code; {_CONVERT}"
    return f"{place} lacks {wanted}; {_again(folder)}"
