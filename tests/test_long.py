"""A long run costs at its end what it cost at its beginning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from batchgen.bench.long import bench_long
from tests import runs


def test_what_is_measured(tmp_path: Path) -> None:
    report = tmp_path / "long.json"
    ended = runs.batchgen("bench", "long", "--rows", 2000, "--json", report, "--folder", tmp_path)
    assert ended.code == 0, ended.err
    found = json.loads(report.read_text())
    assert [path for path in tmp_path.iterdir() if path != report] == []
    samples = found["samples"]
    assert len(samples) == 101
    assert [one["rows"] for one in (samples[0], samples[-1])] == [0, pytest.approx(2000, abs=64)]
    for name in ("rows", "wall_s", "cpu_s"):
        values = [one[name] for one in samples]
        assert values == sorted(values)
    assert found["most_own_bytes"] >= found["own_bytes"] > 20e6
    assert found["restart_s"] > 0
    assert "2,000 rows as webdataset" in ended.out


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_thousand_rows(tmp_path: Path) -> None:
    measured = bench_long(200_000, "webdataset", tmp_path)
    assert measured.growth <= 0.05
    assert measured.last_cpu_ms <= 1.1 * measured.first_cpu_ms
    assert measured.restart_s < 5
