"""The outside world of the product's modules, simulated: disk, clock, threads, tokens, processes, pictures.

What runs as it is: FileSystem's own steps, Ledger, Worker, Epoch, Heart, Maker, publish, finalize's order and sweep,
the balance, `run_job` and `freeze`. What is stood in for, at its own interface and with the same steps on the disk
(tests hold the two equal): PartWriter, `write_table`, `disk.remove`, the files of a plan, the tables that `finalize`
writes.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache, wraps
from types import SimpleNamespace
from typing import Any

import pytest

from batchgen import (
    balance,
    disk,
    epoch,
    filesystem,
    finalize,
    heart,
    ledger,
    making,
    owners,
    plans,
    rundir,
    runner,
    worker,
)
from batchgen.errors import BatchgenError
from batchgen.filesystem import FileStat, FileSystem, resumable
from batchgen.generator import Dropped, Pending
from batchgen.ledger import Receipt
from batchgen.plans import BucketWork, PlanFile, PlanIndex
from batchgen.records import Batch, Failure, Group, Image, Outcome, Part, Row, Written
from tests.simulation.storage import File, Folder, Place, error
from tests.simulation.world import Dead, Thread, Violation, World

GROUP = Group(64, 64, True, 0, "form")
TOP = Place(None, ".")
RUN = TOP / "run"
current: World = None  # type: ignore[assignment]
"""The world in which the product's code runs now."""


def told(call: Callable[..., Any]) -> Callable[..., Any]:
    """Let a call's errors out as `resumable` names them, at no cost where there is none."""

    @wraps(call)
    def made(files: Any, path: Any, *content: bytes) -> Any:
        try:
            return call(files, path, *content)
        except OSError:
            with resumable(path):
                raise

    return made


class SimulatedFiles(FileSystem):
    """The disk as one process sees it."""

    def __init__(self, world: World, host: int, absent: dict[Any, float], listed: dict[Any, Any]) -> None:
        self.world = world
        self.storage = world.storage
        self.host = host
        self.absent = absent
        self.listed = listed

    def put_if_absent(self, path: Any, content: bytes) -> bool:
        is_ours = super().put_if_absent(path, content)
        if is_ours and not self.storage.is_durable(path):
            raise Violation(f"{path} was reported as put, but a crash can take it away")
        return is_ours

    def link(self, source: Any, target: Any) -> None:
        world = self.world
        after = world.step("link", target)
        try:
            self.storage.link(source, target)
        finally:
            self.absent.pop(target, None)
        world.on_link(target)
        if after:
            raise after

    def rename(self, source: Any, target: Any) -> None:
        after = self.world.step("rename", target)
        self.storage.rename(source, target)
        self.absent.pop(target, None)
        if after:
            raise after

    def mkdir(self, path: Any) -> None:
        with resumable(path), suppress(FileExistsError):
            self.mkdir_new(path)

    def mkdir_new(self, path: Any) -> None:
        after = self.world.step("mkdir", path)
        self.absent.pop(path, None)
        self.storage.mkdir(path, self.world.now_s)
        if after:
            raise after

    @told
    def write(self, path: Any, content: bytes) -> None:
        file = self.create(path)
        self.append(file, path, content)
        self.sync_open(file, path)

    def create(self, path: Any) -> File:
        after = self.world.step("create", path)
        file = self.storage.create(path, self.world.now_s, self.host)
        self.absent.pop(path, None)
        if after:
            raise after
        return file

    def append(self, file: File, path: Any, content: bytes) -> None:
        after = self.world.step("write", path)
        file.content += content
        file.writer, file.mtime_s = self.host, self.world.now_s
        if after:
            raise after

    def sync_open(self, file: File, path: Any) -> None:
        after = self.world.step("sync", path)
        file.synced = file.content
        if after:
            raise after

    @told
    def read(self, path: Any) -> bytes | None:
        after = self.world.step("read", path)
        found = self._seen(path)
        if after:
            raise after
        if isinstance(found, Folder):
            raise error(errno.EISDIR, path)
        return None if found is None else found.content

    @told
    def names(self, path: Any) -> list[str]:
        after = self.world.step("names", path)
        try:
            folder = self.storage.folder(path)
        except FileNotFoundError:
            return []
        if after:
            raise after
        return self._listed(path, folder)

    def _ask_again(self, path: Place) -> None:
        """Opening a folder ends what this machine remembers of names absent there."""
        for one in [one for one in self.absent if one.parent is path]:
            del self.absent[one]

    def _listed(self, path: Place, folder: Folder) -> list[str]:
        """The names in a folder, or those that this machine saw there not long ago."""
        lag_s, now_s = self.world.lag_s, self.world.now_s
        if not lag_s:
            return sorted(folder.names)
        until_s, names = self.listed.get(path, (0.0, []))
        if now_s >= until_s:
            names = sorted(folder.names)
            self.listed[path] = (now_s + lag_s * self.world.random.random(), names)
        return list(names)

    @told
    def stat(self, path: Any) -> FileStat | None:
        after = self.world.step("stat", path)
        found = self._seen(path)
        if after:
            raise after
        if isinstance(found, File):
            return FileStat(len(found.content), found.mtime_s)
        return None if found is None else FileStat(0, found.mtime_s, True)

    def _seen(self, path: Place) -> File | Folder | None:
        """What this machine believes to lie there: that a name is absent it may remember for a while, as NFS does."""
        found = self.storage.get(path)
        lag_s = self.world.lag_s
        if not lag_s:
            return found
        if found is None:
            self.absent[path] = self.world.now_s + lag_s * self.world.random.random()
        elif self.world.now_s < self.absent.get(path, 0.0):
            return None
        return found

    @told
    def touch(self, path: Any) -> None:
        after = self.world.step("touch", path)
        found = self._seen(path)
        if found is None:
            raise error(errno.ENOENT, path)
        found.mtime_s = self.world.now_s
        if after:
            raise after

    @told
    def remove(self, path: Any) -> None:
        after = self.world.step("remove", path)
        with suppress(FileNotFoundError):
            self.storage.unlink(path)
        if after:
            raise after

    @told
    def sync(self, path: Any) -> None:
        self.sync_open(self.storage.file(path), path)

    @told
    def sync_folder(self, path: Any) -> None:
        after = self.world.step("sync_folder", path)
        self._ask_again(path)
        self.storage.sync_folder(self.storage.folder(path))
        if after:
            raise after


def my_files() -> SimulatedFiles:
    """The disk as the running process sees it."""
    return current.files(current.me.process)


# disk.py


def remove(path: Any) -> None:
    """As `disk.remove`: a folder loses its name first."""
    files = my_files()
    with resumable(path), suppress(FileNotFoundError):
        if files.is_folder(path):
            nameless = path.with_name(f"{path.name}.{current.token()}.tmp")
            files.rename(path, nameless)
            remove_tree(nameless)
        else:
            current.step("remove", path)
            files.storage.unlink(path)


def remove_tree(path: Any, *, ignore_errors: bool = False) -> None:
    """As `shutil.rmtree`."""
    files = my_files()
    try:
        for name in files.names(path):
            current.step("remove", path / name)
            files.storage.unlink(path / name)
        current.step("rmdir", path)
        files.storage.rmdir(path)
    except (OSError, BatchgenError):
        if not ignore_errors:
            raise


def write_table(path: Any, table: bytes) -> str:
    files = my_files()
    with resumable(path):
        file = create_or_truncate(files, path)
        files.append(file, path, table)
        files.sync_open(file, path)
        files.sync_folder(path.parent)
    return digest(table)


def create_or_truncate(files: SimulatedFiles, path: Any) -> File:
    """As `open(path, "wb")`."""
    if isinstance(file := files.storage.get(path), File):
        current.step("create", path)
        file.content = b""
        return file
    return files.create(path)


def digest(content: bytes) -> str:
    return content.decode(errors="replace")


class SimulatedPartWriter:
    """A part in one file, or in a folder of files: its bytes say whose it is and what it holds."""

    def __init__(self, work_dir: Any, stem: str, output: Any, shard: Any, model: str, pool: Any) -> None:
        self._files = my_files()
        self._is_folder = output.format == "files"
        self._path = work_dir / (stem if self._is_folder else f"{stem}.tar")
        self._owner = current.me.process.owner.token
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


# plans.py


class SimulatedReader:
    """Rows as a plan's files hold them."""

    def __init__(self, root: Any, index: PlanIndex) -> None:
        self.index = index

    def shard(self, number: int) -> list[Row]:
        path = RUN / ".run" / "plan" / self.index.folder / "0000.parquet"
        with resumable(path):
            current.step("read", path)
        prompt = "cannot be encoded" if number == current.odd_shard else ""
        return [
            Row(index, f"{number}.{index}", 0, prompt if index == 0 else "", None, 64, 64, 1, 1.0, "", 0)
            for index in range(self.index.shard_rows[number])
        ]


def batches(shard: list[Row], groups: Any, skip: frozenset[int] = frozenset()) -> Iterator[Batch]:
    size = current.batch_size
    for start in range(0, len(shard), size):
        rows = tuple(row for row in shard[start : start + size] if row.index not in skip)
        if rows:
            yield Batch(start // size, size, GROUP, rows)


def written(drafted: Any, folder: Any, files: Any, model: Any, job: Any, fingerprint: Any, bad: Any) -> PlanIndex:
    """As `plans._written`: a folder with files, whose content is the folder's name."""
    files.make_folder(folder)
    files.write(folder / "0000.parquet", folder.name.encode())
    files.sync_folder(folder)
    return index_of(folder.name, current.shard_rows, job)


def index_of(folder: str, shard_rows: tuple[int, ...], job: Any) -> PlanIndex:
    files = (PlanFile(f"{folder}/0000.parquet", len(folder), "", "", 0, len(shard_rows)),)
    return PlanIndex(0, folder, files, 0, shard_rows, (GROUP,), (BucketWork(0, 1, 1, 1),), 0, 0, "model", job, {})


def plan_manifest(names: Any, job: Any, on_progress: Any) -> Any:
    manifest = SimpleNamespace(check_unchanged=lambda: None)
    drafted = SimpleNamespace(survey=SimpleNamespace(manifest=manifest, rows_digest=""))
    return SimpleNamespace(draft=drafted, facts=None, rejections=None)


def open_run(run: Any, names: Any, job: Any, on_planned: Any, on_progress: Any) -> PlanIndex:
    """As `rundir.open_run`, but for the comparison of manifest and job with those of the plan."""
    index = plans.load_index(run.plans, run.files)
    return index or rundir._freeze(run, names, job, on_planned, on_progress)


# generator.py


class SimulatedGenerator:
    """A device: batches take their time, and the device may be slower for a row than anybody waits."""

    versions: dict[str, str] = {}  # noqa: RUF012

    def prepare(self, batches: Sequence[Batch], should_drop: Callable[[], bool]) -> None:
        current.sleep(current.random.random() * 5)
        if should_drop():
            raise Dropped

    def submit(self, batch: Batch, should_drop: Callable[[], bool]) -> Pending:
        ends_at = current.now_s + current.random.random() * current.batch_s

        def finish() -> list[Outcome]:
            current.sleep(max(0.0, ends_at - current.now_s))
            if should_drop():
                raise Dropped
            return [Image(row, None, 1, "eager", None, None, 0.0) for row in batch.rows]  # type: ignore[arg-type]

        return finish

    def measurements(self) -> list[Any]:
        return []


# finalize.py


def read_table(path: Any, columns: Any = None) -> Any:
    content = my_files().read(path)
    try:
        lines = json.loads(content or b"")
    except ValueError:
        raise BatchgenError(f"{path}, the row table of a committed part, cannot be read") from None
    return [tuple(line) for line in lines]


def sources(run: Any, receipts: Sequence[Receipt], book: Any) -> list[tuple[Receipt, list[tuple[int, str]]]]:
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


# threading, time, secrets, /proc


class Event:
    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Thread] = []

    def set(self) -> None:
        self._is_set = True
        for thread in self._waiting:
            thread.wakes_at = current.now_s

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            self._waiting.append(current.me)
            current.sleep(float("inf") if timeout is None else timeout)
            self._waiting.clear()
        return self._is_set


class SimulatedThread:
    def __init__(self, target: Callable[[], None], name: str, daemon: bool) -> None:
        self._target = target
        self._name = name
        self._ended = Event()

    def start(self) -> None:
        current.start(current.me.process, self._run, f".{self._name}")

    def join(self) -> None:
        if current.me.process.is_dead:
            raise Dead
        self._ended.wait()

    def _run(self) -> None:
        self._target()
        self._ended.set()


def monotonic() -> float:
    return current.now_s + 100.0 * current.me.process.host


def sleep(seconds: float) -> None:
    """Longer than asked for, as it may be: so that waiting costs few steps."""
    current.sleep(seconds + current.random.random() * current.oversleep_s)


CLOCK = SimpleNamespace(monotonic=monotonic, sleep=sleep, time=lambda: current.now_s)
SECRETS = SimpleNamespace(token_hex=lambda num: current.token())
THREADING = SimpleNamespace(Event=Event, Thread=SimulatedThread)


def start_time(pid: int) -> str:
    """Of the process with this pid on the caller's machine."""
    host = current.me.process.host
    alive = (one for one in current.processes if one.host == host and one.owner.pid == pid and not one.is_dead)
    return next((one.owner.start_time for one in alive), "")


def this_process() -> owners.Owner:
    return current.me.process.owner


def has_ended(owner: owners.Owner) -> bool:
    return owner.token in current.ended_tokens


def end(owner: owners.Owner) -> None:
    if not current.me.process.is_dead:
        current.ended_tokens.add(owner.token)


PATCHES: list[tuple[Any, str, Any]] = [
    *((module, "time", CLOCK) for module in (ledger, worker, epoch, making)),
    *((module, "secrets", SECRETS) for module in (filesystem, finalize, plans)),
    *((module, "this_process", this_process) for module in (balance, runner)),
    *((module, "has_ended", has_ended) for module in (owners, heart)),
    *((module, "remove", remove) for module in (disk, epoch, finalize, plans)),
    (heart, "threading", THREADING),
    # Pure functions of bytes that many workers read.
    (ledger, "_receipt", lru_cache(1000)(ledger._receipt)),
    (ledger, "_claim", lru_cache(1000)(ledger._claim)),
    (PlanIndex, "from_bytes", lru_cache(100)(PlanIndex.from_bytes)),
    (owners, "start_time", start_time),
    (runner, "end", end),
    (runner, "open_run", open_run),
    (runner, "RunDirectory", lambda out: current.run_directory(out)),
    (runner, "PlanReader", SimulatedReader),
    (runner, "EncoderPool", lambda threads, limit: nullcontext()),
    (runner, "num_encoder_threads", lambda output: 1),
    (runner, "num_in_flight", lambda *numbers: 1),
    (plans, "_written", written),
    (rundir, "plan_manifest", plan_manifest),
    (rundir, "fingerprint", lambda job, facts, manifest: {}),
    (worker, "batches", batches),
    (epoch, "PartWriter", SimulatedPartWriter),
    (epoch, "write_table", write_table),
    (epoch, "row_table", row_table),
    (finalize, "_sources", sources),
    (finalize, "_write_tables", write_tables),
    (finalize, "_digest", lambda path: ""),
    (finalize, "card", lambda **facts: "card"),
    (finalize, "shutil", SimpleNamespace(rmtree=remove_tree)),
]


@contextmanager
def installed() -> Iterator[pytest.MonkeyPatch]:
    """Within the block, the product's modules live in the simulated world."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, double in PATCHES:
            patch.setattr(module, name, double)
        yield patch


def enter(world: World) -> None:
    global current
    current = world
