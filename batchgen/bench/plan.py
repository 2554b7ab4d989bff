"""How long a large manifest takes to plan."""

from __future__ import annotations

import multiprocessing
import platform
import resource
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchgen.bench.workload import SIZES
from batchgen.cores import usable_cores
from batchgen.filesystem import FileSystem
from batchgen.job import load_job
from batchgen.plan_reader import PlanReader, batches
from batchgen.planned import plan_manifest
from batchgen.plans import Proposal, freeze
from batchgen.version import VERSION
from batchgen.wording import counted, sized

_CHUNK_ROWS = 500_000
_SUBJECTS = ("a red fox", "an old lighthouse", "two paper boats", "a bowl of ripe lemons", "a stone bridge")
_SETTINGS = ("in heavy rain", "at first light, seen from far away", "as a woodcut", "on a crowded market square")
_STYLES = ("35 mm photograph, shallow depth of field", "oil on canvas", "isometric drawing", "wide shot, film grain")


@dataclass(frozen=True, slots=True)
class PlanBench:
    """How long planning took, and what it needed."""

    rows: int
    manifest_bytes: int
    check_and_cut_s: float
    freeze_s: float
    total_s: float
    open_shard_s: float
    """From the index to the batches of one shard: one row group read."""
    peak_bytes: int
    """Largest resident set of the planning process, mapped files included."""
    shards: int
    batches: int
    plan_bytes: int
    cores: int
    versions: dict[str, str]

    def lines(self) -> Iterator[str]:
        yield f"{counted(self.rows, 'row')} in {sized(self.manifest_bytes)}, {self.cores} cores"
        yield f"check, identify, group and cut  {self.check_and_cut_s:7.1f} s"
        yield f"freeze the plan                 {self.freeze_s:7.1f} s  ({sized(self.plan_bytes)})"
        yield f"total                           {self.total_s:7.1f} s"
        per_row = self.peak_bytes / self.rows
        yield f"peak resident memory            {self.peak_bytes / 1e9:7.2f} GB ({per_row:.0f} bytes a row)"
        yield f"open one of {self.shards:,} shards       {self.open_shard_s * 1e3:7.1f} ms"


def bench_plan(num_rows: int, folder: Path | None = None) -> PlanBench:
    """Plan a synthetic manifest of 40 sizes, 20 to 50 steps and six guidance scales, in a process of its own."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="batchgen-bench-") as scratch:
        manifest = Path(scratch) / "manifest.parquet"
        write_manifest(manifest, num_rows)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return pool.submit(_measure, manifest, Path(scratch) / "plan").result()


def write_manifest(path: Path, num_rows: int) -> None:
    """A manifest of distinct prompts of 40 to 90 characters, the same for the same number of rows."""
    random = np.random.default_rng(0)
    with pq.ParquetWriter(path, _chunk(random, 0, 0).schema) as writer:
        for start in range(0, num_rows, _CHUNK_ROWS):
            writer.write_table(_chunk(random, start, min(_CHUNK_ROWS, num_rows - start)))


def _chunk(random: np.random.Generator, start: int, count: int) -> pa.Table:
    choices = [pa.array(words) for words in (_SUBJECTS, _SETTINGS, _STYLES)]
    parts = [words.take(pa.array(random.integers(0, len(words), count))) for words in choices]
    number = pa.array(np.arange(start, start + count)).cast(pa.string())
    sizes = np.array(SIZES, np.int32)[random.integers(0, len(SIZES), count)]
    return pa.table(
        {
            "prompt": pc.binary_join_element_wise(*parts, number, ", "),
            "width": sizes[:, 0],
            "height": sizes[:, 1],
            "steps": random.integers(20, 51, count).astype(np.int32),
            "guidance_scale": random.choice([1.0, 4.0, 5.0, 6.0, 7.5, 9.0], count),
        }
    )


def _measure(manifest: Path, root: Path) -> PlanBench:
    files = FileSystem()
    files.make_folder(root)
    job = load_job(None, ['model.path="pattern"'])
    start = time.perf_counter()
    planned = plan_manifest([manifest], job)
    cut = time.perf_counter()
    index = freeze(Proposal(planned.draft, planned.rejections, "pattern", job.model_dump(), {}), root, files)
    end = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    opened = time.perf_counter()
    reader = PlanReader(root, index)
    num_rows = sum(len(batch.rows) for batch in batches(reader.shard(len(index.shards) // 2), index.groups))
    assert num_rows == index.shard_rows[len(index.shards) // 2]
    open_shard_s = time.perf_counter() - opened
    return PlanBench(
        rows=index.num_rows,
        manifest_bytes=manifest.stat().st_size,
        check_and_cut_s=cut - start,
        freeze_s=end - cut,
        total_s=end - start,
        open_shard_s=open_shard_s,
        peak_bytes=peak,
        shards=len(index.shards),
        batches=len(planned.draft.cut.batch_size),
        plan_bytes=sum(file.num_bytes for file in index.files),
        cores=usable_cores(),
        versions={
            "batchgen": VERSION,
            "python": platform.python_version(),
            "pyarrow": pa.__version__,
            "numpy": np.__version__,
        },
    )
