"""Faults to be planted where plans are appended, each of which a search must find. None is ever in the product."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Any

import pytest

from batchgen import appending, epoch, finalize, marker, mending, plans, publish, runner
from batchgen.ledger import Ledger
from batchgen.plan_index import PlanIndex
from batchgen.rundir import RunDirectory
from tests.simulation import work
from tests.simulation.files import SimulatedFiles
from tests.simulation.plants import PLANTS, plant
from tests.simulation.world import World

__all__ = ["PLANTS"]


# The plan


@plant("an appended plan is published without sync")
def plan_not_synced(patch: pytest.MonkeyPatch) -> None:
    def write_plan(shards: Any, folder: Any, files: Any, job: Any, after: Any, replaced: Any = ()) -> PlanIndex:
        if after is not None:
            patch.setattr(SimulatedFiles, "sync_open", lambda self, file, path: None)
        try:
            return real(shards, folder, files, job, after, replaced)
        finally:
            patch.setattr(SimulatedFiles, "sync_open", sync)

    real, sync = work.write_plan, SimulatedFiles.sync_open
    patch.setattr(work, "write_plan", write_plan)
    patch.setattr("tests.simulation.appends.write_plan", write_plan)


@plant("two appenders take the same number")
def same_number(patch: pytest.MonkeyPatch) -> None:
    """The index is renamed to its name, where nothing lay a moment ago."""

    def put_plan(root: Any, files: Any, number: int, write: Any) -> PlanIndex:
        token = World.now.token()
        folder, slot = root / f"{number}-{token}", root / f"{number}.json"
        index = write(folder)
        if files.stat(slot) is None:
            temp = root / f"{number}.json.{token}.tmp"
            files.write(temp, index.to_bytes(token))
            files.replace(temp, slot)
        return plans._existing(root, files)

    patch.setattr(appending, "put_plan", put_plan)
    patch.setattr(plans, "put_plan", put_plan)


@plant("rows are taken over whose receipts their putter has not synced")
def taken_over_upon_sand(patch: pytest.MonkeyPatch) -> None:
    def check_settled(run: RunDirectory, index: PlanIndex, rows: Any) -> None:
        for state in Ledger(run.root, run.files).states(rows):
            if rows[state.shard] & index.left(state):
                real(run, index, rows)

    real = appending._check_settled
    patch.setattr(appending, "_check_settled", check_settled)


@plant("an append that lost the race takes over what the winner has")
def loser_takes_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PlanIndex, "gone", lambda self, shard: frozenset())


# Parts


@plant("a part that a later plan has taken out is missed by who publishes it")
def taken_out_is_missed(patch: pytest.MonkeyPatch) -> None:
    def published(run: RunDirectory, receipt: Any) -> None:
        if receipt.part:
            publish._publish(run, receipt, run.root / "work" / receipt.part, publish.published(run, receipt))

    for module in (epoch, finalize, mending):
        patch.setattr(module, "publish", published)


@plant("parts are not mended before a later plan's are published")
def not_mended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(runner, "mend", lambda run, index, ledger: None)


@plant("a folder is taken out of data/ under another name in it")
def left_in_data(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mending, "_take_out", lambda run, index, ledger, receipt, path: run.files.remove_any(path))


@plant("what a plan left of a part is brought in though a later plan has overtaken it")
def overtaken_brought_in(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(mending, "_overtake", lambda run, receipt, plan: None)


@plant("a part is taken out while earlier plans may still bring in what they left of it")
def taken_out_too_soon(patch: pytest.MonkeyPatch) -> None:
    def mend_one(run: RunDirectory, index: PlanIndex, ledger: Ledger, receipt: Any) -> None:
        if index.made(receipt):
            real(run, index, ledger, receipt)
        else:
            mending._take_out(run, index, ledger, receipt, publish.published(run, receipt))

    real = mending._mend
    patch.setattr(mending, "_mend", mend_one)


# The end


def newer_plans(patch: pytest.MonkeyPatch, *, after_errors: bool) -> None:
    """Look for plans that were appended meanwhile after errors only, or only where there was none."""

    def newer(self: RunDirectory, index: PlanIndex) -> PlanIndex | None:
        is_after_error = sys.exc_info()[0] is not None
        return real(self, index) if is_after_error == after_errors else None

    real = RunDirectory.newer
    patch.setattr(RunDirectory, "newer", newer)


@plant("finalize stops at what a plan took out that was appended meanwhile")
def finalize_stops(patch: pytest.MonkeyPatch) -> None:
    newer_plans(patch, after_errors=False)


@plant("finalize does not look for plans that were appended meanwhile")
def finalize_once(patch: pytest.MonkeyPatch) -> None:
    newer_plans(patch, after_errors=True)


@plant("finalize sweeps committed parts of plans that it does not know")
def sweeps_unknown(patch: pytest.MonkeyPatch) -> None:
    class Everything(PlanIndex):
        shards = range(2**20)  # type: ignore[assignment]

    def sweep(run: RunDirectory, index: PlanIndex, ledger: Ledger) -> None:
        real(run, Everything(**{field.name: getattr(index, field.name) for field in fields(index)}), ledger)

    real = finalize.sweep
    patch.setattr(finalize, "sweep", sweep)


@plant("finalize counts before it lists the plans")
def counts_first(patch: pytest.MonkeyPatch) -> None:
    """The marker is put for plans that were not there when the rows were counted."""

    def close(run: RunDirectory, index: PlanIndex, *arguments: Any) -> None:
        real(run, run.index(), *arguments)

    real = finalize._close
    patch.setattr(finalize, "_close", close)


@plant("_SUCCESS is taken for that of all plans")
def any_marker(patch: pytest.MonkeyPatch) -> None:
    """Nobody removes it, and nobody reads for which plan it stands."""
    real = SimulatedFiles.remove
    patch.setattr(SimulatedFiles, "remove", lambda self, path: path.name == marker.SUCCESS or real(self, path))
    patch.setattr(runner, "is_finished", lambda run, *_, **__: run.files.stat(run.path / marker.SUCCESS) is not None)


@plant("tables of the size that _SUCCESS names are taken for those that it stands for")
def sizes_say_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(marker, "_damaged", lambda run, files: iter(()))
