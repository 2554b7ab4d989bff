"""What the row tables say, a part at a time: seconds by group, failures by reason, and the rows to show."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.errors import BatchgenError, Interrupted
from batchgen.ledger import Ledger, Receipt
from batchgen.mending import read_row_table
from batchgen.plan_index import PlanIndex
from batchgen.plan_reader import PlanReader
from batchgen.reporting.plan_counts import PlanCounts, planned_columns
from batchgen.reporting.sample import Sample, quotas
from batchgen.reporting.spending import Spending

FAILURES_BY_REASON = 20
"""Failed rows of one reason that are shown."""
_EXAMPLES = 3
GROUP = "\0group"
"""Of the rows to show: the number of their group."""


@dataclass(slots=True)
class Reason:
    """Failures of one error class."""

    count: int = 0
    messages: dict[str, str] = field(default_factory=dict)
    """The first distinct ones, each with a row's id."""


@dataclass(slots=True)
class RowCounts:
    """Sums over all rows that count, and the rows to show."""

    group_s: dict[int, float] = field(default_factory=dict)
    """Seconds of a group's images, together."""
    group_images: dict[int, int] = field(default_factory=dict)
    """Their number."""
    reasons: dict[str, Reason] = field(default_factory=dict)
    num_bytes: int = 0
    flat: int = 0
    retried: int = 0
    smaller: int = 0
    """Images made in smaller batches than planned."""
    made: list[tuple[int, pa.Table]] = field(default_factory=list)
    """By group; with all columns of the row tables."""
    failed: list[tuple[str, pa.Table]] = field(default_factory=list)
    """By reason."""
    unreadable: list[str] = field(default_factory=list)
    """Row tables that are missing or damaged."""


def count_rows(
    index: PlanIndex, reader: PlanReader, ledger: Ledger, plan: PlanCounts, spending: Spending, num_images: int
) -> RowCounts:
    """Read every row table once; one that is damaged is named and left out."""
    counts = RowCounts()
    shares = quotas({number: one.made for number, one in plan.groups.items()}, num_images)
    made: Sample[int] = Sample(lambda group: shares.get(group, 0))
    failed: Sample[str] = Sample(lambda reason: FAILURES_BY_REASON)
    for receipt in plan.receipts:
        try:
            table = _counting(index, read_row_table(ledger, receipt), receipt)
        except Interrupted:
            raise
        except BatchgenError as error:
            counts.unreadable.append(str(error))
            continue
        spending.add(receipt, len(table))
        group, size = planned_columns(plan, reader, receipt.shard)
        rows = table["index"].to_numpy()
        is_ok = table["status"].to_numpy(zero_copy_only=False) == "ok"
        table = table.append_column(GROUP, pa.array(group[rows]))
        _count_made(counts, table.filter(pa.array(is_ok)), size[rows[is_ok]], made)
        _count_failed(counts, table.filter(pa.array(~is_ok)), failed)
    counts.made, counts.failed = made.kinds(), failed.kinds()
    return counts


def _counting(index: PlanIndex, table: pa.Table, receipt: Receipt) -> pa.Table:
    """The rows that no later plan has."""
    gone = index.gone(receipt.shard)
    return table.filter(pc.invert(pc.is_in(table["index"], pa.array(sorted(gone), pa.int32())))) if gone else table


def _count_made(counts: RowCounts, table: pa.Table, planned_size: npt.NDArray[np.int64], sample: Sample[int]) -> None:
    if not len(table):
        return
    counts.num_bytes += pc.sum(table["bytes"]).as_py()
    counts.flat += pc.sum(table["is_flat"]).as_py()
    counts.retried += int((table["retries"].to_numpy() > 0).sum())
    counts.smaller += int((table["batch_size"].to_numpy() < planned_size).sum())
    for number, rows in _by(table, GROUP):
        counts.group_s[number] = counts.group_s.get(number, 0.0) + pc.sum(rows["seconds"]).as_py()
        counts.group_images[number] = counts.group_images.get(number, 0) + len(rows)
        sample.add(number, rows)


def _count_failed(counts: RowCounts, table: pa.Table, sample: Sample[str]) -> None:
    for error, rows in _by(table, "error"):
        reason = counts.reasons.setdefault(error, Reason())
        reason.count += len(rows)
        for id_, message in zip(rows["id"].to_pylist(), rows["message"].to_pylist(), strict=True):
            if len(reason.messages) < _EXAMPLES:
                reason.messages.setdefault(message, id_)
        sample.add(error, rows)


def _by(table: pa.Table, column: str) -> Iterator[tuple[Any, pa.Table]]:
    for value in pc.unique(table[column]).to_pylist():
        yield value, table.filter(pc.field(column) == value)
