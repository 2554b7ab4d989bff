"""The model of a job: whether it is here and whole, and what planning knows of it; no weights are loaded."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from batchgen.doctor.findings import Finding
from batchgen.doctor.torch_probe import Gpu
from batchgen.errors import UsageError
from batchgen.job import Job
from batchgen.models.facts import Facts
from batchgen.models.folder import ModelFolder, facts_of, find_model
from batchgen.models.lora_files import lora_sets
from batchgen.wording import counted, sized

_HALF_BYTES = 2
_AGAIN = "fetch or copy the model again"


def known(job: Job) -> tuple[Facts | None, Finding]:
    """What is known of the model, and whether it is here; None for one that no run could use."""
    name = job.model.path
    try:
        facts = facts_of(job.model, has_checker=job.engine.safety_checker)
        folder = find_model(job.model, has_checker=job.engine.safety_checker) if facts.needs_torch else None
        parameters = num_parameters(folder) if folder else 0
    except UsageError as error:
        what, _, advice = str(error).partition("; ")
        return None, Finding("model", "amiss", what, advice or what)
    how = "made in batches, captured or compiled on a GPU" if facts.is_captured else "made one by one by its own call"
    content = f"{_content(folder, parameters)}; rows are {how}" if folder else "built in; rows are painted, not made"
    found = f"{name}: family {facts.family}, {content}"
    figures = {
        "name": name,
        "family": facts.family,
        "is_captured": facts.is_captured,
        "columns": facts.columns,
        "width": facts.width,
        "height": facts.height,
        "steps": facts.steps,
        "size_multiple": facts.size_multiple,
        "path": str(folder.path) if folder else None,
        "parameters": parameters,
    }
    return facts, Finding("model", "note" if facts.note else "ok", found, facts.note, figures)


def columns(facts: Facts) -> Finding:
    """The manifest's columns that change an image."""
    refused = {"negative_prompt", "guidance_scale", "true_cfg_scale"} - set(facts.columns)
    without = f"; no {', no '.join(sorted(refused))}" if refused else ""
    usual = f"{facts.width}×{facts.height}, {facts.steps} steps"
    return Finding("columns", "ok", f"{', '.join(facts.columns)}{without}; where nothing is said: {usual}")


def loras(job: Job) -> Iterator[Finding]:
    """The sets that rows may name in the column lora, where the job has any."""
    if not job.model.loras:
        return
    sets = lora_sets(job.model)
    told = [f"{name} ({counted(len(parts), 'file')})" for name, parts in sets.items()]
    figures = {"sets": {name: {str(part.path): part.scale for part in parts} for name, parts in sets.items()}}
    has_peft = find_spec("peft") is not None
    advice = "" if has_peft else "the package peft, which puts them into the model, is missing: install batchgen[lora]"
    yield Finding("LoRAs", "ok" if has_peft else "amiss", f"column lora: {', '.join(told)}", advice, figures)


def room(job: Job, facts: Facts, gpus: Sequence[Gpu], free_bytes: int) -> Iterator[Finding]:
    """Whether the weights fit: into the emptiest GPU in half precision, else into memory in float32."""
    if not facts.needs_torch:
        return
    num = num_parameters(find_model(job.model, has_checker=job.engine.safety_checker))
    each = 4 if job.model.dtype == "float32" or not (gpus or job.model.dtype) else _HALF_BYTES
    where = "the GPU" if gpus else "memory"
    free = max((one.free_bytes for one in gpus), default=free_bytes)
    found = f"about {sized(num * each)} of weights, of {sized(free)} that are free in {where}"
    if num * each < free:
        return
    advice = (
        'set engine.text_encoder = "offload", take a GPU with more memory, or free what others hold'
        if gpus
        else "take a machine with more memory, or a GPU"
    )
    yield Finding("room", "amiss", found, advice, {"weights_bytes": num * each, "free_bytes": free})


def _content(folder: ModelFolder, parameters: int) -> str:
    num_bytes = sum(folder.file(file).stat().st_size for file in folder.files)
    number = f"{parameters / 1e9:.1f} billion" if parameters >= 1e9 else f"{parameters / 1e6:,.0f} million"
    return f"whole: {counted(len(folder.files), 'file')}, {sized(num_bytes)}, {number} parameters"


def num_parameters(folder: ModelFolder) -> int:
    """Of all the model's weights, by the headers of their files. Raises UsageError for a file that is not whole."""
    return sum(_parameters(folder.file(file)) for file in folder.files if file.endswith(".safetensors"))


def _parameters(path: Path) -> int:
    """Of a safetensors file: 8 bytes of length, little endian, so many of JSON, and the tensors."""
    with path.open("rb") as file:
        try:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, 10**8)))
            tensors = [one for name, one in header.items() if name != "__metadata__"]
            num_bytes = 8 + length + max((one["data_offsets"][1] for one in tensors), default=0)
        except (struct.error, ValueError, AttributeError, KeyError, TypeError):
            raise UsageError(f"{path} is no safetensors file; {_AGAIN}") from None
    if (size := path.stat().st_size) != num_bytes:
        raise UsageError(f"{path} has {size:,} bytes, where its header tells of {num_bytes:,}; {_AGAIN}")
    return sum(math.prod(one["shape"]) for one in tensors)
