import subprocess
import tarfile
from pathlib import Path

import pytest

from batchgen.errors import BatchgenError
from batchgen.parts import part_digest, part_reader
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
