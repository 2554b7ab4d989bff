"""What `import` is told to make of each row of its source, checked against the columns that are there.

Nothing is multiplied here: a plan that cannot be meant is refused before a row is read.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from batchgen.axes import SIZE, TEMPLATE, Axis, read_grid, read_sizes, template_axis, values_of_file
from batchgen.errors import UsageError
from batchgen.metadata import RESERVED
from batchgen.sources import cells
from batchgen.template import Template, check_names, read_template
from batchgen.wording import counted, listed, shorten

MOST_IMAGES = 10_000_000
_NO_GRID = {
    "id": "each row's id names its values already",
    "num_images": "--num-images N gives each row as many",
}


@dataclass(frozen=True, slots=True)
class Expansion:
    """The options of `import` that multiply rows, as they were given."""

    grid: tuple[str, ...] = ()
    """`NAME=VALUE,VALUE` or `NAME=@FILE`."""
    sizes: Path | None = None
    one_size: bool = False
    """Whether each row has one of the sizes, drawn by its id, and not all of them."""
    num_images: int | None = None
    templates: tuple[str, ...] = ()
    """A template, or `@FILE` with one a line; several multiply rows like a grid."""
    max_images: int = MOST_IMAGES

    def __bool__(self) -> bool:
        return bool(self.grid or self.sizes or self.one_size or self.num_images or self.templates)

    @property
    def image_folder(self) -> Path | None:
        """Where relative paths of a grid over `image` begin: in the folder of its list, or in the current one."""
        told = {name: values for name, _, values in (option.partition("=") for option in self.grid)}
        values = told.get("image")
        if values is None:
            return None
        return Path(values[1:]).parent if values.startswith("@") else Path()

    @property
    def makes_prompts(self) -> bool:
        """Whether rows have prompts that the source knows nothing of."""
        return bool(self.templates) or any(option.startswith("prompt=") for option in self.grid)


@dataclass(frozen=True, slots=True)
class Recipe:
    """An expansion whose values are read and whose names are known."""

    axes: tuple[Axis, ...]
    """Every row of the source is made with all their combinations, the last axis turning fastest."""
    drawn: Axis | None
    """The sizes, where each row has one of them."""
    templates: tuple[Template, ...]
    num_images: int | None
    max_images: int

    @property
    def has_ids(self) -> bool:
        """Whether rows are given ids: where one row of the source may become several, or draws its size."""
        return bool(self.axes or self.drawn)

    @property
    def combinations(self) -> int:
        """Rows that come of one row of the source."""
        return math.prod(map(len, self.axes))

    def check_size(self, source_rows: int) -> None:
        """Raises UsageError, with the product spelled out, where it is beyond what was allowed."""
        rows = source_rows * self.combinations
        images = rows * (self.num_images or 1)
        if images <= self.max_images:
            return
        factors = [f"{source_rows:,} rows of the source"] if source_rows > 1 else []
        factors += [f"{len(axis):,} of {axis.name}" for axis in self.axes]
        factors += [f"{self.num_images:,} images each"] if self.num_images else []
        raise UsageError(
            f"this would be {counted(rows, 'row')} for {counted(images, 'image')} ({' × '.join(factors)}), beyond the "
            f"bound of {self.max_images:,} images; give fewer values, or allow it with --max-images {images}"
        )


def recipe(expansion: Expansion, names: Sequence[str], source: str | None) -> Recipe:
    """The recipe of an expansion for a source with these columns (the manifest's names). Raises UsageError."""
    if expansion.one_size and expansion.sizes is None:
        raise UsageError("--one-size draws each row's size from a list; add --sizes FILE")
    templates = _templates(expansion.templates)
    grids = [read_grid(option) for option in expansion.grid]
    sizes = read_sizes(expansion.sizes) if expansion.sizes else None
    several = [template_axis([one.text for one in templates], "--template")] if len(templates) > 1 else []
    placeholders = {name for template in templates for name in template.names}
    for axis in grids:
        _check_grid(axis.name, placeholders, names)
    made = [*several, *grids, *([sizes] if sizes else [])]
    _refuse_overlap(made, names, expansion, source)
    for template in templates:
        check_names(template, [*names, *(axis.name for axis in grids)])
        _check_use(template, grids, names)
    if not (templates or "prompt" in [*names, *(axis.name for axis in grids)]):
        raise UsageError("there are no prompts: name a source, or add --template or --grid prompt=@FILE")
    if source is None and made == [sizes] and expansion.one_size:
        raise UsageError("--one-size draws for many rows, and there is one; leave it out, or add a source or --grid")
    axes = made[:-1] if sizes and expansion.one_size else made
    drawn = sizes if expansion.one_size else None
    return Recipe(tuple(axes), drawn, templates, expansion.num_images, expansion.max_images)


def _templates(options: Iterable[str]) -> tuple[Template, ...]:
    texts: list[str] = []
    for option in options:
        is_file = option.startswith("@")
        texts += values_of_file(Path(option[1:]), f"--template {shorten(option)!r}") if is_file else [option]
    return tuple(map(read_template, texts))


def _check_grid(name: str, placeholders: set[str], names: Sequence[str]) -> None:
    if name in _NO_GRID:
        raise UsageError(f"--grid {name}: {_NO_GRID[name]}; leave it out")
    if name in cells.TYPES or name in names:
        return
    if name in RESERVED:
        raise UsageError(f"--grid {name}: batchgen's own tables have a column of this name; take another")
    if name not in placeholders:
        known = [one for one in cells.TYPES if one not in _NO_GRID]
        near = difflib.get_close_matches(name, [*known, *placeholders], n=1)
        hint = f"did you mean {near[0]}?" if near else f"known columns are {listed(known)}"
        raise UsageError(
            f"--grid {name}: it is no column that batchgen knows, and {{{name}}} stands in no --template; {hint}"
        )


def _refuse_overlap(axes: Sequence[Axis], names: Sequence[str], expansion: Expansion, source: str | None) -> None:
    """Raises UsageError where two givers say what stands in one column."""
    giver = dict.fromkeys(names, f"{source} has as a column")
    added = [(column, _option(axis)) for axis in axes for column in axis.columns]
    added += [("num_images", "--num-images")] if expansion.num_images else []
    for column, option in added:
        if column in giver:
            raise UsageError(
                f"{option} gives each row its {column}, which {giver[column]} already; leave one of them out"
            )
        giver[column] = f"{option} gives"


def _option(axis: Axis) -> str:
    return {SIZE: "--sizes", TEMPLATE: "--template"}.get(axis.name, f"--grid {axis.name}")


def _check_use(template: Template, grids: Sequence[Axis], names: Sequence[str]) -> None:
    """Raises UsageError for what the template leaves unsaid: rows would differ in nothing, or lose a prompt."""
    where = f"--template {shorten(template.text)!r}"
    for name in (axis.name for axis in grids):
        if name not in template.names and name not in cells.TYPES:
            raise UsageError(f"{where} has no {{{name}}}, so that rows for each {name} would be the same; add it")
    if "prompt" in [*names, *(axis.name for axis in grids)] and "prompt" not in template.names:
        raise UsageError(
            f"{where} has no {{prompt}}, and the prompts that are there would be lost; add it, or take the column "
            "in by another name: --column text=prompt"
        )
