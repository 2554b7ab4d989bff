"""Plans appended beside the workers: who appends what and when, and weightless doubles of what that reads and writes.

What runs as it is: `append_rows`, `extend`, `failed`, `repair`, `put_plan`, `mend` and its slots. What is stood in for:
the manifest, the files of an appended plan, a part written anew from what is left of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from batchgen.appending import Rows, append_rows, extend, failed
from batchgen.errors import BatchgenError
from batchgen.filesystem import resumable
from batchgen.ledger import Ledger, Receipt
from batchgen.mending import Content
from batchgen.plan_index import PlanIndex, Replaced
from batchgen.publish import published
from batchgen.ranges import ranges
from batchgen.repairing import repair
from batchgen.rundir import RunDirectory
from batchgen.verify import Checked
from tests.simulation.files import digest, my_files
from tests.simulation.work import RowTable, Shards, SimulatedReader, base_shards, drafted, read_table, write_plan
from tests.simulation.world import World

MOST_APPENDERS = 3
SHARE = 0.3
"""Of the schedules."""


@dataclass(frozen=True, slots=True)
class Appender:
    """A person who has rows made again, or more of them."""

    kind: str
    """retry · extend · repair"""
    after_s: float
    again_s: float
    """Between tries while rows are outstanding."""
    picks: float
    """The share of the rows that are found damaged."""
    is_plan_only: bool


def draw_appenders(random: Random) -> tuple[Appender, ...]:
    choice = random.choice
    return tuple(
        Appender(
            kind=choice(("retry", "extend", "repair")),
            after_s=10 ** random.uniform(0, 3),
            again_s=10 ** random.uniform(0, 3),
            picks=choice((0.3, 0.6, 1.0)),
            is_plan_only=random.random() < 0.4,
        )
        for _ in range(choice((1, 1, 2, MOST_APPENDERS)))
    )


def draw_repairers(random: Random) -> tuple[Appender, ...]:
    """One after another, each with some of what the others left."""
    num = random.choice((2, 2, MOST_APPENDERS))
    return tuple(replace(draw_appenders(random)[0], kind="repair") for _ in range(num))


def append(run: RunDirectory, appender: Appender, job: Any) -> PlanIndex:
    """Raises UsageError while rows that it asks for are outstanding."""
    if appender.kind == "extend":
        return extend(run, [], job)
    index = run.index()
    if appender.kind == "retry":
        return append_rows(run, index, failed(run, index))
    return repair(run, list(_damaged(run, index, appender.picks)))


def _damaged(run: RunDirectory, index: PlanIndex, share: float) -> Iterable[Checked]:
    """What `verify` might find."""
    random = World.now.random
    for receipt in Ledger(run.root, run.files).committed(index.shards):
        rows = frozenset(row for row in sorted(index.made(receipt)) if random.random() < share)
        if rows:
            yield Checked(receipt, len(receipt.ok), rows=rows)


# Doubles


def grown(run: RunDirectory, names: Any, job: Any, on_progress: Any, index: PlanIndex) -> Any:
    """As `appending._grown`: every planned row is read, and the rows of the manifest that are none of them are cut."""
    reader = SimulatedReader(run.plans, index)
    known = {row.id for shard in index.shards for row in reader.shard(shard)}
    manifest = [*(name for shard in base_shards(World.now.shard_rows) for name in shard), *World.now.new_rows]
    return drafted(cut([name for name in manifest if name not in known], max(World.now.shard_rows)))


def cut(names: list[str], most: int) -> Shards:
    return [names[start : start + most] for start in range(0, len(names), most)]


def taken_over(run: RunDirectory, before: PlanIndex, rows: Rows, facts: Any, folder: Any) -> PlanIndex:
    """As `appending._written`."""
    reader = SimulatedReader(run.plans, before)
    run.files.make_folder(folder)
    names = [reader.shard(shard)[row].id for shard in sorted(rows) for row in sorted(rows[shard])]
    replaced = tuple(Replaced(before.number + 1, shard, tuple(ranges(rows[shard]))) for shard in sorted(rows))
    return write_plan(cut(names, max(before.shard_rows)), folder, run.files, before.job, before, replaced)


def part_table(ledger: Ledger, receipt: Receipt, made: frozenset[int]) -> RowTable:
    table = read_table(ledger, receipt)
    return RowTable(tuple(line for line in table.lines if line[0] in made))


def rewrite(run: RunDirectory, index: PlanIndex, receipt: Receipt, table: RowTable, target: Any) -> Content:
    """As `mending.rewrite`: the images of a part that are to stay."""
    files, wanted = my_files(), {name for _, _, name in table.lines}
    SimulatedReader(run.plans, index).shard(receipt.shard)
    with resumable(target):
        file = files.create(target)
        try:
            old = files.read(published(run, receipt)) or b""
            images = [one for one in old.decode().split(";")[:-1] if one.split()[0] in wanted]
            if len(images) < len(wanted):
                raise BatchgenError(f"{published(run, receipt)}: the part cannot be written anew")
            content = "".join(f"{one};" for one in images).encode()
            files.append(file, target, content)
            files.sync_open(file, target)
        except BaseException:
            files.remove_any(target)
            raise
        files.sync_folder(target.parent)
    return Content(len(content), digest(content))
