"""The product's modules put into the simulated world.

What runs as it is: FileSystem's own steps, Ledger, Worker, Epoch, Heart, Maker, `publish`, `sweeping`, the order of
`finalize`, the balance, `run_job`, `freeze`, and all that appends plans and mends parts. What is stood in for, at its
own interface and with the same steps on the disk (a test holds the two equal, but for appends): PartWriter,
`write_table`, the files of a plan, a part written anew, the tables of `finalize`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest

from batchgen import (
    appending,
    balance,
    epoch,
    filesystem,
    finalize,
    heart,
    ledger,
    making,
    marker,
    mending,
    owners,
    plans,
    presence,
    repairing,
    rundir,
    runner,
    sweeping,
    worker,
)
from batchgen.plan_index import PlanIndex
from tests.simulation import appends, files, system, work
from tests.simulation.world import World

PATCHES: list[tuple[Any, str, Any]] = [
    *((module, "time", system.CLOCK) for module in (ledger, worker, epoch, making)),
    *((module, "secrets", system.SECRETS) for module in (filesystem, finalize, marker, mending, plans, repairing)),
    *((module, "this_process", system.this_process) for module in (balance, finalize, marker, runner, sweeping)),
    *((module, "has_ended", system.has_ended) for module in (owners, heart)),
    *((module, "part_table", appends.part_table) for module in (mending, repairing)),
    *((module, "rewrite", appends.rewrite) for module in (mending, repairing)),
    (mending, "read_row_table", work.read_table),
    (appending, "check_place", lambda run: None),
    # What ends a worker is to be seen.
    *((module, "intact", lambda run: nullcontext()) for module in (presence, runner)),
    (appending, "load_stored", lambda job, path: SimpleNamespace(model=None)),
    (appending, "facts_of", lambda model: None),
    (appending, "open_run", work.open_run),
    (appending, "_grown", appends.grown),
    (appending, "_written", appends.taken_over),
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
    (finalize, "card", lambda **facts: json.dumps([facts["num_images"], facts["num_failed"]])),
]


@contextmanager
def installed() -> Iterator[pytest.MonkeyPatch]:
    """Within the block, the product's modules live in the simulated world."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name, double in PATCHES:
            patch.setattr(module, name, double)
        yield patch
