"""A run read, its page written."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.balance import take_balance
from batchgen.errors import BatchgenError, UsageError
from batchgen.filesystem import readable
from batchgen.job import load_stored
from batchgen.ledger import Ledger
from batchgen.marker import is_finished
from batchgen.models.folder import facts_of
from batchgen.plan_index import PlanIndex
from batchgen.plan_reader import PlanReader
from batchgen.reporting.cards import cards_of
from batchgen.reporting.findings import Findings
from batchgen.reporting.page import page, require_libraries
from batchgen.reporting.plan_counts import Evaluations, count_plan
from batchgen.reporting.rows import count_rows
from batchgen.reporting.spending import Spending
from batchgen.rundir import RunDirectory
from batchgen.targets import check_target, write_target

_MOST_REJECTED = 5


def write_report(run: RunDirectory, target: Path, num_images: int) -> int:
    """Write the page of a run, whatever it has come to, with at most so many of its pictures, and return their number.

    Raises UsageError for a folder that is no run directory, and where a library is missing.
    """
    check_target(target, ".html")
    require_libraries()
    index = run.index()
    reader, ledger = PlanReader(run.plans, index), Ledger(run.root, run.files, plan=index.token)
    balance, spending = take_balance(index, ledger), Spending()
    plan = count_plan(index, reader, ledger, _evaluations(run, index))
    rows = count_rows(index, reader, ledger, plan, spending, num_images)
    found = Findings(
        name=run.path.resolve().name,
        index=index,
        balance=balance,
        is_finalized=is_finished(run, balance),
        plan=plan,
        spending=spending,
        rows=rows,
        cards=cards_of(run, rows, target),
        rejected=_rejected(run, index),
    )
    text = page(found)
    write_target(target, text.encode())
    return sum(bool(card.picture) for card in found.cards)


def _evaluations(run: RunDirectory, index: PlanIndex) -> Evaluations | None:
    """None where the model, whose scheduler decides them, is not to be had here."""
    try:
        facts = facts_of(load_stored(index.job, run.plans / "0.json").model)
    except UsageError:
        return None
    return lambda sampler, *row: facts.evaluations(sampler, *row) if sampler in facts.samplers else 0


def _rejected(run: RunDirectory, index: PlanIndex) -> list[str]:
    """The faults of the first rejected rows, each with its place."""
    if not index.rejected:
        return []
    path = run.plans / index.rejected
    try:
        with readable(path), pa.OSFile(str(path)) as source:
            opened = pq.ParquetFile(source)
            columns = opened.schema_arrow.names[:3]
            batch = next(opened.iter_batches(_MOST_REJECTED, columns=columns), None)
    except (OSError, pa.ArrowException) as error:
        raise BatchgenError(f"{path}, the table of rejected rows, cannot be read: {error}") from error
    lines = [list(line.values()) for line in batch.to_pylist()] if batch else []
    return [f"{file} row {row}: {'; '.join(faults)}" for file, row, faults in lines]
