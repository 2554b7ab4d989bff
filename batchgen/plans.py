"""The frozen plan: rows in plan order in Parquet files (row group = shard), and the index slot that makes it exist.

Whoever plans writes into a folder of its own, `.run/plan/0-<token>/`, and puts the index slot `.run/plan/0.json`,
which names that folder's files; of several planners one wins, and the others use its plan.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.columns import as_type, is_text
from batchgen.disk import remove
from batchgen.drafts import Draft, plan_rows, row_schema
from batchgen.errors import UsageError
from batchgen.filesystem import FileSystem, resumable
from batchgen.metadata import CARRIED
from batchgen.planner import Cut
from batchgen.records import Batch, Bucket, Group, Row, Work
from batchgen.rejections import Rejections
from batchgen.spill import Reorder, part_bounds

SHARDS_PER_FILE = 1_000
FILE_BYTES = 64 * 2**20
"""A plan file's shards, at most, and about their bytes in memory."""
REJECTED = "rejected.parquet"
WRITERS = 2
"""Plan files written at a time."""


@dataclass(frozen=True, slots=True)
class PlanFile:
    """One Parquet file of a plan."""

    name: str
    """Path under `.run/plan/`."""
    num_bytes: int
    sha256: str
    footer_sha256: str
    """Of the end that is read beside each row group."""
    first_shard: int
    num_shards: int


@dataclass(frozen=True, slots=True)
class BucketWork:
    """What the plan does in one bucket."""

    group: int
    """Index into the plan's groups."""
    size: int
    """Batch size."""
    batches: int
    evaluations: int
    """Of whole batches: the sum of each one's longest row."""


@dataclass(frozen=True, slots=True)
class PlanIndex:
    """The content of an index slot."""

    number: int
    folder: str
    """Under `.run/plan/`: holds the files, and `rejected.parquet` if rows were rejected."""
    files: tuple[PlanFile, ...]
    first_shard: int
    shard_rows: tuple[int, ...]
    """Images of each shard."""
    shard_s: tuple[float, ...]
    """What each shard costs by the plan's cost model: only their proportions are trusted, unless that was measured."""
    groups: tuple[Group, ...]
    buckets: tuple[BucketWork, ...]
    num_rejected: int
    num_redrawn: int
    model: str
    job: Mapping[str, Any]
    fingerprint: Mapping[str, str]

    @property
    def num_rows(self) -> int:
        """Images planned."""
        return sum(self.shard_rows)

    @property
    def output_format(self) -> str:
        """The job's `output.format`. Raises UsageError if the index names none."""
        try:
            return str(self.job["output"]["format"])
        except (KeyError, TypeError):
            raise UsageError("the plan's index names no output.format; start a new run directory") from None

    @property
    def shards(self) -> range:
        return range(self.first_shard, self.first_shard + len(self.shard_rows))

    def work(self, share: float) -> dict[Bucket, Work]:
        """The work of each bucket, or a share of it."""
        return {
            Bucket(self.groups[one.group], one.size): Work(round(share * one.batches), round(share * one.evaluations))
            for one in self.buckets
        }

    def to_bytes(self, token: str) -> bytes:
        return json.dumps({"token": token, **asdict(self)}, ensure_ascii=False).encode()

    @classmethod
    def from_bytes(cls, content: bytes, path: Path) -> PlanIndex:
        try:
            fields = json.loads(content)
            del fields["token"]
            fields["files"] = tuple(PlanFile(**one) for one in fields["files"])
            fields["groups"] = tuple(Group(**one) for one in fields["groups"])
            fields["buckets"] = tuple(BucketWork(**one) for one in fields["buckets"])
            fields["shard_rows"], fields["shard_s"] = tuple(fields["shard_rows"]), tuple(fields["shard_s"])
            return cls(**fields)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UsageError(
                f"{path} is not a plan's index that this version of batchgen can read ({error!r}); "
                "if the run directory was damaged, start a new one"
            ) from None


def freeze(
    drafted: Draft,
    root: Path,
    files: FileSystem,
    model: str,
    job: Mapping[str, Any],
    fingerprint: Mapping[str, str],
    rejections: Rejections,
) -> PlanIndex:
    """Write the plan's files under `root` (`.run/plan`), put its index, and return the plan that exists then: ours,
    or that of whoever was first."""
    token = secrets.token_hex(8)
    folder = root / f"0-{token}"
    try:
        index = _written(drafted, folder, files, model, job, fingerprint, rejections)
        drafted.survey.manifest.check_unchanged()
        if files.put_if_absent(root / "0.json", index.to_bytes(token)):
            return index
    except FileNotFoundError:
        # The folder of a plan that lost is swept when the run of the one that won is finalized.
        if load_index(root, files) is None:
            raise
    except UsageError:
        remove(folder)
        raise
    remove(folder)
    existing = load_index(root, files)
    assert existing is not None
    return existing


def _written(
    drafted: Draft,
    folder: Path,
    files: FileSystem,
    model: str,
    job: Mapping[str, Any],
    fingerprint: Mapping[str, str],
    rejections: Rejections,
) -> PlanIndex:
    """The index of a plan whose files lie in `folder`."""
    files.make_folder(folder)
    if rejections.num_cells:
        rejections.write(folder / REJECTED, files)
    return PlanIndex(
        number=0,
        folder=folder.name,
        files=tuple(_write_files(drafted, folder, files)),
        first_shard=0,
        shard_rows=tuple(np.diff(drafted.cut.shard_row_start).tolist()),
        shard_s=tuple(drafted.cut.shard_s.round(6).tolist()),
        groups=drafted.groups,
        buckets=tuple(_buckets(drafted.cut)),
        num_rejected=drafted.survey.num_rejected,
        num_redrawn=len(drafted.survey.redrawn.rows),
        model=model,
        job=job,
        fingerprint=fingerprint,
    )


def _buckets(cut: Cut) -> Iterator[BucketWork]:
    keys = np.stack([cut.batch_group, cut.batch_size])
    found, place, counts = np.unique(keys, axis=1, return_inverse=True, return_counts=True)
    evaluations = np.bincount(place.ravel(), cut.batch_evaluations, len(counts))
    for (group, size), batches, num in zip(found.T.tolist(), counts.tolist(), evaluations.tolist(), strict=True):
        yield BucketWork(group, size, batches, int(num))


def load_index(root: Path, files: FileSystem) -> PlanIndex | None:
    """The plan of a run directory, None if it has none."""
    path = root / "0.json"
    content = files.read(path)
    return None if content is None else PlanIndex.from_bytes(content, path)


def _write_files(drafted: Draft, folder: Path, files: FileSystem) -> Iterator[PlanFile]:
    bounds = part_bounds(drafted.cut.shard_row_start, drafted.survey.num_bytes)
    spilled = Reorder(folder, row_schema(drafted.survey.manifest), bounds)
    with resumable(folder):
        for table, ranks in plan_rows(drafted):
            spilled.add(table, ranks)
        shards = _shards(spilled.parts(), drafted.cut)
        with ThreadPoolExecutor(WRITERS) as pool:
            pending: deque[Future[PlanFile]] = deque()
            first = 0
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
        digest, footer = hashlib.file_digest(file, "sha256").hexdigest(), _footer_digest(file)
    return PlanFile(f"{path.parent.name}/{path.name}", path.stat().st_size, digest, footer, first, len(shards))


def _footer_digest(file: BinaryIO) -> str:
    """SHA-256 of a Parquet file's footer, which the checksums of its pages leave out."""
    file.seek(-8, os.SEEK_END)
    length = int.from_bytes(file.read(4), "little")
    file.seek(-8 - length, os.SEEK_END)
    return hashlib.sha256(file.read()).hexdigest()


def _shards(parts: Iterator[pa.Table], cut_rows: Cut) -> Iterator[pa.Table]:
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
            ("group", cut_rows.batch_group[batches]),
            ("batch", number),
            ("batch_size", cut_rows.batch_size[batches]),
        ):
            part = part.append_column(name, pa.array(np.repeat(values, rows).astype(np.int32)))
        for shard in range(first, end):
            start = int(row_start[shard] - row_start[first])
            yield part.slice(start, int(row_start[shard + 1] - row_start[shard]))
        first = end


class PlanReader:
    """Opens shards of a frozen plan, one row group each."""

    def __init__(self, root: Path, index: PlanIndex) -> None:
        self.index = index
        self._root = root

    def shard(self, number: int) -> pa.Table:
        """The rows of a shard, in order. Raises UsageError if the plan's file is missing or damaged."""
        file = next(one for one in self.index.files if one.first_shard <= number < one.first_shard + one.num_shards)
        path = self._root / file.name
        try:
            with resumable(path), path.open("rb") as source:
                if _footer_digest(source) != file.footer_sha256:
                    raise ValueError("its footer is another one")
                with pq.ParquetFile(source, page_checksum_verification=True) as opened:
                    table = opened.read_row_group(number - file.first_shard)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise UsageError(f"{path}: the plan cannot be read ({error}); start a new run directory") from None
        schema = pa.schema([_short(field) for field in table.schema])
        return pa.table(list(map(as_type, table.columns, schema.types)), schema=schema)


def _short(field: pa.Field) -> pa.Field:
    """A row group's texts fit plain strings; only whole manifests need large ones."""
    is_own = not field.name.startswith(CARRIED)
    return pa.field(field.name, pa.string()) if is_own and is_text(field.type) else field


def batches(shard: pa.Table, groups: tuple[Group, ...], skip: frozenset[int] = frozenset()) -> Iterator[Batch]:
    """The batches of a shard's table, without the rows of `skip` (by index); batches left empty are not there."""
    number = shard["batch"].to_numpy()
    edges = np.append(np.flatnonzero(np.append(True, number[1:] != number[:-1])), len(number)).tolist()
    # Python cannot hold the values of every carried column: dates of the year 12000, say.
    own = shard.select([name for name in shard.schema.names if not name.startswith(CARRIED)])
    for start, end in pairwise(edges):
        lines = own.slice(start, end - start).to_pylist()
        rows = tuple(_row(start + place, one) for place, one in enumerate(lines) if start + place not in skip)
        if rows:
            yield Batch(lines[0]["batch"], lines[0]["batch_size"], groups[lines[0]["group"]], rows)


def _row(index: int, line: Mapping[str, Any]) -> Row:
    return Row(
        index=index,
        id=line["id"],
        image_number=line["image_number"],
        prompt=line["prompt"],
        negative_prompt=line["negative_prompt"],
        width=line["width"],
        height=line["height"],
        steps=line["steps"],
        guidance_scale=line["guidance_scale"],
        sampler=line["sampler"],
        seed=line["seed"],
    )
