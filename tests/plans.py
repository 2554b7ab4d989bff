"""Manifests planned and frozen for tests, and what their plans hold."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.job import Job, load_job
from batchgen.ledger import Ledger
from batchgen.owners import this_process
from batchgen.plan_index import PlanIndex
from batchgen.plan_reader import PlanReader
from batchgen.planned import Planned, plan_manifest
from batchgen.rundir import RunDirectory, open_run
from batchgen.runner import Ending, run_job

_MEMORY = Path("/dev/shm")
"""Where syncing costs nothing, if there is such a place."""


@contextmanager
def folder() -> Iterator[Path]:
    """A temporary folder for one hypothesis example."""
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as name:
        yield Path(name)


def pattern_job(*overrides: str) -> Job:
    return load_job(None, ["model.path=pattern", *overrides])


def write(path: Path, *tables: pa.Table | dict[str, Any]) -> list[Path]:
    """Each table as one file of a manifest."""
    path.mkdir(exist_ok=True)
    files = [path / f"{number:03d}.parquet" for number in range(len(tables))]
    for file, table in zip(files, tables, strict=True):
        pq.write_table(table if isinstance(table, pa.Table) else pa.table(table), file)
    return files


def planned(path: Path, *tables: pa.Table | dict[str, Any], overrides: Sequence[str] = ()) -> Planned:
    return plan_manifest(write(path / "manifest", *tables), pattern_job(*overrides))


@dataclass(frozen=True)
class Frozen:
    """A plan as it lies in a run directory."""

    run: RunDirectory
    index: PlanIndex
    shards: list[pa.Table]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """In plan order."""
        return [row for shard in self.shards for row in shard.to_pylist()]

    @property
    def by_position(self) -> list[dict[str, Any]]:
        return sorted(self.rows, key=lambda row: int(row["position"]))

    def ledger(self) -> Ledger:
        """A worker's ledger, its folders made."""
        ledger = Ledger(self.run.root, self.run.files, this_process())
        ledger.make_folders()
        return ledger


def frozen(path: Path, *tables: pa.Table | dict[str, Any], overrides: Sequence[str] = ()) -> Frozen:
    run = RunDirectory(path / "run")
    index = open_run(run, write(path / "manifest", *tables), pattern_job(*overrides))
    reader = PlanReader(run.plans, index)
    return Frozen(run, index, [reader.shard(number) for number in index.shards])


def finished(
    path: Path, *tables: pa.Table | dict[str, Any], overrides: Sequence[str] = ()
) -> tuple[RunDirectory, Ending]:
    """A whole run."""
    ending = run_job(write(path / "manifest", *tables), path / "run", pattern_job(*overrides))
    return RunDirectory(path / "run"), ending
