"""Plans that are appended: grown manifests and failed rows, beside other workers and other appends."""

from __future__ import annotations

import itertools
import shutil
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen import finalize as finalizing
from batchgen import identity, known, planned, survey
from batchgen.appending import append_rows, extend, failed, job_of
from batchgen.errors import UsageError
from batchgen.finalize import finalize
from batchgen.ledger import Ledger
from batchgen.marker import SUCCESS, is_finished
from batchgen.records import Batch, Failure, Outcome
from batchgen.rundir import RunDirectory
from batchgen.runner import Terms, run_job, run_planned, work
from batchgen.verify import verify
from tests import runs, tiny
from tests.crashes import Crash, machine
from tests.overtaking import Overtaken
from tests.plans import folder, pattern_job, write
from tests.shards import FORMATS
from tests.test_worker import Scripted, image

OPTIONS = ("plan.batch_sizes=[1, 2]", "plan.shard_images=4", "output.encoders=1")
TEN = {"id": [f"row {n}" for n in range(10)], "prompt": [f"prompt {n}" for n in range(10)]}


def failing(*ids: str) -> Terms:
    """With a model that cannot make these rows."""

    def behave(batch: Batch) -> list[Outcome]:
        return [Failure(row, "NotFinite", "NaN") if row.id in ids else image(batch, row) for row in batch.rows]

    return Terms(workforce=partial(work, opener=lambda job, context: Scripted(behave)))


def ids(run: RunDirectory, table: str = "metadata") -> list[str]:
    return [f"{line['id']}" for line in pq.read_table(run.path / f"{table}.parquet").to_pylist()]


def bookkeeping(run: RunDirectory) -> dict[Path, bytes]:
    """Plans and receipts, which are never edited."""
    folders = (run.root / "receipts", run.plans)
    return {path: path.read_bytes() for one in folders for path in one.rglob("*") if path.is_file()}


def grown(columns: dict[str, Any], to: int) -> dict[str, Any]:
    return {"id": [f"row {n}" for n in range(to)], "prompt": [f"prompt {n}" for n in range(to)]} | columns


@pytest.fixture
def memory() -> Iterator[Path]:
    with folder() as path:
        yield path


# Failed rows


@pytest.mark.parametrize("output", FORMATS)
def test_failed_rows_are_tried_again_and_no_others(tmp_path: Path, output: str) -> None:
    job = pattern_job(*OPTIONS, f"output.format={output}")
    manifest = write(tmp_path / "manifest", TEN)
    run = RunDirectory(tmp_path / "run")
    ending = run_job(manifest, run.path, job, failing("row 3", "row 7"))
    assert (ending.exit_code, ending.balance.failed) == (3, 2)
    before, files = bookkeeping(run), runs.images(run.path)
    for cured, code in (("row 7", 3), ("", 0)):
        index = run.index()
        plans = append_rows(run, index, failed(run, index))
        assert not (run.path / SUCCESS).exists()
        ending = run_planned(run, plans, job_of(run, plans), failing(cured))
        assert (ending.exit_code, ending.balance.failed) == (code, int(bool(cured)))
        assert ids(run, "failures") == [cured] * bool(cured)
        assert ids(run) == [one for one in TEN["id"] if one != cured]
        assert before.items() <= bookkeeping(run).items()
        assert files.items() <= runs.images(run.path).items()
        assert is_finished(run)
        assert verify(run).faults == ()
    assert run.index().number == 2
    read = datasets.load_dataset(str(run.path), split="train", cache_dir=str(tmp_path / "cache"))
    assert read.num_rows == 10
    assert run_job(manifest, run.path, job).exit_code == 0
    undisturbed = RunDirectory(tmp_path / "undisturbed")
    run_job(manifest, undisturbed.path, job)
    assert runs.pixels(run.path) == runs.pixels(undisturbed.path)


def test_case_27_the_command_tries_failed_rows_again(tmp_path: Path) -> None:
    rows = [{"id": f"row-{n}", "prompt": "fault: raise" if n == 3 else "a fox"} for n in range(8)]
    out = tmp_path / "out"
    source = runs.manifest(tmp_path / "m.parquet", rows)
    assert runs.run(source, out, "--set", "model.variant=faults").code == 3
    before = {path: path.stat().st_mtime_ns for path in out.glob("data/*/*.png")}
    planned = runs.batchgen("retry", out, "--plan-only")
    assert (planned.code, planned.closing_line) == (0, "8 rows = 7 done + 0 failed + 0 rejected + 1 outstanding")
    assert "the command that began the run makes what is outstanding" in planned.err
    ended = runs.run(source, out, "--set", "model.variant=faults")
    assert (ended.code, ended.closing_line) == (3, "8 rows = 7 done + 1 failed + 0 rejected + 0 outstanding")
    ended = runs.batchgen("retry", out)
    assert (ended.code, ended.closing_line) == (3, "8 rows = 7 done + 1 failed + 0 rejected + 0 outstanding")
    assert {path: path.stat().st_mtime_ns for path in out.glob("data/*/*.png")} == before
    assert len(pq.read_table(out / "failures.parquet")) == 1


def test_nothing_that_is_still_to_be_made_is_taken_over(memory: Path) -> None:
    run = RunDirectory(memory / "run")
    plans = extend(run, write(memory / "manifest", TEN), pattern_job(*OPTIONS))
    assert failed(run, plans) == {}
    with pytest.raises(UsageError, match=r"2 rows of shard 0 are still to be made; run the job to its end first"):
        append_rows(run, plans, {0: frozenset({0, 2})})
    assert append_rows(run, plans, {}) == plans


def test_a_model_that_has_changed_is_not_used_for_a_retry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDirectory(tmp_path / "run")
    run_job(write(tmp_path / "manifest", TEN), run.path, pattern_job(*OPTIONS), failing("row 3"))
    monkeypatch.setattr("batchgen.rundir.identity", lambda model, **options: {"unet": "another"})
    with pytest.raises(UsageError, match=r"model.file:unet: nothing there, another now"):
        job_of(run, run.index())


# A grown manifest


def test_a_plan_says_nothing_of_groups_without_new_rows(tmp_path: Path) -> None:
    """With a model whose memory is reckoned, by the largest batch of each group."""
    columns = {"id": ["a", "b"], "prompt": ["a fox"] * 2, "width": [64, 96], "steps": [1, 1]}
    source, model = runs.manifest(tmp_path / "m.parquet", columns), tiny.folder("sd1")
    assert runs.run(source, tmp_path / "out", model=model).code == 0
    more = {"id": ["c"], "prompt": ["a cat"], "width": [64], "steps": [1]}
    runs.manifest(source, {name: [*values, *more[name]] for name, values in columns.items()})
    ended = runs.run(source, tmp_path / "out", "--extend", model=model)
    assert ended.code == 0, ended.err
    assert "1 image, 1 batch, 1 shard, 1 group;" in ended.err
    assert "64×64" in ended.err
    assert "96×64" not in ended.err


@pytest.mark.parametrize("output", FORMATS)
@pytest.mark.parametrize("has_ids", [True, False])
def test_case_26_done_rows_stay_done_when_the_manifest_grew(tmp_path: Path, output: str, *, has_ids: bool) -> None:
    """New rows may stand anywhere; they have the images that one run over all of them makes."""
    job = pattern_job(*OPTIONS, f"output.format={output}")
    columns = {"prompt": [f"prompt {n % 4}" for n in range(15)], "own": list(range(15))}
    if has_ids:
        columns["id"] = [f"row {n}" for n in range(15)]
    later = {name: [*values[10:], *values[:10]] for name, values in columns.items()}
    run, undisturbed = RunDirectory(tmp_path / "run"), RunDirectory(tmp_path / "undisturbed")
    first = write(tmp_path / "first", {name: values[:10] for name, values in columns.items()})
    run_job(first, run.path, job)
    before, files = bookkeeping(run), runs.images(run.path)
    manifest = write(tmp_path / "manifest", later)
    with pytest.raises(UsageError, match=r"rows added: 5 .*\n.*--extend"):
        run_job(manifest, run.path, job)
    ending = run_job(manifest, run.path, job, may_grow=True)
    assert (ending.exit_code, ending.balance.done) == (0, 15)
    assert before.items() <= bookkeeping(run).items()
    assert files.items() <= runs.images(run.path).items()
    assert len(runs.check_images(run.path)) == 15
    run_job(manifest, undisturbed.path, job)
    assert runs.pixels(run.path) == runs.pixels(undisturbed.path)
    assert [line["own"] for line in runs.metadata(run.path)] == list(range(15))
    for may_grow in (False, True):
        assert run_job(manifest, run.path, job, may_grow=may_grow).exit_code == 0
    assert run.index().number == 1
    with pytest.raises(UsageError, match="rows removed: 5"):
        run_job(first, run.path, job, may_grow=True)


def test_case_26_a_changed_prompt_under_a_known_id_is_refused(tmp_path: Path) -> None:
    run, job = RunDirectory(tmp_path / "run"), pattern_job(*OPTIONS)
    run_job(write(tmp_path / "manifest", TEN), run.path, job)
    columns = grown({}, 15)
    columns["prompt"][3] = "another one"
    before = bookkeeping(run)
    with pytest.raises(UsageError, match=r"row 'row 3': prompt 'prompt 3' there, 'another one' now"):
        run_job(write(tmp_path / "manifest", columns), run.path, job, may_grow=True)
    with pytest.raises(UsageError, match=r"sampling.seed: 0 there, 1 now"):
        run_job(
            write(tmp_path / "manifest", grown({}, 15)),
            run.path,
            pattern_job(*OPTIONS, "sampling.seed=1"),
            may_grow=True,
        )
    assert bookkeeping(run) == before


@pytest.mark.parametrize(("before", "after"), [([5, None], [None, None]), ([5, None], [6, None]), ([None, 5], [1, 5])])
def test_a_changed_seed_is_a_changed_row(tmp_path: Path, before: list[int | None], after: list[int | None]) -> None:
    run, job = RunDirectory(tmp_path / "run"), pattern_job(*OPTIONS)
    columns = {"id": ["a", "b"], "prompt": ["x", "y"]}
    run_job(write(tmp_path / "m", pa.table({**columns, "seed": pa.array(before, pa.uint64())})), run.path, job)
    with pytest.raises(UsageError, match="rows changed: 1"):
        run_job(
            write(tmp_path / "m", pa.table({**columns, "seed": pa.array(after, pa.uint64())})),
            run.path,
            job,
            may_grow=True,
        )


def test_a_manifest_that_has_grown_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, num_read = tmp_path / "out", [0]
    assert runs.run(runs.prompts(tmp_path / "m.parquet", 3), out).code == 0

    def counted(*arguments: Any) -> Any:
        num_read[0] += 1
        return real(*arguments)

    real = planned.survey
    monkeypatch.setattr(planned, "survey", counted)
    assert runs.run(runs.prompts(tmp_path / "m.parquet", 5), out, "--extend").code == 0
    assert num_read == [1]
    assert len(runs.check_images(out)) == 5


def test_more_images_of_a_row_are_new_rows(tmp_path: Path) -> None:
    run, job = RunDirectory(tmp_path / "run"), pattern_job(*OPTIONS)
    run_job(write(tmp_path / "m", {"id": ["a", "b"], "prompt": ["x", "y"], "num_images": [1, 2]}), run.path, job)
    before = runs.pixels(run.path)
    manifest = write(tmp_path / "m", {"id": ["a", "b"], "prompt": ["x", "y"], "num_images": [3, 2]})
    assert run_job(manifest, run.path, job, may_grow=True).balance.done == 5
    assert before.items() <= runs.pixels(run.path).items()
    assert len(runs.check_images(run.path)) == 5


def test_rejected_rows_of_a_grown_manifest_are_those_of_the_whole(tmp_path: Path) -> None:
    run, job = RunDirectory(tmp_path / "run"), pattern_job(*OPTIONS, "plan.on_bad_row=skip")
    run_job(write(tmp_path / "m", {"id": ["a", "b"], "prompt": ["x", None]}), run.path, job)
    manifest = write(tmp_path / "m", {"id": ["a", "b", "c"], "prompt": ["x", None, None]})
    ending = run_job(manifest, run.path, job, may_grow=True)
    assert (ending.balance.done, ending.balance.rejected) == (1, 2)
    assert ids(run, "rejected") == ["b", "c"]
    assert run_job(manifest, run.path, job).balance.rejected == 2


def test_other_columns_of_its_own_are_refused(tmp_path: Path) -> None:
    run, job = RunDirectory(tmp_path / "run"), pattern_job(*OPTIONS)
    run_job(write(tmp_path / "m", TEN | {"own": list(range(10))}), run.path, job)
    columns = grown({"own": pa.array(range(12), pa.int32())}, 12)
    with pytest.raises(UsageError, match=r"--extend takes more rows of the same columns.*own \(int64\).*own \(int32\)"):
        run_job(write(tmp_path / "m", pa.table(columns)), run.path, job, may_grow=True)


def test_seeds_that_are_planned_stay_when_new_rows_meet_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With only 64 derived seeds, new rows of one prompt meet old ones all the time."""
    derive = identity.derived_seeds

    def few(*arguments: Any) -> Any:
        return derive(*arguments) & np.uint64(63)

    for module in (identity, known, survey):
        monkeypatch.setattr(module, "derived_seeds", few)
    run, job = RunDirectory(tmp_path / "run"), pattern_job(*OPTIONS)
    for number, count in enumerate((20, 30, 50)):
        columns = {"id": [f"{n}" for n in range(count)], "prompt": ["one and the same"] * count}
        manifest = write(tmp_path / "m", columns)
        before = {line["id"]: line["seed"] for line in runs.metadata(run.path)} if number else {}
        assert run_job(manifest, run.path, job, may_grow=True).balance.done == count
        seeds = {line["id"]: line["seed"] for line in runs.metadata(run.path)}
        assert before.items() <= seeds.items()
        assert len(set(seeds.values())) == count
    assert run_job(manifest, run.path, job).exit_code == 0
    assert run.index().number == 2


# Others at the same time


def test_two_appends_at_once_make_each_row_once(memory: Path) -> None:
    """Overtaken at each of its steps by another that does the same, and works it off."""
    job = pattern_job(*OPTIONS)
    settled = RunDirectory(memory / "settled")
    run_job(write(memory / "manifest", TEN), settled.path, job, failing("row 3", "row 7"))
    for step in itertools.count(1, 3):
        path = memory / f"{step}"
        shutil.copytree(settled.path, path)

        def overtake(path: Path = path) -> None:
            other = RunDirectory(path)
            plans = append_rows(other, other.index(), failed(other, other.index()))
            run_planned(other, plans, job, failing("row 7"))

        files = Overtaken(step, overtake)
        run = RunDirectory(path, files)
        index = run.index()
        plans = append_rows(run, index, failed(run, index))
        is_overtaken = files.left <= 0
        ending = run_planned(RunDirectory(path), plans, job)
        assert ending.balance.outstanding == 0
        assert len(runs.metadata(path)) + ending.balance.failed == 10
        assert verify(RunDirectory(path)).faults == ()
        assert is_finished(RunDirectory(path))
        shutil.rmtree(path)
        if not is_overtaken:
            break
    assert step > 15


def test_an_append_that_races_with_another_kind(memory: Path) -> None:
    """A retry that an extension overtakes at each of its steps, and the other way round: both come."""
    job = pattern_job(*OPTIONS)
    settled = RunDirectory(memory / "settled")
    run_job(write(memory / "manifest", TEN), settled.path, job, failing("row 3"))
    manifest = write(memory / "later", grown({}, 13))

    def retry(run: RunDirectory) -> None:
        append_rows(run, run.index(), failed(run, run.index()))

    def more(run: RunDirectory) -> None:
        extend(run, manifest, job)

    for one, other in ((retry, more), (more, retry)):
        for step in itertools.count(1, 5):
            path = memory / f"{one.__name__}-{step}"
            shutil.copytree(settled.path, path)
            files = Overtaken(step, lambda path=path, other=other: other(RunDirectory(path)))  # type: ignore[misc]
            one(RunDirectory(path, files))
            is_overtaken = files.left <= 0
            if not is_overtaken:
                other(RunDirectory(path))
            ending = run_job(manifest, path, job)
            assert (ending.exit_code, ending.balance.done) == (0, 13)
            assert sorted(line["id"] for line in runs.metadata(path)) == sorted(f"row {n}" for n in range(13))
            assert verify(RunDirectory(path)).faults == ()
            shutil.rmtree(path)
            if not is_overtaken:
                break
        assert step > 10


def test_a_machine_that_dies_at_any_change_of_an_append(memory: Path) -> None:
    job = pattern_job(*OPTIONS)
    settled = RunDirectory(memory / "settled")
    run_job(write(memory / "manifest", TEN), settled.path, job, failing("row 3"))
    manifest = write(memory / "later", grown({}, 12))
    for number in itertools.count(0, 3):
        run, has_died = RunDirectory(memory / f"{number}"), False
        shutil.copytree(settled.path, run.path)
        with machine(number, is_after=number % 2 == 0):
            try:
                append_rows(run, run.index(), failed(run, run.index()))
                extend(run, manifest, job)
            except Crash:
                has_died = True
        append_rows(run, run.index(), failed(run, run.index()))
        assert run_job(manifest, run.path, job, may_grow=True).balance.done == 12
        assert verify(run).faults == ()
        if not has_died:
            break
    assert number > 10


def test_a_finalizer_that_knows_one_plan_less(memory: Path) -> None:
    """At each of its steps another plan is appended, worked off and finalized: the tables are those of all plans."""
    job = pattern_job(*OPTIONS)
    settled = RunDirectory(memory / "settled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("batchgen.runner.finalize", lambda run, plan: None)
        run_job(write(memory / "manifest", TEN), settled.path, job, failing("row 3"))
    manifest = write(memory / "later", grown({}, 12))
    for step in itertools.count(1, 5):
        path = memory / f"{step}"
        shutil.copytree(settled.path, path)

        def overtake(path: Path = path) -> None:
            other = RunDirectory(path)
            append_rows(other, other.index(), failed(other, other.index()))
            assert run_job(manifest, path, job, may_grow=True).exit_code == 0

        files = Overtaken(step, overtake)
        finalize(RunDirectory(path, files))
        if files.left > 0:
            break
        run = RunDirectory(path)
        assert sorted(ids(run)) == sorted(f"row {n}" for n in range(12))
        assert ids(run, "failures") == []
        assert is_finished(run)
        shutil.rmtree(path)
    assert step > 50


def test_workers_go_on_with_what_is_appended_while_they_run(tmp_path: Path) -> None:
    rows = [{"id": f"row-{n}", "prompt": "fault: slow 0.2"} for n in range(16)]
    out, options = tmp_path / "out", ("--set", "plan.shard_images=2", "--set", "model.variant=faults")
    source = runs.manifest(tmp_path / "m.parquet", rows[:10])
    workers = [runs.start(source, out, *options) for _ in range(2)]
    while not list(out.glob(".run/receipts/*")):
        assert workers[0].is_running
    for one in workers:
        one.signal(signal.SIGSTOP)
    larger = runs.manifest(tmp_path / "larger.parquet", rows)
    appended = runs.start(larger, out, *options, "--extend")
    while not (out / ".run/plan/1.json").exists():
        assert appended.is_running
        time.sleep(0.01)
    for one in workers:
        one.signal(signal.SIGCONT)
    ended = [one.wait() for one in (*workers, appended)]
    line = "16 rows = 16 done + 0 failed + 0 rejected + 0 outstanding"
    assert [(one.code, one.closing_line) for one in ended] == [(0, line)] * 3, ended
    lines = runs.check_images(out)
    assert [line["id"] for line in lines] == [f"row-{n}" for n in range(16)]
    run = RunDirectory(out)
    for state in Ledger(run.root, run.files).states(run.index().shards):
        named = [row for receipt in state.committed for row in receipt.ok]
        assert len(named) == len(set(named))


def test_a_marker_names_the_plan_that_it_stands_for(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that a finalizer puts just as a plan is appended stands for nothing."""
    run, job = RunDirectory(memory / "run"), pattern_job(*OPTIONS)
    run_job(write(memory / "manifest", TEN), run.path, job, failing("row 3"))
    marker = (run.path / SUCCESS).read_bytes()
    index = run.index()
    append_rows(run, index, failed(run, index))
    (run.path / SUCCESS).write_bytes(marker)
    assert not is_finished(run)
    assert run_planned(run, run.index(), job).exit_code == 0
    assert (run.path / SUCCESS).read_bytes() != marker
    assert is_finished(run)
    assert finalizing.finalize(run, plan=0) is None


def test_the_model_is_found_from_another_folder_and_where_it_was_moved_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out, elsewhere = tmp_path / "m.parquet", tmp_path / "out", tmp_path / "elsewhere"
    runs.prompts(source, 2, width=64, height=64, steps=1)
    shutil.copytree(tiny.folder("sd1"), tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert runs.run(source, out, model="model").code == 0
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert runs.batchgen("retry", out).code == 0
    (tmp_path / "model").rename(tmp_path / "moved")
    ended = runs.batchgen("retry", out)
    assert ended.code == 2
    assert "--model" in ended.err
    assert runs.batchgen("retry", out, "--model", tmp_path / "moved").code == 0
    pixels = runs.pixels(out)
    next(out.glob("data/*/*.png")).unlink()
    assert runs.batchgen("verify", out, "--repair").code == 2
    assert runs.batchgen("verify", out, "--model", tmp_path / "moved").code == 2
    assert runs.batchgen("verify", out, "--repair", "--model", tmp_path / "moved").code == 0
    assert runs.pixels(out) == pixels
