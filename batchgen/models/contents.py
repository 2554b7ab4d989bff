"""What a model folder holds, as its files say. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.errors import UsageError
from batchgen.models import checkpoints, generic
from batchgen.models.layouts import FAMILIES, Component, Layout
from batchgen.models.reading import read_json
from batchgen.models.replacing import NOTHING, Replaced

_LEAST = {"num_train_timesteps": 1, "steps_offset": 0, "original_inference_steps": 1, "solver_order": 1}
"""Keys of a scheduler's configuration that planning counts with, and what each is at least."""


@contextmanager
def read_of(path: Path) -> Iterator[None]:
    """What is read off a model folder's configurations: values that nothing can be made of are named as the folder's
    fault."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UsageError(
            f"model folder {path}: its configurations are not usable ({type(error).__name__}: {error}); download it "
            "again"
        ) from error


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
    deferred: frozenset[str] = frozenset()
    """The components whose weights are read anew whenever they have something to do."""
    checkpoint: Path | None = None
    """The single file that holds all weights that it knows; `path` is then where the configuration lies."""
    replaced: Replaced = NOTHING
    """What the job puts in the place of the folder's own components."""

    def place(self, component: str) -> Path:
        """The folder of a component."""
        other = self.replaced.vae if component == "vae" else None
        return other or self.path / component

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

    @property
    def in_checkpoint(self) -> frozenset[str]:
        """The components whose weights the single file holds."""
        if self.checkpoint is None:
            return frozenset()
        found = checkpoints.components_in(self.checkpoint, self.layout.single, self.components)
        return found - {"vae"} if self.replaced.vae else found

    @property
    def encoders(self) -> tuple[str, ...]:
        """The text encoders."""
        return tuple(name for name, one in self.components.items() if name.startswith("text_encoder") and one.weights)

    @property
    def paths(self) -> dict[str, Path]:
        """All files that decide pixels, by name: those of `files`, and a single file as "checkpoint", whatever its own
        name is."""
        single = {} if self.checkpoint is None else {"checkpoint": self.checkpoint}
        return {name: self.file(name) for name in self.files} | single

    @property
    def weights(self) -> list[Path]:
        """The weights' files."""
        return [path for path in self.paths.values() if path.suffix == ".safetensors"]

    def variant_of(self, component: str) -> str | None:
        """The variant that a component's weights are read in: the job's, where the component has it; another VAE has
        one alone."""
        if component == "vae" and self.replaced.vae:
            return None
        dotted = f".{self.variant}"
        has_it = any(name.startswith(f"{component}/") and dotted in Path(name).name for name in self.files)
        return self.variant if has_it else None

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
        file = self.file(f"{component}/{self.components[component].config}")
        found = read_json(file)
        if component != "scheduler":
            return found
        options = self.replaced.scheduler
        for key, least in _LEAST.items():
            value = options.get(key, found.get(key, least))
            if not isinstance(value, int) or value < least:
                where = "model.scheduler_options" if key in options else f"model file {file}"
                raise UsageError(f"{where}: {key} = {value!r} must be a whole number from {least} on")
        return {**found, **options}
