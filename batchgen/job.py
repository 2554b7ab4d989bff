"""Job file and overrides -> one frozen, checked Job.

A job file is TOML; every key can also be given as `--set table.key=value`. Unknown keys and wrong types are
refused by pydantic and told in one sentence each.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from batchgen.errors import UsageError
from batchgen.fields import Few as _Few
from batchgen.fields import Line as _Line
from batchgen.fields import Lines as _Lines
from batchgen.fields import Memory as _Memory
from batchgen.fields import PositiveInt as _PositiveInt
from batchgen.fields import Seconds as _Seconds
from batchgen.fields import Time as _Time
from batchgen.weights import LoraFile, Model, Table
from batchgen.wording import num_bytes

_WORDS = {
    "tuple_type": "it must be a list, [ … ]",
    "too_short": "it must have an entry at least",
    "string_too_short": "it must not be empty",
    "model_type": "it must be a table, { key = value }",
    "dict_type": "it must be a table, { key = value }",
}
"""For what pydantic says in words of Python, by its names for errors."""


class Sampling(Table):
    """`[sampling]`: defaults for what a manifest leaves out; None is the model family's own default."""

    width: _PositiveInt | None = None
    height: _PositiveInt | None = None
    steps: _PositiveInt | None = None
    guidance_scale: float | None = None
    true_cfg_scale: float | None = None
    """Scale of guidance by a negative prompt, of models whose guidance_scale is distilled into them (FLUX)."""
    negative_prompt: str | None = None
    strength: Annotated[float, Field(gt=0, le=1)] | None = None
    """Of rows with an init image: the share of their steps that are made, and so how little is left of the picture."""
    sampler: str | None = None
    """A sampler's name; None is the scheduler that lies in the model folder."""
    lora: str | None = None
    """One of the model's LoRA sets; None or "" is none."""
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    """The run seed, from which rows without a seed derive theirs."""
    num_images: _PositiveInt = 1


class Plan(Table):
    """`[plan]`: how rows are checked, grouped and cut."""

    batch_sizes: Annotated[tuple[_Few, ...], Field(min_length=1, strict=False)] | None = None
    """The allowed batch sizes; None is the powers of two up to `max_batch`."""
    max_batch: _Few | None = None
    """None: as many rows as the memory model allows, at most 32."""
    shard_images: Annotated[int, Field(ge=1, le=2**20)] | None = None
    """Most images in a shard, but for batches that hold more: they stay whole. None is cut by predicted cost."""
    profile: str | None = None
    """JSON file of measured seconds for this GPU and model."""
    size_policy: Literal["strict", "round"] = "strict"
    """Whether a size that the model cannot do is a bad row or becomes the nearest one that it can."""
    on_bad_row: Literal["stop", "skip"] = "stop"
    """Whether a row that cannot be made as asked ends the run or goes into `rejected.parquet`."""
    image_folder: str | None = None
    """The folder that relative paths of the column `image` begin in; None is that of the manifest's file."""
    on_truncate: Literal["warn", "error"] = "warn"
    """Whether prompts longer than the model reads are cut and counted, or refused."""


class Engine(Table):
    """`[engine]`: how the network is run."""

    device: str | None = None
    """A torch device; None is the first GPU, else the CPU."""
    mode: Literal["auto", "eager", "graph", "regional", "regional+graph", "compiled", "compiled+graph"] = "auto"
    """How the network is run: eager kernels, its blocks compiled once for every size (regional), or the whole compiled
    for each bucket, captured in a graph or not. auto weighs the work that is left, and is eager on a CPU."""
    attention: Literal["auto", "flash", "cudnn", "flash3"] = "auto"
    """Attention kernels on a GPU (flash3 needs the package flash_attn_3); auto times those that are there."""
    decode_batch: _Few | None = None
    """Images decoded at once; None is at most 16, as a sixth of the GPU's memory holds, and 4 on a CPU."""
    max_memory: _Memory | None = None
    """Of a GPU, that batches are planned for and that a worker may take: "24GB", "40GiB"; None: all that there is."""
    text_encoder: Literal["gpu", "offload", "load"] = "gpu"
    """Where the text encoders lie while they have nothing to do: on the GPU, in host memory, or only on disk."""
    vae_tiling: bool = False
    """Whether images larger than the VAE was trained on are decoded in tiles; it changes pixels."""
    safety_checker: bool = False
    """Whether the model's own safety checker looks at each image; a row that it flags fails."""

    @property
    def max_memory_bytes(self) -> int | None:
        """`max_memory` as a number."""
        return None if self.max_memory is None else num_bytes(self.max_memory)


class Output(Table):
    """`[output]`: what is written."""

    format: Literal["files", "webdataset", "parquet"] = "files"
    """A folder, a tar or a Parquet file for each part."""
    image: Literal["png", "jpeg", "webp"] = "png"
    quality: Annotated[int, Field(ge=1, le=100)] = 95
    """Of jpeg and webp; png knows none."""
    embed: bool = True
    """Whether a row's parameters travel inside its image file."""
    png_info: bool = False
    """Whether PNG files hold them also in the form that the Stable Diffusion web UI's tab "PNG Info" reads."""
    encoders: _Few | None = None
    """Encoder threads; None is one per usable core, at most 8."""

    @field_validator("png_info")
    @classmethod
    def _is_of_png(cls, value: bool, known: ValidationInfo) -> bool:
        image = known.data.get("image", "png")
        if value and image != "png":
            raise ValueError(f'only PNG files hold such a text, and output.image is "{image}"; leave one of them out')
        return value


class Run(Table):
    """`[run]`: how workers behave."""

    grace_s: _Seconds = 25.0
    """Seconds from a stop signal to the last commit."""
    commit_every_s: _Seconds = 120.0
    """Seconds of work, at most two batches over, that are committed together: what a SIGKILL costs."""
    stale_after_s: _Seconds = 600.0
    """Seconds without a heartbeat, by the file system's clock, after which a worker is thought dead."""
    max_deaths: _PositiveInt = 3
    """Owners of a shard that die in a row, without a commit, until its rows are made one by one; as many more, and
    the row at work fails."""


class Slurm(Table):
    """`[slurm]`: what `submit` asks of a cluster. None is left to the site; see `sbatch`'s manual for the words."""

    partition: _Line | None = None
    account: _Line | None = None
    time: _Time | None = None
    """A task's time limit: "04:00:00", "1-12"."""
    gres: _Line | None = None
    """Of each node: "gpu:1"."""
    constraint: _Line | None = None
    cpus: _PositiveInt | None = None
    """CPUs of a worker; a task with several GPUs has several."""
    memory: _Line | None = None
    """Of each node: "64G"."""
    nodes: _PositiveInt = 1
    """Nodes of a task, a worker on each."""
    tasks: _PositiveInt = 8
    """Tasks of the array, at most: never more than there are shards to do."""
    throttle: _PositiveInt | None = None
    """Tasks that run at once; None: as many as the site lets."""
    modules: _Lines = ()
    """For `module load`."""
    setup: _Lines = ()
    """Lines of the shell before the worker starts, as they are."""
    container: _Line | None = None
    """What stands before the worker's command, as shell text: "apptainer exec --nv image.sif"."""
    program: _Line | None = None
    """What stands for `batchgen`, as shell text; None: the Python that submits, in a container `batchgen`."""
    launcher: Literal["srun", "shell"] = "srun"
    """Whether `srun` starts the workers or the batch script becomes the worker."""
    warn_s: Annotated[int, Field(ge=1, le=65535)] = 120
    """Seconds before the time limit at which a worker is told to stop."""
    wait: bool = False
    """Whether a worker that finds only rows held by others waits to take over from one that falls silent."""
    requeue: bool = False
    """Whether a task puts itself into the queue again when its time is over or another job takes its place."""
    cache: _Line | None = None
    """Folder for compiled kernels and measured costs that all tasks share; None: this user's own."""
    options: _Lines = ()
    """More options of `sbatch`, such as "--qos=long"."""
    finish_partition: _Line | None = None
    """Of the job that finishes the run; it needs no GPU. None: as the others."""
    finish_time: _Time | None = None
    finish_options: _Lines = ()
    """`options` of that job."""


class Job(Table):
    """Everything that a run is told besides its manifest."""

    model: Model = Model()
    sampling: Sampling = Sampling()
    columns: Mapping[str, str] = Field(default_factory=dict)
    """Our name -> the manifest's column name."""
    plan: Plan = Plan()
    engine: Engine = Engine()
    output: Output = Output()
    run: Run = Run()
    slurm: Slurm = Slurm()


def load_job(
    path: Path | str | None = None, overrides: Iterable[str] = (), flags: Mapping[str, str] | None = None
) -> Job:
    """The job of a TOML file (or of nothing but defaults) with `table.key=value` overrides laid over it.

    `flags` are keys whose override was given by an option of its own, which errors then name. Raises UsageError for
    a file that cannot be read, a key that does not exist or a value of the wrong type.
    """
    tables: dict[str, Any] = {}
    if path is not None:
        tables = _read(Path(path))
    _check(tables, "the command line" if path is None else str(path), {})
    for override in overrides:
        _lay_over(tables, override)
    return _check(tables, "--set", flags or {})


def keys_given(path: Path | str | None, overrides: Iterable[str]) -> list[str]:
    """The keys that a job file and overrides name, as `table.key`. Raises UsageError as `load_job`."""
    tables: dict[str, Any] = {} if path is None else _read(Path(path))
    for override in overrides:
        _lay_over(tables, override)
    return [f"{table}.{key}" for table, content in tables.items() for key in content]


def load_stored(content: Mapping[str, Any], path: Path) -> Job:
    """The job of a plan's index. Raises UsageError, naming `path`, for one of another version."""
    try:
        return Job.model_validate_json(json.dumps(content))
    except ValidationError as error:
        said = _sentence(error.errors()[0], str(path), {})
        raise UsageError(f"{said}; the run was planned by another version of batchgen") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except UnicodeDecodeError as error:
        byte = f"byte {error.object[error.start]:#04x} at offset {error.start}"
        raise UsageError(f"job file {path} is not UTF-8 ({byte}); save it as UTF-8") from None
    except OSError as error:
        raise UsageError(f"job file {path} cannot be read: {error}") from None
    except RecursionError:
        raise UsageError(f"job file {path} is not usable: its brackets are nested too deeply") from None
    except ValueError as error:
        raise UsageError(f"job file {path} is not TOML: {error}") from None


def _lay_over(tables: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    *path, key = _path(name.strip())
    if not (equals and path and key):
        raise UsageError(f"--set {_shown(override)} is not of the form table.key=value")
    inner = tables
    for depth, one in enumerate(path, 1):
        inner = inner.setdefault(one, {})
        if not isinstance(inner, dict):
            raise UsageError(
                f"--set {_shown(override)}: {'.'.join(path[:depth])} is {_shown(inner)}, and holds no keys"
            )
    inner[key] = _value(text)


def _path(name: str) -> list[str]:
    """The keys that a dotted name is made of in TOML, where one may be quoted; else what is before and behind its first
    dot."""
    try:
        content: Any = tomllib.loads(f"{name} = 0")
    except (ValueError, RecursionError):
        return name.split(".", 1)
    keys = []
    while isinstance(content, dict) and len(content) == 1:
        ((key, content),) = content.items()
        keys.append(key)
    return keys if content == 0 else name.split(".", 1)


def _value(text: str) -> Any:
    """What a text says in TOML; the text itself if it is no value there."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text
    return parsed["value"] if len(parsed) == 1 else text


def _check(tables: dict[str, Any], source: str, flags: Mapping[str, str]) -> Job:
    try:
        return Job.model_validate(tables)
    except ValidationError as error:
        details = error.errors()
        places = [detail["loc"] for detail in details]
        # A list whose every entry is wrong is said to be empty as well.
        whole = [one for one in details if not any(_is_within(place, one["loc"]) for place in places)]
        raise UsageError("\n".join(_sentence(detail, source, flags) for detail in whole)) from None


def _is_within(place: tuple[int | str, ...], other: tuple[int | str, ...]) -> bool:
    return len(place) > len(other) and place[: len(other)] == other


def _sentence(detail: Any, source: str, flags: Mapping[str, str]) -> str:
    place = [str(part) for part in detail["loc"]]
    name = ".".join(place)
    if detail["type"] == "extra_forbidden":
        known = _keys_beside(place)
        near = difflib.get_close_matches(place[-1], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
        return f"{source}: there is no key {name!r}; {hint}"
    if detail["type"] == "missing":
        return f"{source}: {_shown(detail['input'])} lacks the key {name!r}"
    said = flags.get(name, f"{source}: {name} =")
    if place[-1] == "[key]":
        said = f"{source}: in {'.'.join(place[:-2])}, the name"
    unset = "; a key cannot be unset here, leave it out for its default" if detail["input"] == "" else ""
    why = _WORDS.get(detail["type"], detail["msg"].removeprefix("Value error, "))
    return f"{said} {_shown(detail['input'])} is not usable: {why}{unset}"


def _shown(value: object) -> str:
    text = "an integer of thousands of digits" if isinstance(value, int) and abs(value) >= 10**4000 else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _keys_beside(place: list[str]) -> list[str]:
    if len(place) == 1:
        return list(Job.model_fields)
    table = LoraFile if place[:2] == ["model", "loras"] else Job.model_fields[place[0]].annotation
    assert isinstance(table, type) and issubclass(table, Table)  # noqa: PT018
    return list(table.model_fields)
