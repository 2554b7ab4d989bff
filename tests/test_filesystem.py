"""Slots have one winner and are whole, whatever happens at whatever call."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from batchgen.errors import Interrupted, UsageError
from batchgen.filesystem import FileStat, FileSystem
from tests.crashes import Crash, machine
from tests.processes import PROCESSES

FILES = FileSystem()
TROUBLES = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT]


def put_all(place: tuple[str, int]) -> list[bool]:
    """Try for every slot of a folder, with a content of one's own."""
    folder, number = place
    return [FILES.put_if_absent(Path(folder) / f"{slot:03d}", f"{number}-{slot}".encode() * 1000) for slot in range(40)]


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_each_slot_has_exactly_one_winner(tmp_path: Path, kind: str) -> None:
    places = [(str(tmp_path), number) for number in range(6 if kind == "threads" else 3)]
    if kind == "threads":
        with ThreadPoolExecutor(6) as pool:
            won = list(pool.map(put_all, places))
    else:
        with PROCESSES.Pool(3) as processes:
            won = processes.map(put_all, places, chunksize=1)
    for slot in range(40):
        (winner,) = [number for number, results in enumerate(won) if results[slot]]
        assert (tmp_path / f"{slot:03d}").read_bytes() == f"{winner}-{slot}".encode() * 1000
    assert sorted(os.listdir(tmp_path)) == [f"{slot:03d}" for slot in range(40)]


def failing(real: Callable[..., Any], code: int, *, is_done: bool) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> None:
        if is_done:
            real(*arguments, **options)
        raise OSError(code, os.strerror(code), str(arguments[0]))

    return call


@pytest.mark.parametrize("code", [*TROUBLES, errno.EEXIST])
def test_a_link_whose_reply_was_lost_is_won(tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", failing(os.link, code, is_done=True))
    assert FILES.put_if_absent(tmp_path / "slot", b"token one")
    monkeypatch.undo()
    assert FILES.names(tmp_path) == ["slot"]
    assert FILES.read(tmp_path / "slot") == b"token one"


@pytest.mark.parametrize("code", [*TROUBLES, errno.EEXIST])
def test_a_link_that_failed_beside_another_winner_is_lost(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert FILES.put_if_absent(tmp_path / "slot", b"token one")
    monkeypatch.setattr(os, "link", failing(os.link, code, is_done=False))
    assert not FILES.put_if_absent(tmp_path / "slot", b"token two")
    assert FILES.read(tmp_path / "slot") == b"token one"


@pytest.mark.parametrize("code", TROUBLES)
def test_an_unknown_outcome_stops_and_leaves_nothing_behind(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", failing(os.link, code, is_done=False))
    with pytest.raises(Interrupted, match=r"slot.*Everything committed is kept; run the same command again"):
        FILES.put_if_absent(tmp_path / "slot", b"token one")
    monkeypatch.undo()
    assert FILES.names(tmp_path) == [], "a full disk has better use for its room"
    assert FILES.put_if_absent(tmp_path / "slot", b"token two")


def test_a_temporary_file_that_is_gone_already_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep may take it as soon as its slot exists, and an unlink may be sent twice."""

    def link(source: Path, target: Path, real: Callable[..., None] = os.link) -> None:
        real(source, target)
        source.unlink()

    monkeypatch.setattr(os, "link", link)
    assert FILES.put_if_absent(tmp_path / "slot", b"token")


def test_a_slot_is_whole_or_absent_wherever_the_machine_dies(tmp_path: Path) -> None:
    with machine() as undisturbed:
        FILES.put_if_absent(tmp_path / "slot", b"x" * 10_000)
    assert undisturbed.num_changes >= 4
    for number in range(undisturbed.num_changes):
        for is_after in (False, True):
            folder = tmp_path / f"{number}-{is_after}"
            folder.mkdir()
            with pytest.raises(Crash), machine(number, is_after=is_after):
                FILES.put_if_absent(folder / "slot", b"x" * 10_000)
            before = FILES.read(folder / "slot")
            assert before in (None, b"x" * 10_000)
            assert FILES.put_if_absent(folder / "slot", b"other") == (before is None)
            assert FILES.read(folder / "slot") == (before or b"other")


def prepared(path: Path) -> Path:
    (path / "file").write_bytes(b"x")
    (path / "folder").mkdir()
    return path


CALLS: list[tuple[str, str, Callable[[Path], Any]]] = [
    ("os.fsync", "new", lambda path: FILES.write(path / "new", b"x")),
    ("os.listdir", "", lambda path: FILES.names(path)),
    ("os.stat", "file", lambda path: FILES.stat(path / "file")),
    ("os.utime", "file", lambda path: FILES.touch(path / "file")),
    ("os.mkdir", "made", lambda path: FILES.make_folder(path / "made" / "within")),
    ("os.fsync", "", lambda path: FILES.sync_folder(path)),
    ("os.link", "file", lambda path: FILES.publish_file(path / "file", path / "target")),
    ("os.rename", "folder", lambda path: FILES.publish_folder(path / "folder", path / "target")),
    ("os.rename", "file", lambda path: FILES.replace(path / "file", path / "target")),
    ("os.unlink", "file", lambda path: FILES.remove(path / "file")),
]


@pytest.mark.parametrize("code", TROUBLES)
@pytest.mark.parametrize(("name", "place", "call"), CALLS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_lost_disk_interrupts_with_its_path(
    tmp_path: Path, name: str, place: str, call: Callable[[Path], Any], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = prepared(tmp_path)

    def lost(*arguments: Any, **options: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(name, lost)
    with pytest.raises(Interrupted) as stopped:
        call(path)
    monkeypatch.undo()
    assert str(path) in str(stopped.value)
    assert os.strerror(code) in str(stopped.value)
    assert stopped.value.exit_code == 75


def test_an_error_that_is_nobody_s_trouble_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "utime", failing(os.utime, errno.EBADF, is_done=False))
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        FILES.touch(prepared(tmp_path) / "file")


def test_what_is_not_there_is_none(tmp_path: Path) -> None:
    assert FILES.read(tmp_path / "none") is None
    assert FILES.stat(tmp_path / "none") is None
    assert FILES.names(tmp_path / "none") == []
    FILES.remove(tmp_path / "none")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_publishing_twice_is_harmless(tmp_path: Path, kind: str) -> None:
    path = prepared(tmp_path)
    publish = FILES.publish_file if kind == "file" else FILES.publish_folder
    for _ in range(2):
        publish(path / kind, path / "target")
        assert (path / "target").exists()
    with pytest.raises(FileNotFoundError):
        publish(path / "none", path / "other")


class Hearsay(FileSystem):
    """Remembers that a name was absent until its folder is opened, as NFS does."""

    is_fresh = False

    def sync_folder(self, path: Path) -> None:
        self.is_fresh = True

    def stat(self, path: Path) -> FileStat | None:
        return super().stat(path) if self.is_fresh else None


def test_a_name_seen_absent_is_looked_for_again(tmp_path: Path) -> None:
    path = prepared(tmp_path)
    (path / "folder").rename(path / "target")
    Hearsay().publish_folder(path / "folder", path / "target")
    (path / "file").rename(path / "file target")
    Hearsay().publish_file(path / "file", path / "file target")


def test_a_part_published_by_another_meanwhile_is_published(tmp_path: Path) -> None:
    path = prepared(tmp_path)
    os.link(path / "file", path / "target")
    (path / "file").unlink()
    FILES.publish_file(path / "file", path / "target")
    assert (path / "target").read_bytes() == b"x"


def test_a_probe_whose_reply_was_lost_has_worked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", failing(os.link, errno.EEXIST, is_done=True))
    FILES.probe(tmp_path)
    assert FILES.names(tmp_path) == []


def test_a_folder_that_another_has_just_made_is_made_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever made it may have died before syncing the folder above."""
    synced: list[Path] = []
    (tmp_path / "made").mkdir()
    monkeypatch.setattr(FileSystem, "sync_folder", lambda files, path: synced.append(path))
    FILES.make_folder(tmp_path / "made")
    FILES.make_folder(tmp_path / "made" / "within")
    assert synced == [tmp_path, tmp_path, tmp_path / "made"]


def test_a_file_system_without_links_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FILES.probe(tmp_path)
    assert FILES.names(tmp_path) == []
    monkeypatch.setattr(os, "link", failing(os.link, errno.EPERM, is_done=False))
    with pytest.raises(UsageError, match=r"this file system cannot link files .*NFS, Lustre, GPFS and local disks do"):
        FILES.probe(tmp_path)
    assert FILES.names(tmp_path) == []
    monkeypatch.setattr(os, "link", failing(os.link, errno.ENOSPC, is_done=False))
    with pytest.raises(Interrupted, match="the disk is full"):
        FILES.probe(tmp_path)


def test_a_folder_above_that_may_not_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the one above all homes often is: what stands in it already is taken, a new folder is not promised."""
    (tmp_path / "run").mkdir()
    real = os.open

    def guarded(path: Path, *arguments: Any) -> int:
        if Path(path) == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, *arguments)

    monkeypatch.setattr(os, "open", guarded)
    FILES.make_folder(tmp_path / "run")
    with pytest.raises(UsageError):
        FILES.make_folder(tmp_path / "new")
