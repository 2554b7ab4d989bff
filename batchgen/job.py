"""Job file and overrides -> one frozen, checked Job.

A job file is TOML; every key can also be given as `--set table.key=value`. Unknown keys and wrong types are
refused by pydantic and told in one sentence each.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from batchgen.errors import UsageError

_PositiveInt = Annotated[int, Field(ge=1)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Model(_Table):
    """`[model]`: which weights."""

    path: str = "demo"
    """"pattern", "demo", a local diffusers folder or a hub id."""
    revision: str | None = None
    variant: str | None = None
    """The weights' file variant ("fp16"); for `pattern`, "faults" obeys the fault prompts."""
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """None: float16 on a GPU, float32 on a CPU."""
    vae_dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """None: that of the model, but float32 for a float16 SDXL whose VAE asks for it (`force_upcast`)."""


class Sampling(_Table):
    """`[sampling]`: defaults for what a manifest leaves out; None is the model family's own default."""

    width: _PositiveInt | None = None
    height: _PositiveInt | None = None
    steps: _PositiveInt | None = None
    guidance_scale: float | None = None
    negative_prompt: str | None = None
    sampler: str | None = None
    """A sampler's name; None is the scheduler that lies in the model folder."""
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0
    """The run seed, from which rows without a seed derive theirs."""
    num_images: _PositiveInt = 1


class Plan(_Table):
    """`[plan]`: how rows are checked, grouped and cut."""

    batch_sizes: Annotated[tuple[_PositiveInt, ...], Field(min_length=1, strict=False)] | None = None
    """The allowed batch sizes; None is the powers of two up to `max_batch`."""
    max_batch: _PositiveInt | None = None
    """None: as many rows as the memory model allows, at most 32."""
    shard_images: _PositiveInt | None = None
    """Most images in a shard; None is cut by predicted cost."""
    profile: str | None = None
    """JSON file of measured seconds for this GPU and model."""
    size_policy: Literal["strict", "round"] = "strict"
    on_bad_row: Literal["stop", "skip"] = "stop"
    on_truncate: Literal["warn", "error"] = "warn"


class Engine(_Table):
    """`[engine]`: how the network is run."""

    device: str | None = None
    """A torch device; None is the first GPU, else the CPU."""
    mode: Literal["auto", "eager", "graph", "compiled", "compiled+graph"] = "auto"
    """How the network is run; auto weighs the work that is left, and is eager on a CPU."""
    attention: Literal["auto", "flash", "cudnn"] = "auto"
    """Attention kernels on a GPU; auto times them."""
    decode_batch: _PositiveInt = 4
    """Images decoded at once."""
    text_encoder: Literal["gpu", "offload"] = "gpu"
    """Where the text encoders lie while they have nothing to do."""


class Output(_Table):
    """`[output]`: what is written."""

    format: Literal["files", "webdataset", "parquet"] = "files"
    image: Literal["png", "jpeg", "webp"] = "png"
    quality: Annotated[int, Field(ge=1, le=100)] = 95
    """Of jpeg and webp; png knows none."""
    embed: bool = True
    """Whether a row's parameters travel inside its image file."""
    encoders: _PositiveInt | None = None
    """Encoder threads; None is one per usable core, at most 8."""


class Run(_Table):
    """`[run]`: how workers behave."""

    grace_s: Annotated[float, Field(gt=0)] = 25.0
    commit_every_s: Annotated[float, Field(gt=0)] = 120.0
    stale_after_s: Annotated[float, Field(gt=0)] = 600.0
    max_deaths: _PositiveInt = 3


class Job(_Table):
    """Everything that a run is told besides its manifest."""

    model: Model = Model()
    sampling: Sampling = Sampling()
    columns: Mapping[str, str] = Field(default_factory=dict)
    """Our name -> the manifest's column name."""
    plan: Plan = Plan()
    engine: Engine = Engine()
    output: Output = Output()
    run: Run = Run()


def load_job(path: Path | str | None = None, overrides: Iterable[str] = ()) -> Job:
    """The job of a TOML file (or of nothing but defaults) with `table.key=value` overrides laid over it.

    Raises UsageError for a file that cannot be read, a key that does not exist or a value of the wrong type.
    """
    tables: dict[str, Any] = {}
    source = "the command line"
    if path is not None:
        source = str(path)
        try:
            tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"job file {path} cannot be read: {error}") from None
        except ValueError as error:
            raise UsageError(f"job file {path} is not TOML: {error}") from None
    _check(tables, source)
    for override in overrides:
        _lay_over(tables, override)
    return _check(tables, "--set")


def _lay_over(tables: dict[str, Any], override: str) -> None:
    name, equals, text = override.partition("=")
    table, dot, key = name.strip().partition(".")
    if not (equals and dot and key):
        raise UsageError(f"--set {override!r} is not of the form table.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except ValueError:
        value = text
    tables.setdefault(table, {})[key] = value


def _check(tables: dict[str, Any], source: str) -> Job:
    try:
        return Job.model_validate(tables)
    except ValidationError as error:
        sentences = [_sentence(detail, source) for detail in error.errors()]
        raise UsageError("\n".join(sentences)) from None


def _sentence(detail: Any, source: str) -> str:
    place = [str(part) for part in detail["loc"]]
    name = ".".join(place)
    if detail["type"] == "extra_forbidden":
        known = _keys_beside(place)
        near = difflib.get_close_matches(place[-1], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
        return f"{source}: there is no key {name!r}; {hint}"
    return f"{source}: {name} = {detail['input']!r} is not usable: {detail['msg']}"


def _keys_beside(place: list[str]) -> list[str]:
    if len(place) == 1:
        return list(Job.model_fields)
    table = Job.model_fields[place[0]].annotation
    assert isinstance(table, type) and issubclass(table, _Table)  # noqa: PT018
    return list(table.model_fields)
