"""Plans appended to a run: rows of a grown manifest, failed rows tried again, damaged images made again.

A row that is made again is taken over by the new plan: the old receipt stays as it is, and no longer counts for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from batchgen.drafts import row_schema
from batchgen.errors import UsageError
from batchgen.job import Job, load_stored
from batchgen.ledger import Ledger
from batchgen.marker import remove_marker
from batchgen.metadata import CARRIED
from batchgen.models.facts import Facts
from batchgen.models.folder import facts_of
from batchgen.plan_index import BucketWork, PlanIndex, Replaced
from batchgen.plan_reader import PlanReader
from batchgen.planned import Planned, plan_manifest
from batchgen.plans import Base, put_plan, write_shards
from batchgen.presence import present
from batchgen.ranges import ranges
from batchgen.rundir import (
    RunDirectory,
    check_differences,
    check_place,
    fingerprint,
    freeze_planned,
    known_rows,
    open_run,
)
from batchgen.wording import counted

Rows = Mapping[int, frozenset[int]]
"""Indices of rows by their shard."""


def job_of(run: RunDirectory, index: PlanIndex, model: str | None = None) -> Job:
    """The job that a run was planned with, whose model may lie elsewhere by now. Raises UsageError if its files are not
    to be had or have become others."""
    job = _stored(run, index, model)
    try:
        facts = facts_of(job.model)
    except UsageError as error:
        raise UsageError(f"{error}\nIf the run's model was moved, say with --model where it lies now") from error
    check_differences(run, index, fingerprint(job, facts), job)
    return job


def _stored(run: RunDirectory, index: PlanIndex, model: str | None) -> Job:
    job = load_stored(index.job, run.plans / "0.json")
    if model is None:
        return job
    return job.model_copy(update={"model": job.model.model_copy(update={"path": model})})


def failed(run: RunDirectory, index: PlanIndex) -> Rows:
    """The rows that failed, each in its highest plan."""
    found: dict[int, frozenset[int]] = {}
    for receipt in Ledger(run.root, run.files, plan=index.token).committed(index.shards):
        if rows := index.rows(receipt.shard) & frozenset(receipt.failed):
            found[receipt.shard] = found.get(receipt.shard, frozenset()) | rows
    return found


def append_rows(run: RunDirectory, index: PlanIndex, rows: Rows, model: str | None = None) -> PlanIndex:
    """Append a plan that makes settled rows again, in the bucket that each had. Those that a newer plan has taken
    over meanwhile are left to it. `model` as for `job_of`. Raises UsageError for rows that are still to be made."""
    with present(run):
        return _append_rows(run, index, rows, facts_of(_stored(run, index, model).model))


def _append_rows(run: RunDirectory, index: PlanIndex, rows: Rows, facts: Facts) -> PlanIndex:
    _check_settled(run, index, rows)
    while left := {shard: some - index.gone(shard) for shard, some in rows.items() if some - index.gone(shard)}:
        before = index
        index = put_plan(
            run.plans,
            run.files,
            before.number + 1,
            lambda folder, before=before, left=left: _written(run, before, left, facts, folder),  # type: ignore[misc]
        )
    if rows:
        remove_marker(run)
    return index


def _check_settled(run: RunDirectory, index: PlanIndex, rows: Rows) -> None:
    ledger = Ledger(run.root, run.files, plan=index.token)
    for state in ledger.states(rows):
        if still_open := rows[state.shard] & index.left(state):
            raise UsageError(
                f"{run.path}: {counted(len(still_open), 'row')} of shard {state.shard} are still to be made; "
                "run the job to its end first"
            )
    if rows:
        ledger.refresh()  # What is taken over is not made in its old shard again: its receipts must last.


def _written(run: RunDirectory, before: PlanIndex, rows: Rows, facts: Facts, folder: Path) -> PlanIndex:
    run.files.make_folder(folder)
    base = Base.after(before)
    shard_rows: list[int] = []
    buckets: Counter[tuple[int, int]] = Counter()
    evaluations: Counter[tuple[int, int]] = Counter()

    def noted(shards: Iterable[pa.Table]) -> Iterator[pa.Table]:
        for table in shards:
            shard_rows.append(table.num_rows)
            for bucket, most in _batches(table, facts):
                buckets[bucket] += 1
                evaluations[bucket] += most
            yield table

    most = max(before.shard_rows)
    row_s = sum(before.shard_s) / sum(before.shard_rows)
    shards = noted(_shards(_taken(PlanReader(run.plans, before), rows), most))
    files = tuple(write_shards(shards, folder, run.files, base))
    return PlanIndex(
        number=base.number,
        folder=folder.name,
        files=files,
        first_shard=base.shards,
        shard_rows=tuple(shard_rows),
        shard_s=tuple(row_s * num for num in shard_rows),
        groups=(),
        buckets=tuple(BucketWork(*key, buckets[key], evaluations[key]) for key in sorted(buckets)),
        num_rejected=before.num_rejected,
        num_redrawn=0,
        model=before.model,
        job=before.job,
        fingerprint=before.fingerprint,
        rejected=before.rejected,
        replaced=tuple(Replaced(base.number, shard, tuple(ranges(rows[shard]))) for shard in sorted(rows)),
    )


def _taken(reader: PlanReader, rows: Rows) -> Iterator[pa.Table]:
    for shard in sorted(rows):
        table = reader.shard(shard)
        plain = table.set_column(table.schema.get_field_index("sampler"), "sampler", table["sampler"].cast(pa.string()))
        yield plain.take(pa.array(sorted(rows[shard])))


def _shards(tables: Iterable[pa.Table], most: int) -> Iterator[pa.Table]:
    """The rows in shards of at most about `most`, each sorted by bucket and cut into batches of its old size."""
    waiting: list[pa.Table] = []
    for table in tables:
        waiting.append(table)
        if sum(one.num_rows for one in waiting) >= most:
            yield _rebatched(pa.concat_tables(waiting))
            waiting = []
    if waiting:
        yield _rebatched(pa.concat_tables(waiting))


def _rebatched(table: pa.Table) -> pa.Table:
    """Rows that had one bucket side by side, `batch_size` of them a batch; a batch with fewer is padded, so that the
    same pixels come out."""
    group, size, steps = (table[name].to_numpy() for name in ("group", "batch_size", "steps"))
    order = np.lexsort((steps, size, group))
    group, size = group[order], size[order]
    is_other = np.append(True, (group[1:] != group[:-1]) | (size[1:] != size[:-1]))
    first = np.maximum.accumulate(np.where(is_other, np.arange(len(order)), 0))
    starts = (np.arange(len(order)) - first) % size == 0
    batch = (np.cumsum(starts) - 1).astype(np.int32)
    taken = table.unify_dictionaries().combine_chunks().take(pa.array(order))
    return taken.set_column(taken.schema.get_field_index("batch"), "batch", pa.array(batch))


def _batches(shard: pa.Table, facts: Facts) -> Iterator[tuple[tuple[int, int], int]]:
    """The bucket of each batch, and the evaluations of its longest row."""
    names = ("batch", "group", "batch_size", "sampler", "steps", "strength")
    longest: dict[int, tuple[tuple[int, int], int]] = {}
    for batch, group, size, sampler, steps, strength in zip(*(shard[name].to_pylist() for name in names), strict=True):
        evaluations = facts.evaluations(sampler, steps, strength)
        longest[batch] = (group, size), max(evaluations, longest.get(batch, ((0, 0), 0))[1])
    yield from longest.values()


def extend(
    run: RunDirectory,
    names: Sequence[str | Path],
    job: Job,
    on_planned: Callable[[Planned], None] = lambda planned: None,
    on_progress: Callable[[int, int], None] = lambda rows, total: None,
) -> PlanIndex:
    """The run's plans with those rows of a manifest that they lack appended; a new run's plan.

    Raises UsageError, with the differences, where rows that are planned have changed or are not there any more.
    """
    check_place(run)
    index = run.find_index()
    if index is None:
        return open_run(run, names, job, on_planned, on_progress)
    while True:
        planned = _grown(run, names, job, on_progress, index)
        if not planned.draft.cut.num_rows and planned.draft.survey.num_rejected == index.num_rejected:
            return index
        on_planned(planned)
        before, wanted = index.fingerprint.get("manifest.rows"), planned.draft.survey.rows_digest
        index = freeze_planned(run, job, planned, after=index)
        remove_marker(run)
        if before != wanted == index.fingerprint.get("manifest.rows"):
            return index  # Else a plan of other rows was first.


def _grown(
    run: RunDirectory, names: Sequence[str | Path], job: Job, on_progress: Callable[[int, int], None], index: PlanIndex
) -> Planned:
    """The manifest planned with what is known of it. Raises UsageError for one that has not only grown."""
    planned = plan_manifest(names, job, on_progress, partial(known_rows, run, index))
    check_differences(run, index, fingerprint(job, planned.facts), job, planned.draft)
    ours = [field for field in row_schema(planned.draft.survey.manifest) if field.name.startswith(CARRIED)]
    theirs = (
        [field for field in next(run.planned_rows(index)).schema if field.name.startswith(CARRIED)]
        if index.shard_rows
        else ours
    )
    if ours != theirs:
        names_of = [
            ", ".join(f"{one.name.removeprefix(CARRIED)} ({one.type})" for one in some) for some in (theirs, ours)
        ]
        raise UsageError(
            f"manifest: --extend takes more rows of the same columns; those that are only carried were "
            f"{names_of[0] or 'none'}, and are {names_of[1] or 'none'} now"
        )
    return planned
