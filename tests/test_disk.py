import errno
import os
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchgen import disk
from batchgen.encoders import EncoderPool
from batchgen.errors import Interrupted
from batchgen.filesystem import FileSystem
from batchgen.records import Part
from batchgen.writer import PartWriter
from tests.mounts import Mount, mounted
from tests.shards import FORMATS, MODEL, make_image, output_of, seven, shard_of_seven, write_part

__all__ = ["mounted"]
CODES = [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE]


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("code", CODES, ids=lambda code: errno.errorcode[code])
def test_a_refusing_disk_interrupts_the_run_and_fails_no_row(
    tmp_path: Path, format_name: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = iter(range(1000))

    def refuse_the_fifth(*args: Any) -> Any:
        if next(written) >= 4:
            raise OSError(code, os.strerror(code))
        return original(*args)

    owner, name = (FileSystem, "write") if format_name == "files" else (disk.HashedFile, "write")
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, refuse_the_fifth)
    with EncoderPool(2) as pool:
        part_writer = PartWriter(tmp_path, "0-0", output_of(format=format_name), shard_of_seven(), MODEL, pool)
        with pytest.raises(Interrupted, match=rf"0-0.*\({os.strerror(code)}\)") as caught:
            fill(part_writer)
        assert "run the same command again" in str(caught.value)
        part_writer.discard()
    assert list(tmp_path.iterdir()) == []


def fill(part_writer: PartWriter) -> Part:
    for row in seven():
        part_writer.add(make_image(row))
    return part_writer.finish()


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_really_full_disk(mounted: Mount, format_name: str) -> None:
    mounted.mount("size=8k")
    with pytest.raises(Interrupted, match="No space left on device"):
        write_part(mounted.path, output_of(format=format_name), seven(), shard_of_seven())


@pytest.mark.parametrize("format_name", FORMATS)
def test_everything_is_synced_before_finish_returns(
    tmp_path: Path, format_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[int, int]] = []
    fsync = os.fsync

    def noted(handle: int) -> None:
        fsync(handle)
        state = os.fstat(handle)
        synced.append((state.st_ino, state.st_size))

    monkeypatch.setattr(os, "fsync", noted)
    part = write_part(tmp_path, output_of(format=format_name), seven(), shard_of_seven())
    assert part.path is not None
    paths = [part.path, *part.path.iterdir()] if part.path.is_dir() else [part.path]
    for path in [*paths, tmp_path]:
        state = path.stat()
        assert (state.st_ino, state.st_size) in synced
    assert synced[-1][0] == tmp_path.stat().st_ino


def test_write_table_is_durable_or_leaves_nothing(mounted: Mount) -> None:
    path = mounted.path / "rows.parquet"
    mounted.mount("size=4k")
    with pytest.raises(Interrupted, match="the disk is full"):
        disk.write_table(path, shard_of_seven())
    assert list(mounted.path.iterdir()) == []
    mounted.remount("size=1m")
    disk.write_table(path, shard_of_seven())
    assert pq.read_table(path) == shard_of_seven()


def test_a_table_never_follows_a_link(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("mine")
    (tmp_path / "rows.parquet").symlink_to(tmp_path / "outside")
    disk.write_table(tmp_path / "rows.parquet", shard_of_seven())
    assert (tmp_path / "outside").read_text() == "mine"
    assert pq.read_table(tmp_path / "rows.parquet") == shard_of_seven()
