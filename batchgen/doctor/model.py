"""The model of a job: whether it is here and whole, and what planning knows of it; no weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from batchgen.doctor.findings import Finding
from batchgen.doctor.torch_probe import Gpu
from batchgen.errors import UsageError
from batchgen.job import Job
from batchgen.models.checkpoints import tensors_of
from batchgen.models.contents import ModelFolder
from batchgen.models.facts import Facts
from batchgen.models.folder import facts_of, find_model
from batchgen.models.lora_files import lora_sets
from batchgen.models.packages import check_packages
from batchgen.wording import counted, sized

_HALF_BYTES = 2


def known(job: Job) -> tuple[Facts | None, Finding]:
    """What is known of the model, and whether it is here; None for one that no run could use."""
    name = job.model.path
    try:
        facts = facts_of(job.model, has_checker=job.engine.safety_checker)
        folder = find_model(job.model, has_checker=job.engine.safety_checker) if facts.needs_torch else None
        parameters = num_parameters(folder) if folder else 0
        if folder:
            check_packages(folder)
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
    refused = {"negative_prompt", "guidance_scale", "true_cfg_scale", "image"} - set(facts.columns)
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
    folder = find_model(job.model, has_checker=job.engine.safety_checker)
    num = num_parameters(folder)
    each = 4 if job.model.dtype == "float32" or not (gpus or job.model.dtype) else _HALF_BYTES
    where = "the GPU" if gpus else "memory"
    free = max((one.free_bytes for one in gpus), default=free_bytes)
    found = f"about {sized(num * each)} of weights, of {sized(free)} that are free in {where}"
    if num * each < free:
        return
    offload = "" if folder.is_generic else 'set engine.text_encoder = "offload", '
    advice = (
        f"see `plan`, {offload}take a GPU with more memory, or free what others hold"
        if gpus
        else "take a machine with more memory, or a GPU"
    )
    yield Finding("room", "amiss", found, advice, {"weights_bytes": num * each, "free_bytes": free})


def _content(folder: ModelFolder, parameters: int) -> str:
    num_bytes = sum(path.stat().st_size for path in folder.paths.values())
    number = f"{parameters / 1e9:.1f} billion" if parameters >= 1e9 else f"{parameters / 1e6:,.0f} million"
    return f"whole: {counted(len(folder.paths), 'file')}, {sized(num_bytes)}, {number} parameters"


def num_parameters(folder: ModelFolder) -> int:
    """Of all the model's weights, by the headers of their files. Raises UsageError for a file that is not whole."""
    return sum(one.num_elements for path in folder.weights for one in tensors_of(path).values())
