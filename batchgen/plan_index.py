"""What the plans of a run say of themselves: their index slots `.run/plan/0.json`, `1.json`, …

Each plan after the first appends to those before it: rows of a grown manifest, and rows of earlier plans that are
made again, which it replaces. Shards and groups are numbered through all plans. Per row the highest plan counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain, count
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ConfigDict, TypeAdapter

from batchgen.errors import UsageError
from batchgen.filesystem import FileSystem
from batchgen.ledger import Receipt, ShardState
from batchgen.ranges import indices
from batchgen.records import Bucket, Group, Work
from batchgen.slots import NO_SLOT, sealed, unsealed
from batchgen.wording import shorten

_EXACT = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True)
class PlanFile:
    """One Parquet file of a plan."""

    __pydantic_config__ = _EXACT

    name: str
    """Path under `.run/plan/`."""
    num_bytes: int
    sha256: str
    footer_sha256: str
    """Of the end that is read beside each row group."""
    first_shard: int
    num_shards: int


@dataclass(frozen=True, slots=True)
class BucketWork:
    """What the plan does in one bucket."""

    __pydantic_config__ = _EXACT

    group: int
    """Index into the groups of all plans."""
    size: int
    """Batch size."""
    batches: int
    """Of at most `size` rows each: one with more rows than lanes counts as several."""
    evaluations: int
    """Of whole batches: the sum of each one's longest row, or busiest lane."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """Rows of one shard that a later plan has taken over."""

    __pydantic_config__ = _EXACT

    plan: int
    """The later one."""
    shard: int
    rows: tuple[tuple[int, int], ...]
    """Ascending [first, last] pairs of indices in the shard."""

    def touches(self, rows: Iterable[int]) -> bool:
        return not frozenset(indices(self.rows)).isdisjoint(rows)


@dataclass(frozen=True)
class PlanIndex:
    """The content of an index slot, or of all of a run together."""

    __pydantic_config__ = _EXACT

    number: int
    """Of the plan; together: of the highest one."""
    folder: str
    """Under `.run/plan/`: holds the files, and the rejected rows."""
    files: tuple[PlanFile, ...]
    first_shard: int
    shard_rows: tuple[int, ...]
    """Images of each shard."""
    shard_s: tuple[float, ...]
    """What each shard costs by the plan's cost model: only their proportions are trusted, unless that was measured."""
    groups: tuple[Group, ...]
    buckets: tuple[BucketWork, ...]
    num_rejected: int
    """Of the manifest as it was when it was last read."""
    num_redrawn: int
    model: str
    job: Mapping[str, Any]
    fingerprint: Mapping[str, str]
    rejected: str = ""
    """Path of the rejected rows' table under `.run/plan/`, "" if there are none."""
    replaced: tuple[Replaced, ...] = ()

    @property
    def num_rows(self) -> int:
        """Images planned, each once."""
        return sum(self.shard_rows) - sum(map(len, self._gone.values()))

    @property
    def output_format(self) -> str:
        """The job's `output.format`. Raises UsageError if the index names none."""
        try:
            return str(self.job["output"]["format"])
        except (KeyError, TypeError):
            raise UsageError("the plan's index names no output.format; start a new run directory") from None

    @property
    def shards(self) -> range:
        return range(self.first_shard, self.first_shard + len(self.shard_rows))

    @property
    def folders(self) -> frozenset[str]:
        """All that lies under `.run/plan/` beside the slots."""
        names = [one.name for one in self.files] + [self.rejected]
        return frozenset([self.folder, *(PurePosixPath(name).parts[0] for name in names if name)])

    @property
    def token(self) -> str:
        """What tells this run from another one that lay in its place: the first folder of its plans."""
        return PurePosixPath(self.files[0].name).parts[0] if self.files else self.folder

    def gone(self, shard: int) -> frozenset[int]:
        """Rows of a shard that a later plan has."""
        return self._gone.get(shard, frozenset())

    @cached_property
    def _gone(self) -> Mapping[int, frozenset[int]]:
        found: dict[int, frozenset[int]] = {}
        for one in self.replaced:
            found[one.shard] = found.get(one.shard, frozenset()) | frozenset(indices(one.rows))
        return found

    def takers(self, receipt: Receipt) -> list[int]:
        """The plans that took over rows that a receipt made, ascending."""
        return sorted({one.plan for one in self._replaced.get(receipt.shard, ()) if one.touches(receipt.ok)})

    @cached_property
    def _replaced(self) -> Mapping[int, Sequence[Replaced]]:
        """By shard."""
        found: dict[int, list[Replaced]] = {}
        for one in self.replaced:
            found.setdefault(one.shard, []).append(one)
        return found

    def rows(self, shard: int) -> frozenset[int]:
        """Rows of a shard that no later plan has."""
        return frozenset(range(self.shard_rows[shard - self.first_shard])) - self.gone(shard)

    def left(self, state: ShardState) -> frozenset[int]:
        """Rows of a shard that are to be made: no later plan has them, and no committed receipt names them."""
        return self.rows(state.shard) - state.settled

    def made(self, receipt: Receipt) -> frozenset[int]:
        """Rows of a committed receipt that were made and count."""
        return self.rows(receipt.shard) & frozenset(receipt.ok)

    def work(self, share: float) -> dict[Bucket, Work]:
        """The work of each bucket, or a share of it."""
        found: dict[Bucket, Work] = {}
        for one in self.buckets:
            bucket = Bucket(self.groups[one.group].shape, one.size)
            more = found.get(bucket, Work(0, 0))
            found[bucket] = Work(more.batches + one.batches, more.evaluations + one.evaluations)
        return {
            bucket: Work(round(share * one.batches), round(share * one.evaluations)) for bucket, one in found.items()
        }

    def to_bytes(self, token: str) -> bytes:
        return sealed(token, asdict(self))

    @classmethod
    def from_bytes(cls, content: bytes, path: Path) -> PlanIndex:
        try:
            index = _INDEX.validate_json(json.dumps(unsealed(content)), strict=True)
            _check(index)
        except NO_SLOT as error:
            reason = shorten(" ".join(repr(error).split()), 300)
            raise UsageError(
                f"{path} is not a plan's index that this version of batchgen can read ({reason}); "
                "if the run directory was damaged, start a new one"
            ) from None
        return index


_INDEX = TypeAdapter(PlanIndex)


def _check(index: PlanIndex) -> None:
    if len(PurePosixPath(index.folder).parts) != 1:
        raise ValueError(f"it names {index.folder!r}, which is none of its folders")
    for name in (index.folder, index.rejected, *(file.name for file in index.files)):
        if ".." in PurePosixPath(name).parts or PurePosixPath(name).is_absolute():
            raise ValueError(f"it names {name!r}, which leads out of the run directory")
    if min(index.shard_rows, default=1) < 1 or sum(one.num_shards for one in index.files) != len(index.shard_rows):
        raise ValueError("its files do not hold its shards")


def load_index(root: Path, files: FileSystem) -> PlanIndex | None:
    """All plans of a run directory together, None if it has none.

    Raises UsageError for an index that cannot be read or does not fit to those before it.
    """
    plans: list[PlanIndex] = []
    for number in count():
        path = root / f"{number}.json"
        content = files.read(path)
        if content is None:
            return joined(plans) if plans else None
        plans.append(PlanIndex.from_bytes(content, path))
        first = sum(len(one.shard_rows) for one in plans[:-1])
        num_groups = sum(len(one.groups) for one in plans)
        is_next = (plans[-1].number, plans[-1].first_shard) == (number, first)
        is_next &= all(0 <= one.shard < first and one.plan == number for one in plans[-1].replaced)
        if not is_next or any(not 0 <= one.group < num_groups for one in plans[-1].buckets):
            raise UsageError(f"{path} is the index of another plan; if the run directory was damaged, start a new one")
    raise AssertionError


def joined(plans: Sequence[PlanIndex]) -> PlanIndex:
    """Successive plans as one."""
    first, last = plans[0], plans[-1]
    return replace(
        last,
        files=tuple(chain.from_iterable(one.files for one in plans)),
        first_shard=first.first_shard,
        shard_rows=tuple(chain.from_iterable(one.shard_rows for one in plans)),
        shard_s=tuple(chain.from_iterable(one.shard_s for one in plans)),
        groups=tuple(chain.from_iterable(one.groups for one in plans)),
        buckets=tuple(chain.from_iterable(one.buckets for one in plans)),
        num_redrawn=sum(one.num_redrawn for one in plans),
        replaced=tuple(chain.from_iterable(one.replaced for one in plans)),
    )
