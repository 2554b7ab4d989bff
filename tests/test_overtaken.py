"""Planners and finalizers that another one overtakes at any of their steps on the disk."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from batchgen import epoch, runner
from batchgen.errors import Interrupted
from batchgen.filesystem import FileSystem
from batchgen.finalize import finalize
from batchgen.ledger import Ledger
from batchgen.marker import SUCCESS
from batchgen.owners import mark, this_process
from batchgen.plan_index import load_index
from batchgen.publish import publish
from batchgen.records import Batch
from batchgen.rundir import RunDirectory, open_run
from batchgen.runner import Terms, run_job, work
from batchgen.verify import verify
from tests import runs
from tests.overtaking import Overtaken, finalize_until
from tests.plans import folder, pattern_job, write
from tests.processes import PROCESSES
from tests.shards import FORMATS
from tests.test_worker import Scripted

OPTIONS = ("plan.batch_sizes=[1, 3]", "plan.shard_images=2", "plan.on_bad_row=skip", "output.encoders=1")
MANIFEST = {"id": ["a", "b", "c", "d", "e"], "prompt": ["a", None, "fault: raise", "d", "e"]}
LINE = "5 rows = 3 done + 1 failed + 1 rejected + 0 outstanding"


class Listened(FileSystem):
    """Notes each call and its last path."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not callable(found) or name.startswith("_"):
            return found

        def called(*arguments: Any, **options: Any) -> Any:
            self.calls.append((name, arguments[-1]))
            return found(*arguments, **options)

        return called


def contents(run: RunDirectory) -> dict[str, str]:
    """sha256 of every file outside the bookkeeping, but for the marker's token."""
    files = [path for path in run.path.rglob("*") if path.is_file() and run.root not in path.parents]
    return {
        str(path.relative_to(run.path)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if path.name != SUCCESS
    }


@pytest.fixture
def memory() -> Iterator[Path]:
    with folder() as path:
        yield path


def test_a_planner_takes_the_plan_that_was_worked_off_meanwhile(memory: Path) -> None:
    job = pattern_job(*OPTIONS, "model.variant=faults")
    manifest = write(memory / "manifest", MANIFEST)
    for step in itertools.count(1):
        out = memory / f"{step}"
        files = Overtaken(step, lambda out=out: run_job(manifest, out, job))  # type: ignore[misc]
        index = open_run(RunDirectory(out, files), manifest, job)
        if files.left > 0:
            break
        assert index == load_index(out / ".run" / "plan", FileSystem())
        assert run_job(manifest, out, job).balance.line() == LINE
        assert verify(RunDirectory(out)).faults == ()
    assert step > 20


@pytest.fixture(scope="module", params=FORMATS)
def settled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose rows are settled: nothing is published, nothing finalized."""
    path = tmp_path_factory.mktemp("settled")
    job = pattern_job(*OPTIONS, "model.variant=faults", f"output.format={request.param}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(epoch, "publish", lambda run, receipt: None)
        patch.setattr(runner, "finalize", lambda run, plan: None)
        run_job(write(path / "manifest", MANIFEST), path / "run", job)
    return path / "run"


def finalized(settled: Path, path: Path) -> RunDirectory:
    """A copy of a settled run, finalized by one process alone."""
    run = RunDirectory(path)
    shutil.copytree(settled, path)
    finalize(run)
    return run


def number_of(request: pytest.FixtureRequest) -> int:
    """Of the format of a settled run."""
    return FORMATS.index(request.node.callspec.params["settled"])


def test_two_finalizers_at_once_write_what_one_writes(
    settled: Path, memory: Path, request: pytest.FixtureRequest
) -> None:
    """Each format at every third step of its own: what is overtaken there hardly depends on the format."""
    undisturbed = finalized(settled, memory / "0" / "run")
    assert contents(undisturbed)
    for step in itertools.count(1 + number_of(request), 3):
        path = memory / f"{step}" / "run"
        shutil.copytree(settled, path)
        files = Overtaken(step, lambda path=path: finalize(RunDirectory(path)))  # type: ignore[misc]
        assert finalize(RunDirectory(path, files)).line() == LINE
        assert contents(RunDirectory(path)) == contents(undisturbed)
        if files.left > 0:
            break
        assert verify(RunDirectory(path)).faults == ()
    assert step > 30


def test_the_marker_of_a_run_that_another_finishes_meanwhile_stays(memory: Path) -> None:
    job, manifest, marker = (
        pattern_job(*OPTIONS),
        write(memory / "manifest", {"prompt": ["a"]}),
        memory / "run" / SUCCESS,
    )
    markers: list[bytes] = []

    def finish(*opened: object) -> None:
        run_job(manifest, memory / "run", job)
        markers.append(marker.read_bytes())

    assert run_job(manifest, memory / "run", job, Terms(on_opened=finish)).exit_code == 0
    assert markers == [marker.read_bytes()]


def test_receipts_are_durable_before_anything_is_written_upon_them(settled: Path, memory: Path) -> None:
    """Their putters may have died between `link` and the sync of the folder."""
    files = Listened()
    run = RunDirectory(memory / "run", files)
    shutil.copytree(settled, run.path)
    finalize(run)
    synced = files.calls.index(("sync_folder", run.root / "receipts"))
    changes = [number for number, (name, _) in enumerate(files.calls) if name in ("link", "rename", "write", "mkdir")]
    assert synced < min(changes)


def test_a_partial_finalize_is_overtaken_by_a_commit_that_is_not_published_yet(memory: Path) -> None:
    job = pattern_job(*OPTIONS, "model.variant=faults")
    manifest = write(memory / "manifest", MANIFEST)
    for step in itertools.count(1):
        run = RunDirectory(memory / f"{step}" / "run")
        open_run(run, manifest, job)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(epoch, "publish", lambda run, receipt: None)
            patch.setattr(runner, "finalize", lambda run, plan: None)
            files = Overtaken(step, lambda run=run: run_job(manifest, run.path, job))  # type: ignore[misc]
            finalize(RunDirectory(run.path, files), is_partial=True)
        if files.left > 0:
            break
    assert step > 15


def test_an_owner_publishes_while_its_part_is_published_and_the_run_finalized(settled: Path, memory: Path) -> None:
    for step in itertools.count(1):
        run = RunDirectory(memory / f"{step}" / "run")
        shutil.copytree(settled, run.path)
        states = list(Ledger(run.root, run.files).states(run.index().shards))
        files = Overtaken(step, lambda run=run: finalize(run))  # type: ignore[misc]
        for receipt in (one for state in states for one in state.committed):
            publish(RunDirectory(run.path, files), receipt)
        finalize(run)
        assert verify(run).faults == ()
        if files.left > 0:
            break
    assert step > 3


def left_over(run: RunDirectory) -> list[str]:
    """What no finished run has in its bookkeeping."""
    found = [name for name in os.listdir(run.root) if name.startswith("finalize-") or name.endswith((".tmp", ".link"))]
    return found + [name for name in os.listdir(run.root / "claims") if name.startswith("now.")]


def test_what_a_killed_finalizer_left_is_swept_by_the_next(
    settled: Path, memory: Path, request: pytest.FixtureRequest
) -> None:
    """Real processes, killed at every fourth of their steps, in one format or another."""
    num_left = 0
    for step in itertools.count(1 + 4 * number_of(request), 4 * len(FORMATS)):
        run = RunDirectory(memory / f"{step}" / "run")
        shutil.copytree(settled, run.path)
        process = PROCESSES.Process(target=finalize_until, args=(run.path, step))
        process.start()
        process.join()
        num_left += bool(left_over(run))
        assert finalize(run).line() == LINE  # type: ignore[union-attr]
        assert left_over(run) == []
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
    assert num_left > 1


LEFT = (
    "finalize-0a0b{0}",
    "finalize-0a0b{0}.0c0d.tmp",
    "marker.0a0b{0}.tmp",
    "card.0a0b{0}.tmp",
    "claims/now.0a0b{0}.tmp",
)


def leave(run: RunDirectory, owner: str, age_s: float) -> list[Path]:
    """What a killed finalizer and a killed worker leave, last changed so long ago; the folder's file, not itself."""
    paths = [run.root / name.format(owner) for name in LEFT]
    for path in paths:
        if path.name.startswith("finalize-"):
            path.mkdir()
            path = path / "table-0.parquet"
        path.write_bytes(b"half")
        for one in {path, path.parent} - {run.root, run.root / "claims"}:
            os.utime(one, (time.time() - age_s,) * 2)
    return paths


def test_what_may_still_be_needed_is_not_swept(settled: Path, memory: Path) -> None:
    """By a process that lives, or by one of another machine that changed something within the day."""
    run, me = RunDirectory(memory / "run"), this_process()
    shutil.copytree(settled, run.path)
    machine, pid, start = mark(me).split("-")
    for owner, age_s in ((f".{mark(me)}", 3600.0), (f".{'0' * 8}-{pid}-{start}", 3600.0), ("", 3600.0)):
        paths = leave(run, owner, age_s)
        finalize(run)
        assert all(path.exists() for path in paths)
    for name in (".{0}-{1}-{2}0", ".{0}-0-{2}"):
        paths = leave(run, name.format(machine, pid, start), 0.0)
        finalize(run)
        assert not any(path.exists() for path in paths)
    assert left_over(run)
    leave(run, ".mine", 25 * 3600.0)
    for path in run.root.glob("finalize-*/*"):
        os.utime(path, (time.time() - 25 * 3600.0,) * 2)
    finalize(run)
    assert not [name for name in left_over(run) if "mine" in name]


def test_a_finalizer_that_was_taken_for_dead_says_so_and_harms_nothing(
    settled: Path, memory: Path, request: pytest.FixtureRequest
) -> None:
    """It slept for days, say, and another one finished the run."""
    undisturbed = finalized(settled, memory / "0" / "run")
    num_swept = 0
    for step in itertools.count(1 + 3 * number_of(request), 3 * len(FORMATS)):
        run = RunDirectory(memory / f"{step}" / "run")
        shutil.copytree(settled, run.path)

        def finish(run: RunDirectory = run) -> None:
            for scratch in run.root.glob("finalize-*"):
                shutil.rmtree(scratch)
            finalize(RunDirectory(run.path))

        files = Overtaken(step, finish)
        try:
            finalize(RunDirectory(run.path, files))
        except Interrupted as error:
            num_swept += "another process took this one for dead" in str(error)
        assert contents(run) == contents(undisturbed)
        if files.left > 0:
            break
    assert num_swept > 1


def test_a_finalizer_whose_run_directory_vanishes_says_so(
    settled: Path, memory: Path, request: pytest.FixtureRequest
) -> None:
    """At whichever of its steps the mount is lost, but for the last, which is a look for a plan that is not there."""
    shutil.copytree(settled, memory / "0" / "run")
    counted = Overtaken(-1, lambda: None)
    undisturbed = RunDirectory(memory / "0" / "run", counted)
    undisturbed.index()
    num_first = -1 - counted.left
    finalize(undisturbed)
    num_steps = -1 - counted.left - num_first
    assert num_steps > num_first + 30
    for step in range(num_first + 1 + number_of(request), num_steps, len(FORMATS)):
        path = memory / f"{step}" / "run"
        shutil.copytree(settled, path)
        files = Overtaken(step, lambda path=path: path.rename(path.with_name("away")))  # type: ignore[misc]
        with pytest.raises(Interrupted, match="the run directory is not there any more"):
            finalize(RunDirectory(path, files))
        shutil.rmtree(path.parent)


class Replacing(Scripted):
    """Where its first model loads or compiles, the run's directory is removed, and another run is planned there."""

    def __init__(self, replace_run: Callable[[], object]) -> None:
        super().__init__()
        self._replace_run = replace_run

    def prepare(self, batches: Sequence[Batch], should_drop: Callable[[], bool]) -> None:
        replace_run, self._replace_run = self._replace_run, lambda: None
        replace_run()


@pytest.mark.parametrize("output_format", FORMATS)
def test_a_worker_of_a_run_that_was_removed_settles_nothing_of_the_next_one_there(
    tmp_path: Path, output_format: str
) -> None:
    """It wakes after `rm -r out` and the planning of another run with `-o out`: that has its own pictures."""
    manifest, run = write(tmp_path / "manifest", {"prompt": list("abcdef")}), RunDirectory(tmp_path / "run")
    old, new = (
        pattern_job(
            "plan.batch_sizes=[1]", "plan.shard_images=3", f"sampling.seed={seed}", f"output.format={output_format}"
        )
        for seed in (0, 1)
    )

    def replace_run() -> None:
        shutil.rmtree(run.path)
        Ledger(run.root, run.files, this_process(), open_run(run, manifest, new).token).make_folders()

    terms = Terms(workforce=partial(work, opener=lambda job, context: Replacing(replace_run)))
    with pytest.raises(Interrupted, match="is another run's directory by now"):
        run_job(manifest, run.path, old, terms)
    (late,) = Ledger(run.root, run.files).committed(run.index().shards)
    assert late.plan != run.index().token
    assert run_job(manifest, run.path, new).exit_code == 0
    assert verify(run).faults == ()
    run_job(manifest, tmp_path / "undisturbed", new)
    assert runs.pixels(run.path) == runs.pixels(tmp_path / "undisturbed")
