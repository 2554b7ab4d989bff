"""A whole manifest read once: every row checked, identified and placed; what remains is arrays, no text.

At its largest a survey holds about 32 bytes per row, so 10 million rows take 0.3 GB and 100 million 3 GB; the
texts are read a second time when the plan is written (`plans.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.checks import BadCell, Checked, Rules
from batchgen.columns import Bools
from batchgen.duplicates import refuse_duplicates
from batchgen.errors import UsageError
from batchgen.identified import digest_sum, identify
from batchgen.identity import (
    Digests,
    Redrawn,
    Sources,
    derived_seeds,
    joined,
    merged,
    noise_keys,
    num_repeats,
    number_digests,
    occurrences,
    settle_seeds,
)
from batchgen.known import Known, image_keys
from batchgen.manifest import Manifest
from batchgen.models.tokens import LengthsOf, lengths_of
from batchgen.planner import Grouper
from batchgen.records import Group

U64 = npt.NDArray[np.uint64]
MAX_IMAGES = 2**32
"""What the ranks of a draft can count."""
_SLICE = 1_000_000
"""Images whose seeds are drawn at a time."""


@dataclass(frozen=True, slots=True)
class Images:
    """Some images in manifest order: their rows among the good ones, and their numbers in their rows."""

    row: npt.NDArray[np.intp]
    number: U64


@dataclass(frozen=True, slots=True)
class Seeds:
    """Per image: its seed, and whether that was derived."""

    seeds: U64
    is_derived: Bools


@dataclass(slots=True)
class Survey:
    """What is known of all rows. Arrays are per good manifest row, unless said otherwise, in manifest order."""

    manifest: Manifest
    rules: Rules
    groups: list[Group]
    is_good: Bools
    """Per manifest row, good or not."""
    ids: Digests
    num_images: npt.NDArray[np.uint32] | None
    """None where every row is one image."""
    group: npt.NDArray[np.uint32]
    evaluations: npt.NDArray[np.uint16]
    redrawn: Redrawn
    """By image."""
    num_repeated_noise: int
    """Images with an explicit seed that repeat another one's content and noise."""
    rows_digest: str
    """Of the rows that break no rule, duplicates of an id among them, whatever their order."""
    num_bytes: int
    """About what all images take in memory with their texts and carried columns."""
    num_from_images: int = 0
    """Good rows with an init image, duplicates of an id among them."""
    num_cropped: int = 0
    """Of them, those that are made smaller than the image, at the next size that the model can do."""
    is_planned: Bools | None = None
    """Per image: whether an earlier plan has it. None where there is none."""

    @property
    def num_rejected(self) -> int:
        return int((~self.is_good).sum())

    @property
    def num_images_total(self) -> int:
        return len(self.group) if self.num_images is None else int(self.num_images.sum())

    def images(self, start: int, end: int, most: int) -> Iterator[Images]:
        """The images of the good rows `start:end`, at most `most` at a time, also where one row has more."""
        counts = None if self.num_images is None else self.num_images[start:end]
        ends = None if counts is None else np.cumsum(counts, dtype=np.uint64)
        num_images = end - start if ends is None else int(ends[-1]) if len(ends) else 0
        for first in range(0, num_images, most):
            image = np.arange(first, min(first + most, num_images))
            if counts is None or ends is None:
                yield Images(image + start, np.zeros(len(image), np.uint64))
            else:
                row = np.searchsorted(ends, image.astype(np.uint64), side="right")
                yield Images(row + start, image.astype(np.uint64) - (ends[row] - counts[row]))

    def seeds(self, images: Images, seed: U64, has_seed: Bools) -> Seeds:
        """The seeds of some images, as first drawn: `redrawn` lies over them. `seed` is that of each image's row.

        The first image of a row with an explicit seed has that seed; its others derive theirs from it.
        """
        run_seed = np.where(has_seed, seed & np.uint64(0xFFFF_FFFF), np.uint64(self.rules.job.sampling.seed))
        is_derived = ~has_seed | (images.number > 0)
        drawn = derived_seeds(self.ids.take(images.row), images.number, run_seed)
        return Seeds(np.where(is_derived, drawn, seed), is_derived)

    def per_image(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """An array per row as one per image."""
        return values if self.num_images is None else np.repeat(values, self.num_images)

    def batches(self) -> Iterator[tuple[Checked, pa.RecordBatch, npt.NDArray[np.intp]]]:
        """The manifest once more: each batch with its checked columns and the places of its good rows."""
        first_row = 0
        for batch in self.manifest.batches():
            checked = self.rules.check(batch, first_row)
            good = np.flatnonzero(self.is_good[first_row : first_row + batch.num_rows])
            first_row += batch.num_rows
            yield checked, batch, good


class _Gathered:
    """Arrays of all batches, each joined only when it is asked for and given up then."""

    def __init__(self, lengths: LengthsOf | None) -> None:
        self._lengths = lengths
        self._parts: dict[str, list[npt.NDArray[Any]]] = {}
        self.digest = np.zeros(2, np.uint64)
        self.num_bytes = 0
        self.num_from_images = 0
        self.num_cropped = 0

    def add(self, checked: Checked, grouper: Grouper, num_bytes: int) -> None:
        good = np.flatnonzero(checked.is_good)
        self.num_bytes += num_bytes * int(checked.num_images[good].sum()) // max(1, len(checked.is_good))
        who = identify(checked, grouper.samplers, grouper.loras)
        texts = (checked.prompt, checked.negative_prompt)
        lengths = [self._lengths(column.take(good)) for column in texts] if self._lengths else None
        width, height = checked.width[good], checked.height[good]
        group, evaluations = grouper.assign(
            width,
            height,
            checked.is_guided[good],
            checked.sampler[good],
            checked.steps[good],
            lengths=lengths,
            skipped=checked.skipped[good],
            lora=checked.lora[good],
        )
        has_image = checked.skipped[good] >= 0
        is_smaller = (checked.width < checked.asked_width) | (checked.height < checked.asked_height)
        self.num_from_images += int(has_image.sum())
        self.num_cropped += int((has_image & is_smaller[good]).sum())
        columns: dict[str, npt.NDArray[Any]] = {
            "high": who.ids.high[good],
            "low": who.ids.low[good],
            "content": who.content[good],
            "noise": checked.seed[good].astype(np.uint32),
            "has_seed": checked.has_seed[good],
            "num_images": checked.num_images[good].astype(np.uint32),
            "group": group.astype(np.uint32),
            "evaluations": evaluations.astype(np.uint16),
        }
        for name, values in columns.items():
            self._parts.setdefault(name, []).append(values)
        with np.errstate(over="ignore"):
            self.digest += digest_sum(checked, who, good)

    def take(self, name: str, keep: Bools | None = None) -> npt.NDArray[Any]:
        values = np.concatenate(self._parts.pop(name))
        return values if keep is None else values[keep]


def survey(
    manifest: Manifest,
    rules: Rules,
    on_bad: Callable[[list[BadCell]], None],
    on_progress: Callable[[int], None] = lambda rows: None,
    known: Known | None = None,
) -> Survey:
    """Check and identify every row. Bad cells go to `on_bad` as they are found, in manifest order but for
    duplicate ids, which come last; what to do about them is the caller's matter. Images that are known keep their
    seeds."""
    grouper = Grouper.of(rules.facts, rules.samplers, rules.loras)
    gathered = _Gathered(lengths_of(rules.job.model, rules.facts))
    is_good = np.zeros(manifest.num_rows, bool)
    first_row = 0
    for batch in manifest.batches():
        checked = rules.check(batch, first_row)
        if checked.bad:
            on_bad(checked.bad)
        is_good[first_row : first_row + batch.num_rows] = checked.is_good
        kept = [name for name in batch.schema.names if name != "image"]  # Of a picture, a plan holds a line.
        gathered.add(checked, grouper, batch.select(kept).nbytes)
        first_row += batch.num_rows
        on_progress(batch.num_rows)
    if not first_row:
        raise UsageError(f"manifest: {', '.join(map(str, manifest.files))} holds no row")
    ids = Digests(gathered.take("high"), gathered.take("low"))
    keep: Bools | None = None
    if "id" in manifest.schema.names:
        keep = refuse_duplicates(ids, is_good, manifest, on_bad)
        ids = ids if keep is None else ids.take(np.flatnonzero(keep))
    else:
        ids = _numbered(ids)
    return _settled(manifest, rules, grouper.groups, is_good, ids, gathered, keep, known)


def _numbered(ids: Digests) -> Digests:
    """Digests of rows without an id column: rows that are equal in all columns are told apart by their number."""
    number = occurrences(ids)
    again = np.flatnonzero(number)
    if len(again):
        longer = joined(ids.take(again), number_digests(number[again]))
        ids.high[again], ids.low[again] = longer.high, longer.low
    return ids


def _settled(
    manifest: Manifest,
    rules: Rules,
    groups: list[Group],
    is_good: Bools,
    ids: Digests,
    gathered: _Gathered,
    keep: Bools | None,
    known: Known | None,
) -> Survey:
    num_images = gathered.take("num_images", keep)
    if (total := int(num_images.sum(dtype=np.uint64))) >= MAX_IMAGES:
        raise UsageError(f"manifest: it asks for {total:,} images; one run takes {MAX_IMAGES - 1:,}: split it")
    settled = Survey(
        manifest=manifest,
        rules=rules,
        groups=groups,
        is_good=is_good,
        ids=ids,
        num_images=None if (num_images == 1).all() else num_images,
        group=gathered.take("group", keep),
        evaluations=gathered.take("evaluations", keep),
        redrawn=Redrawn(np.zeros(0, np.intp), np.zeros(0, np.uint64)),
        num_repeated_noise=0,
        rows_digest=f"{gathered.digest[0]:016x}{gathered.digest[1]:016x}",
        num_bytes=gathered.num_bytes,
        num_from_images=gathered.num_from_images,
        num_cropped=gathered.num_cropped,
    )
    noise, has_seed = gathered.take("noise", keep), gathered.take("has_seed", keep)
    keys, is_derived = _noise_keys(settled, gathered.take("content", keep), noise, has_seed)

    def sources(images: npt.NDArray[np.intp]) -> Sources:
        row, number = images, np.zeros(len(images), np.uint64)
        if settled.num_images is not None:
            ends = np.cumsum(settled.num_images, dtype=np.uint64)
            row = np.searchsorted(ends, images.astype(np.uint64), side="right")
            number = images.astype(np.uint64) - (ends - settled.num_images)[row]
        run_seed = np.where(has_seed[row], noise[row].astype(np.uint64), np.uint64(rules.job.sampling.seed))
        return Sources(ids.take(row), number, run_seed)

    kept = None if known is None else _keep_seeds(settled, known, keys, is_derived, sources)
    settled.redrawn = settle_seeds(keys, is_derived, sources)
    settled.num_repeated_noise = num_repeats(keys[~is_derived])
    if kept is not None:
        settled.redrawn = merged(kept, settled.redrawn)
    return settled


def _keep_seeds(
    settled: Survey,
    known: Known,
    keys: U64,
    is_derived: Bools,
    sources: Callable[[npt.NDArray[np.intp]], Sources],
) -> Redrawn:
    """Mark the images that are planned, and put their seeds beyond drawing, in place; those drawn again before."""
    found = [np.zeros(0, np.intp)]
    for images in settled.images(0, len(settled.group), _SLICE):
        found.append(known.find(image_keys(settled.ids.take(images.row), images.number)))
    place = np.concatenate(found)
    settled.is_planned = place >= 0
    planned = np.flatnonzero(settled.is_planned)
    here = known.seeds_as_planned(place[planned], keys[planned], is_derived[planned], sources(planned))
    kept = Redrawn(planned[here.rows], here.seeds)
    keys[kept.rows] = noise_keys((keys[kept.rows] >> np.uint64(32)).astype(np.uint32), kept.seeds)
    is_derived[planned] = False
    return kept


def _noise_keys(
    settled: Survey, content: npt.NDArray[np.uint32], noise: npt.NDArray[np.uint32], has_seed: Bools
) -> tuple[U64, Bools]:
    """Per image, in slices so that the arithmetic's temporaries stay small."""
    keys, derived = [np.zeros(0, np.uint64)], [np.zeros(0, bool)]
    for start in range(0, len(content), _SLICE):
        for images in settled.images(start, min(start + _SLICE, len(content)), _SLICE):
            drawn = settled.seeds(images, noise[images.row].astype(np.uint64), has_seed[images.row])
            keys.append(noise_keys(content[images.row], drawn.seeds))
            derived.append(drawn.is_derived)
    return np.concatenate(keys), np.concatenate(derived)
