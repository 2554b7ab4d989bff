"""What kills have left: a run directory beside an undisturbed one, and what each dead worker cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow.parquet as pq

from batchgen.bench.victims import Log, Made, Victim
from batchgen.finalize import METADATA
from batchgen.ledger import Ledger
from batchgen.plan_reader import PlanReader
from batchgen.rundir import RunDirectory
from batchgen.verify import verify

_MAY_DIFFER = ("file_name", "seconds", "retries")
"""Columns of the metadata that kills may change."""
_FREE_BATCHES = 2
"""A kill costs `commit_every_s` of work, and these."""


@dataclass(frozen=True, slots=True)
class Aftermath:
    """How a finished run differs from an undisturbed one; all of it is to be nothing."""

    lost: int
    """Rows."""
    doubled: int
    """Rows that two lines of the metadata or two receipts name."""
    differing: int
    """Rows with other pixels."""
    problems: tuple[str, ...]
    """All that is wrong, in words."""


@dataclass(frozen=True, slots=True)
class Loss:
    """What a worker had made, and not committed, when it died."""

    rows: int
    batches: int
    beyond_s: float
    """Seconds of the work that are more than what the last two batches took."""


def compare(run: RunDirectory, truth: RunDirectory) -> Aftermath:
    """A finished run beside an undisturbed one of the same rows and format."""
    found, wanted = (pq.read_table(one.path / METADATA) for one in (run, truth))
    ids, wanted_ids = found["id"].to_pylist(), wanted["id"].to_pylist()
    pixels = dict(zip(ids, found["pixel_sha256"].to_pylist(), strict=True))
    wanted_pixels = dict(zip(wanted_ids, wanted["pixel_sha256"].to_pylist(), strict=True))
    verified = verify(run)
    problems = [f"{fault.place}: {fault.what}" for fault in verified.faults]
    if verified.num_images != len(wanted_ids):
        problems.append(f"{verified.num_images} images in data/, {len(wanted_ids)} without kills")
    if not found.drop_columns(list(_MAY_DIFFER)).equals(wanted.drop_columns(list(_MAY_DIFFER))):
        problems.append(f"{METADATA} differs in more than {', '.join(_MAY_DIFFER)}")
    names, wanted_names = (one.files.names(one.path) for one in (run, truth))
    if names != wanted_names:
        problems.append(f"the run directory holds {names}, without kills {wanted_names}")
    twice = [count - 1 for named in (ids, _named(run)) for count in Counter(named).values()]
    return Aftermath(
        lost=len(wanted_pixels.keys() - pixels.keys()),
        doubled=sum(twice),
        differing=sum(pixels.get(one, digest) != digest for one, digest in wanted_pixels.items()),
        problems=tuple(problems),
    )


def _named(run: RunDirectory) -> Iterator[tuple[int, int]]:
    """Shard and index of each row, as often as committed receipts name it."""
    for receipt in Ledger(run.root, run.files).committed(run.index().shards):
        yield from ((receipt.shard, row) for row in (*receipt.ok, *receipt.failed))


@dataclass(frozen=True, slots=True)
class Rows:
    """Whose rows are whose, in a finished run."""

    shard: dict[str, int]
    """Of each id."""
    _committed: dict[tuple[int, str], set[str]]

    def committed_by(self, worker: Victim) -> frozenset[str]:
        """Ids."""
        return frozenset(self._committed.get((worker.pid, worker.start_time), ()))


def rows_of(run: RunDirectory) -> Rows:
    """Read it off plan and receipts."""
    index = run.index()
    reader = PlanReader(run.plans, index)
    ids = {shard: reader.shard(shard)["id"].to_pylist() for shard in index.shards}
    committed: dict[tuple[int, str], set[str]] = {}
    for one in Ledger(run.root, run.files).committed(index.shards):
        mine = committed.setdefault((one.by.pid, one.by.start_time), set())
        mine.update(ids[one.shard][row] for row in one.ok)
    return Rows({row: shard for shard, some in ids.items() for row in some}, committed)


def loss(log: Log, committed: frozenset[str], shard: Mapping[str, int]) -> Loss:
    """What died with a worker of this log that committed these ids. Rows that were taken away from it before are no
    part of it: it saw their receipt."""
    lost = [
        made
        for number, made in enumerate(log.made)
        if not committed.issuperset(made.ids) and not _was_closed(log, number, shard[made.ids[0]])
    ]
    return Loss(sum(len(made.ids) for made in lost), len(lost), _span_s(lost[:-_FREE_BATCHES]))


def _was_closed(log: Log, number: int, shard: int) -> bool:
    return any(num_made > number and int(name.partition("-")[0]) == shard for num_made, name in log.closed)


def _span_s(made: Sequence[Made]) -> float:
    return made[-1].ended_s - made[0].started_s if made else 0.0
