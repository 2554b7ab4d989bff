"""The settled run as a dataset: whole, in order, the same whenever it is written, and nothing else taken for it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen import epoch, runner, spill
from batchgen.appending import append_rows, failed, job_of
from batchgen.balance import Balance, take_balance
from batchgen.errors import BatchgenError, UsageError
from batchgen.filesystem import FileSystem
from batchgen.finalize import finalize
from batchgen.ledger import Ledger
from batchgen.marker import SUCCESS, is_finished
from batchgen.owners import this_process
from batchgen.progress import Now
from batchgen.publish import publish
from batchgen.rundir import RunDirectory
from batchgen.runner import Terms, run_job, run_planned
from batchgen.stopping import Stop
from batchgen.verify import verify
from tests.crashes import Crash, machine
from tests.damage import OTHERS, make_other
from tests.plans import finished, folder, pattern_job, write
from tests.shards import FORMATS

PROMPTS = [*(f"prompt {n}" for n in range(5)), "fault: raise", None]
MANIFEST = {
    "id": [f"row {n}" for n in range(len(PROMPTS))],
    "prompt": PROMPTS,
    "num_images": [1, 2, 1, 1, 1, 1, 1],
    "width": [64, 128, 64, 128, 64, 64, 64],
    "own": [f"own {n}" for n in range(len(PROMPTS))],
}
OPTIONS = ["model.variant=faults", "plan.on_bad_row=skip", "plan.shard_images=2", "plan.max_batch=2"]
MADE = [("row 0", 0), ("row 1", 0), ("row 1", 1), ("row 2", 0), ("row 3", 0), ("row 4", 0)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One finished run of each format; tests that change it take a copy."""
    found = {}
    for name in FORMATS:
        path = tmp_path_factory.mktemp(name)
        run, ending = finished(path, MANIFEST, overrides=[*OPTIONS, f"output.format={name}"])
        assert ending.exit_code == 3
        found[name] = run.path
    return found


@pytest.fixture(params=FORMATS)
def run(request: pytest.FixtureRequest, runs: dict[str, Path], tmp_path: Path) -> RunDirectory:
    shutil.copytree(runs[request.param], tmp_path / "run")
    return RunDirectory(tmp_path / "run")


def contents(run: RunDirectory) -> dict[str, str]:
    """SHA-256 of every file outside the bookkeeping."""
    files = [path for path in run.path.rglob("*") if path.is_file() and ".run" not in path.relative_to(run.path).parts]
    return {str(path.relative_to(run.path)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def ledger_of(run: RunDirectory) -> Ledger:
    return Ledger(run.root, run.files, this_process())


def committed(run: RunDirectory) -> list[Any]:
    return [one for state in ledger_of(run).states(run.index().shards) for one in state.committed]


def pairs(path: Path) -> list[tuple[str, int]]:
    return [(row["id"], row["image_number"]) for row in pq.read_table(path).to_pylist()]


def test_tables_are_in_the_order_of_the_manifest(run: RunDirectory) -> None:
    assert pairs(run.path / "metadata.parquet") == MADE
    failures = pq.read_table(run.path / "failures.parquet").to_pylist()
    assert [(row["id"], row["error"], row["own"]) for row in failures] == [("row 5", "RuntimeError", "own 5")]
    rejected = pq.read_table(run.path / "rejected.parquet").to_pylist()
    assert [(row["row"], row["id"], len(row["faults"])) for row in rejected] == [(6, "row 6", 1)]
    balance = take_balance(run.index(), ledger_of(run))
    assert balance.line() == "8 rows = 6 done + 1 failed + 1 rejected + 0 outstanding"
    marker = json.loads((run.path / SUCCESS).read_text())
    assert {name: marker[name] for name in ("plan", "done", "failed", "rejected")} == {
        "plan": 0, "done": 6, "failed": 1, "rejected": 1,
    }  # fmt: skip


def test_tables_stay_in_order_however_they_are_spilled(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    before = pq.read_table(run.path / "metadata.parquet")
    monkeypatch.setattr(spill, "PART_ROWS", 2)
    finalize(run)
    assert pq.read_table(run.path / "metadata.parquet").equals(before)


def test_doing_it_again_changes_no_byte(run: RunDirectory) -> None:
    before = contents(run)
    finalize(run)
    assert contents(run) == before
    for name in ("metadata.parquet", "README.md", SUCCESS, "failures.parquet", "rejected.parquet"):
        (run.path / name).unlink()
    finalize(run)
    assert {**contents(run), SUCCESS: ""} == {**before, SUCCESS: ""}
    assert not [name for name in os.listdir(run.root) if name.startswith("finalize-")]


def test_several_at_once_write_the_same(run: RunDirectory) -> None:
    before = contents(run)
    (run.path / SUCCESS).unlink()
    with ThreadPoolExecutor(4) as pool:
        balances = list(pool.map(lambda _: finalize(RunDirectory(run.path)), range(4)))
    assert len(set(balances)) == 1
    assert {**contents(run), SUCCESS: ""} == {**before, SUCCESS: ""}


def test_parts_are_published_by_several_at_once(run: RunDirectory) -> None:
    """Each may find at any call that another has just done it."""
    before, receipts = contents(run), committed(run)
    for _ in range(10):
        for receipt in receipts:
            if receipt.part:
                (run.data / receipt.part).rename(run.root / "work" / receipt.part)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: [publish(run, receipt) for receipt in receipts], range(4)))
        assert contents(run) == before


@dataclass
class StopAfter:
    """Asks a run to stop once so many rows are settled."""

    stop: Stop
    num: int
    said: list[str] = field(default_factory=list)

    def count(self, made: int, failed: int) -> None:
        self.num -= made + failed
        if self.num <= 0:
            self.stop.since = self.stop.clock()

    def say(self, text: str) -> None:
        self.said.append(text)

    def show(self, now: Now, who: str = "") -> None:
        pass


def stopped(path: Path, format_name: str, num: int) -> tuple[RunDirectory, list[Path], Balance]:
    """A run that was asked to stop after some rows."""
    files, stop = write(path / "manifest", MANIFEST), Stop()

    @contextmanager
    def progress(balance: Balance) -> Iterator[StopAfter]:
        yield StopAfter(stop, num)

    job = pattern_job(*OPTIONS, f"output.format={format_name}")
    ending = run_job(files, path / "run", job, Terms(stop=stop, progress=progress))
    return RunDirectory(path / "run"), files, ending.balance


@pytest.mark.parametrize("format_name", FORMATS)
def test_what_there_is_so_far_has_names_of_its_own(tmp_path: Path, format_name: str, runs: dict[str, Path]) -> None:
    run, files, balance = stopped(tmp_path, format_name, 3)
    assert 0 < balance.outstanding < 7
    with pytest.raises(UsageError, match=rf"{balance.outstanding} of 8 rows are outstanding; run the job to"):
        finalize(run)
    assert finalize(run, is_partial=True) == balance
    assert sorted(name for name in os.listdir(run.path) if not name.startswith(".")) == [
        "data", "failures.partial.parquet", "metadata.partial.parquet",
    ]  # fmt: skip
    found = pairs(run.path / "metadata.partial.parquet")
    assert len(found) == balance.done
    assert found == [pair for pair in MADE if pair in found]
    assert not (run.data / "metadata.parquet").exists()
    run_job(files, run.path, pattern_job(*OPTIONS, f"output.format={format_name}"))
    assert pairs(run.path / "metadata.parquet") == MADE
    assert hashes(run) == hashes(RunDirectory(runs[format_name]))


def hashes(run: RunDirectory) -> dict[tuple[str, int], str]:
    rows = pq.read_table(run.path / "metadata.parquet").to_pylist()
    assert len(rows) == len({(row["id"], row["image_number"]) for row in rows})
    return {(row["id"], row["image_number"]): row["pixel_sha256"] for row in rows}


def test_what_nothing_names_is_ignored_or_named(run: RunDirectory) -> None:
    before = contents(run)
    foreign = ["metadata.json", "00099-0.tar", "²-0", "notes.txt", "00000-0.bak", "00000-00.tar", "a-b"]
    for name in foreign:
        (run.data / name).write_text("foreign")
    (run.root / "receipts" / "notes.txt").write_text("foreign")
    (run.root / "claims" / "00099-0.abcd.tmp").write_text('{"token": "')
    (run.root / "receipts" / "00099-0.abcd.tmp").write_text('{"token": "')
    (run.root / "work" / "00099-0.tar").write_text("torn")
    finalize(run)
    kept = {name: digest for name, digest in contents(run).items() if name.removeprefix("data/") not in foreign}
    assert kept == before
    faults = {(fault.place, fault.what.split(":")[0]) for fault in verify(run).faults}
    assert faults == {(f"data/{name}", "foreign") for name in foreign if (run.data / name).exists()}
    assert faults >= {("data/metadata.json", "foreign"), ("data/²-0", "foreign"), ("data/00099-0.tar", "foreign")}
    # Nobody knows what these may yet become.
    assert (run.root / "receipts" / "00099-0.abcd.tmp").exists()
    assert (run.root / "work" / "00099-0.tar").exists()


@pytest.mark.parametrize("content", [b"", b"\x00\xff", b'{"token": "', b"[]"])
def test_a_receipt_that_cannot_be_read_settles_nothing(run: RunDirectory, content: bytes, tmp_path: Path) -> None:
    before = hashes(run)
    lost = committed(run)[0]
    format_name = run.index().job["output"]["format"]
    ledger_of(run).receipt_path(lost.shard, lost.epoch).write_bytes(content)
    balance = take_balance(run.index(), ledger_of(run))
    assert balance.outstanding == len(lost.ok) + len(lost.failed)
    finalize(run, is_partial=True)
    assert not (run.data / lost.part).exists()
    (run.path / SUCCESS).unlink()
    job = pattern_job(*OPTIONS, f"output.format={format_name}")
    ending = run_job(write(tmp_path / "manifest", MANIFEST), run.path, job)
    assert ending.balance.outstanding == 0
    assert hashes(run) == before
    assert verify(run).faults == ()


def test_a_part_that_is_missing_or_short_is_named(run: RunDirectory) -> None:
    receipt = committed(run)[0]
    path = run.data / receipt.part
    file = path if path.is_file() else sorted(path.iterdir())[0]
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(BatchgenError, match=rf"{file.name}, which a receipt names, has {len(whole) - 1} bytes"):
        finalize(run)
    file.unlink()
    with pytest.raises(BatchgenError, match=rf"{file.name}, which a receipt names, is missing; `batchgen verify`"):
        finalize(run)
    if path.is_dir():
        shutil.rmtree(path)
        with pytest.raises(BatchgenError, match=rf"{path.name}, which a receipt names, is missing"):
            finalize(run)
    shutil.rmtree(run.data)
    with pytest.raises(BatchgenError, match="data is missing; `batchgen verify --repair`"):
        finalize(run)


def test_a_row_table_that_is_missing_or_damaged_is_named(run: RunDirectory) -> None:
    receipt = committed(run)[0]
    path = ledger_of(run).table_path(receipt.shard, receipt.epoch)
    whole = path.read_bytes()
    for content in (b"", whole[: len(whole) // 2], whole[:4] + bytes(40) + whole[44:]):
        path.write_bytes(content)
        with pytest.raises(BatchgenError, match=rf"{path.name}, the row table of a committed part, cannot be read"):
            finalize(run)
    for byte in range(4, len(whole), 97):
        path.write_bytes(whole[:byte] + bytes([whole[byte] ^ 4]) + whole[byte + 1 :])
        with pytest.raises(BatchgenError, match=r"its sha256 is another one.*verify --repair"):
            finalize(run)
    path.unlink()
    with pytest.raises(BatchgenError, match="cannot be read"):
        finalize(run)


def test_sweeping_takes_what_no_slot_will_name_and_nothing_else(run: RunDirectory) -> None:
    before, ledger = contents(run), ledger_of(run)
    receipt = committed(run)[0]
    work = run.root / "work"
    tables = sorted(name for name in os.listdir(work) if name.endswith(".rows.parquet"))
    last = ledger.state(receipt.shard)
    assert ledger.claim(receipt.shard, last.epoch)
    assert ledger.abandon(receipt.shard, last.epoch)
    dead = f"{receipt.shard:05d}-{last.epoch}"
    (work / dead).mkdir()
    (work / dead / "a.png").write_text("half")
    (work / f"{dead}.tar").write_text("half")
    (work / f"{dead}.rows.parquet").write_text("half")
    (work / f"{receipt.shard:05d}-{last.epoch + 1}.tar").write_text("at work")
    (run.root / "claims" / f"{dead}.1234.tmp").write_text("lost its race")
    (run.root / "claims" / "00042-0.1234.tmp").write_text("on its way")
    (run.root / "claims" / "00042-0.5678.tmp").write_text("on its way")
    (run.plans / "0-lost").mkdir()
    finalize(run)
    assert contents(run) == before
    assert sorted(os.listdir(work)) == sorted([*tables, f"{receipt.shard:05d}-{last.epoch + 1}.tar"])
    assert sorted(name for name in os.listdir(run.root / "claims") if name.endswith(".tmp")) == [
        "00042-0.1234.tmp", "00042-0.5678.tmp",
    ]  # fmt: skip
    assert sorted(os.listdir(run.plans)) == sorted(["0.json", run.index().folder])


@pytest.mark.parametrize("kind", ["file", *OTHERS])
def test_what_was_published_of_an_abandoned_epoch_is_withdrawn(run: RunDirectory, kind: str) -> None:
    before, ledger = contents(run), ledger_of(run)
    receipt = committed(run)[0]
    epoch = ledger.state(receipt.shard).epoch
    assert ledger.abandon(receipt.shard, epoch)
    name = receipt.part.replace(f"-{receipt.epoch}", f"-{epoch}")
    if kind == "file":
        (run.data / name).write_text("never committed")
    else:
        make_other(run.data / name, kind)
    finalize(run)
    assert contents(run) == before
    (moved,) = os.listdir(run.root / "withdrawn")
    assert moved.startswith(name)


def test_a_run_of_bad_rows_alone_is_finished(tmp_path: Path) -> None:
    table = {"prompt": pa.array([None, None], pa.string()), "own": [1, 2]}
    run, ending = finished(tmp_path, table, overrides=["plan.on_bad_row=skip"])
    assert (ending.exit_code, ending.balance.line()) == (3, "2 rows = 0 done + 0 failed + 2 rejected + 0 outstanding")
    assert pq.read_table(run.path / "metadata.parquet").num_rows == 0
    assert pq.read_table(run.path / "rejected.parquet").num_rows == 2
    assert verify(run).faults == ()


SMALL = {"id": ["a", "b", "c"], "prompt": ["one", "two", "three"], "width": [128, 64, 64]}
SMALL_OPTIONS = ("plan.shard_images=1", "plan.max_batch=1", "output.encoders=1")


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_run_resumes_from_whatever_change_the_machine_died_at(format_name: str) -> None:
    """At no moment is more taken for done than is durable, and the same command always ends with the same images."""
    job = pattern_job(*SMALL_OPTIONS, f"output.format={format_name}")
    with folder() as path:
        files = write(path / "manifest", SMALL)
        with machine() as undisturbed:
            run_job(files, path / "whole", job)
        whole = hashes(RunDirectory(path / "whole"))
        for number in range(0, undisturbed.num_changes, 5):
            run = RunDirectory(path / f"{number}")
            with machine(number, is_after=number % 2 == 0), pytest.raises(Crash):
                run_job(files, run.path, job)
            if run.files.stat(run.plans / "0.json") is not None:
                finalize(run, is_partial=True)
                made = pq.read_table(run.path / "metadata.partial.parquet").to_pylist()
                assert {row["pixel_sha256"] for row in made} <= set(whole.values())
                assert verify(run).num_images == len(made)
            ending = run_job(files, run.path, job)
            assert (ending.exit_code, ending.balance.done) == (0, 3)
            assert hashes(run) == whole
            assert verify(run).faults == ()


def test_claims_are_told_with_their_owners(tmp_path: Path) -> None:
    run, _, balance = stopped(tmp_path, "files", 1)
    index, ledger = run.index(), ledger_of(run)
    open_shards = [state.shard for state in ledger.states(index.shards) if not state.settled]
    afar = Ledger(run.root, run.files, replace(this_process(), token="afar", boot_id="another", host="afar"))
    dead = Ledger(run.root, run.files, replace(this_process(), token="dead", start_time="0"))
    for one, shard in zip((ledger, afar, dead), open_shards, strict=False):
        assert one.claim(shard, ledger.state(shard).epoch)
    for onlooker in (ledger, Ledger(run.root, run.files)):
        seen = take_balance(index, onlooker)
        assert [(one.host, one.pid == os.getpid()) for one in seen.holders] == [
            (this_process().host, True), ("afar", True),
        ], "a process that is known to be gone holds nothing"  # fmt: skip
        assert all(-5 < one.heartbeat_age_s < 60 for one in seen.holders)
        assert seen.outstanding == balance.outstanding
        assert seen.line().endswith(f"{seen.outstanding} outstanding ({seen.held} held by workers)")
    old = time.time() - 5000
    os.utime(ledger.claim_path(open_shards[1], ledger.state(open_shards[1]).epoch), (old, old))
    living = take_balance(index, ledger, 600.0)
    assert [one.shard for one in living.holders] == [f"{open_shards[0]:05d}-{ledger.state(open_shards[0]).epoch}"]
    ledger.claim_path(open_shards[1], ledger.state(open_shards[1]).epoch).write_bytes(b"torn")
    assert "unknown (the claim cannot be read)" in [one.host for one in take_balance(index, ledger).holders]


def test_a_receipt_that_is_damaged_after_the_end_costs_its_rows_another_making(
    run: RunDirectory, tmp_path: Path
) -> None:
    """Case 24 after `_SUCCESS`: the part is withdrawn, its rows are made again, and each image is there once."""
    before = pq.read_table(run.path / "metadata.parquet", columns=["id", "image_number", "pixel_sha256"])
    ledger = ledger_of(run)
    (victim, *_) = (receipt for receipt in ledger.committed(run.index().shards) if receipt.part)
    ledger.receipt_path(victim.shard, victim.epoch).write_bytes(b"")
    job = pattern_job(*OPTIONS, f"output.format={run.index().output_format}")
    ending = run_job(write(tmp_path / "manifest", MANIFEST), run.path, job)
    assert ending.exit_code == 3
    assert ending.balance.outstanding == 0
    assert victim.part not in os.listdir(run.data)
    assert pq.read_table(run.path / "metadata.parquet", columns=before.column_names).equals(before)
    assert verify(run).faults == ()
    assert (run.path / SUCCESS).exists()


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_table_that_is_damaged_after_the_end_is_found_and_written_again(
    run: RunDirectory, tmp_path: Path, *, is_gone: bool
) -> None:
    before = contents(run)
    names = [
        name
        for name in ("metadata.parquet", "data/metadata.parquet", "README.md", "rejected.parquet")
        if name in before
    ]
    for name in names:
        (run.path / name).unlink()
        if not is_gone:
            (run.path / name).write_bytes(b"garbage")
    assert {fault.place: fault.what.split(":")[0] for fault in verify(run).faults} == dict.fromkeys(
        names, "missing" if is_gone else "altered"
    )
    assert not is_finished(run)
    job = pattern_job(*OPTIONS, f"output.format={run.index().output_format}")
    assert run_job(write(tmp_path / "manifest", MANIFEST), run.path, job).exit_code == 3
    assert contents(run) == before
    assert verify(run).faults == ()
    assert is_finished(run)


def test_a_part_that_is_lost_while_it_is_published(tmp_path: Path) -> None:
    """Its receipt is read again where there is no row in the one at hand."""

    class Lossy(FileSystem):
        def publish_file(self, source: Path, target: Path) -> None:
            self.remove(source)
            super().publish_file(source, target)

    run = RunDirectory(tmp_path / "run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(epoch, "publish", lambda run, receipt: None)
        patch.setattr(runner, "finalize", lambda run, plan: None)
        run_job(write(tmp_path / "manifest", {"prompt": ["a"]}), run.path, pattern_job("output.format=webdataset"))
    with pytest.raises(BatchgenError, match=r"tar, which a receipt names, is missing, and so is what it is made of"):
        finalize(RunDirectory(run.path, Lossy()))


def test_only_a_worker_reads_the_tables_of_a_finished_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an append, to know whether it is to finalize; who asks for the status does not."""
    run, _ = finished(tmp_path, MANIFEST, overrides=OPTIONS)
    index = append_rows(run, run.index(), failed(run, run.index()))
    run_planned(run, index, job_of(run, index))
    digested: list[Path] = []
    real = FileSystem.digest
    monkeypatch.setattr(FileSystem, "digest", lambda self, path: digested.append(path) or real(self, path))
    assert is_finished(run)
    assert digested == []
    assert is_finished(run, reads_all=True)
    assert run.path / "metadata.parquet" in digested
    with (run.path / "metadata.parquet").open("rb+") as file:
        file.write(b"XXXX")
    assert is_finished(run)
    assert not is_finished(run, reads_all=True)


def test_nothing_is_a_run_directory_without_a_plan(tmp_path: Path) -> None:
    for call in (finalize, verify):
        with pytest.raises(UsageError, match=r"is no run directory \(it has no plan, .run/plan/0.json\)"):
            call(RunDirectory(tmp_path))
    assert SUCCESS not in os.listdir(tmp_path)


def test_another_run_in_a_folder_of_the_same_name_is_read_afresh(tmp_path: Path) -> None:
    """`datasets` keeps what it has read under the folder's name."""
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        run, _ = finished(tmp_path / str(number), {"id": ["a"], "prompt": ["a fox"], "seed": [number]})
        read = datasets.load_dataset(str(run.path), split="train", cache_dir=str(tmp_path / "cache"))
        assert read["seed"] == [str(number)]
