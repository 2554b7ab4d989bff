"""The files of a manifest: found by path, folder or glob, and told from what another program makes of them later."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from batchgen.errors import UsageError
from batchgen.filesystem import is_utf8, resumable


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """What changes when a file is written again or replaced."""

    device: int
    inode: int
    num_bytes: int
    mtime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileIdentity | None:
        """None if the file is gone."""
        try:
            with resumable(path):
                found = path.stat()
        except FileNotFoundError:
            return None
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def find_files(names: Sequence[str | Path]) -> tuple[Path, ...]:
    """The Parquet files that paths, folders and globs name, each once.

    A run directory is no part of a manifest: folders and globs pass over what lies in one. A file in it that is
    named by its path is taken. Raises UsageError for a name without any file, and for an empty one: that of a variable
    that is not set would be the current folder.
    """
    found: dict[Path, Path] = {}
    for name in names:
        if not str(name):
            raise UsageError("manifest: a name is empty; name a file, or . for the folder that you are in")
        for file in _files_of(name):
            if not is_utf8(file):
                raise UsageError(f"manifest: the name of {str(file)!r} is not UTF-8; rename it")
            found.setdefault(file.resolve(), file)
    if not found:
        raise UsageError("manifest: no file was named")
    return tuple(found.values())


def _files_of(name: str | Path) -> list[Path]:
    path = Path(name)
    with resumable(path):
        if path.is_dir():
            _refuse_run(path, [path])
            matches = [path]
        elif path.exists():
            return [path]
        else:
            every = [Path(file) for file in sorted(glob.glob(str(name), recursive=True))]
            matches = [match for match in every if _run_around(match) is None]
            if every and not matches:
                _refuse_run(name, every)
        if not matches:
            raise UsageError(
                f"manifest: {name} matches no file; the folder {path.parent} holds {_listing(path.parent)}"
            )
        files = [file for match in matches for file in (_files_in(match) if match.is_dir() else [match])]
    if not files:
        holds = "; ".join(f"{match} holds {_listing(match)}" for match in matches)
        raise UsageError(f"manifest: folder {name} holds no *.parquet file; {holds}")
    return files


def _refuse_run(name: str | Path, matches: list[Path]) -> None:
    run = _run_around(matches[0])
    if run is not None:
        lies = f"{name} is" if run == Path(name) else f"{name} names nothing but what lies in {run},"
        raise UsageError(f"{lies} a run directory; name the manifest that it was made of, and {run} with -o")


def _run_around(path: Path) -> Path | None:
    """The run directory that a path is or lies in, as far as the path itself tells."""
    return next((place for place in (path, *path.parents) if _is_run(place)), None)


def _is_run(folder: Path) -> bool:
    return (folder / ".run").is_dir()


def _files_in(folder: Path) -> list[Path]:
    return sorted(_walked(folder))


def _walked(folder: Path) -> Iterator[Path]:
    for place, folders, files in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if _is_visible(name) and not _is_run(Path(place, name))]
        here = (Path(place, name) for name in files if _is_visible(name) and name.endswith(".parquet"))
        yield from (file for file in here if file.is_file())


def _raise(error: OSError) -> NoReturn:
    raise error


def _is_visible(name: str) -> bool:
    return not name.startswith((".", "_"))


def _listing(folder: Path) -> str:
    if not folder.is_dir():
        return "nothing: it does not exist"
    names = sorted(entry.name for entry in folder.iterdir())
    shown = ", ".join(names[:10]) or "nothing"
    return shown + (f" and {len(names) - 10} more" if len(names) > 10 else "")
