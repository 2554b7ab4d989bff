"""One worker and two on the same rows: what is measured, and that pixels are compared."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from batchgen.bench.workers import Comparison, Measured, compare, lose_one, measure, too_few
from batchgen.errors import BatchgenError
from batchgen.job import load_job
from batchgen.launcher import worker_seats
from batchgen.ledger import Ledger
from batchgen.rundir import RunDirectory
from batchgen.slots import sealed, unsealed
from tests import runs

OPTIONS = ["model.path=pattern", "plan.batch_sizes=[2]", "plan.shard_images=4"]


def test_both_runs_have_one_plan_and_the_same_pixels(tmp_path: Path) -> None:
    source = runs.prompts(tmp_path / "m.parquet", 16)
    report = Comparison("pattern", {}, 2)
    said: list[str] = []
    compare(report, source, tmp_path, load_job(None, OPTIONS), worker_seats(2), said.append)
    assert [one.images for one in report.runs] == [16, 16]
    assert report.has_same_pixels is True
    assert report.runs[0].workers == 1
    assert len([line for line in said if "images each" in line]) == 2
    plans = [(tmp_path / name / ".run/plan/0.json").read_bytes() for name in ("one", "all")]
    assert plans[0] == plans[1]


def test_the_rate_is_that_of_the_time_in_which_all_were_at_work(tmp_path: Path) -> None:
    """Two workers of four images each; times are put on the files."""
    source, out = runs.prompts(tmp_path / "m.parquet", 8), tmp_path / "out"
    assert runs.run(source, out, *(word for one in OPTIONS for word in ("--set", one))).code == 0
    run = RunDirectory(out)
    times = {0: [10, 10, 20, 20], 1: [12, 12, 17, 17]}
    for receipt in Ledger(run.root, run.files).committed(run.index().shards):
        for file, at in zip(sorted((run.data / receipt.part).iterdir()), times[receipt.shard], strict=True):
            os.utime(file, (at, at))
        path = run.root / "receipts" / receipt.stem
        fields = unsealed(path.read_bytes())
        by = fields["by"] | {"token": f"{receipt.shard:016x}"}
        path.write_bytes(sealed(by["token"], fields | {"by": by}))
    measured = measure(out, 30.0)
    assert (measured.workers, measured.images, measured.images_of_each) == (2, 8, [4, 4])
    # From 12, when the second had its first batch, until 17, when it had its last.
    assert measured.window_s == pytest.approx(5.0)
    assert measured.images_per_s == pytest.approx(2 / 5.0)
    assert measured.versions == dict(next(Ledger(run.root, run.files).committed(run.index().shards)).versions)


def measured_as(workers: int, images: int, images_per_s: float) -> Measured:
    return Measured(workers, images, [images], 0.0, images_per_s, 1.0, {})


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        (measured_as(1, 2, 0.0), "2 rows are too few for a rate of 2 workers"),
        (measured_as(1, 8, 1.0), "8 rows are too few for 2 workers: 1 made all of them"),
        (measured_as(2, 8, 0.0), "8 rows are too few for a rate of 2 workers: one had written its last image before"),
        (measured_as(2, 8, 1.0), ""),
    ],
)
def test_too_few_rows_are_said_to_be(measured: Measured, said: str) -> None:
    assert too_few(measured, 2).startswith(said.replace("a rate of ", "") if measured.workers == 1 else said)
    assert bool(said) == too_few(measured, 2).endswith("ask for more with --rows")


def test_too_few_rows_give_no_figure(tmp_path: Path) -> None:
    """Two rows in one batch: nothing is written after the first."""
    source, report, said = runs.prompts(tmp_path / "m.parquet", 2), Comparison("pattern", {}, 2), list[str]()
    compare(report, source, tmp_path, load_job(None, OPTIONS), worker_seats(2), said.append)
    assert report.speedup is None
    assert report.has_same_pixels is True
    assert not [line for line in said if "0.000" in line]
    assert [line for line in said if "too few" in line]


def test_one_worker_is_killed_midway_and_all_rows_are_made(tmp_path: Path) -> None:
    source, report, said = runs.prompts(tmp_path / "m.parquet", 240), Comparison("pattern", {}, 2), list[str]()
    job = load_job(None, [*OPTIONS[:2], "plan.shard_images=40"])
    compare(report, source, tmp_path, job, worker_seats(2), said.append)
    lose_one(report, source, tmp_path, job, worker_seats(2), said.append)
    assert report.loss is not None
    assert (report.loss.images, sum(report.loss.images_of_each)) == (240, 240)
    assert 80 <= report.loss.killed_after < 240
    assert report.loss.has_same_pixels
    assert [line for line in said if line.startswith("one of 2 workers killed")]


def test_rows_too_few_to_kill_a_worker_among_are_said_to_be(tmp_path: Path) -> None:
    source, report, said = runs.prompts(tmp_path / "m.parquet", 2), Comparison("pattern", {}, 2), list[str]()
    job = load_job(None, OPTIONS)
    compare(report, source, tmp_path, job, worker_seats(2), said.append)
    report.runs[0] = measured_as(1, 12, 1.0)
    with pytest.raises(BatchgenError, match="before a worker could be killed; ask for more with --rows"):
        lose_one(report, source, tmp_path, job, worker_seats(2), said.append)
