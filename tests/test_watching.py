"""`status --watch`: a run seen from another terminal, until it is done."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests import runs
from tests.terminals import on_a_terminal


def test_it_ends_with_the_run(tmp_path: Path) -> None:
    """Which commits after each batch; the rate is that of its commits."""
    source, out = runs.slow(tmp_path / "m.parquet", 20, 0.1), tmp_path / "out"
    words = ("--set", "model.variant=faults", "--set", "plan.batch_sizes=[1]", "--set", "plan.shard_images=1")
    process = runs.start(source, out, *words)
    runs.until(lambda: (out / ".run/plan/0.json").exists(), process)
    watched = runs.batchgen("status", out, "--watch", 0.2, "--check")
    assert process.wait(runs.PATIENCE_S).code == 0
    assert watched.code == 0
    closing = [line for line in watched.out.splitlines() if line.startswith("at ")]
    assert closing[-1].endswith("all rows are settled")
    assert re.search(r"at \d\d:\d\d:\d\d: \d+\.\d\d rows/s committed, about \d\d:\d\d left", watched.out), watched.out
    settled = [int(one) for one in re.findall(r"20 rows = (\d+) done", watched.out)]
    assert settled == sorted(settled)
    assert settled[-1] == 20


def test_a_run_that_is_done_is_shown_once(tmp_path: Path) -> None:
    source, out = runs.prompts(tmp_path / "m.parquet", 3), tmp_path / "out"
    assert runs.run(source, out).code == 0
    once, watched = runs.batchgen("status", out), runs.batchgen("status", out, "--watch")
    assert watched.code == 0
    assert watched.out.startswith(once.out)
    (line,) = runs.batchgen("status", out, "--watch", "--json").out.splitlines()
    assert json.loads(line) == json.loads(runs.batchgen("status", out, "--json").out)
    assert runs.batchgen("status", tmp_path, "--watch").code == 2
    assert runs.batchgen("status", out, "--watch", "0").code == 2


def test_what_was_shown_before_is_replaced_on_a_terminal(tmp_path: Path) -> None:
    source, out = runs.prompts(tmp_path / "m.parquet", 3), tmp_path / "out"
    assert runs.run(source, out).code == 0
    code = "import sys; sys.stdout = sys.stderr; sys.argv[0] = 'batchgen'; from batchgen.cli import cli; cli()"
    assert "\x1b[2J" in on_a_terminal("-c", code, "status", out, "--watch")
