"""`status --watch`: a run seen from another terminal, until it is done."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from batchgen.job import load_job
from batchgen.rundir import RunDirectory, open_run
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
    assert runs.batchgen("status", out, "--watch", "nan").code == 2


def test_it_ends_when_nobody_reads_it_any_more(tmp_path: Path) -> None:
    """`status DIR --watch | head -1`, of a run that never ends."""
    out = tmp_path / "out"
    open_run(RunDirectory(out), [runs.prompts(tmp_path / "m.parquet", 3)], load_job(None, ["model.path=pattern"]))
    words = [sys.executable, "-m", "batchgen", "status", str(out), "--watch", "0.1"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=runs.ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"3 rows = 0 done")
        process.stdout.close()
        assert process.wait(runs.PATIENCE_S) == 0


def test_what_was_shown_before_is_replaced_on_a_terminal(tmp_path: Path) -> None:
    source, out = runs.prompts(tmp_path / "m.parquet", 3), tmp_path / "out"
    assert runs.run(source, out).code == 0
    code = "import sys; sys.stdout = sys.stderr; sys.argv[0] = 'batchgen'; from batchgen.cli import cli; cli()"
    assert "\x1b[2J" in on_a_terminal("-c", code, "status", out, "--watch")
