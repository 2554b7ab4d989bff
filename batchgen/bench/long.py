"""Whether the last rows of a long run cost what the first ones did, and how soon it goes on where it stopped."""

from __future__ import annotations

import multiprocessing
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import PIL
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.bench.figures import rate
from batchgen.cores import usable_cores
from batchgen.errors import BatchgenError
from batchgen.filesystem import FileSystem
from batchgen.job import load_job
from batchgen.progress import Quiet
from batchgen.runner import Terms, run_job
from batchgen.stopping import Stop
from batchgen.version import VERSION

_SAMPLES = 100
_LEFT = 0.05
"""Of the rows measured, as many more are left for the restart."""
_RESTART_S = 600.0


@dataclass(frozen=True, slots=True)
class Sample:
    """The worker after some rows."""

    rows: int
    wall_s: float
    cpu_s: float
    """Of all threads."""
    own_bytes: int
    """Resident memory that no file backs, and what of it is swapped out: pages of libraries come and go with what else
    the machine does."""


@dataclass(frozen=True, slots=True)
class LongBench:
    """One worker's long run, and the next one's start."""

    rows: int
    output_format: str
    first_rows_s: float
    """Rows a second of the first tenth."""
    last_rows_s: float
    first_cpu_ms: float
    """CPU milliseconds a row of the first tenth: what other programs do to the machine shows less in it."""
    last_cpu_ms: float
    own_bytes: int
    """As in a sample, at the end of the first tenth."""
    most_own_bytes: int
    """From then on."""
    restart_s: float
    """From the command to its first claim, with all these rows done."""
    rest_s: float
    """Of that worker: until the rows left over are made and everything is finalized."""
    restart_peak_bytes: int
    """Largest resident set of the worker that did so."""
    load: float
    """Of the machine, over the last minute, at the end."""
    cores: int
    versions: dict[str, str]
    samples: list[Sample] = field(repr=False)

    @property
    def growth(self) -> float:
        """Of the process's own memory after the first tenth."""
        return self.most_own_bytes / self.own_bytes - 1

    def lines(self) -> Iterator[str]:
        yield f"{self.rows:,} rows as {self.output_format}, {self.cores} cores, load {self.load:.1f}"
        yield f"first tenth  {self.first_rows_s:7.0f} rows/s  {self.first_cpu_ms:6.2f} ms CPU a row"
        yield f"last tenth   {self.last_rows_s:7.0f} rows/s  {self.last_cpu_ms:6.2f} ms CPU a row"
        yield f"memory       {self.own_bytes / 1e6:7.0f} MB after a tenth, {self.growth:+.1%} at most from then on"
        yield f"restart      {self.restart_s:7.1f} s to the first claim, {self.rest_s:.1f} s more to the end"


def bench_long(num_rows: int, output_format: str, folder: Path | None = None) -> LongBench:
    """Make rows of one small size with `pattern`, stop, and go on. Raises BatchgenError if the run does not."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="batchgen-bench-") as scratch:
        manifest, out = Path(scratch) / "manifest.parquet", Path(scratch) / "out"
        write_manifest(manifest, num_rows + max(1, int(num_rows * _LEFT)))
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            samples = pool.submit(_measure, manifest, out, num_rows, output_format).result()
        restart_s, rest_s, peak = _go_on(manifest, out, output_format)
    first, last = (samples[0], samples[_SAMPLES // 10]), (samples[-1 - _SAMPLES // 10], samples[-1])
    return LongBench(
        rows=num_rows,
        output_format=output_format,
        first_rows_s=_rows_s(*first),
        last_rows_s=_rows_s(*last),
        first_cpu_ms=_cpu_ms(*first),
        last_cpu_ms=_cpu_ms(*last),
        own_bytes=first[1].own_bytes,
        most_own_bytes=max(one.own_bytes for one in samples[_SAMPLES // 10 :]),
        restart_s=restart_s,
        rest_s=rest_s,
        restart_peak_bytes=peak,
        load=os.getloadavg()[0],
        cores=usable_cores(),
        versions={
            "batchgen": VERSION,
            "python": platform.python_version(),
            "pyarrow": pa.__version__,
            "numpy": np.__version__,
            "pillow": PIL.__version__,
        },
        samples=samples,
    )


def write_manifest(path: Path, num_rows: int) -> None:
    """Rows that all cost the same."""
    numbers = [f"{number:07d}" for number in range(num_rows)]
    pq.write_table(pa.table({"id": numbers, "prompt": [f"a red fox, number {one}" for one in numbers]}), path)


def _overrides(output_format: str) -> list[str]:
    return [
        *("model.path=pattern", "sampling.width=64", "sampling.height=64", "sampling.steps=2"),
        *(f"output.format={output_format}", "plan.max_batch=32"),
    ]


class _Meter(Quiet):
    """Takes samples as rows are made, and asks the run to stop after the last one."""

    def __init__(self, num_rows: int, stop: Stop) -> None:
        self._num_rows = num_rows
        self._stop = stop
        self._made = 0
        self.samples = [_sample(0)]

    def count(self, made: int, failed: int) -> None:
        self._made += made
        while len(self.samples) <= _SAMPLES and self._made >= len(self.samples) * self._num_rows // _SAMPLES:
            self.samples.append(_sample(self._made))
        if self._made >= self._num_rows:
            self._stop.ask("the bench")


def _sample(rows: int) -> Sample:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    own_kb = sum(int(status[name].split()[0]) for name in ("RssAnon", "VmSwap"))
    return Sample(rows, time.monotonic(), time.process_time(), own_kb * 1024)


def _measure(manifest: Path, out: Path, num_rows: int, output_format: str) -> list[Sample]:
    stop, meters = Stop(), list[_Meter]()

    def begin(balance: object) -> nullcontext[_Meter]:
        meters.append(_Meter(num_rows, stop))
        return nullcontext(meters[0])

    run_job([manifest], out, load_job(None, _overrides(output_format)), Terms(stop=stop, progress=begin))
    return meters[0].samples


def _go_on(manifest: Path, out: Path, output_format: str) -> tuple[float, float, int]:
    """Seconds to the first claim and from there to the end, and peak memory, of a command that finishes the run."""
    words = [word for one in _overrides(output_format) for word in ("--set", one)]
    command = [sys.executable, "-m", "batchgen", "run", str(manifest), "-o", str(out), *words]
    claims = out / ".run" / "claims"
    before = set(FileSystem().names(claims))
    started = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as worker:
        _wait(lambda: set(FileSystem().names(claims)) - before or worker.poll() is not None, worker)
        claimed = time.monotonic()
        _wait(lambda: worker.poll() is not None, worker)
    if worker.returncode != 0:
        raise BatchgenError(f"the run that was to go on ended with {worker.returncode}; {' '.join(command)}")
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return claimed - started, time.monotonic() - claimed, peak


def _wait(condition: Callable[[], object], worker: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _RESTART_S
    while not condition():
        if time.monotonic() > deadline:
            worker.kill()
            raise BatchgenError(f"a run that was to go on has not done so in {_RESTART_S:.0f} s")
        time.sleep(0.01)


def _rows_s(start: Sample, end: Sample) -> float:
    return rate(end.rows - start.rows, end.wall_s - start.wall_s)


def _cpu_ms(start: Sample, end: Sample) -> float:
    return 1e3 * (end.cpu_s - start.cpu_s) / (end.rows - start.rows)
