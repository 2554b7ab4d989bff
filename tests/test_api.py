"""The Python API, as a notebook uses it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

SCRIPT = """
import batchgen
job = batchgen.load_job(None, ["model.path=pattern"])
for _ in range(2):
    assert batchgen.plan("m.parquet", job).draft.cut.num_rows == 3
    assert batchgen.run("m.parquet", "out", job).balance.done == 3
print(batchgen.__version__)
"""


def test_the_api_does_what_it_says_twice(tmp_path: Path) -> None:
    """In a process of its own: what a test has imported before would hide a name that a module takes."""
    pq.write_table(pa.table({"prompt": ["a", "b", "c"]}), tmp_path / "m.parquet")
    environment = {"PYTHONPATH": str(Path(__file__).parent.parent), "PATH": ""}
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "out" / "_SUCCESS").exists()
