"""The settled run made into a dataset: parts in place, tables in manifest order, the card, and `_SUCCESS` last.

Any worker that finds all rows settled does this, or a person does; two at once write the same bytes.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchgen.balance import Balance, take_balance
from batchgen.card import card, image_folder_table
from batchgen.errors import BatchgenError, Interrupted, UsageError
from batchgen.filesystem import resumable
from batchgen.ledger import Ledger, Receipt
from batchgen.marker import CARD, put_marker, remove_marker
from batchgen.mending import content_of, mend, read_row_table
from batchgen.metadata import failed_rows, made_rows, row_table_schema
from batchgen.owners import mark, this_process
from batchgen.plan_index import PlanIndex
from batchgen.plans import REJECTED
from batchgen.presence import present, require_present
from batchgen.publish import publish, published
from batchgen.rundir import RunDirectory
from batchgen.spill import Reorder, part_bounds
from batchgen.sweeping import sweep, sweep_left, withdraw
from batchgen.version import VERSION

METADATA = "metadata.parquet"
METADATA_PARTIAL = "metadata.partial.parquet"
_PARTIAL = (METADATA_PARTIAL, "failures.partial.parquet")
_CHECKED = ("status", "file_name", "bytes", "sha256")
"""Columns of a row table that parts are held against."""


@dataclass(frozen=True, slots=True)
class _Sources:
    """The row tables of all committed receipts."""

    ledger: Ledger
    receipts: tuple[tuple[Receipt, pa.Array], ...]
    """Each with the indices of rows that later plans have."""
    positions: npt.NDArray[np.uint64]
    """Of all their rows, ascending."""

    def ranks(self, table: pa.Table) -> npt.NDArray[np.uint32]:
        ranks: npt.NDArray[np.uint32] = np.searchsorted(self.positions, table["position"].to_numpy()).astype(np.uint32)
        return ranks


def finalize(run: RunDirectory, *, is_partial: bool = False, plan: int | None = None) -> Balance | None:
    """Write the tables of a run whose rows are all settled; of what there is so far with `is_partial`, under names
    of their own. Given a plan's number, nothing is done, and None returned, once a higher one is there.

    Raises UsageError if rows are outstanding, BatchgenError if a committed part is missing or has another size.
    """
    index = run.index()
    with present(run):
        while plan in (None, index.number):
            try:
                balance = _finalize(run, index, is_partial=is_partial)
            except (BatchgenError, FileNotFoundError) as error:
                if isinstance(error, Interrupted):
                    raise
                require_present(run, f" ({error})")
                # Parts may have become what a plan that was appended meanwhile leaves of them.
                newer = run.newer(index)
                if newer is None:
                    raise
            else:
                newer = None if is_partial else run.newer(index)
                if newer is None:
                    return balance
                # It may be worked off, too: what stands there now may be the tables without it.
                remove_marker(run)
            index = newer
    return None


def _finalize(run: RunDirectory, index: PlanIndex, *, is_partial: bool) -> Balance:
    ledger = Ledger(run.root, run.files, plan=index.token)
    balance = take_balance(index, ledger)
    if balance.outstanding and not is_partial:
        raise UsageError(
            f"{run.path}: {balance.outstanding} of {balance.rows} rows are outstanding; run the job to its end, or "
            "write tables of what there is with --partial"
        )
    # Read once: with `is_partial` a worker may commit the next one at any time. Their rows are not held.
    receipts = tuple(
        replace(one, ok=(), failed=(), cut=())
        for one in ledger.committed(index.shards)
        if not index.rows(one.shard).isdisjoint((*one.ok, *one.failed))
    )
    # What is written from here on stands on these receipts.
    if receipts:
        ledger.refresh()
    for receipt in receipts:
        publish(run, receipt)
    mend(run, index, ledger)
    withdraw(run, ledger)
    # Before the parts are looked for: opening a folder also makes NFS forget which names it saw absent there.
    try:
        run.files.sync_folder(run.data)
    except FileNotFoundError as error:
        raise BatchgenError(f"{run.data} is missing; `batchgen verify --repair` has its images made again") from error
    with _scratch(run) as scratch:
        sweep_left(run, scratch)
        sources = _sources(run, index, receipts, ledger)
        tables = _write_tables(index, sources, scratch, is_partial=is_partial)
        digests = {name: run.files.digest(temp) for name, temp in tables.items()}
        for name, temp in tables.items():
            run.files.replace(temp, run.path / name)
        if not is_partial:
            _close(run, index, balance, digests, scratch)
    if not is_partial:
        sweep(run, index, ledger)
    return balance


@contextmanager
def _scratch(run: RunDirectory) -> Iterator[Path]:
    """A folder of this process's own, for the time of the block. Raises Interrupted where another took it away."""
    path = run.root / f"finalize-{secrets.token_hex(4)}.{mark(this_process())}"
    run.files.make_folder(path)
    try:
        yield path
    except FileNotFoundError as error:
        require_present(run, f" ({error})")
        if run.files.stat(path) is not None:
            raise
        raise Interrupted(
            f"{path}: another process took this one for dead and has removed what it was writing; nothing of the run "
            "is lost. Run the same command again"
        ) from error
    finally:
        run.files.remove_folder(path, ignore_errors=True)


def _sources(run: RunDirectory, index: PlanIndex, receipts: Sequence[Receipt], ledger: Ledger) -> _Sources:
    found, positions = [], [np.zeros(0, np.uint64)]
    for receipt in receipts:
        gone = pa.array(sorted(index.gone(receipt.shard)), pa.int32())
        table = _counting(read_row_table(ledger, receipt, ["position", "index", *_CHECKED]), gone)
        whole = ledger.receipt(receipt.shard, receipt.epoch) if len(gone) else None
        _check_files(run, index, whole or receipt, table)
        found.append((receipt, gone))
        positions.append(table["position"].to_numpy())
    return _Sources(ledger, tuple(found), np.sort(np.concatenate(positions)))


def _counting(table: pa.Table, gone: pa.Array) -> pa.Table:
    """The rows of a row table but for those that a later plan has."""
    return table.filter(pc.invert(pc.is_in(table["index"], gone))) if len(gone) else table


def _check_files(run: RunDirectory, index: PlanIndex, receipt: Receipt, table: pa.Table) -> None:
    """Existence and size of a published part; `verify` reads the bytes."""
    made = table.filter(pc.field("status") == "ok")
    if not receipt.part or not made.num_rows:
        return
    path = published(run, receipt)
    if not run.files.is_folder(path):
        _check_size(run, path, content_of(run, index, receipt, made).num_bytes)
        return
    for name, size in zip(made["file_name"].to_pylist(), made["bytes"].to_pylist(), strict=True):
        _check_size(run, run.path / name, size)


def _check_size(run: RunDirectory, path: Path, size: int) -> None:
    found = run.files.stat(path)
    if found is None or found.is_folder or found.size != size:
        what = f"has {found.size} bytes instead of {size}" if found and not found.is_folder else "is missing"
        raise BatchgenError(
            f"{path}, which a receipt names, {what}; `batchgen verify` names all that is damaged, and has it "
            "made again with --repair"
        )


def _write_tables(index: PlanIndex, sources: _Sources, scratch: Path, *, is_partial: bool) -> dict[str, Path]:
    """Write the tables into `scratch`: the name that each is to have under the run directory, and where it lies."""
    middle = ".partial" if is_partial else ""
    wanted: dict[str, Callable[[pa.Table], pa.Table]] = {
        METADATA.replace(".", f"{middle}.", 1): made_rows,
        f"failures{middle}.parquet": failed_rows,
    }
    if index.output_format == "files" and not is_partial:
        wanted["data/metadata.parquet"] = lambda rows: image_folder_table(made_rows(rows))
    temps = {name: scratch / f"table-{number}.parquet" for number, name in enumerate(wanted)}
    writers: dict[str, pq.ParquetWriter] = {}
    with resumable(scratch), ExitStack() as stack:
        for rows in _in_order(sources, scratch):
            for name, select in wanted.items():
                table = select(rows)
                if name not in writers:
                    writer = pq.ParquetWriter(temps[name], table.schema, compression="zstd")
                    writers[name] = stack.enter_context(writer)
                writers[name].write_table(table)
    return temps


def _in_order(sources: _Sources, scratch: Path) -> Iterator[pa.Table]:
    """All rows of the row tables in manifest order; one empty table if there are none."""
    if not sources.receipts:
        yield row_table_schema([]).empty_table()
        return
    bounds = part_bounds(np.arange(len(sources.positions) + 1))
    spilled = Reorder(scratch, read_row_table(sources.ledger, sources.receipts[0][0]).schema, bounds)
    for receipt, gone in sources.receipts:
        table = _counting(read_row_table(sources.ledger, receipt), gone)
        spilled.add(table, sources.ranks(table))
    yield from spilled.parts()


def _close(
    run: RunDirectory, index: PlanIndex, balance: Balance, tables: Mapping[str, tuple[int, str]], scratch: Path
) -> None:
    """The rejected rows, the card, and the marker that says for which plan all of it stands. It names what was written
    here, and not what lies there now: a finalizer that knows fewer plans may be at work too."""
    digests = dict(tables)
    if index.num_rejected:
        digests[REJECTED] = run.files.digest(run.plans / index.rejected)
        temp = scratch / REJECTED
        run.files.publish_file(run.plans / index.rejected, temp)
        run.files.replace(temp, run.path / REJECTED)
        run.files.remove(temp)  # A rename onto another name of the same file leaves both.
    text = card(
        name=run.path.resolve().name,
        output_format=index.output_format,
        model=index.model,
        version=VERSION,
        digest=tables[METADATA][1],
        num_images=balance.done,
        num_failed=balance.failed,
    )
    temp = scratch / CARD
    run.files.write(temp, text.encode())
    digests[CARD] = run.files.digest(temp)
    run.files.replace(temp, run.path / CARD)
    for name in _PARTIAL:
        run.files.remove(run.path / name)
    facts = {
        "plan": index.number,
        "done": balance.done,
        "failed": balance.failed,
        "rejected": balance.rejected,
        "version": VERSION,
    }
    put_marker(run, facts, digests)
