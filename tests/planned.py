"""Manifests, frozen plans and finished runs of the pattern model, for tests of what comes after planning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.filesystem import FileSystem
from batchgen.job import Job, load_job
from batchgen.plan import PlanIndex, freeze
from batchgen.rundir import RunDirectory, plan_manifest
from batchgen.runner import run_job

PATTERN = 'model.path="pattern"'


def job_of(*overrides: str) -> Job:
    return load_job(None, [PATTERN, "output.encoders=1", *overrides])


def write_manifest(path: Path, rows: Sequence[Mapping[str, Any]], schema: pa.Schema | None = None) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows), schema), path)
    return path


def prompts(num_rows: int, **columns: Any) -> list[dict[str, Any]]:
    """Rows with an id and a prompt of their own, and the same value in all other columns."""
    return [{"id": f"row-{number}", "prompt": f"prompt {number}", **columns} for number in range(num_rows)]


def freeze_plan(root: Path, manifest: Path, job: Job, files: FileSystem | None = None) -> PlanIndex:
    planned = plan_manifest([manifest], job)
    files = files or FileSystem()
    files.make_folder(root)
    return freeze(planned.draft, root, files, "pattern", job.model_dump(), {"a": "1"}, planned.rejections)


def finished_run(folder: Path, rows: Iterable[Mapping[str, Any]], *overrides: str) -> RunDirectory:
    """A run directory in which all has been made."""
    folder.mkdir(exist_ok=True)
    manifest = write_manifest(folder / "manifest.parquet", list(rows))
    run_job([manifest], folder / "out", job_of(*overrides))
    return RunDirectory(folder / "out")
