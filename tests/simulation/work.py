"""Rows, pictures, parts and tables without their weight: the same steps on the disk, bytes that say what they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from batchgen import plans, rundir
from batchgen.errors import BatchgenError, UsageError
from batchgen.filesystem import resumable
from batchgen.generator import Dropped, Pending
from batchgen.ledger import Receipt
from batchgen.mending import content_of
from batchgen.plan_index import BucketWork, PlanFile, PlanIndex, Replaced
from batchgen.plans import Base
from batchgen.records import Batch, Failure, Group, Image, Outcome, Part, Row, Spent, Written
from tests.simulation.files import digest, my_files
from tests.simulation.world import World

GROUP = Group(64, 64, True, 0, "form")


class SimulatedPartWriter:
    """A part in one file, or in a folder of files: its bytes say whose it is and what it holds."""

    def __init__(self, work_dir: Any, stem: str, output: Any, shard: Any, model: str, pool: Any) -> None:
        self._files = my_files()
        self._is_folder = output.format == "files"
        self._path = work_dir / (stem if self._is_folder else f"{stem}.tar")
        self._owner = World.now.me.process.owner.token
        self._images: list[Written] = []
        self._failures: list[Failure] = []
        self._contents: dict[str, bytes] = {}
        self._files.remove_any(self._path)
        with resumable(self._path):
            self._file = None if self._is_folder else self._files.create(self._path)
            if self._is_folder:
                self._files.mkdir_new(self._path)

    def add(self, image: Image) -> None:
        name, data = f"{image.row.index}.png", f"{image.row.id} by {self._owner};".encode()
        if image.row.prompt == "cannot be encoded":
            self._failures.append(Failure(image.row, "RowError", "it cannot"))
            return
        with resumable(self._path):
            if self._file is None:
                self._files.write(self._path / name, data)
            else:
                self._files.append(self._file, self._path, data)
        self._contents[name] = data
        self._images.append(made_of(image, name, data))

    def finish(self) -> Part:
        if not self._images:
            self.discard()
            return Part(None, 0, "", (), tuple(self._failures))
        content = b"".join(self._contents.values())
        with resumable(self._path):
            if self._file is None:
                self._files.sync_folder(self._path)
            else:
                self._files.sync_open(self._file, self._path)
            self._files.sync_folder(self._path.parent)
        return Part(self._path, len(content), digest(content), tuple(self._images), tuple(self._failures))

    def discard(self) -> None:
        self._files.remove_any(self._path)


def made_of(image: Image, file_name: str, data: bytes) -> Written:
    return Written(image.row.index, file_name, len(data), "", "", "png", False, 1, "eager", None, None, 0, 0.0)


@dataclass(frozen=True, slots=True)
class RowTable:
    """A row table as far as it is asked for."""

    lines: tuple[tuple[int, str, str], ...]
    """Index, status and id of each row."""

    def __getitem__(self, column: str) -> Any:
        assert column == "file_name"
        return SimpleNamespace(to_pylist=lambda: [f"{index}.png" for index, status, _ in self.lines if status == "ok"])


def row_table(shard: Sequence[Row], model: str, made: Sequence[Written], failed: Sequence[Failure]) -> bytes:
    lines = [(one.index, "ok") for one in made] + [(one.row.index, "failed") for one in failed]
    return json.dumps([(index, status, shard[index].id) for index, status in lines]).encode()


@lru_cache(1000)
def ids_in(content: bytes) -> tuple[tuple[str, ...], ...]:
    """The ids of the rows of each shard in a plan's file."""
    return tuple(tuple(shard) for shard in json.loads(content))


class SimulatedReader:
    """Rows as a plan's files hold them."""

    def __init__(self, root: Any, index: PlanIndex) -> None:
        self.index = index
        self.root = root

    def shard(self, number: int) -> list[Row]:
        file = next(one for one in self.index.files if one.first_shard <= number < one.first_shard + one.num_shards)
        path = self.root / file.name
        content = my_files().read(path)
        if content is None or digest(content) != file.sha256:
            raise UsageError(f"{path}: the plan cannot be read")
        return [
            Row(index, name, 0, "cannot be encoded" if is_odd(number, name) else "", None, 64, 64, 1, 1.0, "", 0)
            for index, name in enumerate(ids_in(content)[number - file.first_shard])
        ]


def is_odd(shard: int, name: str) -> bool:
    """Whether the row of this id cannot be encoded: the first one of a shard, perhaps cured when it is tried again."""
    odd = World.now.odd_shard
    return name == f"{odd}.0" and (shard == odd or World.now.is_stubborn)


def batches(shard: list[Row], groups: Any, skip: frozenset[int] = frozenset(), root: Any = None) -> Iterator[Batch]:
    size = World.now.batch_size
    for start in range(0, len(shard), size):
        rows = tuple(row for row in shard[start : start + size] if row.index not in skip)
        if rows:
            yield Batch(start // size, size, GROUP, rows)


Shards = Sequence[Sequence[str]]
"""Ids of rows by shard."""


def written(proposal: Any, folder: Any, files: Any) -> PlanIndex:
    """As `plans._written`."""
    return write_plan(proposal.draft.shards, folder, files, proposal.job, proposal.after)


def write_plan(
    shards: Shards, folder: Any, files: Any, job: Any, after: PlanIndex | None, replaced: tuple[Replaced, ...] = ()
) -> PlanIndex:
    """A folder with one file, which holds the rows' ids."""
    files.make_folder(folder)
    content = json.dumps(shards).encode()
    files.write(folder / "0000.parquet", content)
    files.sync_folder(folder)
    return index_of(folder.name, content, job, after, replaced)


def index_of(
    folder: str, content: bytes, job: Any, after: PlanIndex | None = None, replaced: tuple[Replaced, ...] = ()
) -> PlanIndex:
    base, shard_rows = Base.after(after), tuple(map(len, ids_in(content)))
    return PlanIndex(
        number=base.number,
        folder=folder,
        files=(PlanFile(f"{folder}/0000.parquet", len(content), digest(content), "", base.shards, len(shard_rows)),),
        first_shard=base.shards,
        shard_rows=shard_rows,
        shard_s=(1.0,) * len(shard_rows),
        groups=() if after else (GROUP,),
        buckets=(BucketWork(0, 1, 1, 1),),
        num_rejected=0,
        num_redrawn=0,
        model="model",
        job=job,
        fingerprint={},
        replaced=replaced,
    )


def base_shards(shard_rows: Sequence[int]) -> Shards:
    """What is planned first."""
    return [[f"{shard}.{row}" for row in range(num_rows)] for shard, num_rows in enumerate(shard_rows)]


def plan_manifest(names: Any, job: Any, on_progress: Any) -> Any:
    return drafted(base_shards(World.now.shard_rows))


def drafted(shards: Shards) -> Any:
    """What `plan_manifest` says of rows that are to be planned."""
    survey = SimpleNamespace(manifest=SimpleNamespace(check_unchanged=lambda: None), rows_digest="", num_rejected=0)
    draft = SimpleNamespace(survey=survey, shards=shards, cut=SimpleNamespace(num_rows=sum(map(len, shards))))
    return SimpleNamespace(draft=draft, facts=None, rejections=None)


def open_run(run: Any, names: Any, job: Any, on_planned: Any, on_progress: Any) -> PlanIndex:
    """As `rundir.open_run`, but for the comparison of manifest and job with those of the plan."""
    index = plans.load_index(run.plans, run.files)
    return index or rundir._freeze(run, names, job, on_planned, on_progress)


class SimulatedGenerator:
    """A device: batches take their time, and the device may be slower for a row than anybody waits."""

    versions: dict[str, str] = {}  # noqa: RUF012

    def prepare(self, batches: Sequence[Batch], should_drop: Callable[[], bool]) -> None:
        World.now.sleep(World.now.random.random() * 5)
        if should_drop():
            raise Dropped

    def submit(self, batch: Batch, should_drop: Callable[[], bool]) -> Pending:
        ends_at = World.now.now_s + World.now.random.random() * World.now.batch_s

        def finish() -> list[Outcome]:
            World.now.sleep(max(0.0, ends_at - World.now.now_s))
            if should_drop():
                raise Dropped
            return [Image(row, None, 1, "eager", None, None, 0.0) for row in batch.rows]  # type: ignore[arg-type]

        return finish

    def measurements(self) -> list[Any]:
        return []

    def spent(self) -> Spent:
        return Spent()


def read_table(book: Any, receipt: Receipt, columns: Any = None) -> RowTable:
    path = book.table_path(receipt.shard, receipt.epoch)
    content = my_files().read(path)
    try:
        lines = json.loads(content or b"")
    except ValueError:
        raise BatchgenError(f"{path}, the row table of a committed part, cannot be read") from None
    return RowTable(tuple(tuple(line) for line in lines))


def sources(run: Any, index: PlanIndex, receipts: Sequence[Receipt], book: Any) -> list[tuple[Receipt, RowTable]]:
    """As `finalize._sources`: every row table read, every part looked for."""
    found = []
    for receipt in receipts:
        table = read_table(book, receipt)
        gone = index.gone(receipt.shard)
        table = RowTable(tuple(line for line in table.lines if line[0] not in gone))
        check_part(run, index, (gone and book.receipt(receipt.shard, receipt.epoch)) or receipt, table)
        found.append((receipt, table))
    return found


def check_part(run: Any, index: PlanIndex, receipt: Receipt, table: RowTable) -> None:
    """As `finalize._check_files`."""
    made = table["file_name"].to_pylist()
    if not receipt.part or not made:
        return
    path = run.data / receipt.part
    is_folder = run.files.is_folder(path)
    for one in [path / name for name in made] if is_folder else [path]:
        found = run.files.stat(one)
        if found is None or not (is_folder or found.size == content_of(run, index, receipt, None).num_bytes):  # type: ignore[arg-type]
            raise BatchgenError(f"{one}, which a receipt names, is missing or has another size")


def write_tables(index: Any, rows: Any, scratch: Any, *, is_partial: bool) -> dict[str, Any]:
    files = my_files()
    middle = ".partial" if is_partial else ""
    lines = sorted((name, receipt.shard, row, status) for receipt, table in rows for row, status, name in table.lines)
    tables = {f"metadata{middle}.parquet": "ok", f"failures{middle}.parquet": "failed"}
    if index.output_format == "files" and not is_partial:
        tables["data/metadata.parquet"] = "ok"
    temps = {name: scratch / f"table-{number}.parquet" for number, name in enumerate(tables)}
    for name, status in tables.items():
        with resumable(scratch):
            file = files.create(temps[name])
            files.append(file, temps[name], json.dumps([line[:3] for line in lines if line[3] == status]).encode())
    return temps
