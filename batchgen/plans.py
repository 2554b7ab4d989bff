"""The frozen plan: rows in plan order in Parquet files (row group = shard), and the index slot that makes it exist.

Whoever plans writes into a folder of its own, `.run/plan/0-<token>/`, and puts the index slot `.run/plan/0.json`,
which names that folder's files; of several planners one wins, and the others use its plan. So it is with `1.json` and
all that are appended.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.drafts import Draft, new_rows, row_schema
from batchgen.errors import Interrupted
from batchgen.filesystem import FileSystem, resumable
from batchgen.init_images import packing
from batchgen.plan_index import BucketWork, PlanFile, PlanIndex, load_index
from batchgen.planner import Cut
from batchgen.rejections import Rejections
from batchgen.spill import Reorder, part_bounds

SHARDS_PER_FILE = 1_000
FILE_BYTES = 64 * 2**20
"""A plan file's shards, at most, and about their bytes in memory."""
REJECTED = "rejected.parquet"
WRITERS = 2
"""Plan files written at a time."""


@dataclass(frozen=True, slots=True)
class Base:
    """What a plan counts on from: how much the plans before it have."""

    number: int = 0
    shards: int = 0
    groups: int = 0
    rows: int = 0
    """Each once: new rows have their positions in the tables behind them."""

    @classmethod
    def after(cls, index: PlanIndex | None) -> Base:
        return (
            cls() if index is None else cls(index.number + 1, len(index.shard_rows), len(index.groups), index.num_rows)
        )


@dataclass(frozen=True, slots=True)
class Proposal:
    """A plan that is to be frozen, and what it was made from."""

    draft: Draft
    rejections: Rejections
    model: str
    job: Mapping[str, Any]
    fingerprint: Mapping[str, str]
    after: PlanIndex | None = None
    """The plans before it, whose rows the draft leaves out."""


def freeze(proposal: Proposal, root: Path, files: FileSystem) -> PlanIndex:
    """Write the plan's files under `root` (`.run/plan`), put its index, and return all plans that exist then: with
    ours, or with that of whoever was first."""

    def write(folder: Path) -> PlanIndex:
        index = _written(proposal, folder, files)
        proposal.draft.survey.manifest.check_unchanged()
        return index

    return put_plan(root, files, 0 if proposal.after is None else proposal.after.number + 1, write)


def put_plan(root: Path, files: FileSystem, number: int, write: Callable[[Path], PlanIndex]) -> PlanIndex:
    """Let `write` fill a folder for a plan's files and put the index that it returns; all plans that exist then: with
    that one, or with that of whoever was first."""
    token = secrets.token_hex(8)
    folder, slot = root / f"{number}-{token}", root / f"{number}.json"
    try:
        index = write(folder)
    except FileNotFoundError:
        # The folder of a plan that lost is swept when the run of the one that won is finalized.
        if files.read(slot) is None:
            raise
    except Exception:
        # No index names it; a disk that is full has better use for its room.
        with suppress(Interrupted):
            files.remove_any(folder)
        raise
    else:
        if files.put_if_absent(slot, index.to_bytes(token)):
            return _existing(root, files)
    files.remove_any(folder)
    return _existing(root, files)


def _existing(root: Path, files: FileSystem) -> PlanIndex:
    existing = load_index(root, files)
    assert existing is not None
    return existing


def _written(proposal: Proposal, folder: Path, files: FileSystem) -> PlanIndex:
    """The index of a plan whose files lie in `folder`."""
    drafted, has_rejected = proposal.draft, proposal.rejections.num_cells > 0
    files.make_folder(folder)
    if has_rejected:
        proposal.rejections.write(folder / REJECTED, files)
    base = Base.after(proposal.after)
    return PlanIndex(
        number=base.number,
        folder=folder.name,
        files=tuple(_write_files(drafted, folder, files, base)),
        first_shard=base.shards,
        shard_rows=tuple(np.diff(drafted.cut.shard_row_start).tolist()),
        shard_s=tuple(drafted.cut.shard_s.round(6).tolist()),
        groups=drafted.groups,
        buckets=tuple(_buckets(drafted.cut, base)),
        num_rejected=drafted.survey.num_rejected,
        num_redrawn=len(drafted.survey.redrawn.rows),
        model=proposal.model,
        job=proposal.job,
        fingerprint=proposal.fingerprint,
        rejected=f"{folder.name}/{REJECTED}" if has_rejected else "",
    )


def _buckets(cut: Cut, base: Base) -> Iterator[BucketWork]:
    keys = np.stack([cut.batch_group, cut.batch_size])
    found, place = np.unique(keys, axis=1, return_inverse=True)
    loads, evaluations = (
        np.bincount(place.ravel(), one, len(found.T)) for one in (cut.batch_loads, cut.batch_evaluations)
    )
    for (group, size), batches, num in zip(found.T.tolist(), loads.tolist(), evaluations.tolist(), strict=True):
        yield BucketWork(base.groups + group, size, int(batches), int(num))


def _write_files(drafted: Draft, folder: Path, files: FileSystem, base: Base) -> Iterator[PlanFile]:
    bounds = part_bounds(drafted.cut.shard_row_start, drafted.survey.num_bytes)
    spilled = Reorder(folder, row_schema(drafted.survey.manifest), bounds)
    with resumable(folder):
        with packing(folder, files) as pack:
            for table, ranks in new_rows(drafted, base.rows, pack):
                spilled.add(table, ranks)
        yield from write_shards(_shards(spilled.parts(), drafted.cut, base), folder, files, base)


def write_shards(shards: Iterator[pa.Table], folder: Path, files: FileSystem, base: Base) -> Iterator[PlanFile]:
    """Write shards into durable files of a folder."""
    with ThreadPoolExecutor(WRITERS) as pool:
        pending: deque[Future[PlanFile]] = deque()
        first = base.shards
        for number, tables in enumerate(_of_files(shards)):
            path = folder / f"{number:04d}.parquet"
            pending.append(pool.submit(_write_file, path, tables, first, files))
            first += len(tables)
            if len(pending) == WRITERS:
                yield pending.popleft().result()
        yield from (one.result() for one in pending)
    files.sync_folder(folder)


def _of_files(shards: Iterator[pa.Table]) -> Iterator[list[pa.Table]]:
    """The shards of each file."""
    tables: list[pa.Table] = []
    num_bytes = 0
    for shard in shards:
        tables.append(shard)
        num_bytes += shard.nbytes
        if len(tables) == SHARDS_PER_FILE or num_bytes >= FILE_BYTES:
            yield tables
            tables, num_bytes = [], 0
    if tables:
        yield tables


def _write_file(path: Path, shards: list[pa.Table], first: int, files: FileSystem) -> PlanFile:
    repeated = ["sampler", "negative_prompt", "width", "height", "steps", "batch", "batch_size"]
    options = {"use_dictionary": repeated, "write_statistics": False, "write_page_checksum": True}
    with resumable(path), path.open("xb+") as file:
        with pq.ParquetWriter(file, shards[0].schema, **options) as writer:
            for shard in shards:
                writer.write_table(shard, row_group_size=shard.num_rows)
        files.sync_file(file)
        file.seek(0)
        digest, footer = hashlib.file_digest(file, "sha256").hexdigest(), footer_digest(file)
    return PlanFile(f"{path.parent.name}/{path.name}", path.stat().st_size, digest, footer, first, len(shards))


def footer_digest(file: BinaryIO) -> str:
    """SHA-256 of a Parquet file's footer, which the checksums of its pages leave out."""
    file.seek(-8, os.SEEK_END)
    length = int.from_bytes(file.read(4), "little")
    file.seek(-8 - length, os.SEEK_END)
    return hashlib.sha256(file.read()).hexdigest()


def _shards(parts: Iterator[pa.Table], cut_rows: Cut, base: Base) -> Iterator[pa.Table]:
    """Shard after shard with their group, batch and batch_size; parts begin and end with a shard."""
    row_start, batch_rows = cut_rows.shard_row_start, cut_rows.batch_rows
    first = 0
    for part in parts:
        end = int(np.searchsorted(row_start, row_start[first] + part.num_rows, side="right")) - 1
        batches = slice(int(cut_rows.shard_start[first]), int(cut_rows.shard_start[end]))
        rows = batch_rows[batches]
        shard_of_batch = np.repeat(np.arange(first, end), np.diff(cut_rows.shard_start[first : end + 1]))
        number = np.arange(batches.start, batches.stop) - cut_rows.shard_start[shard_of_batch]
        for name, values in (
            ("group", cut_rows.batch_group[batches] + base.groups),
            ("batch", number),
            ("batch_size", cut_rows.batch_size[batches]),
        ):
            part = part.append_column(name, pa.array(np.repeat(values, rows).astype(np.int32)))
        for shard in range(first, end):
            start = int(row_start[shard] - row_start[first])
            yield part.slice(start, int(row_start[shard + 1] - row_start[shard]))
        first = end
