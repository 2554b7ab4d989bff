"""A plan that is not written: rows sorted and cut, and their texts read once more in manifest order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.checks import Checked, Rules
from batchgen.columns import as_type
from batchgen.cost import Cost
from batchgen.errors import UsageError
from batchgen.init_images import COLUMNS as INIT_COLUMNS
from batchgen.init_images import InitImages, Pack
from batchgen.limits import Limits
from batchgen.manifest import READ_BYTES, Manifest
from batchgen.metadata import CARRIED
from batchgen.planner import Cut, cut, order_of_groups
from batchgen.records import Group
from batchgen.sharing import share
from batchgen.survey import Survey

MAX_GROUPS = 2**16
"""What the sort key of a draft can count."""
SLICE_IMAGES = 131_072
"""Images spelled out at a time."""
COLUMNS = pa.schema(
    [
        ("position", pa.uint64()),
        ("id", pa.large_string()),
        ("image_number", pa.int32()),
        ("prompt", pa.large_string()),
        ("negative_prompt", pa.large_string()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("asked_width", pa.int32()),
        ("asked_height", pa.int32()),
        ("steps", pa.int32()),
        ("guidance_scale", pa.float64()),
        ("true_cfg_scale", pa.float64()),
        ("strength", pa.float64()),
        *INIT_COLUMNS,
        ("sampler", pa.dictionary(pa.int32(), pa.string())),
        ("lora", pa.dictionary(pa.int32(), pa.string())),
        ("seed", pa.uint64()),
    ]
)
"""A row as it is spilled and frozen; a frozen shard also has group, batch and batch_size."""


@dataclass(frozen=True, slots=True)
class Draft:
    """A plan that is not written: everything but the texts."""

    survey: Survey
    cost: Cost
    groups: tuple[Group, ...]
    """In plan order; a row's `group` is an index into this."""
    cut: Cut
    rank: npt.NDArray[np.uint32]
    """Per image in manifest order: its place in the plan; 0 for one that an earlier plan has."""


def draft(survey: Survey, cost: Cost, limits: Limits) -> Draft:
    """Sort and cut all rows: groups in plan order, inside a group by evaluations, then by id digest, so that the
    order of the manifest does not matter."""
    groups, place = _in_order(survey.groups)
    key = (place[survey.group] << np.uint64(48)) | (survey.evaluations.astype(np.uint64) << np.uint64(32))
    key = survey.per_image(key | (survey.ids.high >> np.uint64(32)))
    order = np.argsort(key, kind="stable")
    if survey.is_planned is not None:
        order = order[~survey.is_planned[order]]
    key = key[order]
    _settle_ties(order, key, survey)
    lengths = survey.rules.facts.lengths
    if lengths is not None and lengths.shared:
        groups = _share(key, groups, lengths.shared, cost, limits)
        again = np.argsort(key, kind="stable")
        order, key = order[again], key[again]
    runs, counts = np.unique(key >> np.uint64(32), return_counts=True)
    del key
    group_of_run, evaluations = runs >> np.uint64(16), (runs & np.uint64(0xFFFF)).astype(np.int64)
    edges = np.searchsorted(group_of_run, np.arange(len(groups) + 1, dtype=np.uint64)).tolist()
    of_group = [(number, slice(*here)) for number, here in enumerate(pairwise(edges)) if here[0] < here[1]]
    cut_rows = cut(groups, [(number, evaluations[here], counts[here]) for number, here in of_group], cost, limits)
    rank = np.zeros(survey.num_images_total, np.uint32)
    rank[order] = np.arange(len(order), dtype=np.uint32)
    return Draft(survey, cost, groups, cut_rows, rank)


def _in_order(groups: Sequence[Group]) -> tuple[tuple[Group, ...], npt.NDArray[np.uint64]]:
    """The groups in the plan's order, and the place of each in it. Raises UsageError for more than can be counted."""
    if len(groups) > MAX_GROUPS:
        raise UsageError(f"manifest: its rows fall into {len(groups):,} groups; one run takes {MAX_GROUPS:,}: split it")
    in_order = order_of_groups(groups)
    place = np.empty(len(in_order), np.uint64)
    place[in_order] = np.arange(len(in_order), dtype=np.uint64)
    return tuple(groups[number] for number in in_order), place


def _share(
    key: npt.NDArray[np.uint64], groups: Sequence[Group], lengths: Sequence[int], cost: Cost, limits: Limits
) -> tuple[Group, ...]:
    """Put the last images of groups into groups that they share, by their sorted keys, in place; all groups then."""
    edges = np.searchsorted(key, np.arange(len(groups) + 1, dtype=np.uint64) << np.uint64(48))
    counts = np.diff(edges)
    shares = share(groups, counts, lengths, cost, limits)
    left = np.flatnonzero(counts > shares.leaving)
    found, place = _in_order([*(groups[number] for number in left.tolist()), *shares.groups])
    own = np.zeros(len(groups), np.uint64)
    own[left] = place[: len(left)]
    for number, (start, end) in enumerate(pairwise(edges.tolist())):
        stay = end - int(shares.leaving[number])
        _move(key[start:stay], own[number])
        if stay < end:
            _move(key[stay:end], place[len(left) + shares.target[number]])
    return found


def _move(key: npt.NDArray[np.uint64], place: np.uint64) -> None:
    """Put images into the group of a place, in place."""
    key &= np.uint64(2**48 - 1)
    key |= place << np.uint64(48)


def _settle_ties(order: npt.NDArray[np.intp], key: npt.NDArray[np.uint64], survey: Survey) -> None:
    """Sort images whose 64-bit keys are equal by their whole digest, in place; images of one row keep their order."""
    same = key[1:] == key[:-1]
    tied = np.flatnonzero(np.append(same, False) | np.append(False, same))
    if not len(tied):
        return
    images = order[tied]
    rows = images
    if survey.num_images is not None:
        rows = np.searchsorted(np.cumsum(survey.num_images), images, side="right")
    order[tied] = images[np.lexsort((images, survey.ids.low[rows], survey.ids.high[rows], key[tied]))]


def row_schema(manifest: Manifest) -> pa.Schema:
    """`COLUMNS` and the manifest's own columns."""
    carried = [pa.field(CARRIED + name, manifest.schema.field(name).type) for name in manifest.carried]
    return pa.schema([*COLUMNS, *carried])


def plan_rows(drafted: Draft, pack: Pack | None = None) -> Iterator[tuple[pa.Table, npt.NDArray[np.uint32]]]:
    """All images in manifest order as tables of `row_schema`, with their ranks. Init images whose bytes the manifest
    holds go into the pack, but for those of images that an earlier plan has; without a pack their place is null."""
    survey = drafted.survey
    schema = row_schema(survey.manifest)
    row, image = 0, 0
    for checked, batch, good in survey.batches():
        most = max(1, min(SLICE_IMAGES, READ_BYTES * batch.num_rows // max(1, batch.nbytes)))
        for images in survey.images(row, row + len(good), most):
            places = good[images.row - row]
            seeds = survey.seeds(images, checked.seed[places], checked.has_seed[places]).seeds
            again = slice(*np.searchsorted(survey.redrawn.rows, [image, image + len(places)]))
            seeds[survey.redrawn.rows[again] - image] = survey.redrawn.seeds[again]
            ids = survey.ids.take(images.row).hex() if checked.id_texts is None else checked.id_texts.take(places)
            table = _table(checked, batch, places, ids, images.number, seeds, image, survey.rules, schema)
            if checked.init is not None:
                is_planned = None if survey.is_planned is None else survey.is_planned[image : image + len(places)]
                table = _with_images(table, checked, places, survey.rules.init_images, pack, is_planned)
            yield table, drafted.rank[image : image + len(places)]
            image += len(places)
        row += len(good)


def _with_images(
    table: pa.Table,
    checked: Checked,
    places: npt.NDArray[np.intp],
    init_images: InitImages,
    pack: Pack | None,
    is_planned: npt.NDArray[np.bool_] | None,
) -> pa.Table:
    """The rows with their init images; the bytes of those that are planned already are not packed again."""
    is_kept = np.zeros(len(places), bool) if is_planned is None else is_planned
    planned = init_images.planned(checked.columns["image"], checked.first_row, places, pack, is_kept)
    for name, column in planned.items():
        table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), column)
    return table


def new_rows(
    drafted: Draft, first_position: int, pack: Pack | None = None
) -> Iterator[tuple[pa.Table, npt.NDArray[np.uint32]]]:
    """As `plan_rows`, but for the images that an earlier plan has; positions count from `first_position`."""
    is_planned, image = drafted.survey.is_planned, 0
    for table, ranks in plan_rows(drafted, pack):
        if is_planned is not None:
            new = np.flatnonzero(~is_planned[image : image + len(ranks)])
            image += len(ranks)
            table, ranks = table.take(new), ranks[new]
            positions = np.arange(first_position, first_position + len(new), dtype=np.uint64)
            table = table.set_column(0, table.schema.field(0), pa.array(positions))
            first_position += len(new)
        yield table, ranks


def _table(
    checked: Checked,
    batch: pa.RecordBatch,
    places: npt.NDArray[np.intp],
    ids: pa.Array,
    image_number: npt.NDArray[np.uint64],
    seeds: npt.NDArray[np.uint64],
    first_position: int,
    rules: Rules,
    schema: pa.Schema,
) -> pa.Table:
    arrays = {
        "position": np.arange(first_position, first_position + len(places), dtype=np.uint64),
        "id": ids,
        "image_number": image_number,
        "prompt": checked.prompt.take(places),
        "negative_prompt": checked.negative_prompt.take(places),
        "width": checked.width[places],
        "height": checked.height[places],
        "asked_width": checked.asked_width[places],
        "asked_height": checked.asked_height[places],
        "steps": checked.steps[places],
        "guidance_scale": checked.guidance_scale[places],
        "true_cfg_scale": pa.array(checked.true_cfg_scale[places], from_pandas=True),
        "strength": pa.array(checked.strength[places], from_pandas=True),
        **{name: pa.nulls(len(places), INIT_COLUMNS.field(name).type) for name in INIT_COLUMNS.names},
        "sampler": pa.DictionaryArray.from_arrays(checked.sampler[places], pa.array(rules.samplers)),
        "lora": pa.DictionaryArray.from_arrays(
            pa.array(checked.lora[places], mask=checked.lora[places] == 0), pa.array(rules.loras, pa.string())
        ),
        "seed": seeds,
    }
    for name in schema.names[len(COLUMNS) :]:
        arrays[name] = batch.column(name.removeprefix(CARRIED)).take(places)
    return pa.table([as_type(pa.array(arrays[field.name]), field.type) for field in schema], schema=schema)
