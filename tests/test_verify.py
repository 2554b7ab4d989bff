"""Every damage to a finished run is found and named, and none of it is a traceback."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen import verify as verifying
from batchgen.errors import BatchgenError, Interrupted
from batchgen.finalize import finalize
from batchgen.ledger import Ledger, Receipt
from batchgen.marker import is_finished
from batchgen.parts import part_digest, part_reader
from batchgen.repairing import repair
from batchgen.rundir import RunDirectory
from batchgen.verify import verify
from tests import runs as commands
from tests.damage import OTHERS, emptied, flipped, make_other, truncated
from tests.plans import finished, frozen
from tests.shards import FORMATS

MANIFEST = {
    "id": [f"row {n}" for n in range(6)],
    "prompt": [f"prompt {n}" for n in range(6)],
    "num_images": [1, 2, 1, 1, 1, 1],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name in FORMATS:
        options = [f"output.format={name}", "plan.shard_images=4"]
        found[name] = finished(tmp_path_factory.mktemp(name), MANIFEST, overrides=options)[0].path
    return found


@pytest.fixture(params=FORMATS)
def run(request: pytest.FixtureRequest, runs: dict[str, Path], tmp_path: Path) -> RunDirectory:
    shutil.copytree(runs[request.param], tmp_path / "run")
    return RunDirectory(tmp_path / "run")


def receipts(run: RunDirectory) -> list[Receipt]:
    return [one for state in Ledger(run.root, run.files).states(run.index().shards) for one in state.committed]


def test_a_whole_run_has_no_fault(run: RunDirectory) -> None:
    counts: list[int] = []
    found = verify(run, counts.append)
    assert (found.num_images, found.faults) == (7, ())
    assert sum(counts) == 7


def test_a_part_that_is_published_meanwhile_is_not_foreign(run: RunDirectory) -> None:
    """Its receipt came after receipts were read."""
    one = receipts(run)[-1]
    receipt, part = run.root / "receipts" / one.stem, run.data / one.part
    aside = receipt.rename(run.root / "aside-receipt"), part.rename(run.root / "aside-part")

    def publish(images: int) -> None:
        for path, place in zip(aside, (receipt, part), strict=True):
            if path.exists():
                path.rename(place)

    assert not [one for one in verify(run, publish).faults if "foreign" in one.what]
    assert part.exists()


@pytest.mark.parametrize(
    ("damage", "what"), [(truncated, "truncated: "), (emptied, "truncated: 0 of "), (flipped, "altered: ")]
)
def test_each_damaged_image_is_named_with_its_row(
    runs: dict[str, Path], tmp_path: Path, damage: Callable[[bytes], bytes], what: str
) -> None:
    shutil.copytree(runs["files"], tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    rows = pq.read_table(run.path / "metadata.parquet").to_pylist()
    for row in (rows[1], rows[2], rows[5]):
        path = run.path / row["file_name"]
        path.write_bytes(damage(path.read_bytes()))
    (run.path / rows[6]["file_name"]).unlink()
    faults = verify(run).faults
    wanted = {(row["file_name"], row["id"], row["image_number"]) for row in (rows[1], rows[2], rows[5], rows[6])}
    assert {(one.place, one.row_id, one.image_number) for one in faults} == wanted
    assert all(one.what.startswith("missing" if one.row_id == rows[6]["id"] else what) for one in faults)
    kind = what.partition(":")[0]
    ended = commands.batchgen("verify", run.path)
    assert (ended.code, ended.closing_line) == (3, f"7 images checked, 4 faults: 3 {kind}, 1 missing")
    assert f"batchgen verify {run.path} --repair makes what is damaged again" in ended.err
    told = json.loads(commands.batchgen("verify", run.path, "--json").out)
    assert (told["images"], told["kinds"]) == (7, {kind: 3, "missing": 1})
    assert [one["row_id"] for one in told["faults"] if one["kind"] == "missing"] == [rows[6]["id"]]


@pytest.mark.parametrize("format_name", ["webdataset", "parquet"])
def test_an_image_flipped_within_its_part_is_named_with_its_row(
    runs: dict[str, Path], tmp_path: Path, format_name: str
) -> None:
    shutil.copytree(runs[format_name], tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    part = run.data / receipts(run)[0].part
    name, image = list(part_reader(part))[1]
    whole = part.read_bytes()
    place = whole.index(image) + len(image) // 2
    part.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    rows = pq.read_table(run.path / "metadata.parquet").to_pylist()
    (row,) = [row for row in rows if Path(row["file_name"]).name == name]
    (fault,) = verify(run).faults
    assert (fault.place, fault.row_id, fault.image_number) == (row["file_name"], row["id"], row["image_number"])
    assert fault.what.startswith("altered")


def test_any_flipped_byte_and_any_cut_is_found(run: RunDirectory) -> None:
    random = np.random.default_rng(2)
    paths = [path for path in sorted(run.data.rglob("*")) if path.is_file() and path.name != "metadata.parquet"]
    paths += [run.root / "work" / f"{one.stem}.rows.parquet" for one in receipts(run)]
    for number in range(60):
        path = paths[number % len(paths)]
        whole = path.read_bytes()
        place = int(random.integers(0, len(whole)))
        path.write_bytes(
            whole[:place] + (b"" if number % 3 == 0 else bytes([whole[place] ^ 0x41]) + whole[place + 1 :])
        )
        assert verify(run).faults, (path, place)
        path.write_bytes(whole)
    assert verify(run).faults == ()


def test_what_is_missing_is_named(run: RunDirectory) -> None:
    first, second = receipts(run)[:2]
    rows = {row["file_name"]: row["id"] for row in pq.read_table(run.path / "metadata.parquet").to_pylist()}
    part = run.data / first.part
    shutil.rmtree(part) if part.is_dir() else part.unlink()
    (run.root / "work" / f"{second.stem}.rows.parquet").unlink()
    found = verify(run)
    gone = {(one.place, one.row_id) for one in found.faults if one.row_id}
    assert gone == {(name, row_id) for name, row_id in rows.items() if name.startswith(f"data/{first.part}")}
    parts = {one.place: one.what for one in found.faults if not one.row_id}
    table = f".run/work/{second.stem}.rows.parquet"
    assert parts.keys() == {f"data/{first.part}", table}
    assert parts[f"data/{first.part}"] == "missing"
    assert parts[table].startswith("damaged: ")


@pytest.mark.parametrize("name", ["webdataset", "parquet"])
@pytest.mark.parametrize("length", [0, 700, -1])
def test_a_part_that_cannot_be_read_is_named_once_and_in_one_line(
    runs: dict[str, Path], tmp_path: Path, name: str, length: int
) -> None:
    shutil.copytree(runs[name], tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    part = run.data / receipts(run)[0].part
    part.write_bytes(part.read_bytes()[:length])
    (what,) = [one.what for one in verify(run).faults if not one.row_id]
    assert what.startswith("unreadable: ")
    assert what.isprintable()
    assert str(part) not in what


def test_rows_that_are_outstanding_are_told_and_no_fault(tmp_path: Path) -> None:
    source, out = commands.prompts(tmp_path / "m.parquet", 3), tmp_path / "out"
    assert commands.run(source, out).code == 0
    assert commands.batchgen("verify", out).err == ""
    (out / "_SUCCESS").unlink()
    for receipt in list((out / ".run" / "receipts").iterdir()):
        shutil.rmtree(out / "data" / receipt.name)
        receipt.unlink()
    ended = commands.batchgen("verify", out)
    assert (ended.code, ended.closing_line) == (0, "0 images checked, 0 faults")
    assert ended.err == "outstanding, and not looked at: 3 of 3 rows; the command that began the run makes them\n"


@pytest.mark.parametrize("damage", [truncated, emptied, flipped])
def test_a_receipt_that_cannot_be_read_is_a_fault_and_its_rows_are_made_again(
    run: RunDirectory, damage: Callable[[bytes], bytes]
) -> None:
    one = receipts(run)[0]
    path = run.root / "receipts" / one.stem
    path.write_bytes(damage(path.read_bytes()))
    found = {fault.place: fault for fault in verify(run).faults}
    assert found.keys() == {f".run/receipts/{one.stem}", f"data/{one.part}", "_SUCCESS"}
    assert all(fault.is_curable and "foreign" not in fault.what for fault in found.values())
    assert commands.batchgen("status", run.path).out.count("not finalized") == 1
    ended = commands.batchgen("verify", run.path, "--repair")
    assert (ended.code, "left alone" in ended.err) == (0, False), ended
    assert verify(run).faults == ()
    assert is_finished(run)
    assert len(commands.check_images(run.path)) == 7


def test_a_marker_over_rows_that_no_receipt_names_is_a_fault(run: RunDirectory) -> None:
    (run.root / "receipts" / receipts(run)[-1].stem).unlink()
    assert "_SUCCESS" in {fault.place for fault in verify(run).faults}
    assert commands.batchgen("status", run.path).out.count("not finalized") == 1


@pytest.mark.parametrize("damage", [truncated, emptied, flipped])
def test_a_marker_that_cannot_be_read_is_a_fault(run: RunDirectory, damage: Callable[[bytes], bytes]) -> None:
    marker = run.path / "_SUCCESS"
    whole = marker.read_bytes()
    marker.write_bytes(damage(whole))
    (fault,) = verify(run).faults
    assert (fault.place, fault.what.split(":")[0]) == ("_SUCCESS", "unreadable")
    assert commands.batchgen("verify", run.path, "--repair").code == 0
    assert verify(run).faults == ()
    assert is_finished(run)


def test_a_settled_run_without_a_marker_is_finalized_by_a_repair(run: RunDirectory) -> None:
    """So left by one that was told to plan only, or stopped: the tables that it found damaged are written again."""
    table = run.path / "metadata.parquet"
    whole = table.read_bytes()
    table.write_bytes(flipped(whole))
    assert commands.batchgen("verify", run.path, "--repair", "--plan-only").code == 0
    ended = commands.batchgen("verify", run.path)
    assert (ended.code, ended.closing_line) == (0, "7 images checked, 0 faults")
    again = f"batchgen finalize {run.path}"
    assert ended.err == f"not finalized: its tables and its card were not looked at; {again} writes them\n"
    assert commands.batchgen("verify", run.path, "--repair").code == 0
    assert table.read_bytes() == whole
    ended = commands.batchgen("verify", run.path)
    assert (ended.code, ended.err) == (0, "")


def test_a_repair_makes_no_rows_of_a_run_that_has_not_ended(tmp_path: Path) -> None:
    frozen(tmp_path, MANIFEST)
    ended = commands.batchgen("verify", tmp_path / "run", "--repair")
    assert (ended.code, ended.closing_line) == (0, "0 images checked, 0 faults")
    assert ended.err.startswith("outstanding, and not looked at: 7 of 7 rows")


def test_only_an_image_folder_has_a_table_beside_its_parts(run: RunDirectory) -> None:
    """Elsewhere a reader takes it for a part."""
    format_name = run.index().output_format
    (run.data / "metadata.parquet").write_bytes((run.path / "metadata.parquet").read_bytes())
    (fault,) = verify(run).faults
    assert fault.place == "data/metadata.parquet"
    assert (fault.what.split(":")[0], fault.is_curable) == (
        ("altered", True) if format_name == "files" else ("foreign", False)
    )


def test_a_foreign_image_within_a_part_is_named(runs: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(runs["files"], tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    (run.data / receipts(run)[0].part / "foreign.png").write_bytes(b"x")
    (fault,) = verify(run).faults
    assert fault.place.endswith("/foreign.png")
    assert fault.what.startswith("foreign: ")


@pytest.fixture
def files_run(runs: dict[str, Path], tmp_path: Path) -> RunDirectory:
    """A finished run of image folders, to be damaged."""
    shutil.copytree(runs["files"], tmp_path / "run")
    return RunDirectory(tmp_path / "run")


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_file_within_an_image_folder_is_named_and_hides_nothing(files_run: RunDirectory, kind: str) -> None:
    """Such as what a file manager or a notebook leaves; whole images before and behind it are whole."""
    run = files_run
    part = run.data / receipts(run)[0].part
    whole = part_digest(part)
    make_other(part / ".thumbs", kind)
    found = verify(run)
    (fault,) = found.faults
    assert (fault.place, fault.what) == (f"data/{part.name}/.thumbs", "foreign: it is no file")
    assert not fault.is_curable
    assert not found.damaged[0].rows
    assert part_digest(part) == whole


@pytest.mark.parametrize("kind", OTHERS)
def test_an_image_is_missing_where_something_else_has_its_name(
    files_run: RunDirectory, tmp_path: Path, kind: str
) -> None:
    """A link to the very image, too: what it leads to is not the run's."""
    run = files_run
    row = pq.read_table(run.path / "metadata.parquet").to_pylist()[3]
    image = run.path / row["file_name"]
    content = image.read_bytes()
    image.unlink()
    if kind == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        image.symlink_to(tmp_path / "elsewhere")
    else:
        make_other(image, kind)
    found = {(one.row_id, one.what) for one in verify(run).faults if one.place == row["file_name"]}
    assert found == {("", "foreign: it is no file"), (row["id"], "missing")}


def test_a_part_that_was_not_yet_published_is_read(run: RunDirectory) -> None:
    receipt = receipts(run)[0]
    (run.data / receipt.part).rename(run.root / "work" / receipt.part)
    found = verify(run)
    assert (found.num_images, found.faults) == (7, ())


def test_all_usable_cores_read(runs: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the process may use, not those that the machine has."""
    asked: list[int] = []
    pool = verifying.ThreadPoolExecutor

    def noted(threads: int) -> Any:
        asked.append(threads)
        return pool(threads)

    monkeypatch.setattr(verifying, "ThreadPoolExecutor", noted)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5, 7})
    assert verify(RunDirectory(runs["files"])).faults == ()
    assert asked == [3]


def test_the_row_table_of_failed_rows_is_read_too(tmp_path: Path) -> None:
    """Nothing but that table says why they failed."""
    run, ending = finished(tmp_path, {"id": ["a"], "prompt": ["fault: raise"]}, overrides=["model.variant=faults"])
    assert ending.balance.failed == 1
    (table,) = (run.root / "work").glob("*.rows.parquet")
    table.unlink()
    (fault,) = verify(run).faults
    assert fault.place == f".run/work/{table.name}"


LOST = [errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT, errno.EIO, errno.ESHUTDOWN, errno.EACCES, errno.EPERM]
"""What a file system answers that is lost, or whose credentials have run out."""


class _Lost(io.FileIO):
    """A file whose disk answers with an error after so many bytes."""

    def __init__(self, path: Path, code: int, num_bytes: int) -> None:
        super().__init__(path)
        self._code, self._left = code, num_bytes

    def readinto(self, buffer: Any, /) -> int:
        self._left -= len(buffer)
        if self._left < 0:
            raise OSError(self._code, os.strerror(self._code))
        return super().readinto(buffer) or 0

    def readall(self) -> bytes:
        raise OSError(self._code, os.strerror(self._code))


@contextmanager
def lost(place: Path, code: int, num_bytes: int) -> Iterator[None]:
    """Within the block nothing under `place` can be opened, or read further than so many bytes."""
    real, arrows = io.open, pa.OSFile

    def opened(file: Any, *arguments: Any, **options: Any) -> Any:
        if not isinstance(file, Path) or place not in (file, *file.parents):
            return real(file, *arguments, **options)
        if not num_bytes:
            raise OSError(code, os.strerror(code), str(file))
        return io.BufferedReader(_Lost(file, code, num_bytes), 16)

    def opened_by_arrow(file: str) -> Any:
        path = Path(file)
        return pa.PythonFile(opened(path)) if place in (path, *path.parents) else arrows(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(io, "open", opened)
        patch.setattr(pa, "OSFile", opened_by_arrow)
        yield


def test_arrow_names_what_the_disk_reports() -> None:
    with pytest.raises(OSError, match="Error reading bytes from file") as found, pa.OSFile("/proc/self/mem") as file:
        file.read(1)
    assert found.value.errno == errno.EIO


@pytest.mark.parametrize("code", LOST, ids=lambda code: errno.errorcode[code])
def test_a_lost_disk_is_no_damage(run: RunDirectory, code: int) -> None:
    """Of parts and of their row tables, opened or read half; nothing is repaired for it either."""
    (run.data / receipts(run)[0].part).touch()
    for place in (run.data / receipts(run)[0].part, run.root / "work"):
        for num_bytes in (0, 40):
            with lost(place, code, num_bytes):
                ended = commands.batchgen("verify", run.path, "--repair")
            assert (ended.code, ended.out) == (75, ""), ended
            assert os.strerror(code) in ended.err
            assert "Everything committed is kept; run the same command again" in ended.err
            assert "damaged" not in ended.err
    assert not (run.plans / "1.json").exists()
    assert verify(run).faults == ()


@pytest.mark.parametrize("code", LOST, ids=lambda code: errno.errorcode[code])
@pytest.mark.parametrize("format_name", ["webdataset", "parquet"])
def test_a_part_on_a_lost_disk_is_not_written_anew(
    runs: dict[str, Path], tmp_path: Path, format_name: str, code: int
) -> None:
    """While images are made again whose neighbours stay."""
    shutil.copytree(runs[format_name], tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    part = run.data / next(one for one in receipts(run) if len(one.ok) > 1).part
    _, image = next(iter(part_reader(part)))
    part.write_bytes(part.read_bytes().replace(image, bytes(len(image)), 1))
    found = verify(run)
    assert found.faults
    with lost(part, code, 40), pytest.raises(Interrupted, match="is kept"):
        repair(run, found.damaged)
    repair(run, found.damaged)


def test_a_run_directory_that_vanishes_is_no_damage(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its mount is gone: an empty folder is in its place."""

    def vanish(check: Any, receipts: Any) -> Any:
        known = list(receipts)
        run.path.rename(tmp_path / "elsewhere")
        run.data.mkdir(parents=True)
        return spread(check, known)

    spread = verifying._spread
    monkeypatch.setattr(verifying, "_spread", vanish)
    with pytest.raises(Interrupted, match="the run directory is not there any more"):
        verify(run)


def test_a_finalize_whose_run_directory_vanishes_says_so(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanish(*arguments: Any) -> None:
        run.path.rename(tmp_path / "elsewhere")
        raise BatchgenError("a part is missing")

    monkeypatch.setattr("batchgen.finalize.withdraw", vanish)
    with pytest.raises(Interrupted, match=r"the run directory is not there any more \(a part is missing\)"):
        finalize(run)
