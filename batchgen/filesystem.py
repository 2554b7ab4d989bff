"""The seam to the disk: every change that the run directory's protocol makes goes through one of these calls.

`put_if_absent` is the one primitive that decides anything. All others write bytes that mean nothing until a slot
names them.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from batchgen.errors import Interrupted, UsageError

_RESUMABLE = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EIO: "the disk reports an input/output error",
    errno.ESTALE: "the file system's handle is stale",
    errno.ENOTCONN: "the file system is not connected",
    errno.ETIMEDOUT: "the file system does not answer",
    errno.ESHUTDOWN: "the file system's server has shut this host out",
    errno.EHOSTDOWN: "the file system's server is down",
    errno.EREMOTEIO: "the file system's server reports an input/output error",
    errno.ENODEV: "the file system's device is gone",
    errno.ENXIO: "the file system's device is gone",
    errno.ECONNABORTED: "the file system's connection broke",
    errno.ECONNRESET: "the file system's connection broke",
    errno.ECONNREFUSED: "the file system's server refuses",
    errno.ENETUNREACH: "the file system's server cannot be reached",
    errno.EHOSTUNREACH: "the file system's server cannot be reached",
    errno.EKEYEXPIRED: "the file system's credentials have expired",
    errno.EKEYREVOKED: "the file system's credentials were revoked",
    errno.EMFILE: "this process has as many files open as it may (see ulimit -n)",
    errno.ENFILE: "this host has as many files open as it can",
    errno.EFBIG: "the file would exceed the size limit of this process or of the file system",
}
_NO_PLACE = (errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)
"""A path that cannot be used as it is named."""
_CLOSED = dict.fromkeys((errno.EACCES, errno.EPERM), "it may not be used any more")
"""What a mount answers whose credentials have run out."""
_IN_USE = (errno.ENOTEMPTY, errno.EBUSY)
"""What NFS answers where a file in a folder is still open, which keeps it there under another name."""


@contextmanager
def resumable(path: Path) -> Iterator[None]:
    """Turn a disk that is full, lost or read-only into an Interrupted that says so, and a path that is none or
    closed to us into a UsageError."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_PLACE:
            place = error.filename or path
            raise UsageError(f"{place} cannot be used: {error.strerror}; name another place") from error
        if error.errno not in _RESUMABLE:
            raise
        raise _interrupted(_RESUMABLE[error.errno], error, path) from error


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """As `resumable`, where something is read that the run itself has written: a disk that is lost or closed to us by
    now says nothing about it. Any other OSError is raised as it comes: what it speaks of is missing or damaged."""
    troubles = _RESUMABLE | _CLOSED
    try:
        yield
    except OSError as error:
        if error.errno not in troubles:
            raise
        raise _interrupted(troubles[error.errno], error, path) from error


@contextmanager
def lost(path: Path) -> Iterator[None]:
    """Turn a disk that is lost into an Interrupted that says so. Any other OSError is raised as it comes."""
    try:
        yield
    except OSError as error:
        if error.errno not in _RESUMABLE:
            raise
        raise _interrupted(_RESUMABLE[error.errno], error, path) from error


def withdrawn(error: BaseException) -> Interrupted | None:
    """What to say of a refusal by a disk that took this process's files before: by now it may not use them any more."""
    cause = error.__cause__
    if isinstance(error, UsageError) and isinstance(cause, OSError) and cause.errno in _CLOSED:
        return _interrupted(_CLOSED[cause.errno], cause, Path())
    return None


def _interrupted(trouble: str, error: OSError, path: Path) -> Interrupted:
    return Interrupted(
        f"{error.filename or path}: {trouble} ({error.strerror}). "
        "Everything committed is kept; run the same command again when that is mended"
    )


def is_utf8(name: str | Path) -> bool:
    """Whether a name can be written down: Python reads the bytes of one that is not UTF-8 as halves of characters."""
    try:
        str(name).encode()
    except UnicodeEncodeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class FileStat:
    """Size in bytes and change time in seconds of the file system's clock."""

    size: int
    mtime_s: float
    is_folder: bool = False


class FileSystem:
    """The real one.

    The first calls, down to `probe`, say in which order things are done. They reach the disk by the others, one
    system call each (a new file: three; a whole folder: many), which a simulation overrides.
    """

    def put_if_absent(self, path: Path, content: bytes) -> bool:
        """Make `path` hold `content`, durably, unless it exists: True if it is ours.

        A temporary file beside it is written, synced and linked to the final name; `link` fails where the name
        exists. Its reply can be lost on NFS, so after any error the slot itself is read: every content begins with
        its putter's random token, so equal bytes mean that we won.
        """
        temp = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
        with resumable(path):
            try:
                self.write(temp, content)
                is_ours = self._link_slot(temp, path, content)
            except (Interrupted, OSError, UsageError):
                with suppress(Interrupted):
                    self.remove(temp)  # A full disk has better use for its room.
                raise
            # It may be gone: a lost reply, or a sweep that saw its slot.
            self.remove(temp)
            self.sync_folder(path.parent)
        return is_ours

    def _link_slot(self, temp: Path, path: Path, content: bytes) -> bool:
        """Whether the slot is ours."""
        try:
            self.link(temp, path)
        except OSError:
            settled = self.read(path)
            if settled is None and self.is_link(path):
                raise UsageError(f"{path} is a symbolic link to nowhere; remove it") from None
            if settled is None:
                raise
            return settled == content
        return True

    def make_folder(self, path: Path) -> None:
        """The folder and its parents, on the disk when the call returns."""
        with resumable(path):
            was_there = self.is_folder(path)
            if not was_there:
                self.make_folder(path.parent)
                self.mkdir(path)
            try:
                # Another may have made it just now and not have come to this.
                self.sync_folder(path.parent)
            except UsageError:
                # A folder that may be entered but not listed, such as the one above all homes.
                if not was_there:
                    raise

    def publish_file(self, source: Path, target: Path) -> None:
        """Give a durable file a second name; doing it twice is harmless, and so is another's doing it meanwhile."""
        with resumable(target):
            with suppress(FileExistsError, FileNotFoundError):
                self.link(source, target)
            self._require(target)

    def publish_folder(self, source: Path, target: Path) -> None:
        """Move a durable folder to its final name; doing it twice is harmless."""
        with resumable(target):
            with suppress(FileNotFoundError):
                self.rename(source, target)
            self._require(target)

    def _require(self, target: Path) -> None:
        """Make a published name durable, whoever made it. The folder is opened for this, which makes NFS forget that
        it saw no such name a moment ago: only then a missing one is missing."""
        self.sync_folder(target.parent)
        if self.stat(target) is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(target))

    def replace(self, source: Path, target: Path) -> None:
        """Put a finished file in the place of another, or of none. Decides nothing: whoever does it has the same
        content."""
        with resumable(target):
            if not self.is_folder(source):
                self.sync(source)
            self.rename(source, target)
            self.sync_folder(target.parent)

    def remove_any(self, path: Path) -> None:
        """Remove a file or a whole folder, if it is there. Another process may be doing the same, or still be writing
        into the folder: it loses its name first, so that nothing new is made in it."""
        with resumable(path), suppress(FileNotFoundError):
            if not self.is_link(path) and self.is_folder(path):
                nameless = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
                self.rename(path, nameless)
                self._remove_nameless(nameless)
            else:
                self.unlink(path)

    def _remove_nameless(self, path: Path) -> None:
        try:
            self.remove_folder(path)
        except OSError as error:
            if error.errno not in _IN_USE:
                raise
            # Whoever finalizes the run sweeps what has such a name.

    def is_folder(self, path: Path) -> bool:
        found = self.stat(path)
        return found is not None and found.is_folder

    def probe(self, folder: Path) -> None:
        """Check that slots work in a folder. Raises UsageError where `link` does not."""
        one = folder / f"probe.{secrets.token_hex(4)}.tmp"
        two = one.with_suffix(".link")
        self.write(one, b"probe")
        try:
            self.link(one, two)
        except FileExistsError:
            pass  # Nobody else has this name: the link was made, and its first reply was lost.
        except OSError as error:
            if error.errno in _RESUMABLE:
                with resumable(folder):
                    raise
            raise UsageError(
                f"{folder}: this file system cannot link files ({error.strerror}), which batchgen needs to decide "
                "who makes what; put the run directory on another one (NFS, Lustre, GPFS and local disks do)"
            ) from None
        finally:
            self.remove(two)
            self.remove(one)

    def link(self, source: Path, target: Path) -> None:
        """A second name for a file; raises OSError as it comes, FileExistsError where the name is taken."""
        os.link(source, target)

    def rename(self, source: Path, target: Path) -> None:
        """Another name for a file or folder, in the place of a file that has it; raises OSError as it comes."""
        os.rename(source, target)

    def mkdir(self, path: Path) -> None:
        """One folder, if it is not there."""
        path.mkdir(exist_ok=True)

    def write(self, path: Path, content: bytes) -> None:
        """A new file with this content, on the disk when the call returns; its name is not yet."""
        with resumable(path), path.open("xb") as file:
            file.write(content)
            self.sync_file(file)

    def read(self, path: Path) -> bytes | None:
        """The content of a file, None if there is none."""
        try:
            with resumable(path):
                return path.read_bytes()
        except FileNotFoundError:
            return None

    def names(self, folder: Path) -> list[str]:
        """The names in a folder, sorted; none if it does not exist."""
        try:
            with resumable(folder):
                return sorted(os.listdir(folder))
        except FileNotFoundError:
            return []

    def stat(self, path: Path) -> FileStat | None:
        """What the file system says of a file, None if there is none."""
        try:
            with resumable(path):
                found = os.stat(path)
        except FileNotFoundError:
            return None
        return FileStat(found.st_size, found.st_mtime, stat.S_ISDIR(found.st_mode))

    def is_link(self, path: Path) -> bool:
        """Whether a name is that of a symbolic link."""
        try:
            with resumable(path):
                return stat.S_ISLNK(os.lstat(path).st_mode)
        except FileNotFoundError:
            return False

    def digest(self, path: Path) -> tuple[int, str]:
        """Size in bytes and sha256 of a file, of any size."""
        with resumable(path), path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            return file.tell(), sha256

    def touch(self, path: Path, at_s: float | None = None) -> None:
        """Set a file's change time: to now, by the file system's clock, or to a time. It needs no room on the disk."""
        with resumable(path):
            os.utime(path, None if at_s is None else (at_s, at_s), follow_symlinks=False)

    def remove(self, path: Path) -> None:
        """Remove a file if it is there."""
        with resumable(path):
            path.unlink(missing_ok=True)

    def unlink(self, path: Path) -> None:
        """Remove a file; raises OSError as it comes, FileNotFoundError where there is none."""
        path.unlink()

    def remove_folder(self, path: Path, *, ignore_errors: bool = False) -> None:
        """Remove a folder with all that is in it; raises OSError as it comes."""
        shutil.rmtree(path, ignore_errors=ignore_errors)

    def sync(self, path: Path) -> None:
        """Make a file's content durable."""
        with resumable(path), path.open("rb+") as file:
            self.sync_file(file)

    def sync_file(self, file: BinaryIO) -> None:
        """Make an open file's content durable."""
        file.flush()
        os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""
        with resumable(path):
            handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
