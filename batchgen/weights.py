"""The job's `[model]`: which weights make the images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from batchgen.fields import Given, Line, Scalar


class Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class LoraFile(Table):
    """One file of a LoRA set."""

    path: Line
    """A .safetensors file, a folder with one, or a hub id."""
    weight_name: Line | None = None
    """The file within; None where there is but one."""
    revision: Given | None = None
    """Of a hub id."""
    scale: float = 1.0
    """Weight of its change."""


class Model(Table):
    """`[model]`: which weights."""

    path: Given = "demo"
    """"pattern", "demo", a local diffusers folder, a hub id, or a single .safetensors file."""
    config: Given | None = None
    """Of a single file: the diffusers folder or fetched hub id whose configuration and tokenizers it takes, and the
    weights that it lacks."""
    revision: Given | None = None
    """Branch, tag or commit of a hub id; None is its main branch."""
    variant: Given | None = None
    """The weights' file variant ("fp16"), for components that have it; for `pattern`, "faults" obeys the fault
    prompts."""
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """None: on a GPU float16 or bfloat16, as suits the family; float32 on a CPU."""
    vae_dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """None: that of the model, but float32 for a float16 SDXL, Kolors or AuraFlow whose VAE asks for it
    (`force_upcast`)."""
    vae: Given | None = None
    """Another VAE in the place of the model's: a folder or a hub id, of a VAE or of a whole model."""
    scheduler: Given | None = None
    """Another scheduler in the place of the model's: a scheduler_config.json, or a class of diffusers, which takes the
    configuration over."""
    scheduler_options: Mapping[str, Scalar] = Field(default_factory=dict)
    """Keys laid over the scheduler's configuration."""
    loras: Mapping[Line, Annotated[tuple[LoraFile, ...], Field(min_length=1, strict=False)]] = Field(
        default_factory=dict
    )
    """Sets of LoRAs by name: rows choose one with the column lora."""
