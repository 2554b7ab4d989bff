"""A disk in memory that knows what would be left of it after a crash. It knows no processes and no time."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any


class Place:
    """A path, as far as the product uses paths: interned, so that it is found by identity."""

    __slots__ = ("_children", "name", "parent", "text")

    def __init__(self, parent: Place | None, name: str) -> None:
        self.parent: Place = parent or self
        self.name = name
        self.text = name if self.parent.parent is self.parent else f"{self.parent.text}/{name}"
        self._children: dict[str, Place] = {}

    def __truediv__(self, name: str) -> Place:
        if not name:
            return self
        child = self._children.get(name)
        if child is None:
            first, _, rest = name.partition("/")
            child = self / first / rest if rest else Place(self, name)
            self._children[name] = child
        return child

    def with_name(self, name: str) -> Place:
        return self.parent / name

    def with_suffix(self, suffix: str) -> Place:
        return self.parent / (self.name.rpartition(".")[0] + suffix)

    @property
    def suffix(self) -> str:
        _, dot, suffix = self.name.rpartition(".")
        return dot + suffix if dot else ""

    def resolve(self) -> Place:
        return self

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


class File:
    """Bytes as every process sees them, and as they were last synced."""

    __slots__ = ("content", "mtime_s", "synced", "writer")

    def __init__(self, writer: Any, mtime_s: float) -> None:
        self.content = self.synced = b""
        self.mtime_s = mtime_s
        self.writer = writer

    @property
    def is_durable(self) -> bool:
        return self.content is self.synced or self.content == self.synced


class Folder:
    """Names as every process sees them, and as they were last synced."""

    __slots__ = ("mtime_s", "names", "synced")

    def __init__(self, mtime_s: float = 0.0) -> None:
        self.names: dict[str, File | Folder] = {}
        self.synced: dict[str, File | Folder] = {}
        self.mtime_s = mtime_s


@dataclass(slots=True)
class Rename:
    """One that a crash may undo, as a whole."""

    source: Folder
    old: str
    target: Folder
    new: str
    moved: File | Folder

    def keep(self) -> None:
        if self.source.synced.get(self.old) is self.moved:
            del self.source.synced[self.old]
        self.target.synced[self.new] = self.moved

    def undo(self) -> None:
        """What replaced it since, or was there before, stays."""
        if self.target.names.get(self.new) is self.moved:
            del self.target.names[self.new]
            if before := self.target.synced.get(self.new):
                self.target.names[self.new] = before
        if self.source.synced.get(self.old) is self.moved:
            self.source.names[self.old] = self.moved


def error(number: int, place: Place) -> OSError:
    return OSError(number, os.strerror(number), place.text)


@dataclass(slots=True)
class Storage:
    """The tree of one file system. Errors are those of the system calls."""

    top: Folder = field(default_factory=Folder)
    renames: list[Rename] = field(default_factory=list)
    _found: dict[Place, Folder] = field(default_factory=dict)

    def folder(self, place: Place) -> Folder:
        found = self._found.get(place)
        if found is None:
            if place.parent is place:
                found = self.top
            else:
                inner = self.folder(place.parent).names.get(place.name)
                if inner is None:
                    raise error(errno.ENOENT, place)
                if not isinstance(inner, Folder):
                    raise error(errno.ENOTDIR, place)
                found = inner
            self._found[place] = found
        return found

    def get(self, place: Place) -> File | Folder | None:
        if place.parent is place:
            return self.top
        try:
            return self.folder(place.parent).names.get(place.name)
        except FileNotFoundError:
            return None

    def file(self, place: Place) -> File:
        found = self.get(place)
        if found is None:
            raise error(errno.ENOENT, place)
        if isinstance(found, Folder):
            raise error(errno.EISDIR, place)
        return found

    def create_all(self, place: Place) -> None:
        """A folder and those above it, durably."""
        if place.parent is not place:
            self.create_all(place.parent)
            above = self.folder(place.parent)
            above.names.setdefault(place.name, Folder())
            above.synced = dict(above.names)

    def create(self, place: Place, now_s: float, writer: Any) -> File:
        file = File(writer, now_s)
        self._add(place, file)
        return file

    def mkdir(self, place: Place, now_s: float) -> None:
        self._add(place, Folder(now_s))

    def link(self, source: Place, target: Place) -> None:
        self._add(target, self.file(source))

    def _add(self, place: Place, one: File | Folder) -> None:
        folder = self.folder(place.parent)
        if place.name in folder.names:
            raise error(errno.EEXIST, place)
        folder.names[place.name] = one

    def rename(self, source: Place, target: Place) -> None:
        old, new = self.folder(source.parent), self.folder(target.parent)
        moved, before = old.names.get(source.name), new.names.get(target.name)
        if moved is None:
            raise error(errno.ENOENT, source)
        if isinstance(before, Folder) and (not isinstance(moved, Folder) or before.names):
            raise error(errno.ENOTEMPTY if isinstance(moved, Folder) else errno.EISDIR, target)
        if isinstance(before, File) and isinstance(moved, Folder):
            raise error(errno.ENOTDIR, target)
        del old.names[source.name]
        new.names[target.name] = moved
        self.renames.append(Rename(old, source.name, new, target.name, moved))
        if isinstance(moved, Folder):
            self._found.clear()

    def unlink(self, place: Place) -> None:
        names = self.folder(place.parent).names
        found = names.get(place.name)
        if found is None:
            raise error(errno.ENOENT, place)
        if isinstance(found, Folder):
            raise error(errno.EISDIR, place)
        del names[place.name]

    def rmdir(self, place: Place) -> None:
        folder = self.folder(place)
        if folder.names:
            raise error(errno.ENOTEMPTY, place)
        del self.folder(place.parent).names[place.name]
        self._found.clear()

    def sync_folder(self, folder: Folder) -> None:
        if self.renames:
            touched = [one for one in self.renames if one.source is folder or one.target is folder]
            for one in touched:
                one.keep()
            if touched:
                self.renames = [one for one in self.renames if one not in touched]
        folder.synced = dict(folder.names)

    def is_durable(self, place: Place) -> bool:
        """Whether a file, or a folder and all within, is there under its name after any crash."""
        if place.parent is place:
            return True
        names = self.folder(place.parent)
        one, synced = names.names.get(place.name), names.synced.get(place.name)
        if one is None or synced is None or not _is_whole(one) or not self.is_reachable(place.parent):
            return False
        return one is synced or (_is_whole(synced) and _content(one) == _content(synced))

    def is_reachable(self, place: Place) -> bool:
        """Whether a folder keeps its name, and those above it theirs."""
        if place.parent is place:
            return True
        is_kept = self.folder(place.parent).synced.get(place.name) is self.folder(place)
        return is_kept and self.is_reachable(place.parent)

    def walk(self) -> Iterator[File | Folder]:
        yield from _walk(self.top)

    def lose(self, random: Random, writer: Any | None) -> None:
        """The machine of a writer is gone, and with it some of what it had not synced: bytes of its files; where all
        writers are on one machine (no writer is named), names of folders as well."""
        if writer is None:
            for one in reversed(self.renames):
                if random.random() < 0.5:
                    one.undo()
            for one in self.renames:
                if one.target.names.get(one.new) is one.moved:
                    one.keep()
            self.renames.clear()
        for one in list(self.walk()):
            if isinstance(one, Folder):
                if writer is None:
                    _lose_names(one, random)
            elif not one.is_durable and writer in (None, one.writer):
                one.content = one.synced = _torn(one, random)
        self._found.clear()


def _is_whole(one: File | Folder) -> bool:
    if isinstance(one, File):
        return one.is_durable
    return one.synced == one.names and all(map(_is_whole, one.names.values()))


def _content(one: File | Folder) -> bytes | dict[str, File | Folder]:
    return one.names if isinstance(one, Folder) else one.content


def _walk(folder: Folder) -> Iterator[File | Folder]:
    """What is there or may come back."""
    yield folder
    for one in dict.fromkeys([*folder.names.values(), *folder.synced.values()]):
        if isinstance(one, Folder):
            yield from _walk(one)
        else:
            yield one


def _lose_names(folder: Folder, random: Random) -> None:
    if folder.names == folder.synced:
        return
    after = {}
    for name in sorted(folder.names.keys() | folder.synced.keys()):
        now, synced = folder.names.get(name), folder.synced.get(name)
        one = now if random.random() < 0.5 else synced
        if one is not None:
            after[name] = one
    folder.names, folder.synced = after, dict(after)


def _torn(file: File, random: Random) -> bytes:
    length = random.randrange(len(file.content) + 1)
    return random.choice((file.synced, file.content, file.content[:length], bytes(len(file.content))))
