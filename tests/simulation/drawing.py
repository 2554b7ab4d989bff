"""What is drawn from a seed before the first step: who works on what, and which troubles come."""

from __future__ import annotations

import errno
from dataclasses import dataclass, replace
from random import Random

from tests.simulation.appends import SHARE, Appender, draw_appenders, draw_repairers
from tests.simulation.world import CHANGES, Trouble

CONTENDED = 0.25
"""Of the schedules with appends."""
ERRORS = (errno.ENOSPC, errno.EIO, errno.ESTALE)
LOST_REPLIES = (errno.EEXIST, errno.EIO, errno.ETIMEDOUT, errno.ESTALE)
KINDS = (
    ("kill",) * 5
    + ("crash",) * 2
    + ("pause",) * 5
    + ("stall",) * 2
    + ("signal", "error", "error", "lost", "lost", "full")
)
CALLS = ("",) * 4 + (
    "link",
    "link",
    "sync",
    "sync_folder",
    "remove",
    "rename",
    "rename",
    "create",
    "names",
    "read",
    "touch",
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is drawn before the first step."""

    num_workers: int
    num_hosts: int
    shard_rows: tuple[int, ...]
    batch_size: int
    batch_s: float
    commit_every_s: float
    stale_after_s: float
    max_deaths: int
    output_format: str
    lag_s: float
    restlessness: float
    oversleep_s: float
    odd_shard: int
    """The one whose first row cannot be encoded; -1: none."""
    num_restarts: int
    """Of each worker."""
    num_finalizers: int
    """Processes that finalize what there is, beside the workers."""
    is_planned: bool
    has_jobs: bool
    may_wait: bool
    troubles: tuple[Trouble, ...]
    appenders: tuple[Appender, ...] = ()
    num_new_rows: int = 0
    """Of the manifest that has grown."""
    is_stubborn: bool = True
    """Whether the row that cannot be encoded cannot when it is tried again either."""


def draw(random: Random) -> Schedule:
    choice, num = random.choice, random.randrange
    num_workers = choice((2, 2, 2, 3, 4))
    stale_after_s = choice((60.0, 600.0))
    return Schedule(
        num_workers=num_workers,
        num_hosts=choice((1, 1, 2, num_workers)),
        shard_rows=tuple(num(1, 4) for _ in range(choice((1, 1, 1, 2, 3)))),
        batch_size=choice((1, 1, 2)),
        batch_s=choice((1.0, 60.0, 200.0)),
        commit_every_s=choice((0.001, 30.0, 120.0)),
        stale_after_s=stale_after_s,
        max_deaths=choice((1, 2, 3)),
        output_format=choice(("files", "webdataset")),
        lag_s=choice((0.0, 0.0, 3.0, 60.0)),
        restlessness=choice((0.02, 0.1, 0.3, 0.7)),
        oversleep_s=stale_after_s * choice((0.1, 0.4, 1.5)),
        odd_shard=choice((-1, -1, 0)),
        num_restarts=num(4),
        num_finalizers=choice((0, 0, 0, 1, 2)),
        is_planned=random.random() < 0.7,
        has_jobs=random.random() < 0.3,
        may_wait=random.random() < 0.9,
        troubles=tuple(_troubles(random, num_workers)),
    )


def with_appenders(one: Schedule, random: Random) -> Schedule:
    """The schedule, if it is to be one with appends: these, and troubles that come when they do."""
    appended = _with_appenders(one, random)
    return _contended(appended, random) if appended.appenders and random.random() < CONTENDED else appended


def _contended(one: Schedule, random: Random) -> Schedule:
    """Repairs that take one part's rows after one another, and somebody who stalls while he brings in what is left."""
    stall = Trouble(
        random.randrange(100, 500),
        "pause",
        random.choice(("create", "link", "stat")),
        10 ** random.uniform(0.5, 3.5),
        at="/mended/",
        kills_after=random.choice((0, random.randrange(1, 60))),
    )
    return replace(
        one,
        output_format="webdataset",
        commit_every_s=120.0,
        troubles=tuple(sorted((*one.troubles[:3], stall), key=lambda one: one.step)),
        appenders=draw_repairers(random),
    )


def _with_appenders(one: Schedule, random: Random) -> Schedule:
    if not one.is_planned or random.random() >= SHARE:
        return one
    more = (_trouble(random, random.randrange(100, 1000)) for _ in range(random.randrange(6)))
    troubles = [*one.troubles, *(_prolonged(random, trouble) for trouble in more)]
    return replace(
        one,
        odd_shard=random.choice((-1, 0, 0)),
        num_restarts=max(1, one.num_restarts),
        troubles=tuple(sorted(troubles, key=lambda one: one.step)),
        appenders=draw_appenders(random),
        num_new_rows=random.randrange(1, 4),
        is_stubborn=random.random() < 0.5,
    )


def _prolonged(random: Random, trouble: Trouble) -> Trouble:
    """A pause in which a plan may be appended and worked off, by one that may not live long when it wakes."""
    if trouble.kind != "pause":
        return trouble
    return replace(
        trouble,
        call=random.choice(("", trouble.call)),
        seconds=10 ** random.uniform(2, 4.7),
        at=random.choice(("", "/finalize-")),
        kills_after=random.choice((0, random.randrange(1, 60))),
    )


def _troubles(random: Random, num_workers: int) -> list[Trouble]:
    last = random.choice((60, 200, 120 * num_workers))
    found = [_trouble(random, random.randrange(last)) for _ in range(random.randrange(7))]
    return sorted(found, key=lambda one: one.step)


def _trouble(random: Random, step: int) -> Trouble:
    kind = random.choice(KINDS)
    call = random.choice(CALLS)
    match kind:
        case "pause":
            return Trouble(step, kind, call, 10 ** random.uniform(-1, 4.5), is_replaced=random.random() < 0.3)
        case "stall":
            return Trouble(step, kind, call, 10 ** random.uniform(-1, 3.5))
        case "error":
            return Trouble(step, kind, call, number=random.choice(ERRORS))
        case "lost":
            call = random.choice(("link", "link", *CHANGES_SORTED))
            return Trouble(step, kind, call, number=random.choice(LOST_REPLIES if call == "link" else ERRORS))
        case "full":
            return Trouble(step, kind, call, seconds=random.randrange(1, 60))
    return Trouble(step, kind, call)


CHANGES_SORTED = sorted(CHANGES)
