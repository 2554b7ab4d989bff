import subprocess
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.errors import BatchgenError
from batchgen.parts import part_digest, part_reader
from tests.damage import OTHERS, make_other
from tests.shards import FORMATS, output_of, seven, shard_of_seven, write_part


def test_a_folder_is_digested_as_sha256sum_would(tmp_path: Path) -> None:
    part = write_part(tmp_path, output_of(), seven(), shard_of_seven())
    command = "LC_ALL=C sha256sum * | sha256sum"
    printed = subprocess.run(command, shell=True, cwd=part.path, capture_output=True, text=True, check=True)
    assert printed.stdout.split()[0] == part.sha256


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_damaged_part_is_named(tmp_path: Path, format_name: str) -> None:
    part = write_part(tmp_path, output_of(format=format_name), seven(), shard_of_seven())
    assert part.path is not None
    if format_name == "files":
        (part.path / "row-3.png").write_bytes(b"")
        assert part_digest(part.path) != (part.bytes, part.sha256)
        return
    whole = part.path.read_bytes()
    for length in range(0, len(whole), 512):
        part.path.write_bytes(whole[:length])
        assert part_digest(part.path) != (part.bytes, part.sha256)
        with pytest.raises(BatchgenError, match="missing or damaged"):
            list(part_reader(part.path))
    part.path.unlink()
    with pytest.raises(BatchgenError, match="missing or damaged"):
        list(part_reader(part.path))


def test_a_tar_damaged_in_the_middle_yields_what_comes_before(tmp_path: Path) -> None:
    part = write_part(tmp_path, output_of(format="webdataset"), seven(), shard_of_seven())
    assert part.path is not None
    with tarfile.open(part.path) as tar:
        header = tar.getmember("row-6.png").offset
    data = bytearray(part.path.read_bytes())
    data[header] ^= 1
    part.path.write_bytes(data)
    reader = part_reader(part.path)
    assert [next(reader)[0] for _ in range(3)] == ["row-2.png", "row-0.png", "row-1.png"]
    with pytest.raises(BatchgenError, match="no further member can be read"):
        next(reader)


def test_no_flipped_bit_of_a_part_is_a_traceback(tmp_path: Path) -> None:
    """Of the bytes that say what lies where; those of the images say nothing here."""
    random = Random(5)
    for format_name in ("parquet", "webdataset"):
        part = write_part(tmp_path, output_of(format=format_name), seven(), shard_of_seven())
        assert part.path is not None
        whole = part.path.read_bytes()
        for _ in range(600):
            data = bytearray(whole)
            first = len(whole) - 9000 if format_name == "parquet" else 0
            data[random.randrange(first, len(whole))] ^= 1 << random.randrange(8)
            part.path.write_bytes(data)
            with suppress(BatchgenError):
                assert all(isinstance(name, str) and isinstance(data, bytes) for name, data in part_reader(part.path))


IMAGES = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
NO_PARTS = {
    "no images": pa.table({"id": ["a"]}),
    "no column": pa.table({}),
    "images that are text": pa.table({"image": ["a"]}),
    "images without a path": pa.table({"image": pa.array([{"bytes": b"a"}])}),
    "a path that is a number": pa.table({"image": pa.array([{"bytes": b"a", "path": 1}])}),
    "no image": pa.table({"image": pa.array([None], IMAGES)}),
    "an image without bytes": pa.table({"image": pa.array([{"bytes": None, "path": "a.png"}], IMAGES)}),
}


@pytest.mark.parametrize("table", NO_PARTS.values(), ids=NO_PARTS)
def test_another_parquet_file_in_a_part_s_place_is_damage(tmp_path: Path, table: pa.Table) -> None:
    pq.write_table(table, tmp_path / "00000-0.parquet")
    with pytest.raises(BatchgenError, match="missing or damaged"):
        list(part_reader(tmp_path / "00000-0.parquet"))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE])
def test_a_member_that_is_no_file_holds_no_image(tmp_path: Path, kind: bytes) -> None:
    path = tmp_path / "00000-0.tar"
    with tarfile.open(path, "w") as tar:
        entry = tarfile.TarInfo("a.png")
        entry.type, entry.linkname = kind, "nowhere.png"
        tar.addfile(entry)
    assert list(part_reader(path)) == []


def test_a_member_is_not_read_that_is_longer_than_its_tar(tmp_path: Path) -> None:
    entry = tarfile.TarInfo("a.png")
    entry.size = 2**62
    path = tmp_path / "00000-0.tar"
    path.write_bytes(entry.tobuf(tarfile.GNU_FORMAT) + bytes(20 * 512))
    with pytest.raises(BatchgenError, match="more than there are"):
        list(part_reader(path))


@pytest.mark.parametrize("suffix", [".tar", ".parquet"])
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("read", [part_digest, lambda path: list(part_reader(path))])
def test_what_is_no_file_is_no_part(tmp_path: Path, suffix: str, kind: str, read: Callable[[Path], object]) -> None:
    path = tmp_path / f"00000-0{suffix}"
    make_other(path, kind)
    with pytest.raises(BatchgenError, match="it is no file"):
        read(path)


@pytest.mark.parametrize("format_name", FORMATS)
def test_some_images_are_read_and_no_others(tmp_path: Path, format_name: str) -> None:
    part = write_part(tmp_path, output_of(format=format_name), seven(), shard_of_seven())
    assert part.path is not None
    every = dict(part_reader(part.path))
    for names in ({"row-2.png"}, {"row-6.png", "row-0.png"}, {"another.png"}, set()):
        assert dict(part_reader(part.path, names)) == {name: every[name] for name in names & every.keys()}
