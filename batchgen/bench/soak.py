"""Real workers killed some hundred times, and what they leave held against an undisturbed run.

First at every step in turn, then by any signal at any step or moment."""

from __future__ import annotations

import platform
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import NoReturn

import PIL
import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from batchgen.bench.aftermath import Loss, compare, loss, rows_of
from batchgen.bench.siege import STALE_AFTER_S, Ended, Siege, Targets
from batchgen.bench.victims import Victim
from batchgen.errors import BatchgenError, UsageError
from batchgen.rundir import RunDirectory
from batchgen.version import VERSION
from batchgen.wording import counted

KILLS_EACH = 40
"""The most kills on one run directory."""
FORMATS = ("files", "parquet", "webdataset")
COMMIT_EVERY_S = 0.2
_SIZES = ((64, 64), (96, 64), (128, 192), (320, 256), (64, 448), (256, 256))
_DEATHS = 1_000_000
"""Of a shard's owners until its rows are suspected: never, where the soak is what kills them."""
_UNDISTURBED_S = 300.0
_SAID_EVERY = 10
"""Kills from one line of progress to the next, where there is no terminal for a bar."""
_FEW_ROWS = 40
"""Of the run directories in which every step is died at: few, so that the last ones are soon come to."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a soak is asked for."""

    kills: int
    seed: int = 0
    workers: tuple[int, int] = (1, 4)
    """Fewest and most on one run directory."""
    formats: Sequence[str] = FORMATS
    rows: int = 240
    """Of each run directory."""
    folder: Path | None = None


@dataclass(slots=True)
class Report:
    """What was tried, and what came of it."""

    seed: int
    workers: str
    formats: list[str]
    commit_every_s: float
    stale_after_s: float
    run_directories: int = 0
    rows: int = 0
    """Wanted, of all run directories."""
    rows_made: int = 0
    """By all workers: more than once where a kill cost them."""
    kills: int = 0
    kills_by_signal: dict[str, dict[str, int]] = field(default_factory=dict)
    """At a step, and at a moment."""
    steps: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    """By format and step: SIGKILLs before and after its call."""
    longest_drain_s: float = 0.0
    """From a SIGTERM to the end of its worker."""
    rows_lost: int = 0
    rows_doubled: int = 0
    rows_differing: int = 0
    most_rows_uncommitted: int = 0
    """Of one worker that SIGKILL ended."""
    most_s_uncommitted: float = 0.0
    """Seconds of work of one such worker, but for its last two batches."""
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)

    def lines(self) -> list[str]:
        signals = ", ".join(
            f"{name} {places['step']} at a step and {places['moment']} at a moment"
            for name, places in sorted(self.kills_by_signal.items())
        )
        places = [count for steps in self.steps.values() for sides in steps.values() for count in sides]
        return [
            f"kills: {self.kills:,}, run directories: {self.run_directories:,}, {self.seconds:.0f} s: {signals}",
            f"SIGKILL came at {sum(map(bool, places))} of the {len(places)} places before and after a step; "
            f"SIGTERM was obeyed in {self.longest_drain_s:.1f} s at most",
            f"{self.rows} rows, {self.rows_made} made: "
            f"{self.rows_lost} lost, {self.rows_doubled} doubled, {self.rows_differing} with other pixels",
            f"a SIGKILL cost at most {self.most_rows_uncommitted} rows: {self.most_s_uncommitted:.2f} s of work "
            f"and two batches, of {self.commit_every_s} s and two allowed",
            f"problems: {len(self.problems)}",
        ]


def bench_soak(settings: Settings, say: Callable[[str], None]) -> Report:
    """Kill workers until that has been done often enough, on one run directory after another, in all formats.

    Everything is kept where a problem was found.
    """
    folder = settings.folder or Path(tempfile.mkdtemp(prefix="batchgen-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise UsageError(f"{folder} has something in it; name a new folder with --folder")
    is_kept = True
    try:
        report = _Soak(settings, folder.resolve(), say).go()
        is_kept = settings.folder is not None or bool(report.problems)
    finally:
        if is_kept:
            say(f"everything is kept in {folder}")
        else:
            shutil.rmtree(folder)
    return report


@dataclass(slots=True)
class _Format:
    """What all run directories of a format share."""

    name: str
    manifest: Path
    truth: RunDirectory
    targets: Targets


class _Soak:
    def __init__(self, settings: Settings, folder: Path, say: Callable[[str], None]) -> None:
        self._settings = settings
        self._folder = folder
        self._say = say
        self._random = Random(settings.seed)
        self._kills: Counter[tuple[signal.Signals, bool]] = Counter()
        self._num_seen = 0
        fewest, most = settings.workers
        self._report = Report(
            settings.seed,
            f"{fewest}-{most}",
            list(settings.formats),
            COMMIT_EVERY_S,
            STALE_AFTER_S,
            versions=_versions(),
        )

    def go(self) -> Report:
        settings, report, started = self._settings, self._report, time.monotonic()
        few = write_manifest(self._folder / "few.parquet", _FEW_ROWS, self._random)
        manifest = write_manifest(self._folder / "manifest.parquet", settings.rows, self._random)
        self._say(
            f"at least {counted(settings.kills, 'kill')}; a run directory that is begun is ended, so that it may be "
            f"some dozens more. First {counted(2 * len(settings.formats), 'undisturbed run')}"
        )
        with tqdm(total=settings.kills, unit="kill", file=sys.stderr, disable=not sys.stderr.isatty()) as bar:
            small = [self._undisturbed(name, few) for name in settings.formats]
            large = [self._undisturbed(name, manifest) for name in settings.formats]
            for one, other in zip(small, large, strict=True):
                other.targets = one.targets
                while self._has_work and one.targets.left():
                    self._sweep(one, bar)
            while self._has_work:
                self._besiege(large[report.run_directories % len(large)], bar)
        report.kills = self._kills.total()
        report.steps = {one.name: one.targets.table() for one in small}
        report.seconds = time.monotonic() - started
        return report

    def _words(self, manifest: Path, out: Path, output_format: str) -> list[str]:
        keys = (
            *("model.path=pattern", "model.variant=faults", f"output.format={output_format}", "output.encoders=2"),
            *("plan.max_batch=4", "plan.shard_images=16", f"run.max_deaths={_DEATHS}"),
            *(f"run.commit_every_s={COMMIT_EVERY_S}", f"run.stale_after_s={STALE_AFTER_S}"),
        )
        return [str(manifest), "-o", str(out), *(word for key in keys for word in ("--set", key))]

    @property
    def _has_work(self) -> bool:
        return self._kills.total() < self._settings.kills and not self._report.problems

    def _undisturbed(self, name: str, manifest: Path) -> _Format:
        truth = RunDirectory(self._folder / f"undisturbed-{manifest.stem}-{name}")
        words = ["run", *self._words(manifest, truth.path, name)]
        worker = Victim(words, truth.path, self._folder / f"{truth.path.name}-worker")
        try:
            while worker.exit_code is None and worker.age_s < _UNDISTURBED_S:
                time.sleep(0.01)
        finally:
            worker.send(signal.SIGKILL)
        if worker.exit_code != 0:
            raise BatchgenError(f"an undisturbed run ended with {worker.exit_code}:\n{worker.errors()}")
        return _Format(name, manifest, truth, Targets(worker.log().steps))

    def _sweep(self, of: _Format, bar: tqdm[NoReturn]) -> None:
        """Die at every step in turn, in one run directory."""
        siege = self._siege(of, 1, bar)
        places = counted(len(of.targets.left()), "place")
        self._say(f"{siege.run.path.name}: one worker after another is to die, at {places}, until the run is finished")
        siege.sweep()
        self._close(siege, of)

    def _besiege(self, of: _Format, bar: tqdm[NoReturn]) -> None:
        settings = self._settings
        siege = self._siege(of, self._random.randint(*settings.workers), bar)
        most = min(KILLS_EACH, settings.kills - self._kills.total())
        self._say(f"{siege.run.path.name}: {siege.num_workers} at once, up to {counted(most, 'kill')}")
        siege.go(most)
        self._close(siege, of)

    def _siege(self, of: _Format, workers: int, bar: tqdm[NoReturn]) -> Siege:
        self._report.run_directories += 1
        run = RunDirectory(self._folder / f"run-{self._report.run_directories}-{of.name}")
        folder = self._folder / f"{run.path.name}-workers"
        folder.mkdir()
        words = self._words(of.manifest, run.path, of.name)
        return Siege(run, words, of.targets, self._random, workers, folder, lambda: self._on_kill(bar))

    def _on_kill(self, bar: tqdm[NoReturn]) -> None:
        self._num_seen += 1
        bar.update()
        if bar.disable and self._num_seen % _SAID_EVERY == 0:
            self._say(f"{counted(self._num_seen, 'kill')} so far")

    def _close(self, siege: Siege, of: _Format) -> None:
        self._kills += siege.kills
        problems = siege.problems + ([] if siege.problems else self._look_at(siege, of))
        self._report.problems += problems
        self._count(siege, of)
        text = f"{siege.run.path.name}: {siege.num_workers} at once, {siege.kills.total()} kills"
        self._say(text + "".join(f"\n  {one}" for one in problems))
        if not problems and self._settings.folder is None:
            shutil.rmtree(siege.run.path)
            shutil.rmtree(siege.folder)

    def _count(self, siege: Siege, of: _Format) -> None:
        report = self._report
        report.rows += pq.read_metadata(of.manifest).num_rows
        report.rows_made += sum(len(made.ids) for one in siege.ended for made in one.log.made)
        report.longest_drain_s = max(report.longest_drain_s, siege.longest_drain_s)
        for (number, is_at_step), count in siege.kills.items():
            places = report.kills_by_signal.setdefault(number.name, {"step": 0, "moment": 0})
            places["step" if is_at_step else "moment"] += count

    def _look_at(self, siege: Siege, of: _Format) -> list[str]:
        """What is wrong with a finished run directory, or with what its dead have cost."""
        report, after = self._report, compare(siege.run, of.truth)
        report.rows_lost += after.lost
        report.rows_doubled += after.doubled
        report.rows_differing += after.differing
        problems = [f"{siege.run.path.name}: {problem}" for problem in after.problems]
        if after.lost or after.doubled or after.differing:
            problems.append(f"{siege.run.path.name}: {after}")
        rows = rows_of(siege.run)
        for one in siege.ended:
            # One that slept while others took its epoch has nothing that a kill could cost.
            if one.signal and not one.was_stopped:
                problems += self._weigh(one, loss(one.log, rows.committed_by(one.victim), rows.shard))
        return problems

    def _weigh(self, one: Ended, cost: Loss) -> list[str]:
        report = self._report
        if one.signal == signal.SIGTERM:
            return [f"{one.victim.folder}: SIGTERM cost {cost.rows} finished rows"] if cost.rows else []
        report.most_rows_uncommitted = max(report.most_rows_uncommitted, cost.rows)
        report.most_s_uncommitted = max(report.most_s_uncommitted, cost.beyond_s)
        is_within = cost.beyond_s <= COMMIT_EVERY_S
        return [] if is_within else [f"{one.victim.folder}: SIGKILL cost {cost}, commit_every_s is {COMMIT_EVERY_S}"]


def write_manifest(path: Path, num_rows: int, random: Random) -> Path:
    """Rows of mixed sizes, steps and guidance; one in eight takes a while, so that kills find batches at work."""
    rows = [
        {
            "id": f"row-{number:05d}",
            "prompt": f"fault: slow {random.choice([0.02, 0.05])}" if number % 8 == 0 else f"a fox, number {number}",
            "negative_prompt": random.choice([None, "", "blurred"]),
            **dict(zip(("width", "height"), random.choice(_SIZES), strict=True)),
            "steps": random.randint(1, 50),
            "guidance_scale": random.choice([2.0, 4.0, 7.5]),
            "note": f"carried, {number}",
        }
        for number in range(num_rows)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def _versions() -> dict[str, str]:
    return {
        "batchgen": VERSION,
        "python": platform.python_version(),
        "pyarrow": pa.__version__,
        "pillow": PIL.__version__,
    }
