"""Several workers on one run directory, padded batches, foreign files, and rows that fail."""

from __future__ import annotations

import importlib
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchgen.job import load_job
from batchgen.ledger import Ledger
from batchgen.rundir import RunDirectory, open_run
from tests import runs, tiny

ONE_BY_ONE = ("--set", "plan.batch_sizes=[1]", "--set", "plan.shard_images=1")
FAULTS = ("--set", "model.variant=faults")
DONE = "{0} rows = {0} done + 0 failed + 0 rejected + 0 outstanding"


def check_union(out: Path, num: int) -> None:
    """Every row is there exactly once, in the table and in the receipts."""
    lines = runs.check_images(out)
    assert [line["id"] for line in lines] == [f"row-{n}" for n in range(num)]
    run = RunDirectory(out)
    index = run.index()
    for state in Ledger(run.root, run.files).states(index.shards):
        named = [row for receipt in state.committed for row in (*receipt.ok, *receipt.failed)]
        assert sorted(named) == list(range(index.shard_rows[state.shard]))


@pytest.mark.parametrize("num", range(1, 13))
def test_case_18_ten_rows_by_some_workers(tmp_path: Path, num: int) -> None:
    """All start at once in a new directory: whoever plans, there is one plan, and every worker sees the end."""
    source = runs.prompts(tmp_path / "m.parquet", 10)
    workers = [runs.start(source, tmp_path / "out", *ONE_BY_ONE) for _ in range(num)]
    ended = [worker.wait() for worker in workers]
    assert [(one.code, one.closing_line) for one in ended] == [(0, DONE.format(10))] * num, ended
    check_union(tmp_path / "out", 10)
    assert len(list((tmp_path / "out" / ".run" / "plan").iterdir())) == 2


def test_case_18_a_planner_that_comes_too_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it writes its plan, another one's is worked off and finalized, and its own folder swept."""
    source, out = runs.prompts(tmp_path / "m.parquet", 10), tmp_path / "out"
    plan = importlib.import_module("batchgen.drafts")
    own = plan.plan_rows
    others: list[runs.Ended] = []

    def late(*told: Any) -> Iterator[Any]:
        monkeypatch.setattr(plan, "plan_rows", own)
        others.append(runs.start(source, out, *ONE_BY_ONE).wait())
        return own(*told)

    monkeypatch.setattr(plan, "plan_rows", late)
    ended = runs.run(source, out, *ONE_BY_ONE)
    assert [(one.code, one.closing_line) for one in (*others, ended)] == [(0, DONE.format(10))] * 2, ended.err
    check_union(out, 10)
    assert len(list((out / ".run" / "plan").iterdir())) == 2


def test_case_18_workers_that_do_not_wait(tmp_path: Path) -> None:
    """They exit with 0, done or not, and by then or later every row is made."""
    source = runs.prompts(tmp_path / "m.parquet", 10)
    workers = [runs.start(source, tmp_path / "out", *ONE_BY_ONE, "--no-wait") for _ in range(6)]
    assert {worker.wait().code for worker in workers} == {0}
    assert runs.batchgen("status", tmp_path / "out").out.splitlines()[0] == DONE.format(10)
    check_union(tmp_path / "out", 10)


def test_case_18_idle_workers_say_who_holds_the_rest(tmp_path: Path) -> None:
    rows = [{"id": f"row-{n}", "prompt": "fault: slow 600"} for n in range(10)]
    source, out = runs.manifest(tmp_path / "m.parquet", rows), tmp_path / "out"
    options = ("--set", "plan.shard_images=5", "--set", "plan.batch_sizes=[5]", *FAULTS)
    holders = [runs.start(source, out, *options, "--grace", "5.5") for _ in range(2)]
    while len(list(out.glob(".run/claims/*-0"))) < 2:
        assert all(holder.is_running for holder in holders)
        time.sleep(0.01)
    for _ in range(3):
        ended = runs.run(source, out, *options, "--no-wait")
        assert ended.code == 0
        assert ended.closing_line == "10 rows = 0 done + 0 failed + 0 rejected + 10 outstanding (10 held by workers)"
        said = [line.split(" on ")[0] for line in ended.err.splitlines() if " held by process" in line]
        wanted = [f"5 rows of shard {shard} held by process" for shard in ("00000-0", "00001-0")]
        assert [line.rsplit(" ", 1)[0] for line in said] == wanted
        assert {int(line.rsplit(" ", 1)[1]) for line in said} == {holder.pid for holder in holders}
    for holder in holders:
        holder.signal(signal.SIGTERM)
    assert [holder.wait().code for holder in holders] == [75, 75]


def test_a_worker_joins_one_that_is_at_work(tmp_path: Path) -> None:
    rows = [{"id": f"row-{n}", "prompt": "fault: slow 0.1"} for n in range(10)]
    source = runs.manifest(tmp_path / "m.parquet", rows)
    first = runs.start(source, tmp_path / "out", *ONE_BY_ONE, *FAULTS)
    while not list((tmp_path / "out").glob(".run/receipts/*")):
        assert first.is_running
    second = runs.start(source, tmp_path / "out", *ONE_BY_ONE, *FAULTS)
    assert [first.wait().code, second.wait().code] == [0, 0]
    run = RunDirectory(tmp_path / "out")
    by = {state.receipts[0].by.pid for state in Ledger(run.root, run.files).states(run.index().shards)}
    assert by == {first.pid, second.pid}
    check_union(tmp_path / "out", 10)


@pytest.mark.parametrize("output", runs.FORMATS)
@pytest.mark.parametrize("sizes", ["[1, 2, 4, 8]", "[8]"])
def test_case_19_seventeen_rows(tmp_path: Path, sizes: str, output: str) -> None:
    """A padded slot is neither saved nor counted."""
    source = runs.prompts(tmp_path / "m.parquet", 17)
    options = ("--set", f"plan.batch_sizes={sizes}", "--format", output)
    planned = json.loads(runs.batchgen("plan", source, "--model", "pattern", *options, "--json").out)
    assert (planned["images"], planned["padded"]) == (17, 7 if sizes == "[8]" else 0)
    ended = runs.run(source, tmp_path / "out", *options)
    assert ended.closing_line == DONE.format(17)
    assert len(runs.images(tmp_path / "out")) == 17
    check_union(tmp_path / "out", 17)


def test_case_19_padding_of_a_network(tmp_path: Path) -> None:
    source = runs.prompts(tmp_path / "m.parquet", 5)
    options = ("--set", "plan.batch_sizes=[4]", "--set", "sampling.steps=1", "--set", "engine.device=cpu")
    ended = runs.run(source, tmp_path / "out", *options, model=tiny.folder("sd1"))
    assert ended.closing_line == DONE.format(5)
    lines = runs.check_images(tmp_path / "out", is_pattern=False)
    assert [line["batch_size"] for line in lines] == [4] * 5
    assert len({line["pixel_sha256"] for line in lines}) == 5


@pytest.mark.parametrize("output", runs.FORMATS)
def test_case_24_foreign_and_torn_files(tmp_path: Path, output: str) -> None:
    """In a run directory that is planned and not begun: ignored, or named, and never taken for done."""
    source, out = runs.prompts(tmp_path / "m.parquet", 6), tmp_path / "out"
    overrides = ["model.path=pattern", f"output.format={output}", "plan.batch_sizes=[1]", "plan.shard_images=1"]
    run = RunDirectory(out)
    open_run(run, [source], load_job(overrides=overrides))
    Ledger(run.root, run.files).make_folders()
    (out / "data" / "metadata.json").write_text('{"id": "row-0"}')
    (run.root / "receipts" / "00000-0").touch()
    (run.root / "receipts" / "00001-0.0a0b.tmp").write_text('{"kind": "committed"}')
    (run.root / "claims" / "00002-0.0a0b.tmp").write_text("{")
    (run.root / "work" / "00003-0").mkdir()
    (run.root / "work" / "00003-0" / "row-3.png").write_bytes(b"half")
    (run.root / "work" / "00004-0.tar").write_bytes(b"half")
    (run.root / "work" / "00004-0.parquet").write_bytes(b"half")
    (run.root / "plan" / "0.json.0a0b.tmp").write_text("{")
    assert runs.batchgen("status", out).out.startswith("6 rows = 0 done + 0 failed + 0 rejected + 6 outstanding")
    options = [word for one in overrides[1:] for word in ("--set", one)]
    ended = runs.run(source, out, *options)
    assert (ended.code, ended.closing_line) == (0, DONE.format(6)), ended.err
    (out / "data" / "metadata.json").rename(tmp_path / "metadata.json")
    lines = runs.check_images(out)
    assert [line["id"] for line in lines] == [f"row-{n}" for n in range(6)]
    (tmp_path / "metadata.json").rename(out / "data" / "metadata.json")
    verified = runs.batchgen("verify", out)
    assert verified.code == 3
    assert verified.out.splitlines() == [
        "data/metadata.json: foreign: no committed receipt names it",
        "6 images checked, 1 fault: 1 foreign",
    ]


class TestCase27:
    """One row of eight goes wrong."""

    def source(self, folder: Path, prompt: str) -> Path:
        rows = [{"id": f"row-{n}", "prompt": prompt if n == 3 else f"prompt number {n}"} for n in range(8)]
        return runs.manifest(folder / "m.parquet", rows)

    def check_seven(self, out: Path, error: str, message: str) -> None:
        made = runs.check_images(out)
        assert [line["id"] for line in made] == [f"row-{n}" for n in range(8) if n != 3]
        (failed,) = pq.read_table(out / "failures.parquet").to_pylist()
        assert (failed["id"], failed["error"]) == ("row-3", error)
        assert message in failed["message"]
        assert failed["prompt"].startswith("fault:")

    def test_raises_once(self, tmp_path: Path) -> None:
        ended = runs.run(self.source(tmp_path, "fault: raise once"), tmp_path / "out", *FAULTS)
        assert (ended.code, ended.closing_line) == (0, DONE.format(8))
        made = runs.check_images(tmp_path / "out")
        assert {line["id"]: line["retries"] for line in made}["row-3"] == 1

    @pytest.mark.parametrize(
        ("prompt", "error", "message"),
        [
            ("fault: raise", "RuntimeError", "row 'row-3' raises, as its prompt says"),
            ("fault: nan", "NotFinite", "the latents hold NaN"),
            ("fault: flat", "Constant", "every pixel is the same"),
            ("fault: no such fault", "RowError", "names no known fault"),
        ],
    )
    @pytest.mark.parametrize("output", runs.FORMATS)
    def test_fails_always(self, tmp_path: Path, output: str, prompt: str, error: str, message: str) -> None:
        source = self.source(tmp_path, prompt)
        ended = runs.run(source, tmp_path / "out", *FAULTS, "--format", output)
        assert ended.code == 3, ended.err
        assert ended.closing_line == "8 rows = 7 done + 1 failed + 0 rejected + 0 outstanding"
        self.check_seven(tmp_path / "out", error, message)
        again = runs.run(source, tmp_path / "out", *FAULTS, "--format", output)
        assert (again.code, again.closing_line) == (3, ended.closing_line)

    @pytest.mark.parametrize("max_deaths", [1, 3])
    @pytest.mark.parametrize("sizes", ["[1]", "[8]"])
    def test_kills_its_process_each_time(self, tmp_path: Path, max_deaths: int, sizes: str) -> None:
        """The same command again and again comes to the same end."""
        source = self.source(tmp_path, "fault: exit")
        options = (*FAULTS, "--set", f"run.max_deaths={max_deaths}", "--set", f"plan.batch_sizes={sizes}")
        codes = []
        for _ in range(2 * max_deaths + 1):
            ended = runs.start(source, tmp_path / "out", *options).wait()
            codes.append(ended.code)
            if ended.code != -9:
                break
        assert codes == [-9] * 2 * max_deaths + [3], ended.err
        assert ended.closing_line == "8 rows = 7 done + 1 failed + 0 rejected + 0 outstanding"
        self.check_seven(tmp_path / "out", "ProcessDied", f"{max_deaths} processes in a row ended")
