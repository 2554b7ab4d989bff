"""The measuring of planning: what it plans, and that what it says is what happened."""

from __future__ import annotations

import os
import re
from dataclasses import asdict
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchgen.bench import plan
from batchgen.bench.plan import PlanBench, bench_plan, write_manifest
from batchgen.bench.workload import SIZES
from batchgen.planned import plan_manifest
from tests.plans import pattern_job

ROWS = 3_000


def test_the_sizes_are_forty_of_about_a_megapixel() -> None:
    assert len(set(SIZES)) == len(SIZES) == 40
    assert all(width % 64 == height % 64 == 0 for width, height in SIZES)
    assert all(0.85 < width * height / 1024**2 < 1.13 for width, height in SIZES)
    assert {(height, width) for width, height in SIZES if (width, height) != (704, 1344)} <= set(SIZES)


def test_the_manifest_is_the_same_each_time_and_every_row_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_manifest(tmp_path / "one.parquet", ROWS)
    write_manifest(tmp_path / "two.parquet", ROWS)
    table = pq.read_table(tmp_path / "one.parquet")
    assert table.equals(pq.read_table(tmp_path / "two.parquet"))
    assert len(set(table["prompt"].to_pylist())) == table.num_rows == ROWS
    lengths = [len(prompt) for prompt in table["prompt"].to_pylist()]
    assert (min(lengths) >= 20, max(lengths) <= 120) == (True, True)
    planned = plan_manifest([tmp_path / "one.parquet"], pattern_job())
    assert planned.rejections.num_cells == 0
    assert len(planned.draft.groups) == 2 * len(SIZES)
    monkeypatch.setattr(plan, "_CHUNK_ROWS", 700)
    write_manifest(tmp_path / "chunks.parquet", ROWS)
    assert pq.read_metadata(tmp_path / "chunks.parquet").num_rows == ROWS


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> PlanBench:
    path = tmp_path_factory.mktemp("bench")
    found = bench_plan(ROWS, path)
    assert os.listdir(path) == []
    return found


def test_what_was_measured_adds_up(measured: PlanBench) -> None:
    assert measured.rows == ROWS
    assert measured.total_s == pytest.approx(measured.check_and_cut_s + measured.freeze_s)
    assert measured.open_shard_s > 0
    assert measured.shards >= 16
    assert measured.batches >= ROWS / 32
    assert measured.plan_bytes > ROWS * 10
    assert measured.peak_bytes > 20e6
    assert measured.cores == len(os.sched_getaffinity(0))
    assert all(asdict(measured).values())


def test_its_lines_say_it_in_words(measured: PlanBench) -> None:
    text = "\n".join(measured.lines())
    assert f"{ROWS:,} rows in " in text
    assert f"open one of {measured.shards:,} shards" in text
    assert f"{measured.total_s:.1f} s" in text
    assert not re.search(r"\b0 [KMG]B", text)
