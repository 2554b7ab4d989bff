"""The files of a job's LoRA sets: found, fetched and identified, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from batchgen.errors import UsageError
from batchgen.models import hashes
from batchgen.models.reading import absolute
from batchgen.weights import LoraFile, Model
from batchgen.wording import first_line, listed

_ENDING = ".safetensors"
_LIKE = "*.safetensors"


@dataclass(frozen=True, slots=True)
class LoraPart:
    """A LoRA file that is here, and the weight of its change."""

    path: Path
    scale: float


def lora_sets(model: Model) -> dict[str, tuple[LoraPart, ...]]:
    """The job's sets; no network is asked. Raises UsageError for a file that is not here or holds no LoRA."""
    return {
        name: tuple(LoraPart(_checked(_found(name, file), name), file.scale) for file in files)
        for name, files in model.loras.items()
    }


def identity(model: Model) -> dict[str, str]:
    """What tells each set from another: its files' hashes, and their scales."""
    return {
        f"lora {name}": ", ".join(f"{hashes.sha256(part.path)} x {part.scale!r}" for part in parts)
        for name, parts in lora_sets(model).items()
    }


def located(model: Model) -> Model:
    """The same sets for processes that start in another folder."""
    loras = {name: tuple(map(_absolute, files)) for name, files in model.loras.items()}
    return model.model_copy(update={"loras": loras})


def fetch(model: Model) -> Iterator[Path]:
    """Fetch what is missing of the sets that lie on the hub; all their files. Raises UsageError as `lora_sets`."""
    for name, files in model.loras.items():
        for file in files:
            if not Path(file.path).expanduser().exists():
                _fetch(name, file)
    for parts in lora_sets(model).values():
        yield from (part.path for part in parts)


def _absolute(file: LoraFile) -> LoraFile:
    path = Path(file.path).expanduser()
    return file.model_copy(update={"path": str(absolute(path))}) if path.exists() else file


def _found(name: str, file: LoraFile) -> Path:
    place = Path(file.path).expanduser()
    if place.is_file():
        _refuse_idle(name, file, "weight_name", "revision")
        return absolute(place)
    if place.is_dir():
        _refuse_idle(name, file, "revision")
    else:
        place = _cached(name, file)
    if file.weight_name is not None:
        return absolute(place) / file.weight_name
    files = sorted(place.glob(_LIKE))
    if len(files) != 1:
        raise UsageError(_which(name, file, [one.name for one in files]))
    return files[0].absolute()


def _refuse_idle(name: str, file: LoraFile, *keys: str) -> None:
    for key in (one for one in keys if getattr(file, one) is not None):
        is_what = "a folder here, which has no revisions" if Path(file.path).expanduser().is_dir() else "a file here"
        raise UsageError(
            f"model.loras: set {name!r}: {key} = {getattr(file, key)!r} has no effect, since {file.path} is {is_what}; "
            "leave it out"
        )


def _which(name: str, file: LoraFile, names: list[str]) -> str:
    found = f"{len(names)}, {listed(names[:5], len(names))}" if names else "none"
    return (
        f"model.loras: set {name!r}: {file.path} should hold one {_LIKE} file and has {found}; name one with "
        "weight_name"
    )


def _checked(path: Path, name: str) -> Path:
    """The file, once it is known to hold low-rank factors."""
    from safetensors import SafetensorError, safe_open

    where = f"model.loras: set {name!r}: {path}"
    if not path.is_file():
        raise UsageError(f"{where} is not there; check path and weight_name")
    if path.suffix != _ENDING:
        raise UsageError(f"{where} is no {_ENDING} file; others can run code and are never opened")
    try:
        with safe_open(path, framework="np") as content:
            keys = list(content.keys())
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{where} cannot be read: {first_line(error)}; copy or fetch it again") from None
    if not any("lora" in key or "lokr" in key for key in keys):
        raise UsageError(f"{where} holds no LoRA: its tensors are {listed(keys[:3], len(keys))}")
    return path


def _cached(name: str, file: LoraFile) -> Path:
    """The snapshot of a hub id in the local cache."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(file.path, revision=file.revision, local_files_only=True))
    except Exception as error:  # which ones there are differs between the hub package's versions
        raise UsageError(
            f"model.loras: set {name!r}: {file.path!r} is neither a file or folder here nor in the hub's cache "
            f"({first_line(error)}); fetch it once, where there is a network: batchgen prefetch and the job file"
        ) from None


def _fetch(name: str, file: LoraFile) -> None:
    from huggingface_hub import HfApi, snapshot_download

    try:
        wanted = file.weight_name
        if wanted is None:
            names = HfApi().list_repo_files(file.path, revision=file.revision)
            names = [one for one in names if one.endswith(_ENDING) and "/" not in one]
            if len(names) != 1:
                raise UsageError(_which(name, file, names))
            (wanted,) = names
        snapshot_download(file.path, revision=file.revision, allow_patterns=[wanted])
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"model.loras: set {name!r}: {file.path!r} could not be fetched: {first_line(error)}; check its name and "
            "the network"
        ) from None
