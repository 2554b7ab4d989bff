"""Rows, pictures, parts and tables without their weight: the same steps on the disk, bytes that say what they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from batchgen import plans, rundir
from batchgen.errors import BatchgenError
from batchgen.filesystem import resumable
from batchgen.generator import Dropped, Pending
from batchgen.ledger import Receipt
from batchgen.plan_index import BucketWork, PlanFile, PlanIndex
from batchgen.records import Batch, Failure, Group, Image, Outcome, Part, Row, Written
from tests.simulation.files import RUN, create_or_truncate, digest, my_files, remove
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
        remove(self._path)
        with resumable(self._path):
            self._file = None if self._is_folder else create_or_truncate(self._files, self._path)
            if self._is_folder:
                self._files.mkdir_new(self._path)

    @property
    def num_added(self) -> int:
        return len(self._images) + len(self._failures)

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
        remove(self._path)


def made_of(image: Image, file_name: str, data: bytes) -> Written:
    return Written(image.row.index, file_name, len(data), "", "", "png", False, 1, "eager", None, None, 0, 0.0)


def row_table(shard: Any, model: str, made: Sequence[Written], failed: Sequence[Failure]) -> bytes:
    lines = [(one.index, "ok") for one in made] + [(one.row.index, "failed") for one in failed]
    return json.dumps(lines).encode()


class SimulatedReader:
    """Rows as a plan's files hold them."""

    def __init__(self, root: Any, index: PlanIndex) -> None:
        self.index = index

    def shard(self, number: int) -> list[Row]:
        path = RUN / ".run" / "plan" / self.index.folder / "0000.parquet"
        with resumable(path):
            World.now.step("read", path)
        prompt = "cannot be encoded" if number == World.now.odd_shard else ""
        return [
            Row(index, f"{number}.{index}", 0, prompt if index == 0 else "", None, 64, 64, 1, 1.0, "", 0)
            for index in range(self.index.shard_rows[number])
        ]


def batches(shard: list[Row], groups: Any, skip: frozenset[int] = frozenset()) -> Iterator[Batch]:
    size = World.now.batch_size
    for start in range(0, len(shard), size):
        rows = tuple(row for row in shard[start : start + size] if row.index not in skip)
        if rows:
            yield Batch(start // size, size, GROUP, rows)


def written(
    drafted: Any, folder: Any, files: Any, model: Any, job: Any, fingerprint: Any, bad: Any, after: Any
) -> PlanIndex:
    """As `plans._written`: a folder with files, whose content is the folder's name."""
    files.make_folder(folder)
    files.write(folder / "0000.parquet", folder.name.encode())
    files.sync_folder(folder)
    return index_of(folder.name, World.now.shard_rows, job)


def index_of(folder: str, shard_rows: tuple[int, ...], job: Any) -> PlanIndex:
    files = (PlanFile(f"{folder}/0000.parquet", len(folder), "", "", 0, len(shard_rows)),)
    buckets = (BucketWork(0, 1, 1, 1),)
    shard_s = (1.0,) * len(shard_rows)
    return PlanIndex(0, folder, files, 0, shard_rows, shard_s, (GROUP,), buckets, 0, 0, "model", job, {})


def plan_manifest(names: Any, job: Any, on_progress: Any) -> Any:
    manifest = SimpleNamespace(check_unchanged=lambda: None)
    drafted = SimpleNamespace(survey=SimpleNamespace(manifest=manifest, rows_digest=""))
    return SimpleNamespace(draft=drafted, facts=None, rejections=None)


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


def read_table(path: Any, columns: Any = None) -> Any:
    content = my_files().read(path)
    try:
        lines = json.loads(content or b"")
    except ValueError:
        raise BatchgenError(f"{path}, the row table of a committed part, cannot be read") from None
    return [tuple(line) for line in lines]


def sources(
    run: Any, index: Any, receipts: Sequence[Receipt], book: Any
) -> list[tuple[Receipt, list[tuple[int, str]]]]:
    """As `finalize._sources`: every row table read, every part looked for."""
    found = []
    for receipt in receipts:
        table = read_table(book.table_path(receipt.shard, receipt.epoch))
        if receipt.part:
            check_part(run, receipt, table)
        found.append((receipt, table))
    return found


def check_part(run: Any, receipt: Receipt, table: list[tuple[int, str]]) -> None:
    path = run.data / receipt.part
    names = [path / f"{row}.png" for row, status in table if status == "ok"]
    for one in names if run.files.is_folder(path) else [path]:
        if run.files.stat(one) is None:
            raise BatchgenError(f"{one}, which a receipt names, is missing")


def write_tables(index: Any, rows: Any, scratch: Any, *, is_partial: bool) -> dict[str, Any]:
    files = my_files()
    middle = ".partial" if is_partial else ""
    lines = sorted((receipt.shard, row, status) for receipt, table in rows for row, status in table)
    tables = {f"metadata{middle}.parquet": "ok", f"failures{middle}.parquet": "failed"}
    if index.output_format == "files" and not is_partial:
        tables["data/metadata.parquet"] = "ok"
    temps = {name: scratch / f"table-{number}.parquet" for number, name in enumerate(tables)}
    for name, status in tables.items():
        with resumable(scratch):
            file = files.create(temps[name])
            files.append(file, temps[name], json.dumps([line[:2] for line in lines if line[2] == status]).encode())
    return temps
