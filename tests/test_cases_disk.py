"""Case 22 with real file systems that are full, read-only or lost: the run stops as resumable and goes on."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from batchgen import codec
from batchgen.disk import HashedFile
from batchgen.filesystem import FileSystem, resumable
from batchgen.models.pattern import PatternGenerator
from batchgen.presence import intact
from batchgen.records import Batch
from batchgen.rundir import RunDirectory
from tests import runs
from tests.mounts import Mount, mounted

__all__ = ["mounted"]
SMALL = ("--set", "plan.batch_sizes=[2]", "--set", "plan.shard_images=4", "--set", "output.encoders=2")
DONE = "8 rows = 8 done + 0 failed + 0 rejected + 0 outstanding"
BALANCE = re.compile(r"8 rows = (\d) done \+ 0 failed \+ 0 rejected \+ (\d) outstanding$")


def stopped(ended: runs.Ended, said: str) -> None:
    """Exit code 75, one sentence that says what is wrong and what to do, no traceback, no row failed."""
    assert ended.code == 75, ended
    sentences = [line for line in ended.err.splitlines() if line.startswith("batchgen: ")]
    assert len(sentences) == 1, ended.err
    assert re.search(said, sentences[0]), sentences
    assert "run the same command again" in sentences[0]
    assert "Traceback" not in ended.err
    if ended.out:
        balance = BALANCE.match(ended.closing_line)
        assert balance, ended
        assert int(balance[1]) + int(balance[2]) == 8


def whole(out: Path) -> dict[str, bytes]:
    """The images under a final name, each of which can be decoded."""
    found = runs.images(out) if (out / "data").is_dir() else {}
    for data in found.values():
        codec.decode(data)
    return found


def grown_until_done(mount: Mount, source: Path, options: list[str], said: str, output: str) -> int:
    """The same command with a little more room each time; how often it was stopped."""
    out, before = mount.path / "out", dict[str, bytes]()
    for number, option in enumerate(options):
        (mount.remount if number else mount.mount)(option)
        ended = runs.run(source, out, *SMALL, "--format", output)
        if ended.code == 0:
            assert ended.closing_line == DONE
            assert before.items() <= runs.images(out).items()
            assert len(runs.check_images(out)) == 8
            assert runs.batchgen("verify", out).code == 0
            return number
        stopped(ended, said)
        after = whole(out)
        assert before.items() <= after.items()
        before = after

    raise AssertionError("it was never done")


@pytest.mark.parametrize("output", runs.FORMATS)
def test_a_full_disk_that_grows(tmp_path: Path, mounted: Mount, output: str) -> None:
    """From a disk that does not hold the plan to one that holds all, a few pages at a time."""
    source = runs.prompts(tmp_path / "m.parquet", 8, width=192, height=192)
    sizes = [f"size={kilobytes}k" for kilobytes in range(8, 900, 24)]
    assert grown_until_done(mounted, source, sizes, "the disk is full", output) > 6


@pytest.mark.parametrize("output", runs.FORMATS)
def test_a_disk_without_inodes(tmp_path: Path, mounted: Mount, output: str) -> None:
    source = runs.prompts(tmp_path / "m.parquet", 8)
    counts = [f"size=16m,nr_inodes={number}" for number in range(4, 400, 6)]
    assert grown_until_done(mounted, source, counts, "the disk is full", output) > 2


def at_batch(monkeypatch: pytest.MonkeyPatch, number: int, happens: Callable[[], None]) -> None:
    """Something happens when the n-th batch is asked for."""
    submit, asked = PatternGenerator.submit, list[Batch]()

    def noted(self: PatternGenerator, batch: Batch, should_drop: Any) -> Any:
        asked.append(batch)
        if len(asked) == number:
            happens()
        return submit(self, batch, should_drop)

    monkeypatch.setattr(PatternGenerator, "submit", noted)


@pytest.mark.parametrize("batch", [1, 3, 4])
def test_a_disk_that_becomes_read_only(
    tmp_path: Path, mounted: Mount, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    mounted.mount("size=16m")
    source, out = runs.prompts(tmp_path / "m.parquet", 8), mounted.path / "out"

    def freeze() -> None:
        for _ in range(1000):  # Encoders may be just writing.
            with suppress(OSError):
                return mounted.remount("ro")
        return mounted.remount("ro")

    with monkeypatch.context() as patch:
        at_batch(patch, batch, freeze)
        ended = runs.run(source, out, *SMALL)
    stopped(ended, r"the file system is read-only")
    before = whole(out)
    stopped(runs.run(source, out, *SMALL), r"the file system is read-only")
    mounted.remount("rw")
    assert runs.run(source, out, *SMALL).closing_line == DONE
    assert before.items() <= runs.images(out).items()
    assert len(runs.check_images(out)) == 8


@pytest.mark.parametrize("output", runs.FORMATS)
@pytest.mark.parametrize("batch", [1, 3, 4])
def test_a_mount_that_vanishes(
    tmp_path: Path, mounted: Mount, monkeypatch: pytest.MonkeyPatch, output: str, batch: int
) -> None:
    """What lies under the mount point is not taken for the run directory, and nothing is written there."""
    mounted.mount("size=16m")
    elsewhere = Mount(tmp_path / "elsewhere")
    mounted.bind(elsewhere)
    source, out = runs.prompts(tmp_path / "m.parquet", 8), mounted.path / "out"
    try:
        with monkeypatch.context() as patch:
            at_batch(patch, batch, mounted.vanish)
            ended = runs.run(source, out, *SMALL, "--format", output)
        stopped(ended, "the run directory is not there any more")
        assert ended.out == ""
        assert "the balance is not known" in ended.err
        assert os.listdir(mounted.path) == []
        elsewhere.bind(mounted)
        before = whole(out)
        assert runs.run(source, out, *SMALL, "--format", output).closing_line == DONE
        assert before.items() <= runs.images(out).items()
        assert len(runs.check_images(out)) == 8
    finally:
        elsewhere.end()


CALLS = ["write", "link", "rename", "sync_folder", "sync_file"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("code", [errno.EDQUOT], ids=lambda code: errno.errorcode[code])
def test_a_disk_that_refuses_from_some_call_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    """Through the seam, where no disk can be had that does it: after the n-th call of a kind all of that kind fail."""
    source, out = runs.prompts(tmp_path / "m.parquet", 8), tmp_path / "out"
    original, num_stops = getattr(FileSystem, call), 0
    for allowed in range(1, 200, 7):
        left = [allowed]

        def refuses(self: FileSystem, *arguments: Any, left: list[int] = left) -> Any:
            left[0] -= 1
            if left[0] < 0:
                error = OSError(code, os.strerror(code), str(arguments[-1]))
                if call in ("link", "rename"):
                    raise error
                with resumable(out):
                    raise error
            return original(self, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(FileSystem, call, refuses)
            ended = runs.run(source, out, *SMALL)
        if ended.code == 0:
            break
        stopped(ended, re.escape(os.strerror(code)))
        whole(out)
        num_stops += 1
    assert num_stops > 0
    assert ended.closing_line == DONE
    assert len(runs.check_images(out)) == 8


def test_a_quota_that_is_used_up_within_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, out = runs.prompts(tmp_path / "m.parquet", 8), tmp_path / "out"

    def refuses(self: HashedFile, data: Any) -> int:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    for output in ("webdataset", "parquet"):
        with monkeypatch.context() as patch:
            patch.setattr(HashedFile, "write", refuses)
            stopped(runs.run(source, out / output, *SMALL, "--format", output), "the quota is used up")
        assert runs.run(source, out / output, *SMALL, "--format", output).closing_line == DONE


@pytest.mark.parametrize("num_taken", [0, 1, 2, 3])
def test_permissions_that_are_withdrawn_stop_a_run_as_a_lost_disk_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_taken: int
) -> None:
    """A Kerberos ticket that runs out in the night, say: no row is blamed, and the same command goes on. A disk that
    never took anything is a wrong place."""
    source, out = runs.prompts(tmp_path / "m.parquet", 8), tmp_path / "out"
    link, left = FileSystem.link, num_taken

    def refuse(self: FileSystem, source: Path, target: Path) -> None:
        nonlocal left
        if target.parent.name in ("claims", "receipts"):
            left -= 1
            if left < 0:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
        link(self, source, target)

    with monkeypatch.context() as patch:
        patch.setattr(FileSystem, "link", refuse)
        ended = runs.run(source, out, *SMALL)
    if num_taken:
        stopped(ended, "it may not be used any more")
    else:
        assert ended.code == 2
        assert "name another place" in ended.err
    ended = runs.run(source, out, *SMALL)
    assert (ended.code, ended.closing_line) == (0, DONE)


def test_a_folder_whose_file_is_still_open_over_nfs_is_left_to_be_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def remove_folder(self: FileSystem, path: Path, **options: bool) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    folder = tmp_path / "00000-0"
    folder.mkdir()
    (folder / ".nfs0001").write_bytes(b"")
    with monkeypatch.context() as patch:
        patch.setattr(FileSystem, "remove_folder", remove_folder)
        FileSystem().remove_any(folder)
    assert not folder.exists()
    (left,) = tmp_path.iterdir()
    assert re.fullmatch(r"00000-0\.[0-9a-f]{8}\.tmp", left.name)


@pytest.mark.parametrize("place", ["plan", "claims"])
def test_what_is_taken_out_of_a_run_directory_in_use_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    source, out = runs.prompts(tmp_path / "m.parquet", 8), tmp_path / "out"
    real = FileSystem.put_if_absent

    def put_if_absent(self: FileSystem, path: Path, content: bytes) -> bool:
        if path.parent.name == place:
            shutil.rmtree(path.parent)
        return real(self, path, content)

    with monkeypatch.context() as patch:
        patch.setattr(FileSystem, "put_if_absent", put_if_absent)
        stopped(runs.run(source, out, *SMALL), "is gone: it was taken out of the run directory|is not there any more")
    ended = runs.run(source, out, *SMALL)
    assert (ended.code, ended.closing_line) == (0, DONE)


def test_an_import_onto_a_read_only_disk_says_so(tmp_path: Path, mounted: Mount) -> None:
    (tmp_path / "p.txt").write_text("a fox\n")
    mounted.mount("size=1m")
    mounted.remount("ro")
    ended = runs.batchgen("import", tmp_path / "p.txt", "-o", mounted.path / "m.parquet")
    assert ended.code == 75
    assert "read-only" in ended.err
    assert "Traceback" not in ended.err


def test_a_place_where_no_folder_can_be_made_is_a_mistake(tmp_path: Path) -> None:
    ended = runs.run(runs.prompts(tmp_path / "m.parquet", 2), Path("/proc/batchgen-out"))
    assert ended.code == 2
    assert "/proc/batchgen-out cannot be made here" in ended.err


def test_a_file_that_has_no_name_is_none_of_the_run_directorys() -> None:
    with pytest.raises(FileNotFoundError, match="whatever"), intact(RunDirectory(Path())):
        raise FileNotFoundError("whatever")
