"""Whole runs on a CUDA device, by the command line. Run by hand: pytest -m gpu."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import tiny

pytestmark = pytest.mark.gpu

ROWS = 96


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "rows.parquet"
    sizes = [(64, 64), (96, 64), (64, 96)]
    samplers = ["ddim", "euler_ancestral", "dpmpp_2m_karras", "pndm"]
    table = pa.table(
        {
            "id": [f"row-{i}" for i in range(ROWS)],
            "prompt": [f"picture number {i}" for i in range(ROWS)],
            "width": [sizes[i % 3][0] for i in range(ROWS)],
            "height": [sizes[i % 3][1] for i in range(ROWS)],
            "steps": [10 + i % 21 for i in range(ROWS)],
            "guidance_scale": [1.0 if i % 5 == 0 else 2.0 + i % 7 for i in range(ROWS)],
            "sampler": [samplers[i % 4] for i in range(ROWS)],
        }
    )
    pq.write_table(table, path)
    return path


def start(manifest: Path, out: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "batchgen",
        "run",
        str(manifest),
        "-o",
        str(out),
        "--model",
        str(tiny.folder("sd1")),
    ]
    # Timing would choose among modes and attention kernels by chance for a network as small as this.
    keys = ("run.commit_every_s=1", "engine.mode=graph", "engine.attention=flash")
    return subprocess.Popen([*command, *(word for key in keys for word in ("--set", key))])


def hashes(out: Path) -> dict[str, str]:
    table = pq.read_table(out / "metadata.parquet", columns=["id", "pixel_sha256"])
    return dict(zip(table["id"].to_pylist(), table["pixel_sha256"].to_pylist(), strict=True))


def test_killed_and_resumed_run_has_the_same_pixels(manifest: Path, tmp_path: Path) -> None:
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    assert start(manifest, calm).wait(300) == 0
    num_kills = 0
    while (process := start(manifest, rough)) and process.poll() is None:
        deadline = time.monotonic() + 300
        receipts = rough / ".run" / "receipts"
        before = len(list(receipts.glob("*"))) if receipts.is_dir() else 0
        while process.poll() is None and num_kills < 4 and time.monotonic() < deadline:
            if receipts.is_dir() and len(list(receipts.glob("*"))) >= before + 2:
                process.send_signal(signal.SIGKILL)
                num_kills += 1
                break
            time.sleep(0.02)
        if process.wait(300) == 0:
            break
    assert num_kills > 0
    assert len(hashes(calm)) == ROWS
    assert hashes(rough) == hashes(calm)
    assert len(set(hashes(calm).values())) == ROWS
