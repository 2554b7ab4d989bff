"""Runs whose plan has more rows in a batch than lanes: stopped, resumed, repaired."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from batchgen.plan_reader import PlanReader, batches
from batchgen.rundir import RunDirectory
from tests import runs, tiny

SETS = (
    *("sampling.width=64", "sampling.height=64", "engine.device=cpu"),
    *("plan.batch_sizes=[4]", "plan.shard_images=12", "sampling.sampler=euler_ancestral"),
)
OPTIONS = [word for one in SETS for word in ("--set", one)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 rows of 2 to 13 steps."""
    rows = [{"id": f"s{n}", "prompt": f"cat {n}", "seed": n, "steps": 2 + n % 12} for n in range(24)]
    return runs.manifest(tmp_path_factory.mktemp("rows") / "m.parquet", rows)


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole") / "out"
    ended = runs.run(source, out, *OPTIONS, model=tiny.folder("sd1"))
    assert ended.code == 0, ended.err
    return out


def test_every_row_is_made_in_as_many_lanes_as_are_recorded(whole: Path) -> None:
    run = RunDirectory(whole)
    reader = PlanReader(run.plans, run.index())
    planned = [batch for shard in reader.index.shards for batch in batches(reader.shard(shard), reader.index.groups)]
    assert [(batch.size, len(batch.rows)) for batch in planned] == [(4, 12), (4, 12)]
    ((bucket, work),) = reader.index.work(1.0).items()
    assert (bucket.size, work.batches) == (4, 6)
    assert sum(2 + n % 12 for n in range(24)) / 4 <= work.evaluations < 50, "less than of six batches by themselves"
    lines = runs.check_images(whole, is_pattern=False)
    assert len(lines) == 24
    assert {line["batch_size"] for line in lines} == {4}


def die(*arguments: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("place", "num_made"), [("batchgen.epoch:row_table", 0), ("batchgen.epoch:publish", 12)])
def test_a_run_that_is_killed_and_resumed_makes_the_same_pixels(
    source: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, num_made: int
) -> None:
    """Just before its first commit, with a batch made and another at work, and just after it."""
    # What the last bits depend on, on a CPU.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    killed = runs.start(source, tmp_path / "out", *OPTIONS, model=str(tiny.folder("sd1")), puts={place: die})
    assert killed.wait(240).code == -signal.SIGKILL
    status = json.loads(runs.batchgen("status", tmp_path / "out", "--json").out)
    assert status["done"] == num_made
    ended = runs.run(source, tmp_path / "out", *OPTIONS, model=tiny.folder("sd1"))
    assert ended.code == 0, ended.err
    assert runs.pixels(tmp_path / "out") == runs.pixels(whole)


def test_a_damaged_image_is_made_again_with_the_same_pixels(source: Path, tmp_path: Path) -> None:
    """Padded, without the neighbours that it had."""
    out = tmp_path / "out"
    assert runs.run(source, out, *OPTIONS, model=tiny.folder("sd1")).code == 0
    before = runs.pixels(out)
    for line in runs.metadata(out)[3::7]:
        (out / line["file_name"]).write_bytes(b"")
    ended = runs.batchgen("verify", out, "--repair")
    assert ended.code == 0, ended.err
    assert runs.pixels(out) == before
    assert {line["batch_size"] for line in runs.check_images(out, is_pattern=False)} == {4}
    assert runs.batchgen("verify", out).code == 0
