"""Runs on a real Slurm, disturbed in the ways that clusters disturb jobs: each ends with every row exactly once."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from batchgen.ledger import Ledger
from batchgen.owners import Owner
from batchgen.rundir import RunDirectory
from tests import runs
from tests.slurm.cluster import NODES, Cluster, State, cluster, is_running, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

SMALL = ("plan.batch_sizes=[2]", "model.variant=faults", "run.commit_every_s=1.5")
AS_ANOTHER_HOST = """#!/bin/sh
# A host of its own, as far as a worker can tell: its name, and the id of its boot.
hostname "$SLURMD_NODENAME"
mount --bind "$(dirname "$0")/boot-$SLURMD_NODENAME" /proc/sys/kernel/random/boot_id
exec "$@"
"""


@dataclass(frozen=True, slots=True)
class Run:
    """A submitted run."""

    cluster: Cluster
    out: Path
    arrays: tuple[str, ...]
    finish: str

    @property
    def array(self) -> str:
        (one,) = self.arrays
        return one

    def claims(self) -> dict[str, Owner]:
        """Who has the open claims, by the names of their tasks."""
        run = RunDirectory(self.out)
        states = Ledger(run.root, run.files).states(run.index().shards)
        return {one.claim.owner.job_id: one.claim.owner for one in states if one.claim is not None}

    def is_at_work(self, tasks: Sequence[int]) -> bool:
        return self.claims().keys() >= {f"{self.array}_{task}" for task in tasks}

    def wait_until_at_work(self, *tasks: int) -> None:
        wait_for(lambda: self.is_at_work(tasks), lambda: f"{tasks} are not all at work: {self.claims()}\n{self.logs()}")

    def num_committed(self) -> int:
        run = RunDirectory(self.out)
        return len(list(Ledger(run.root, run.files).committed(run.index().shards)))

    def ended(self) -> tuple[dict[int, State], State]:
        """The array's tasks and the finishing job, once all have ended."""
        finish = self.cluster.ended(self.finish)[0]
        return self.cluster.ended(self.array), finish

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(self.out.glob(".run/slurm/*.log")))

    def check_every_row_once(self, num: int) -> None:
        """In the tables, in the files, and in the receipts."""
        assert [line["id"] for line in runs.check_images(self.out)] == [f"row-{n}" for n in range(num)], self.logs()
        run = RunDirectory(self.out)
        index = run.index()
        for state in Ledger(run.root, run.files).states(index.shards):
            named = [row for receipt in state.committed for row in (*receipt.ok, *receipt.failed)]
            assert sorted(named) == list(range(index.shard_rows[state.shard]))


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with cluster() as started:
        yield started


@pytest.fixture(autouse=True)
def environment(slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What jobs inherit: this batchgen, and no other's cache. Both nodes are free, whatever the test before did."""
    wait_for(lambda: set(slurm.ask("sinfo", "-h", "-N", "-o", "%T").split()) == {"idle"}, slurm.logs)
    monkeypatch.setenv("PYTHONPATH", str(runs.ROOT))
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def submit(slurm: Cluster, *words: object, keys: Sequence[str] = (), out: str = "out") -> Run:
    """`batchgen submit` with the pattern model."""
    settings = [word for key in (*SMALL, *keys) for word in ("--set", key)]
    return said_by(slurm, out, runs.batchgen("submit", *words, "-o", out, "--model", "pattern", *settings))


def said_by(slurm: Cluster, out: str, ended: runs.Ended) -> Run:
    assert ended.code == 0, ended.err
    *arrays, finish = re.findall(r"(?m)^submitted job ([0-9]+):", ended.out)
    return Run(slurm, Path(out).absolute(), tuple(arrays), finish)


def codes(states: dict[int, State]) -> dict[int, tuple[str, int]]:
    return {index: (state.name, state.code) for index, state in sorted(states.items())}


OK = ("COMPLETED", 0)


def test_four_tasks_on_two_nodes_and_their_status(slurm: Cluster, tmp_path: Path) -> None:
    keys = ("slurm.tasks=4", "plan.shard_images=4", "slurm.gres='gpu:1'", "slurm.cpus=1", "slurm.time=10")
    run = submit(slurm, runs.slow(tmp_path / "m.parquet", 48, 0.5), keys=keys)
    run.wait_until_at_work(0, 1, 2, 3)
    status = runs.batchgen("status", run.out, "--check")
    assert status.code == 75
    assert {f"{run.array}_{task}" for task in range(4)} <= set(status.out.split())
    states, finish = run.ended()
    assert codes(states) == dict.fromkeys(range(4), OK), run.logs()
    assert {state.node for state in states.values()} == {*NODES}
    assert (finish.name, finish.code) == OK
    assert runs.batchgen("status", run.out, "--check").code == 0
    run.check_every_row_once(48)


def test_scancel_of_one_task_and_requeue_of_another(slurm: Cluster, tmp_path: Path) -> None:
    keys = ("slurm.tasks=4", "plan.shard_images=8")
    run = submit(slurm, runs.slow(tmp_path / "m.parquet", 64, 0.5), keys=keys)
    run.wait_until_at_work(0, 1, 2, 3)
    slurm.ask("scancel", f"{run.array}_1")
    slurm.ask("scontrol", "requeue", f"{run.array}_2")
    states, finish = run.ended()
    assert codes(states) == {0: OK, 1: ("CANCELLED", states[1].code), 2: OK, 3: OK}, run.logs()
    assert (states[2].restarts, finish.name, finish.code) == (1, *OK)
    assert run.logs().count("stopped by SIGTERM; the same command goes on") == 2
    run.check_every_row_once(64)


def test_a_node_set_down(slurm: Cluster, tmp_path: Path) -> None:
    """Its task commits what it has and goes on on the other node."""
    run = submit(slurm, runs.slow(tmp_path / "m.parquet", 40, 0.5), keys=("slurm.tasks=2", "plan.shard_images=8"))
    run.wait_until_at_work(0, 1)
    (lost,) = [index for index, state in slurm.states(run.array).items() if state.node == "n2"]
    slurm.ask("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    states, finish = run.ended()
    slurm.ask("scontrol", "update", "nodename=n2", "state=resume")
    assert codes(states) == {0: OK, 1: OK}, run.logs()
    assert (states[lost].node, states[lost].restarts, finish.name, finish.code) == ("n1", 1, *OK)
    run.check_every_row_once(40)


def test_a_node_lost_with_a_worker_that_lives_on(slurm: Cluster, tmp_path: Path) -> None:
    """slurmd is killed, the node set down and the worker frozen: its task starts again on the other node and takes its
    claim over at once. When the worker wakes up it is too late, and throws away what it has."""
    (tmp_path / "host.sh").write_text(AS_ANOTHER_HOST)
    for name in NODES:
        (tmp_path / f"boot-{name}").write_text(f"{name}\n")
    keys = ("slurm.tasks=2", "plan.shard_images=4", "plan.batch_sizes=[4]")
    container = f"unshare --mount --uts sh {shlex.quote(str(tmp_path / 'host.sh'))}"
    program = f"{shlex.quote(sys.executable)} -m batchgen"
    keys = (*keys, f"slurm.container={container!r}", f"slurm.program={program!r}")
    run = submit(slurm, runs.slow(tmp_path / "m.parquet", 8, 2), keys=keys)
    run.wait_until_at_work(0, 1)
    (lost,) = [index for index, state in slurm.states(run.array).items() if state.node == "n2"]
    slurm.kill("slurmd-n2")
    worker = run.claims()[f"{run.array}_{lost}"].pid
    os.kill(worker, signal.SIGSTOP)
    slurm.ask("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    states, finish = run.ended()
    os.kill(worker, signal.SIGCONT)
    wait_for(lambda: not is_running(worker), lambda: f"worker {worker} goes on")
    slurm.start_node("n2")
    slurm.ask("scontrol", "update", "nodename=n2", "state=resume")
    assert codes(states) == {0: OK, 1: OK}, run.logs()
    assert (states[lost].node, states[lost].restarts, finish.name, finish.code) == ("n1", 1, *OK)
    assert f"is taken over: Slurm has restarted its job {run.array}_{lost}" in run.logs()
    run.check_every_row_once(8)


def test_slurmd_killed(slurm: Cluster, tmp_path: Path) -> None:
    """Its job goes on, and the next slurmd finds it."""
    run = submit(slurm, runs.slow(tmp_path / "m.parquet", 32, 0.5), keys=("slurm.tasks=2", "plan.shard_images=4"))
    run.wait_until_at_work(0, 1)
    slurm.kill("slurmd-n2")
    before = run.num_committed()
    wait_for(lambda: run.num_committed() > before + 2, run.logs)
    slurm.start_node("n2")
    states, finish = run.ended()
    assert codes(states) == {0: OK, 1: OK}, run.logs()
    assert [state.restarts for state in states.values()] == [0, 0]
    assert (finish.name, finish.code) == OK
    run.check_every_row_once(32)


def test_preemption(slurm: Cluster, tmp_path: Path) -> None:
    """Told at the start of the grace time, the tasks commit what they have, and go back into the queue."""
    source = runs.slow(tmp_path / "m.parquet", 40, 0.5)
    run = submit(slurm, source, "--requeue", keys=("slurm.tasks=2", "plan.shard_images=8"))
    run.wait_until_at_work(0, 1)
    higher = ["sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null"]
    job = slurm.ask(*higher, "--wrap", "sleep 3").strip()
    states, finish = run.ended()
    assert slurm.ended(job)[0].name == "COMPLETED"
    assert codes(states) == {0: OK, 1: OK}, run.logs()
    assert [state.restarts for state in states.values()] == [1, 1]
    assert run.logs().count("stopped by SIGTERM; the same command goes on") == 2
    assert (finish.name, finish.code) == OK
    run.check_every_row_once(40)


@pytest.mark.parametrize("launcher", ["srun", "shell"])
def test_time_limit(slurm: Cluster, tmp_path: Path, launcher: str) -> None:
    """Warned before it, a task commits what it has and puts itself into the queue again, by its own name, once."""
    keys = ("slurm.tasks=1", "slurm.time=1", "slurm.warn_s=15", "run.grace_s=10", f"slurm.launcher={launcher}")
    keys = (*keys, "plan.shard_images=60", "plan.batch_sizes=[1]")
    run = submit(slurm, runs.slow(tmp_path / "m.parquet", 60, 0.8), "--requeue", keys=keys)
    states, finish = run.ended()
    assert codes(states) == {0: OK}, run.logs()
    assert states[0].restarts >= 1
    assert (finish.name, finish.code) == OK
    again = f"job {run.array}_0 is in the queue again"
    assert run.logs().count(again) == run.logs().count("stopped by ") == states[0].restarts, run.logs()
    assert "stopped by SIGUSR1" in run.logs()
    run.check_every_row_once(60)


def test_time_limit_of_a_task_with_two_workers(slurm: Cluster, tmp_path: Path) -> None:
    """As of one that has several GPUs: its launcher drains both, and puts the task into the queue again."""
    keys = (
        "slurm.tasks=1",
        "slurm.time=1",
        "slurm.warn_s=20",
        "run.grace_s=10",
        "plan.shard_images=40",
        "plan.batch_sizes=[1]",
    )
    run = submit(slurm, runs.slow(tmp_path / "m.parquet", 160, 0.7), "--requeue", keys=keys)
    slurm.ask("scancel", run.array)
    assert slurm.ended(run.array)[0].name == "CANCELLED"
    script = run.out / ".run" / "slurm" / "two-workers.sbatch"
    alone = (run.out / ".run" / "slurm" / "array.sbatch").read_text()
    script.write_text(re.sub("(?m)^exec .*$", r"\g<0> --workers 2", alone))
    array = slurm.ask("sbatch", "--parsable", script).strip()
    (state,) = slurm.ended(array).values()
    assert (state.name, state.code) == OK, run.logs()
    assert state.restarts >= 1
    assert run.logs().count(f"job {array}_0 is in the queue again") == state.restarts
    assert "stopped by SIGUSR1" in run.logs()
    assert {owner.pid for owner in run.claims().values()} == set()
    assert slurm.ended(run.finish)[0].code in (0, 75)
    run.check_every_row_once(160)


def test_time_limit_without_requeue_then_resume(slurm: Cluster, tmp_path: Path) -> None:
    """The finishing job says what is outstanding; `submit --resume` sends tasks for that alone."""
    keys = (
        "slurm.tasks=2",
        "slurm.time=1",
        "slurm.warn_s=15",
        "run.grace_s=10",
        "plan.shard_images=40",
        "plan.batch_sizes=[1]",
    )
    run = submit(slurm, runs.slow(tmp_path / "m.parquet", 80, 1.2), keys=keys)
    states, finish = run.ended()
    assert codes(states) == dict.fromkeys(range(2), ("FAILED", 75)), run.logs()
    assert (finish.name, finish.code) == ("FAILED", 75)
    assert "outstanding" in (run.out / ".run" / "slurm" / f"{run.finish}.log").read_text()
    resumed = ("submit", "--resume", run.out, "--set", "slurm.time=10", "--set", "slurm.tasks=8")
    again = said_by(slurm, "out", runs.batchgen(*resumed))
    states, finish = again.ended()
    assert codes(states) == dict.fromkeys(range(2), OK), run.logs()
    assert (finish.name, finish.code) == OK
    run.check_every_row_once(80)
    assert "nothing is submitted" in runs.batchgen("submit", "--resume", run.out).err


def test_tasks_that_wait_are_not_sent_twice(slurm: Cluster, tmp_path: Path) -> None:
    """Held in the queue by a dependency that is never met, then forgotten by Slurm."""
    blocker = slurm.ask("sbatch", "--parsable", "--hold", "--wrap", "true").strip()
    one_by_one = ("plan.batch_sizes=[1]", "plan.shard_images=1")
    keys = ("slurm.tasks=2", *one_by_one, f'slurm.options=["--dependency=afterok:{blocker}"]')
    run = submit(slurm, runs.prompts(tmp_path / "m.parquet", 4), keys=keys)
    again = runs.batchgen("submit", "--resume", run.out)
    assert again.code == 0
    assert f"2 tasks sent before, in the queue or just begun: {run.array}_0, {run.array}_1 (" in again.err
    assert "nothing is submitted: that is as many as slurm.tasks allows" in again.err
    more = runs.batchgen("submit", "--resume", run.out, "--set", "slurm.tasks=3", "--set", "slurm.options=[]")
    third = said_by(slurm, "out", more)
    assert codes(slurm.ended(third.array)) == {0: OK}, run.logs()
    slurm.ask("scancel", blocker, run.array, run.finish)
    run.check_every_row_once(4)


def test_case_20_two_of_eight_tasks_again(slurm: Cluster, tmp_path: Path) -> None:
    # Two shards are made at once, so that the others are far from their end when the array is cancelled.
    rows = [{"id": f"row-{n}", "prompt": f"fault: slow {0.1 if n < 8 else 3}"} for n in range(32)]
    source = runs.manifest(tmp_path / "m.parquet", rows)
    run = submit(slurm, source, keys=("slurm.tasks=8", "plan.shard_images=4"))
    wait_for(lambda: run.num_committed() >= 2, run.logs)
    slurm.ask("scancel", run.array)
    states, finish = run.ended()
    assert {state.name for state in states.values()} == {"CANCELLED"}
    assert (finish.name, finish.code) == ("FAILED", 75)
    script = run.out / ".run" / "slurm" / "array.sbatch"
    again = slurm.ask("sbatch", "--parsable", "--array=3,7", script).strip()
    assert codes(slurm.ended(again)) == {3: OK, 7: OK}, run.logs()
    run.check_every_row_once(32)


def test_case_18_twelve_tasks_for_three_shards(slurm: Cluster, tmp_path: Path) -> None:
    run = submit(slurm, runs.slow(tmp_path / "m.parquet", 12, 4), keys=("slurm.tasks=12", "plan.shard_images=4"))
    # The finishing job waits for the array alone: had one of the others taken a shard, it could find that one at work.
    run.wait_until_at_work(0, 1, 2)
    more = slurm.ask("sbatch", "--parsable", "--array=3-11", run.out / ".run" / "slurm" / "array.sbatch").strip()
    states, finish = run.ended()
    assert codes(states) == dict.fromkeys(range(3), OK), run.logs()
    assert codes(slurm.ended(more)) == dict.fromkeys(range(3, 12), OK), run.logs()
    assert (finish.name, finish.code) == OK
    assert "held by process" in run.logs()
    run.check_every_row_once(12)


def test_case_21_more_tasks_than_an_array_may_have_and_a_path_full_of_traps(slurm: Cluster, tmp_path: Path) -> None:
    """Of thirteen tasks the thirteenth is in an array of its own; a row that fails is told by the finishing job."""
    folder = tmp_path / 'it\'s a "run" #1 of 100% $HOME; é'
    folder.mkdir()
    rows = [{"id": f"row-{n}", "prompt": "fault: nan" if n == 12 else "fault: slow 0.1"} for n in range(13)]
    source = runs.manifest(folder / "m.parquet", rows)
    keys = ("slurm.tasks=13", "plan.shard_images=1", "plan.batch_sizes=[1]", "slurm.throttle=13")
    run = submit(slurm, source, keys=keys, out=str(folder / "out"))
    finish = slurm.ended(run.finish)[0]
    assert [len(slurm.ended(array)) for array in run.arrays] == [12, 1]
    assert (finish.name, finish.code) == ("FAILED", 3), run.logs()
    assert [line["id"] for line in runs.check_images(run.out)] == [f"row-{n}" for n in range(12)]
    assert pq.read_table(run.out / "failures.parquet")["id"].to_pylist() == ["row-12"]
    logs = {path.name for path in (folder / "out" / ".run" / "slurm").glob("*.log")}
    assert logs == {*(f"{run.arrays[0]}_{n}.log" for n in range(12)), f"{run.arrays[1]}_0.log", f"{run.finish}.log"}
