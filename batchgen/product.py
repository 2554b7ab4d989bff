"""The rows that come of a source's rows by a recipe: every one with each combination of values, streamed.

A row's id is its source's, followed by the mark of each axis in the order of their names: `cat-07_seed-1_steps-20`. A
source without ids gives `FIRST-WORDS-HASH`, of all that its row says, and `-2` for the second one alike. So ids depend
neither on a row's place nor on the order of options and values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from batchgen.axes import SIZE, TEMPLATE, slug
from batchgen.columns import is_text
from batchgen.errors import UsageError
from batchgen.expansion import Recipe
from batchgen.sources.base import CHARACTERS_PER_CHUNK, ROWS_PER_CHUNK, shorten
from batchgen.wording import listed

Batches: TypeAlias = Callable[[], Iterator[pa.RecordBatch]]
Places: TypeAlias = npt.NDArray[np.int64]

_SHOWN = 20


@dataclass(slots=True)
class Product:
    """A recipe over a source that can be read twice: once to count its rows and find ids that stand twice, once to
    make them. Memory grows by 8 bytes with each row of the source, by a little more with each that stands again, and
    with none of the product's."""

    recipe: Recipe
    source: str
    num_rows: int = field(init=False, default=0)
    """Of the source, once it was read."""
    _twins: dict[int, int] = field(init=False, default_factory=dict)
    """Hashes of bases that several rows have, and how many of those rows were made."""

    def read(self, batches: Batches) -> None:
        """The first reading. Raises UsageError for a product beyond the bound, and for ids that stand twice."""
        self.recipe.check_size(1)
        hashes = [np.zeros(0, np.uint64)]
        for batch in batches():
            self.num_rows += batch.num_rows
            hashes += [_hashes(self._bases(batch))] if self.recipe.has_ids else []
        self.recipe.check_size(self.num_rows)
        values, counts = np.unique(np.concatenate(hashes), return_counts=True)
        self._twins = dict.fromkeys(values[counts > 1].tolist(), 0)
        if self._twins:
            self._refuse_twin_ids(batches)

    def rows(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """All rows, at most ROWS_PER_CHUNK in a batch, all of one schema. Raises UsageError."""
        first = 1
        for batch in batches:
            source = _Chunk(dict(zip(batch.schema.names, batch.columns, strict=True)), first, self._numbered(batch))
            total = batch.num_rows * self.recipe.combinations
            step = _step(batch)
            for start in range(0, total, step):
                yield self._made(source, np.arange(start, min(start + step, total)))
            first += batch.num_rows

    def _made(self, source: _Chunk, places: Places) -> pa.RecordBatch:
        """The rows at some places of the product of a batch."""
        recipe = self.recipe
        rows, combination = np.divmod(places, recipe.combinations)
        picks: dict[str, Places] = {}
        for axis in reversed(recipe.axes):
            combination, picks[axis.name] = np.divmod(combination, len(axis))
        made: dict[str, pa.Array] = {}
        if recipe.has_ids:
            made["id"] = self._ids(source, rows, picks)
        for axis in recipe.axes:
            made |= {name: values.take(picks[axis.name]) for name, values in axis.columns.items()}
        if recipe.drawn:
            pick = _hashes(made["id"].to_pylist()) % np.uint64(len(recipe.drawn))
            made |= {name: values.take(pick) for name, values in recipe.drawn.columns.items()}
        if recipe.num_images:
            made["num_images"] = pa.repeat(pa.scalar(recipe.num_images, pa.int32()), len(places))
        if recipe.templates:
            made["prompt"] = self._prompts(source, rows, picks)
        columns = made | {name: values.take(rows) for name, values in source.columns.items() if name not in made}
        front = {name: columns[name] for name in ("id", "prompt") if name in columns}
        return pa.RecordBatch.from_pydict(front | columns)

    def _ids(self, source: _Chunk, rows: Places, picks: Mapping[str, Places]) -> pa.Array:
        """Bases and marks; sizes come last, the others in the order of their names."""
        axes = sorted(self.recipe.axes, key=lambda axis: (axis.name == SIZE, axis.name))
        parts = [axis.marks.take(picks[axis.name]) for axis in axes]
        if source.columns:
            parts = [pa.array(source.bases, pa.string()).take(rows), *parts]
        return pc.binary_join_element_wise(*parts, "_")

    def _prompts(self, source: _Chunk, rows: Places, picks: Mapping[str, Places]) -> pa.Array:
        axes = {axis.name: axis.texts for axis in self.recipe.axes}
        templates = self.recipe.templates
        which = picks.get(TEMPLATE, np.zeros(len(rows), np.int64))
        parts, order = [], np.argsort(which, kind="stable")
        for number in np.unique(which):
            some = np.flatnonzero(which == number)

            def column(name: str, some: Places = some) -> pa.Array:
                return axes[name].take(picks[name][some]) if name in axes else source.text(name).take(rows[some])

            parts.append(templates[number].filled(column, len(some)))
        return pa.concat_arrays(parts).take(np.argsort(order, kind="stable"))

    def _bases(self, batch: pa.RecordBatch) -> list[str]:
        """What the ids of each row's offspring begin with."""
        names = batch.schema.names
        if "id" in names:
            return self._given(batch)
        values = [batch.column(name).to_pylist() for name in sorted(names)] or [[None] * batch.num_rows]
        digests = (xxhash.xxh3_64_hexdigest(repr(row).encode()) for row in zip(*values, strict=True))
        words = self._words(batch)
        return [f"{slug(text)}-{digest}".removeprefix("-") for text, digest in zip(words, digests, strict=True)]

    def _given(self, batch: pa.RecordBatch) -> list[str]:
        ids = batch.column("id").to_pylist()
        wrong = [one for one in ids if not isinstance(one, str | int) or isinstance(one, bool) or one == ""]
        if wrong:
            raise UsageError(
                f"{self.source}: an id is {shorten(wrong[0])}; every row needs one, text or integer, from which those "
                "of its offspring are made, or none does (--column other=id takes the column in by another name)"
            )
        return [str(one) for one in ids]

    def _words(self, batch: pa.RecordBatch) -> list[str]:
        """What a person would know each row by: its prompt, else what the template shows of it."""
        shown = [name for template in self.recipe.templates for name in template.names]
        known = [name for name in dict.fromkeys(["prompt", *shown]) if name in batch.schema.names]
        columns = [map(str, batch.column(name).to_pylist()) for name in known]
        return [" ".join(words) for words in zip(*columns, strict=True)] if columns else [""] * batch.num_rows

    def _numbered(self, batch: pa.RecordBatch) -> list[str]:
        """Bases that no two rows share: the second row of one kind is `-2`."""
        bases = self._bases(batch) if self.recipe.has_ids else []
        if not self._twins or "id" in batch.schema.names:
            return bases
        return [self._told_apart(base, digest) for base, digest in zip(bases, _hashes(bases).tolist(), strict=True)]

    def _told_apart(self, base: str, digest: int) -> str:
        if digest not in self._twins:
            return base
        self._twins[digest] += 1
        return base if self._twins[digest] == 1 else f"{base}-{self._twins[digest]}"

    def _refuse_twin_ids(self, batches: Batches) -> None:
        """Raises UsageError if the ids that stand twice are the source's own."""
        first, found = 1, dict[str, list[int]]()
        for batch in batches():
            if "id" not in batch.schema.names:
                return
            for number, base in enumerate(self._bases(batch), start=first):
                if _hash(base) in self._twins:
                    found.setdefault(base, []).append(number)
            first += batch.num_rows
        twins = {base: rows for base, rows in found.items() if len(rows) > 1}
        if twins:
            told = [f"{shorten(base)} (rows {listed(list(map(str, rows)))})" for base, rows in twins.items()]
            raise UsageError(
                f"{self.source}: ids stand in more than one row: "
                f"{listed(told[:_SHOWN], len(told))}; give each row an id of its own"
            )


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A batch of the source."""

    columns: Mapping[str, pa.Array]
    first: int
    """Number of its first row, from 1."""
    bases: list[str]

    def text(self, name: str) -> pa.Array:
        """A column as a template shows it. Raises UsageError for what is neither text nor a whole number."""
        column = self.columns[name]
        if not (is_text(column.type) or pa.types.is_integer(column.type)):
            raise UsageError(
                f"{{{name}}}: the column is of type {column.type}, and a template shows texts and whole numbers"
            )
        if column.null_count:
            row = self.first + int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            raise UsageError(f"{{{name}}} has nothing to show in row {row}: the column is null there; give it a text")
        return column.cast(pa.string())


def _hash(text: str) -> int:
    return int(xxhash.xxh3_64_intdigest(text.encode()))


def _hashes(texts: list[str]) -> npt.NDArray[np.uint64]:
    return np.fromiter(map(_hash, texts), np.uint64, len(texts))


def _step(batch: pa.RecordBatch) -> int:
    """Rows in a batch of the product: fewer where the source's rows are long."""
    mean_bytes: int = batch.nbytes // max(1, batch.num_rows)
    return max(1, min(ROWS_PER_CHUNK, CHARACTERS_PER_CHUNK // max(1, mean_bytes)))
