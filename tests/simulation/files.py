"""The disk as simulated processes reach it: FileSystem's own steps over `storage`, and `disk.py` beside it."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any

from batchgen.errors import BatchgenError
from batchgen.filesystem import FileStat, FileSystem, resumable
from batchgen.marker import SUCCESS
from tests.simulation.storage import File, Folder, Place, error
from tests.simulation.world import Violation, World

TOP = Place(None, ".")
RUN = TOP / "run"


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
        if target.parent is RUN or target.parent is RUN / "data":
            self.world.on_link(target)
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

    def digest(self, path: Any) -> tuple[int, str]:
        content = self.read(path)
        if content is None:
            raise error(errno.ENOENT, path)
        return len(content), hashlib.sha256(content).hexdigest()

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

    def is_link(self, path: Any) -> bool:
        return False

    @told
    def touch(self, path: Any, at_s: float | None = None) -> None:
        after = self.world.step("touch", path)
        found = self._seen(path)
        if found is None:
            raise error(errno.ENOENT, path)
        found.mtime_s = self.world.now_s if at_s is None else at_s
        if after:
            raise after

    @told
    def remove(self, path: Any) -> None:
        after = self.world.step("remove", path)
        if path is RUN / SUCCESS and self.storage.get(path) is not None and not self.world.schedule.appenders:
            raise Violation(f"{path} is taken away from a finished run")
        with suppress(FileNotFoundError):
            self.storage.unlink(path)
        if after:
            raise after

    def unlink(self, path: Any) -> None:
        self.world.step("remove", path)
        self.storage.unlink(path)

    def remove_folder(self, path: Any, *, ignore_errors: bool = False) -> None:
        try:
            for name in self.names(path):
                self.unlink(path / name)
            self.world.step("rmdir", path)
            self.storage.rmdir(path)
        except (OSError, BatchgenError):
            if not ignore_errors:
                raise

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
    return World.now.files(World.now.me.process)


def write_table(path: Any, table: bytes) -> str:
    """As `disk.write_table`: what has the name loses it first."""
    files = my_files()
    with resumable(path):
        file = create_anew(files, path)
        files.append(file, path, table)
        files.sync_open(file, path)
        files.sync_folder(path.parent)
    return digest(table)


def create_anew(files: SimulatedFiles, path: Any) -> File:
    if files.storage.get(path) is not None:
        files.unlink(path)
    return files.create(path)


def digest(content: bytes) -> str:
    return content.decode(errors="replace")
