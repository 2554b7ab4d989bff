"""The product's modules put into the simulated world.

What runs as it is: FileSystem's own steps, Ledger, Worker, Epoch, Heart, Maker, `publish`, the order and sweep of
`finalize`, the balance, `run_job` and `freeze`. What is stood in for, at its own interface and with the same steps on
the disk (a test holds the two equal): PartWriter, `write_table`, `disk.remove`, the files of a plan, the tables of
`finalize`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest

from batchgen import (
    balance,
    disk,
    epoch,
    filesystem,
    finalize,
    heart,
    ledger,
    making,
    marker,
    owners,
    plans,
    rundir,
    runner,
    worker,
)
from batchgen.plan_index import PlanIndex
from tests.simulation import files, system, work
from tests.simulation.world import World

PATCHES: list[tuple[Any, str, Any]] = [
    *((module, "time", system.CLOCK) for module in (ledger, worker, epoch, making)),
    *((module, "secrets", system.SECRETS) for module in (filesystem, finalize, marker, plans)),
    *((module, "this_process", system.this_process) for module in (balance, finalize, marker, runner)),
    *((module, "has_ended", system.has_ended) for module in (owners, heart)),
    *((module, "remove", files.remove) for module in (disk, epoch, finalize, plans)),
    (heart, "threading", system.THREADING),
    # Pure functions of bytes that many workers read.
    (ledger, "_receipt", lru_cache(1000)(ledger._receipt)),
    (ledger, "_claim", lru_cache(1000)(ledger._claim)),
    (PlanIndex, "from_bytes", lru_cache(100)(PlanIndex.from_bytes)),
    (owners, "start_time", system.start_time),
    (runner, "end", system.end),
    (runner, "open_run", work.open_run),
    (runner, "RunDirectory", lambda out: World.now.run_directory(out)),
    (runner, "PlanReader", work.SimulatedReader),
    (runner, "EncoderPool", lambda threads, limit: nullcontext()),
    (runner, "num_encoder_threads", lambda output: 1),
    (runner, "num_in_flight", lambda *numbers: 1),
    (plans, "_written", work.written),
    (rundir, "plan_manifest", work.plan_manifest),
    (rundir, "fingerprint", lambda job, facts, manifest: {}),
    (worker, "batches", work.batches),
    (epoch, "PartWriter", work.SimulatedPartWriter),
    (epoch, "write_table", files.write_table),
    (epoch, "row_table", work.row_table),
    (finalize, "_sources", work.sources),
    (finalize, "_write_tables", work.write_tables),
    (finalize, "card", lambda **facts: "card"),
    (finalize, "shutil", SimpleNamespace(rmtree=files.remove_tree)),
]


@contextmanager
def installed() -> Iterator[pytest.MonkeyPatch]:
    """Within the block, the product's modules live in the simulated world."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, double in PATCHES:
            patch.setattr(module, name, double)
        yield patch
