"""Case 23: damaged images are made again, exactly those, with the pixels that they had; each reader sees each once."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset

from batchgen import formats, mending, repairing, runner
from batchgen.appending import append_rows, failed, job_of
from batchgen.errors import BatchgenError, Interrupted
from batchgen.finalize import finalize
from batchgen.ledger import Ledger
from batchgen.marker import is_finished
from batchgen.mending import mend
from batchgen.repairing import repair
from batchgen.rundir import RunDirectory
from batchgen.runner import run_job, run_planned
from batchgen.verify import verify
from tests import runs
from tests.crashes import Crash, machine
from tests.damage import OTHERS, emptied, flipped, make_other, truncated
from tests.overtaking import Overtaken
from tests.plans import folder, pattern_job, write
from tests.shards import FORMATS
from tests.test_appending import bookkeeping, failing

TEN = {"id": [f"row {n}" for n in range(10)], "prompt": [f"prompt {n}" for n in range(10)], "own": list(range(10))}
OPTIONS = ("plan.batch_sizes=[1, 4]", "plan.shard_images=5", "output.encoders=1")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name in FORMATS:
        path = tmp_path_factory.mktemp(name)
        job = pattern_job(*OPTIONS, f"output.format={name}")
        run_job(write(path / "manifest", TEN), path / "run", job, failing("row 9"))
        found[name] = path / "run"
    return found


@pytest.fixture
def memory() -> Iterator[Path]:
    with folder() as path:
        yield path


@pytest.fixture(params=FORMATS)
def run(request: pytest.FixtureRequest, whole: dict[str, Path], memory: Path) -> RunDirectory:
    shutil.copytree(whole[request.param], memory / "run")
    return RunDirectory(memory / "run")


def damage(run: RunDirectory, row_id: str, change: Callable[[bytes], bytes]) -> None:
    """Change an image's bytes where they lie; of a tar or Parquet file the length stays."""
    line = runs.by_id(run.path)[row_id]
    path = run.path / line["file_name"]
    image = runs.images(run.path)[line["file_name"]]
    if path.is_file():
        path.write_bytes(change(image))
    else:
        content = path.parent.read_bytes()
        path.parent.write_bytes(content.replace(image, change(image).ljust(len(image), b"\0")))


def mended(run: RunDirectory) -> list[str]:
    """Verify, repair, work; the ids of rows that were made again, each checked to be there once."""
    pixels, before, files = runs.pixels(run.path), bookkeeping(run), runs_of(run)
    plans = repair(run, verify(run).damaged)
    ending = run_planned(run, plans, job_of(run, plans), failing("row 9"))
    assert (ending.balance.done, ending.balance.failed, ending.balance.outstanding) == (9, 1, 0)
    assert verify(run).faults == ()
    assert is_finished(run)
    assert runs.pixels(run.path) == pixels
    runs.check_images(run.path)
    assert before.items() <= bookkeeping(run).items()
    return sorted(row for row, place in runs_of(run).items() if files[row] != place)


def runs_of(run: RunDirectory) -> dict[str, str]:
    return {line["id"]: line["file_name"] for line in runs.metadata(run.path)}


def readers_see(run: RunDirectory, cache: Path) -> list[str]:
    """The ids that the format's own reader finds."""
    if run.index().output_format == "webdataset":
        tars = sorted(map(str, run.data.glob("*.tar")))
        samples = list(webdataset.WebDataset(tars, shardshuffle=False, empty_check=False).decode())
        assert all({"png", "json"} <= sample.keys() for sample in samples)
        return sorted(sample["json"]["id"] for sample in samples)
    return sorted(datasets.load_dataset(str(run.path), split="train", cache_dir=str(cache))["id"])


def test_case_23_a_truncated_an_emptied_and_a_flipped_image(run: RunDirectory, tmp_path: Path) -> None:
    sizes = {line["id"]: (line["batch_size"], line["seed"]) for line in runs.metadata(run.path)}
    for row_id, change in (("row 1", truncated), ("row 4", emptied), ("row 6", flipped)):
        damage(run, row_id, change)
    assert {fault.row_id for fault in verify(run).faults if fault.row_id} >= {"row 1", "row 4", "row 6"}
    assert mended(run) == ["row 1", "row 4", "row 6"]
    assert {line["id"]: (line["batch_size"], line["seed"]) for line in runs.metadata(run.path)} == sizes
    assert readers_see(run, tmp_path) == [f"row {n}" for n in range(9)]
    assert [line["own"] for line in runs.metadata(run.path)] == list(range(9))
    damage(run, "row 4", flipped)
    damage(run, "row 2", flipped)
    assert mended(run) == ["row 2", "row 4"]
    assert readers_see(run, tmp_path / "again") == [f"row {n}" for n in range(9)]


def test_a_part_that_is_gone_and_a_row_table_that_is_gone(run: RunDirectory, tmp_path: Path) -> None:
    ledger = Ledger(run.root, run.files)
    first, *_, last = (one for one in ledger.committed(run.index().shards) if one.part)
    lost = [row for row, place in runs_of(run).items() if Path(place).parent.name in (first.part, last.part)]
    part = run.data / first.part
    shutil.rmtree(part) if part.is_dir() else part.unlink()
    ledger.table_path(last.shard, last.epoch).unlink()
    assert mended(run) == sorted(lost)
    assert not {first.part, last.part} & set(run.files.names(run.data))
    assert readers_see(run, tmp_path) == [f"row {n}" for n in range(9)]


def test_a_row_table_that_is_altered(run: RunDirectory) -> None:
    ledger = Ledger(run.root, run.files)
    receipts = list(ledger.committed(run.index().shards))
    path = ledger.table_path(receipts[0].shard, receipts[0].epoch)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert len(mended(run)) == len(receipts[0].ok)


@pytest.mark.parametrize(("output", "old"), [("webdataset", b'"asked_width"'), ("parquet", b"huggingface")])
def test_what_lies_beside_whole_images_is_written_anew(
    whole: dict[str, Path], memory: Path, output: str, old: bytes
) -> None:
    """No row is made again, and the part is the one that the receipt names; or, mended before, its slot."""
    run = RunDirectory(memory / "run")
    shutil.copytree(whole[output], run.path)
    part = run.data / max(Ledger(run.root, run.files).committed(run.index().shards), key=lambda one: len(one.ok)).part
    for is_mended in (False, True):
        content = part.read_bytes()
        part.write_bytes(content.replace(old, old.upper()))
        (fault,) = verify(run).faults
        assert "what lies beside them is not" in fault.what
        assert mended(run) == []
        assert part.read_bytes() == content
        if not is_mended:
            victim = next(row for row, place in runs_of(run).items() if part.name in place)
            damage(run, victim, flipped)
            assert mended(run) == [victim]


def test_a_part_that_is_written_anew_outlasts_another_s_finalize(
    whole: dict[str, Path], memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies beside the rest of the bookkeeping then, and nowhere afterwards."""
    run, real = RunDirectory(memory / "run"), repairing.rewrite
    shutil.copytree(whole["webdataset"], run.path)
    part = run.data / next(Ledger(run.root, run.files).committed([0])).part
    content, before = part.read_bytes(), sorted(run.root.rglob("*"))
    part.write_bytes(content.replace(b'"asked_width"', b'"ASKED_WIDTH"'))

    def overtaken(*arguments: Any) -> mending.Content:
        written = real(*arguments)
        finalize(run)
        return written

    monkeypatch.setattr(repairing, "rewrite", overtaken)
    assert mended(run) == []
    assert part.read_bytes() == content
    assert sorted(run.root.rglob("*")) == before


def test_a_part_that_does_not_come_out_as_it_was_is_made_again(
    whole: dict[str, Path], memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with another version of the library that wrote it."""
    run = RunDirectory(memory / "run")
    shutil.copytree(whole["webdataset"], run.path)
    receipt = next(Ledger(run.root, run.files).committed([0]))
    part = run.data / receipt.part
    part.write_bytes(part.read_bytes().replace(b'"asked_width"', b'"ASKED_WIDTH"'))
    spelled = formats.without_nulls
    monkeypatch.setattr(formats, "without_nulls", lambda sample: spelled(sample) | {"version": 2})
    assert len(mended(run)) == len(receipt.ok)


def test_a_disk_that_refuses_is_no_reason_to_make_a_part_again(
    whole: dict[str, Path], memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(memory / "run")
    shutil.copytree(whole["webdataset"], run.path)
    part = run.data / next(Ledger(run.root, run.files).committed([0])).part
    part.write_bytes(part.read_bytes().replace(b'"asked_width"', b'"ASKED_WIDTH"'))

    def full(*arguments: object) -> None:
        raise Interrupted("the disk is full")

    monkeypatch.setattr("batchgen.repairing.rewrite", full)
    with pytest.raises(Interrupted, match="the disk is full"):
        repair(run, verify(run).damaged)
    assert run.index().number == 0


def test_what_never_was_the_runs_is_left_alone(run: RunDirectory) -> None:
    damage(run, "row 1", flipped)
    (run.data / "foreign.png").write_bytes(b"mine")
    plans = repair(run, verify(run).damaged)
    run_planned(run, plans, job_of(run, plans), failing("row 9"))
    assert [fault.place for fault in verify(run).faults] == ["data/foreign.png"]
    assert (run.data / "foreign.png").read_bytes() == b"mine"


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("is_whole", [True, False])
def test_what_lies_among_images_outlasts_them(
    whole: dict[str, Path], memory: Path, kind: str, *, is_whole: bool
) -> None:
    """Where all of a folder's images are made again, and where some of them are."""
    run = RunDirectory(memory / "run")
    shutil.copytree(whole["files"], run.path)
    places = runs_of(run)
    part = max(run.data.glob("0*"), key=lambda one: len(os.listdir(one)))
    lost = [row for row, place in places.items() if part.name in place][: None if is_whole else 1]
    (part / "labels.json").write_text("mine")
    make_other(part / ".thumbs", kind)
    for row in lost:
        (run.path / places[row]).unlink()
    image = run.path / places[lost[0]]
    make_other(image, "folder")
    plans = repair(run, verify(run).damaged)
    run_planned(run, plans, job_of(run, plans), failing("row 9"))
    left = {fault.place for fault in verify(run).faults}
    assert left == (set() if is_whole else {f"data/{part.name}/labels.json", f"data/{part.name}/.thumbs"})
    (moved,) = (run.root / "withdrawn").iterdir()
    assert moved.name.startswith(part.name if is_whole else image.name)
    taken = moved if is_whole else part
    assert (taken / "labels.json").read_text() == "mine"
    assert os.path.lexists(taken / ".thumbs")
    assert ((moved / image.name if is_whole else moved) / "mine").read_text() == "mine"
    if is_whole:
        assert sorted(os.listdir(moved)) == sorted([".thumbs", "labels.json", image.name])
    else:
        shutil.move(part / ".thumbs", memory)
        (part / "labels.json").unlink()
    assert len(runs.check_images(run.path)) == 9


def test_nothing_is_known_to_be_the_part_s_without_its_row_table(whole: dict[str, Path], memory: Path) -> None:
    run = RunDirectory(memory / "run")
    shutil.copytree(whole["files"], run.path)
    receipt = next(Ledger(run.root, run.files).committed([0]))
    before = sorted(os.listdir(run.data / receipt.part))
    (run.root / "work" / f"{receipt.stem}.rows.parquet").write_bytes(b"")
    assert len(mended(run)) == len(receipt.ok)
    (moved,) = (run.root / "withdrawn").iterdir()
    assert sorted(os.listdir(moved)) == before


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_part_outlasts_the_one_whose_place_it_took(run: RunDirectory, kind: str) -> None:
    part = run.data / next(Ledger(run.root, run.files).committed([0])).part
    shutil.rmtree(part) if part.is_dir() else part.unlink()
    if part.suffix:
        make_other(part, kind)
    else:
        part.write_text("mine")
    assert mended(run)
    moved = [one.name for one in (run.root / "withdrawn").glob("*")]
    assert [name.startswith(f"{part.name}.") for name in moved] == ([] if part.suffix and kind == "pipe" else [True])


def test_all_images_are_gone_with_their_folder(run: RunDirectory) -> None:
    pixels = runs.pixels(run.path)
    shutil.rmtree(run.data)
    plans = repair(run, verify(run).damaged)
    run_planned(run, plans, job_of(run, plans), failing("row 9"))
    assert runs.pixels(run.path) == pixels
    assert verify(run).faults == ()


def test_a_part_waits_to_be_published_when_the_folder_of_all_is_removed(run: RunDirectory) -> None:
    pixels, part = runs.pixels(run.path), sorted(run.data.glob("0*"))[0]
    part.rename(run.root / "work" / part.name)
    shutil.rmtree(run.data)
    found = verify(run)
    assert part.exists()
    assert not any(fault.place.startswith(f"data/{part.name}") for fault in found.faults)
    plans = repair(run, found.damaged)
    run_planned(run, plans, job_of(run, plans), failing("row 9"))
    assert runs.pixels(run.path) == pixels
    assert verify(run).faults == ()


def test_arrow_holds_nothing_of_pythons(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of Arrow's that lets go of a Python object while the interpreter ends aborts the process."""
    sources: list[object] = []

    def spy(inner: Callable[..., Any]) -> Callable[..., Any]:
        def outer(source: object, *args: object, **options: object) -> object:
            sources.append(source)
            return inner(source, *args, **options)

        return outer

    monkeypatch.setattr(pq, "ParquetFile", spy(pq.ParquetFile))
    monkeypatch.setattr(pq, "read_table", spy(pq.read_table))
    monkeypatch.setattr(pa, "BufferReader", spy(pa.BufferReader))
    damage(run, "row 1", flipped)
    plans = repair(run, verify(run).damaged)
    run_planned(run, plans, job_of(run, plans), failing("row 9"))
    kinds = {type(one) for one in sources}
    assert kinds <= {type(run.path), pa.OSFile, pa.Buffer, type(pa.BufferReader(pa.py_buffer(b"")))}, kinds
    assert {type(run.path), pa.OSFile, pa.Buffer} <= kinds
    assert all(one.parent is None for one in sources if isinstance(one, pa.Buffer))


def test_the_command(tmp_path: Path) -> None:
    source, out = runs.prompts(tmp_path / "m.parquet", 6), tmp_path / "out"
    assert runs.run(source, out).code == 0
    pixels = runs.pixels(out)
    files = sorted(out.glob("data/*/*.png"))
    before = {path: path.stat().st_mtime_ns for path in files[1:-1]}
    files[0].unlink()
    files[-1].write_bytes(b"")
    assert runs.batchgen("verify", out, "--plan-only").code == 2
    assert runs.batchgen("verify", out, "--repair", "--json").code == 2
    planned = runs.batchgen("verify", out, "--repair", "--plan-only")
    assert planned.code == 0
    assert planned.out.splitlines()[-2:] == [
        "6 images checked, 2 faults: 1 missing, 1 truncated", "6 rows = 4 done + 0 failed + 0 rejected + 2 outstanding",
    ]  # fmt: skip
    assert runs.batchgen("verify", out).code == 0
    assert runs.run(source, out).closing_line == "6 rows = 6 done + 0 failed + 0 rejected + 0 outstanding"
    next(out.glob("data/*/*.png")).write_bytes(b"")
    ended = runs.batchgen("verify", out, "--repair")
    assert (ended.code, ended.closing_line) == (0, "6 rows = 6 done + 0 failed + 0 rejected + 0 outstanding")
    assert runs.pixels(out) == pixels
    assert len(runs.check_images(out)) == 6
    assert sum(path.exists() and path.stat().st_mtime_ns == time for path, time in before.items()) >= 3
    assert runs.batchgen("verify", out, "--repair").code == runs.batchgen("verify", out).code == 0
    (out / "metadata.parquet").write_bytes(b"")
    (out / "data" / "mine").write_bytes(b"")
    ended = runs.batchgen("verify", out, "--repair")
    assert ended.code == 0
    assert "not the run's, and left alone: data/mine; move them out of data/, where readers find them\n" in ended.err
    (out / "data" / "mine").unlink()
    assert len(runs.metadata(out)) == 6


def test_the_command_says_what_it_moves_and_what_it_leaves(tmp_path: Path) -> None:
    source, out = runs.prompts(tmp_path / "m.parquet", 3), tmp_path / "out"
    assert runs.run(source, out, "--set", "plan.shard_images=1", "--set", "plan.batch_sizes=[1]").code == 0
    first, second, _ = sorted(out.glob("data/*/*.png"))
    first.write_bytes(b"")
    for image in (first, second):
        (image.parent / "labels.json").write_text("mine")
    ended = runs.batchgen("verify", out, "--repair")
    assert ended.code == 0
    (moved,) = (out / ".run" / "withdrawn").iterdir()
    assert f"not known to be the run's, and moved out of data/, to {moved}\n" in ended.err
    assert f"not the run's, and left alone: data/{second.parent.name}/labels.json; move them out of data/" in ended.err
    assert [path.read_text() for path in sorted(out.rglob("labels.json"))] == ["mine", "mine"]


@pytest.mark.parametrize("is_made", [False, True])
def test_the_same_command_goes_on_with_a_repair_that_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_made: bool
) -> None:
    """Before the rows were made, or before the tables were written anew."""
    source, out = runs.prompts(tmp_path / "m.parquet", 6), tmp_path / "out"
    assert runs.run(source, out).code == 0
    next(out.glob("data/*/*.png")).unlink()
    assert runs.batchgen("verify", out, "--repair", "--plan-only").code == 0
    if is_made:
        with monkeypatch.context() as patch:
            patch.setattr(runner, "finalize", lambda run, plan: None)
            assert runs.run(source, out).code == 0
    assert not is_finished(RunDirectory(out))
    ended = runs.batchgen("verify", out, "--repair")
    assert (ended.code, ended.closing_line) == (0, "6 rows = 6 done + 0 failed + 0 rejected + 0 outstanding")
    assert is_finished(RunDirectory(out))
    assert len(runs.check_images(out)) == 6


def test_an_image_that_is_damaged_between_verify_and_repair_is_not_kept(whole: dict[str, Path], memory: Path) -> None:
    run = RunDirectory(memory / "run")
    shutil.copytree(whole["webdataset"], run.path)
    damage(run, "row 1", flipped)
    found = verify(run).damaged
    for row in ("row 0", "row 2", "row 3", "row 4", "row 5", "row 6", "row 7", "row 8"):
        damage(run, row, flipped)
    with pytest.raises(BatchgenError, match=r"is damaged or missing.*`batchgen verify --repair` has it made again"):
        repair(run, found)
    assert len(mended(run)) == 9


@pytest.mark.parametrize("output", FORMATS)
def test_a_machine_that_dies_at_any_change_of_a_repair(whole: dict[str, Path], memory: Path, output: str) -> None:
    for number in itertools.count(FORMATS.index(output), 3):
        run, has_died = RunDirectory(memory / f"{number}"), False
        shutil.copytree(whole[output], run.path)
        damage(run, "row 1", flipped)
        damage(run, "row 6", flipped)
        damaged = verify(run).damaged
        with machine(number, is_after=number % 2 == 0):
            try:
                repair(run, damaged)
            except Crash:
                has_died = True
        if failed(run, run.index()) and run.index().number == 0:
            plans = repair(run, verify(run).damaged)
        else:
            plans = run.index()
        ending = run_planned(run, plans, job_of(run, plans), failing("row 9"))
        assert (ending.balance.done, ending.balance.outstanding) == (9, 0)
        assert verify(run).faults == ()
        assert len(runs.check_images(run.path)) == 9
        shutil.rmtree(run.path)
        if not has_died:
            break
    assert number > 10


@pytest.mark.parametrize("output", FORMATS)
def test_a_mender_that_a_second_repair_overtakes(whole: dict[str, Path], memory: Path, output: str) -> None:
    """At each of its steps more images are damaged, and all of it repaired: no row comes back."""
    for step in itertools.count(1):
        path = memory / f"{step}"
        shutil.copytree(whole[output], path)
        run = RunDirectory(path)
        damage(run, "row 1", flipped)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("batchgen.repairing.mend", lambda run, index, ledger: None)
            plans = repair(run, verify(run).damaged)

        def overtake(run: RunDirectory = run) -> None:
            now = run.index()
            run_planned(run, now, job_of(run, now), failing("row 9"))
            damage(run, "row 2", flipped)
            now = repair(run, verify(run).damaged)
            run_planned(run, now, job_of(run, now), failing("row 9"))

        files = Overtaken(step, overtake)
        late = RunDirectory(path, files)
        mend(late, plans, Ledger(late.root, files))
        if files.left > 0:
            break
        assert verify(run).faults == ()
        assert len(runs.check_images(path)) == 9
        shutil.rmtree(path)
    assert step > 5


@pytest.mark.parametrize("run", ["webdataset", "parquet"], indirect=True)
@pytest.mark.parametrize("num_first", [0, 1])
def test_a_mender_that_later_plans_overtake(run: RunDirectory, memory: Path, num_first: int) -> None:
    """At each of its steps later plans take all that it leaves of a part, at once or some rows first: it brings nothing
    back."""
    state = max(Ledger(run.root, run.files).states(run.index().shards), key=lambda one: len(one.settled))
    shard, (row, *rest) = state.shard, sorted(state.settled)
    index = append_rows(run, run.index(), {shard: frozenset([row])})
    for step in itertools.count(1):
        path = memory / f"{step}"
        shutil.copytree(run.path, path)

        def overtake(path: Path = path) -> None:
            other = RunDirectory(path)
            for rows in filter(None, (rest[:num_first], rest[num_first:])):
                plans = append_rows(other, other.index(), {shard: frozenset(rows)})
                mend(other, plans, Ledger(other.root, other.files))

        files = Overtaken(step, overtake)
        mend(RunDirectory(path, files), index, Ledger(path / ".run", files))
        if files.left > 0:
            break
        assert not (path / "data" / state.committed[0].part).exists()
        assert (path / ".run" / "mended").is_dir()
        shutil.rmtree(path)
    assert step > 15
