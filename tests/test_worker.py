"""One worker with a model that does as it is told: what it retries, halves, commits, drops and leaves alone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen import codec, heart, worker
from batchgen.cost import Measurement
from batchgen.disk import FILES
from batchgen.encoders import EncoderPool
from batchgen.epoch import Workplace
from batchgen.errors import Interrupted, RowError, UsageError
from batchgen.generator import DeviceLost, Dropped, OutOfMemory, Pending
from batchgen.heart import Heart
from batchgen.ledger import ABANDONED, COMMITTED, RELEASED, Ledger, Receipt
from batchgen.making import Maker
from batchgen.models.pattern import paint
from batchgen.owners import end, this_process
from batchgen.plan_reader import PlanReader, batches
from batchgen.progress import Now
from batchgen.records import Batch, Failure, Image, Outcome, Row, Spent
from batchgen.stopping import Stop
from batchgen.worker import Worker
from tests.plans import Frozen, folder, frozen, pattern_job


class Scripted:
    """Paints, unless `behave` raises or has outcomes of its own; remembers what it was asked for."""

    versions: Mapping[str, str] = {"scripted": "1"}

    def __init__(self, behave: Callable[[Batch], list[Outcome] | None] = lambda batch: None) -> None:
        self.behave = behave
        self.asked: list[tuple[int, list[str]]] = []
        self.should_drop: Callable[[], bool] = lambda: False

    def prepare(self, batches: Sequence[Batch], should_drop: Callable[[], bool]) -> None:
        pass

    def measurements(self) -> Sequence[Measurement]:
        return ()

    def spent(self) -> Spent:
        return Spent({"batches": float(len(self.asked))})

    def submit(self, batch: Batch, should_drop: Callable[[], bool]) -> Pending:
        self.asked.append((batch.size, [row.id for row in batch.rows]))
        self.should_drop = should_drop
        outcomes = self.behave(batch) or [image(batch, row) for row in batch.rows]
        return lambda: outcomes


def image(batch: Batch, row: Row) -> Image:
    return Image(row, paint(row), batch.size, "scripted", None, None, 0.1)


@dataclass
class Heard:
    """What a person would see."""

    made: int = 0
    failed: int = 0
    lines: list[str] = field(default_factory=list)

    def count(self, made: int, failed: int) -> None:
        self.made += made
        self.failed += failed

    def say(self, text: str) -> None:
        self.lines.append(text)

    def show(self, now: Now, who: str = "") -> None:
        pass


@dataclass
class Bench:
    """A frozen plan, and workers on it."""

    plan: Frozen
    overrides: tuple[str, ...]
    stop: Stop = field(default_factory=Stop)
    heard: Heard = field(default_factory=Heard)

    @contextmanager
    def worker(self, generator: Scripted, *, may_wait: bool = False) -> Iterator[Worker]:
        reader = PlanReader(self.plan.run.plans, self.plan.index)
        job = pattern_job(*self.overrides)
        with EncoderPool(1) as pool:
            maker = Maker(generator, self.stop, job.run.grace_s, self.heard.say)
            ledger = self.plan.ledger()
            yield Worker(Workplace(self.plan.run, reader, job, ledger, maker, pool, self.stop, self.heard), may_wait)

    def work(self, generator: Scripted, *, may_wait: bool = False) -> None:
        with self.worker(generator, may_wait=may_wait) as one:
            one.work()

    def receipts(self, shard: int = 0) -> list[Receipt]:
        return list(self.plan.ledger().state(shard).receipts)

    def table(self) -> dict[str, dict[str, Any]]:
        """The row tables of all commits, by row id; a row that is named twice fails the test."""
        ledger, found = self.plan.ledger(), {}
        for state in ledger.states(self.plan.index.shards):
            for receipt in state.committed:
                lines = pq.read_table(ledger.table_path(receipt.shard, receipt.epoch)).to_pylist()
                assert not found.keys() & {line["id"] for line in lines}
                found |= {line["id"]: line for line in lines}
        return found

    def left_in_work(self) -> list[str]:
        return sorted(os.listdir(self.plan.run.root / "work"))


def bench(path: Path, num_rows: int, *overrides: str) -> Bench:
    overrides = ("plan.shard_images=100", *overrides)
    columns = {"id": [f"{number}" for number in range(num_rows)], "prompt": [f"prompt {n}" for n in range(num_rows)]}
    return Bench(frozen(path, columns, overrides=overrides), overrides)


def planned_ids(one: Bench) -> list[list[str]]:
    return [
        [row.id for row in batch.rows] for shard in one.plan.shards for batch in batches(shard, one.plan.index.groups)
    ]


def raising(error: BaseException, when: Callable[[Batch], bool]) -> Callable[[Batch], None]:
    def behave(batch: Batch) -> None:
        if when(batch):
            raise error

    return behave


def has(row_id: str) -> Callable[[Batch], bool]:
    return lambda batch: row_id in [row.id for row in batch.rows]


EIGHT = ("plan.batch_sizes=[8]",)


# What is made


def test_receipts_tell_what_was_spent_each_time_once(tmp_path: Path) -> None:
    one = bench(tmp_path, 40, *EIGHT, "run.commit_every_s=1e-9")
    one.work(Scripted())
    receipts = [receipt for state in one.plan.ledger().states(one.plan.index.shards) for receipt in state.committed]
    assert len(receipts) > 3
    assert sum(receipt.spent.stage_s["batches"] for receipt in receipts) == 5
    assert all(receipt.spent.stage_s["write"] > 0 for receipt in receipts)
    assert all(0 < receipt.started_s <= receipt.ended_s for receipt in receipts)


def test_batches_are_made_as_planned_and_each_shard_is_one_commit(tmp_path: Path) -> None:
    one, generator = bench(tmp_path, 21, "plan.shard_images=9"), Scripted()
    one.work(generator)
    assert sorted(planned_ids(one)) == sorted(ids for _, ids in generator.asked)
    assert one.table().keys() == {f"{number}" for number in range(21)}
    for shard in one.plan.index.shards:
        (receipt,) = one.receipts(shard)
        assert receipt.versions == {"scripted": "1"}
        assert receipt.ok == tuple(range(one.plan.index.shard_rows[shard]))
        assert (one.plan.run.data / receipt.part).exists()
    assert (one.heard.made, one.heard.failed, one.heard.lines) == (21, 0, [])
    one.work(generator)
    assert sum(len(ids) for _, ids in generator.asked) == 21


@pytest.mark.parametrize("first", range(3))
def test_a_worker_begins_at_a_shard_of_its_own(tmp_path: Path, first: int) -> None:
    one, generator = bench(tmp_path, 3, "plan.shard_images=1"), Scripted()
    with one.worker(generator) as working:
        working.place.ledger.owner = replace(working.place.me, token=f"{300 + first:016x}")
        working.work()
    ids = [ids[0] for ids in planned_ids(one)]
    assert [asked[0] for _, asked in generator.asked] == ids[first:] + ids[:first]


# Rows that fail


@pytest.mark.parametrize("is_cured", [True, False])
def test_a_row_that_failed_is_tried_once_more_alone_in_its_bucket(tmp_path: Path, *, is_cured: bool) -> None:
    def behave(batch: Batch) -> list[Outcome] | None:
        if is_cured and len(batch.rows) == 1:
            return None
        return [Failure(row, "NotFinite", "NaN") if row.id == "2" else image(batch, row) for row in batch.rows]

    one, generator = bench(tmp_path, 8, *EIGHT), Scripted(behave)
    one.work(generator)
    assert generator.asked[1:] == [(8, ["2"])]
    lines = one.table()
    assert [lines["2"][name] for name in ("status", "error", "message", "retries")] == (
        ["ok", None, None, 1] if is_cured else ["failed", "NotFinite", "NaN", 1]
    )
    assert {(line["status"], line["retries"]) for row, line in lines.items() if row != "2"} == {("ok", 0)}
    assert (one.heard.made, one.heard.failed) == ((8, 0) if is_cured else (7, 1))


def test_a_batch_that_raises_is_tried_row_by_row_and_only_the_guilty_row_fails(tmp_path: Path) -> None:
    one = bench(tmp_path, 8, *EIGHT)
    generator = Scripted(raising(ValueError("no such colour"), has("3")))
    one.work(generator)
    (_, first), *rest = generator.asked
    assert rest == [(8, [row]) for row in first]
    lines = one.table()
    assert [lines["3"][name] for name in ("status", "error", "message", "retries")] == [
        "failed", "ValueError", "no such colour", 1,
    ]  # fmt: skip
    assert {(line["status"], line["retries"]) for row, line in lines.items() if row != "3"} == {("ok", 1)}
    assert "ValueError: no such colour" in one.heard.lines[0]


def test_a_row_that_cannot_be_encoded_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = codec.encode

    def refuse_one(pixels: Any, parameters: Any, output: Any) -> bytes:
        if parameters["id"] == "5":
            raise RowError("too wide for webp")
        return encode(pixels, parameters, output)

    monkeypatch.setattr(codec, "encode", refuse_one)
    one = bench(tmp_path, 8, *EIGHT)
    one.work(Scripted())
    lines = one.table()
    assert [lines["5"][name] for name in ("status", "error", "message")] == ["failed", "RowError", "too wide for webp"]
    assert [len(one.receipts()[0].ok), len(one.receipts()[0].failed)] == [7, 1]
    assert (one.heard.made, one.heard.failed) == (7, 1)


def test_a_shard_whose_rows_all_fail_is_settled_without_a_part(tmp_path: Path) -> None:
    one = bench(tmp_path, 3)
    one.work(Scripted(raising(ValueError("never"), lambda batch: True)))
    (receipt,) = one.receipts()
    assert (receipt.ok, receipt.failed, receipt.part) == ((), (0, 1, 2), "")
    assert os.listdir(one.plan.run.data) == []
    assert one.left_in_work() == ["00000-0.rows.parquet"]


# Memory


@given(st.integers(1, 20), st.sampled_from([[1], [8], [3, 7], [1, 16], [5]]), st.integers(1, 16))
@settings(max_examples=15)
def test_batches_that_do_not_fit_are_halved_until_they_do(num_rows: int, sizes: list[int], fits: int) -> None:
    with folder() as path:
        one = bench(path, num_rows, f"plan.batch_sizes={sizes}")
        generator = Scripted(raising(OutOfMemory("too large"), lambda batch: batch.size > fits))
        one.work(generator)
        lines = one.table()
        assert lines.keys() == {f"{number}" for number in range(num_rows)}
        assert {line["status"] for line in lines.values()} == {"ok"}
        assert all(line["batch_size"] <= fits for line in lines.values())
        assert all(len(ids) <= size for size, ids in generator.asked)
        made = [row for size, ids in generator.asked if size <= fits for row in ids]
        assert sorted(made) == sorted(lines)
        assert bool(one.heard.lines) == any(size > fits for size, _ in generator.asked)


def test_a_row_that_does_not_even_fit_alone_fails_as_such(tmp_path: Path) -> None:
    one = bench(tmp_path, 8, *EIGHT)
    generator = Scripted(raising(OutOfMemory("12 GiB more"), has("6")))
    one.work(generator)
    assert [size for size, ids in generator.asked if "6" in ids] == [8, 4, 2, 1]
    lines = one.table()
    assert [lines["6"][name] for name in ("status", "error", "message")] == ["failed", "OutOfMemory", "12 GiB more"]
    assert {line["status"] for row, line in lines.items() if row != "6"} == {"ok"}


def turns_of(one: Bench, size: int) -> Batch:
    """All rows of the first shard, in `size` lanes."""
    (batch, *more) = batches(one.plan.shards[0], one.plan.index.groups)
    return replace(batch, size=size, rows=(*batch.rows, *(row for other in more for row in other.rows)))


@pytest.mark.parametrize("fits", [8, 4, 3, 1])
def test_rows_that_take_turns_stay_together_when_their_lanes_are_halved(tmp_path: Path, fits: int) -> None:
    one = bench(tmp_path, 20, "plan.batch_sizes=[1]", "plan.shard_images=20")
    generator = Scripted(raising(OutOfMemory("too large"), lambda batch: batch.size > fits))
    with one.worker(generator) as working:
        batch = turns_of(one, 8)
        outcomes = working.place.maker.start(batch)()
    assert [outcome.row for outcome in outcomes] == list(batch.rows)
    assert all(isinstance(outcome, Image) for outcome in outcomes)
    ids = [row.id for row in batch.rows]
    tried = {8: [8], 4: [8, 4], 3: [8, 4, 2], 1: [8, 4, 2, 1]}[fits]
    assert generator.asked == [(size, ids) for size in tried]


def test_of_rows_that_take_turns_only_the_one_that_does_not_fit_fails(tmp_path: Path) -> None:
    one = bench(tmp_path, 5, "plan.batch_sizes=[1]", "plan.shard_images=20")
    generator = Scripted(raising(OutOfMemory("12 GiB more"), has("3")))
    with one.worker(generator) as working:
        outcomes = working.place.maker.start(turns_of(one, 2))()
    assert [(lost.row.id, lost.error) for lost in outcomes if isinstance(lost, Failure)] == [("3", "OutOfMemory")]
    assert len(outcomes) == 5
    assert [(size, len(ids)) for size, ids in generator.asked] == [(2, 5), (1, 5), *[(1, 1)] * 5]


def test_a_row_tried_alone_is_halved_too_where_memory_has_become_short(tmp_path: Path) -> None:
    def behave(batch: Batch) -> None:
        if len(batch.rows) == 8:
            raise ValueError("a batch that fails")
        if batch.size > 2:
            raise OutOfMemory("and now memory is short")

    one = bench(tmp_path, 8, *EIGHT)
    one.work(Scripted(behave))
    assert {(line["status"], line["batch_size"], line["retries"]) for line in one.table().values()} == {("ok", 2, 1)}


# What is nobody's fault


@pytest.mark.parametrize("error", [DeviceLost("gone"), UsageError("no such device"), Interrupted("disk full")])
@pytest.mark.parametrize("is_alone", [False, True])
def test_a_fatal_error_ends_the_worker_and_commits_nothing_of_its_epoch(
    tmp_path: Path, error: Exception, *, is_alone: bool
) -> None:
    def behave(batch: Batch) -> None:
        if "3" in [row.id for row in batch.rows]:
            if is_alone and len(batch.rows) > 1:
                raise ValueError("a batch that fails")
            raise error

    one = bench(tmp_path, 8, "plan.batch_sizes=[4]")
    with pytest.raises(type(error)):
        one.work(Scripted(behave))
    given_back = [] if isinstance(error, DeviceLost) else [RELEASED]
    assert [receipt.kind for receipt in one.receipts()] == given_back
    assert one.left_in_work() == []
    assert os.listdir(one.plan.run.data) == []


def test_a_full_disk_while_a_part_is_written_is_no_rows_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(pixels: Any, parameters: Any, output: Any) -> bytes:
        raise Interrupted("the disk is full")

    monkeypatch.setattr(codec, "encode", full)
    one = bench(tmp_path, 4)
    with pytest.raises(Interrupted, match="full"):
        one.work(Scripted())
    assert [receipt.kind for receipt in one.receipts()] == [RELEASED]
    assert one.left_in_work() == []


# When it commits


def test_time_makes_an_epoch_of_what_is_finished(tmp_path: Path) -> None:
    one = bench(tmp_path, 7, "plan.batch_sizes=[2, 1]", "run.commit_every_s=1e-9")
    one.work(Scripted())
    assert [receipt.ok for receipt in one.receipts()] == [(0, 1), (2, 3), (4, 5), (6,)]
    assert sorted(os.listdir(one.plan.run.data)) == [f"00000-{epoch}" for epoch in range(4)]
    assert len(one.table()) == 7


def test_a_receipt_names_no_row_that_an_earlier_epoch_settled(tmp_path: Path) -> None:
    one, generator = bench(tmp_path, 8, *EIGHT), Scripted()
    ledger = one.plan.ledger()
    assert ledger.owner is not None
    ledger.claim(0, 0)
    ledger.commit(Receipt(COMMITTED, 0, 0, ledger.owner, ok=(0, 5), failed=(2,)))
    one.work(generator)
    assert one.receipts()[1].ok == (1, 3, 4, 6, 7)
    assert [(size, len(ids)) for size, ids in generator.asked] == [(8, 5)]


def abandoned(one: Bench, times: int) -> None:
    ledger = one.plan.ledger()
    for epoch in range(times):
        ledger.claim(0, epoch)
        ledger.abandon(0, epoch)


def test_a_shard_whose_owners_died_is_run_row_by_row(tmp_path: Path) -> None:
    one, generator = bench(tmp_path, 5, "plan.batch_sizes=[4, 1]"), Scripted()
    abandoned(one, 3)
    one.work(generator)
    assert [(size, len(ids)) for size, ids in generator.asked] == [(1, 1)] + [(4, 1)] * 4
    assert [receipt.ok for receipt in one.receipts()[3:]] == [(0,), (1,), (2,), (3,), (4,)]


@pytest.mark.parametrize("num_rows", [1, 5])
def test_the_row_whose_owners_died_alone_is_failed_first_and_not_tried(tmp_path: Path, num_rows: int) -> None:
    one, generator = bench(tmp_path, num_rows, "plan.batch_sizes=[4, 1]"), Scripted()
    abandoned(one, 6)
    one.work(generator)
    first, *rest = one.receipts()[6:]
    assert (first.ok, first.failed) == ((), (0,))
    assert [receipt.ok for receipt in rest] == [(row,) for row in range(1, num_rows)]
    (failed,) = [line for line in one.table().values() if line["status"] == "failed"]
    assert (failed["index"], failed["error"]) == (0, "ProcessDied")
    assert failed["id"] not in [row for _, ids in generator.asked for row in ids]
    assert (one.heard.made, one.heard.failed) == (num_rows - 1, 1)


# Stopping


def test_the_batch_that_is_running_is_finished_and_committed(tmp_path: Path) -> None:
    one = bench(tmp_path, 12, "plan.batch_sizes=[4]")

    def ask(batch: Batch) -> None:
        if len(generator.asked) == 2:
            one.stop.since = one.stop.clock()

    generator = Scripted(ask)
    one.work(generator)
    assert [receipt.ok for receipt in one.receipts()] == [tuple(range(8))]
    assert len(generator.asked) == 2


@pytest.mark.parametrize(("num_finished", "kinds"), [(0, [RELEASED]), (1, [COMMITTED])])
def test_a_dropped_batch_leaves_what_was_finished(tmp_path: Path, num_finished: int, kinds: list[str]) -> None:
    one = bench(tmp_path, 12, "plan.batch_sizes=[4]")

    def drop(batch: Batch) -> None:
        if len(generator.asked) > num_finished:
            one.stop.since = one.stop.clock()
            raise Dropped

    generator = Scripted(drop)
    one.work(generator)
    assert [receipt.kind for receipt in one.receipts()] == kinds
    assert one.heard.made == 4 * num_finished
    assert len(one.left_in_work()) == num_finished
    one.stop.since = None
    one.work(Scripted())
    assert len(one.table()) == 12


def test_a_worker_that_is_asked_to_stop_takes_no_shard(tmp_path: Path) -> None:
    one, generator = bench(tmp_path, 3), Scripted()
    one.stop.since = one.stop.clock()
    one.work(generator, may_wait=True)
    assert (generator.asked, one.receipts(), os.listdir(one.plan.run.root / "claims")) == ([], [], [])


@pytest.mark.parametrize(
    ("last_s", "age_s", "is_dropped"),
    [
        (None, 0, False),
        (None, 19, False),
        (None, 20.1, True),
        (10, 0, False),
        (10, 9, False),
        (10, 10.1, True),
        (30, 0, True),
    ],
)
def test_a_batch_is_dropped_if_it_would_outlast_the_grace(
    tmp_path: Path, last_s: float | None, age_s: float, *, is_dropped: bool
) -> None:
    one, now = bench(tmp_path, 1, "run.grace_s=25"), [100.0]
    one.stop.clock = lambda: now[0]
    with one.worker(Scripted()) as working:
        (batch,) = batches(one.plan.shards[0], one.plan.index.groups)
        if last_s is not None:
            working.place.maker._batch_s[batch.group, batch.size] = last_s
        should_drop = working.place.maker.should_drop(batch, time.monotonic())
        assert not should_drop()
        one.stop.since = now[0]
        now[0] += age_s
        assert should_drop() == is_dropped
        if last_s == 10:
            longer = replace(batch, rows=batch.rows * 3)
            assert working.place.maker.should_drop(longer, time.monotonic())(), "three turns take three times as long"


# Others


def test_an_epoch_that_was_taken_away_is_thrown_away_and_its_rows_are_made_once(tmp_path: Path) -> None:
    one = bench(tmp_path, 4)

    def suspect(batch: Batch) -> None:
        if len(generator.asked) == 1:
            assert one.plan.ledger().abandon(0, 0)

    generator = Scripted(suspect)
    one.work(generator, may_wait=True)
    assert [receipt.kind for receipt in one.receipts()] == [ABANDONED, COMMITTED]
    assert os.listdir(one.plan.run.data) == ["00000-1"]
    assert "00000-0" not in one.left_in_work()
    assert (len(one.table()), one.heard.made) == (4, 4)
    assert "thrown away" in one.heard.lines[0]


@pytest.mark.parametrize("output", ["files", "webdataset", "parquet"])
def test_an_owner_that_wakes_after_its_epoch_was_swept_goes_on_with_what_is_left(tmp_path: Path, output: str) -> None:
    """Others abandoned its epoch while it was paused, and finalize swept its part."""
    one = bench(tmp_path, 4, "plan.batch_sizes=[1]", f"output.format={output}", "output.encoders=1")
    work = one.plan.run.root / "work"

    def pause(batch: Batch) -> None:
        if len(generator.asked) == 3:
            assert one.plan.ledger().abandon(0, 0)
            for name in one.left_in_work():
                FILES.remove_any(work / name)

    generator = Scripted(pause)
    one.work(generator, may_wait=True)
    assert [receipt.kind for receipt in one.receipts()] == [ABANDONED, COMMITTED]
    assert (len(one.table()), one.heard.made) == (4, 4)
    assert [name for name in one.left_in_work() if name.startswith("00000-0")] == []


def test_rows_that_a_living_worker_holds_are_left_to_it(tmp_path: Path) -> None:
    one, generator = bench(tmp_path, 2, "plan.shard_images=1"), Scripted()
    other = one.plan.ledger()
    assert other.claim(0, 0)
    one.work(generator)
    assert [ids for _, ids in generator.asked] == planned_ids(one)[1:]


def test_rows_of_a_dead_worker_are_taken_over(tmp_path: Path) -> None:
    one, generator = bench(tmp_path, 2), Scripted()
    dead = Ledger(one.plan.run.root, one.plan.run.files, replace(this_process(), start_time="1"))
    one.plan.ledger()
    assert dead.claim(0, 0)
    one.work(generator)
    assert [receipt.kind for receipt in one.receipts()] == [ABANDONED, COMMITTED]
    assert "taken over" in one.heard.lines[0]


def test_a_worker_waits_for_rows_that_are_held_and_takes_them_when_they_are_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "POLL_S", 0.05)
    one, generator = bench(tmp_path, 2), Scripted()
    other = one.plan.ledger()
    assert other.claim(0, 0)
    threading.Timer(0.3, other.release, (0, 0)).start()
    one.work(generator, may_wait=True)
    assert [receipt.kind for receipt in one.receipts()] == [RELEASED, COMMITTED]
    assert len(one.table()) == 2


def test_two_workers_at_once_make_each_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "POLL_S", 0.05)
    one = bench(tmp_path, 24, "plan.shard_images=3", "run.commit_every_s=1e-9", "plan.batch_sizes=[1]")
    generators = [Scripted(), Scripted(), Scripted()]
    threads = [
        threading.Thread(target=one.work, args=(generator,), kwargs={"may_wait": True}) for generator in generators
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(one.table()) == 24
    assert sorted(row for generator in generators for _, ids in generator.asked for row in ids) == sorted(one.table())


# Heartbeats


@pytest.mark.parametrize(("stale_after_s", "period_s"), [(600, 30), (8, 2), (1e-6, 0.01)])
def test_a_claim_is_touched_often_enough_for_any_stale_after_s(
    tmp_path: Path, stale_after_s: float, period_s: float
) -> None:
    """Its own limit, not 30 s, decides how often: a living owner is never taken for dead."""
    one = bench(tmp_path, 1)
    beating = Heart(one.plan.ledger(), 0, 0, stale_after_s)
    beating.stop()
    assert beating._period_s == period_s


def test_a_claim_is_touched_for_as_long_as_a_batch_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heart, "PERIOD_S", 0.01)
    one = bench(tmp_path, 1)
    claim = one.plan.ledger().claim_path(0, 0)

    def be_slow(batch: Batch) -> None:
        os.utime(claim, (1, 1))
        until = time.monotonic() + 20
        while claim.stat().st_mtime == 1 and time.monotonic() < until:
            time.sleep(0.01)
        assert claim.stat().st_mtime > 1

    one.work(Scripted(be_slow))
    assert len(one.table()) == 1
    assert one.heard.lines == []


def test_a_disk_that_is_lost_between_two_commits_stops_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heart, "PERIOD_S", 0.01)
    one, failed = bench(tmp_path, 1), threading.Event()

    def lose(ledger: Ledger, shard: int, epoch: int) -> None:
        failed.set()
        raise Interrupted("the disk is lost")

    monkeypatch.setattr(Ledger, "heartbeat", lose)

    def wait(batch: Batch) -> None:
        assert failed.wait(20)
        time.sleep(0.05)

    with pytest.raises(Interrupted, match="lost"):
        one.work(Scripted(wait))
    assert [receipt.kind for receipt in one.receipts()] == [RELEASED]
    assert one.left_in_work() == []


def test_a_heart_beats_until_it_is_stopped(tmp_path: Path) -> None:
    one = bench(tmp_path, 1)
    beating = Heart(one.plan.ledger(), 0, 0, 600)
    assert "heartbeat" in [thread.name for thread in threading.enumerate()]
    beating.stop()
    assert "heartbeat" not in [thread.name for thread in threading.enumerate()]


# The device is kept busy


def test_the_next_batch_is_at_work_before_the_one_before_is_taken_and_committed(tmp_path: Path) -> None:
    """From one shard to the next too: a device never waits for an encoder or a disk."""
    one = bench(tmp_path, 6, "plan.batch_sizes=[1]", "plan.shard_images=2")
    events: list[str] = []

    class Queued(Scripted):
        def submit(self, batch: Batch, should_drop: Callable[[], bool]) -> Pending:
            number = len(self.asked)
            pending = super().submit(batch, should_drop)
            events.append(f"start {number}")

            def outcomes() -> list[Outcome]:
                events.append(f"take {number}")
                return pending()

            return outcomes

    ledger = one.plan.ledger()

    def note(batch: Batch) -> None:
        events.extend(f"committed {receipt.stem}" for receipt in ledger.committed(one.plan.index.shards))

    one.work(Queued(note))
    starts = [events.index(f"start {number}") for number in range(6)]
    takes = [events.index(f"take {number}") for number in range(6)]
    assert all(takes[number] > starts[number + 1] for number in range(5))
    first_commit = next(place for place, event in enumerate(events) if event.startswith("committed"))
    assert starts[2] < first_commit < starts[4], (
        "the first shard is committed once the next one's first batch is started"
    )
    assert len(one.table()) == 6


def test_the_end_of_a_heart_that_its_owner_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that was broken off in a process that lives on holds nothing any more."""
    monkeypatch.setattr(heart, "PERIOD_S", 0.01)
    one = bench(tmp_path, 1)
    ledger = one.plan.ledger()
    assert ledger.claim(0, 0)
    beating = Heart(ledger, 0, 0, 600)
    assert ledger.owner is not None
    end(ledger.owner)
    beating._thread.join(20)
    assert not beating._thread.is_alive()


# What a worker gives back


class Killed(BaseException):
    """Stands for a second signal."""


@pytest.mark.parametrize("error", [UsageError("no"), Killed()])
def test_a_worker_that_lives_to_say_that_it_stops_is_no_death(tmp_path: Path, error: BaseException) -> None:
    """Time and again: nothing is counted against the rows, and what was finished before is kept."""
    one = bench(tmp_path, 4, "plan.batch_sizes=[1]", "plan.shard_images=2")
    for _ in range(7):
        with pytest.raises(type(error)):
            one.work(Scripted(raising(error, has(planned_ids(one)[2][0]))))
    one.work(Scripted())
    assert len(one.table()) == 4
    assert {line["status"] for line in one.table().values()} == {"ok"}


def test_a_finished_shard_is_committed_though_the_next_one_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = bench(tmp_path, 4, "plan.batch_sizes=[2]", "plan.shard_images=2")
    read, asked = PlanReader.shard, []

    def shard(reader: PlanReader, number: int) -> Any:
        asked.append(number)
        if len(asked) == 2:
            raise UsageError("the plan cannot be read")
        return read(reader, number)

    monkeypatch.setattr(PlanReader, "shard", shard)
    with pytest.raises(UsageError, match="cannot be read"):
        one.work(Scripted())
    assert [receipt.kind for receipt in one.receipts(asked[0])] == [COMMITTED]
    assert [receipt.kind for receipt in one.receipts(asked[1])] == [RELEASED]


def test_a_row_that_ends_its_process_takes_no_other_shard_along(tmp_path: Path) -> None:
    """Once a shard's owner has died in it, the shard before is committed before it is begun."""
    one = bench(tmp_path, 4, "plan.batch_sizes=[2]", "plan.shard_images=2")
    dead = Ledger(one.plan.run.root, one.plan.run.files, replace(this_process(), start_time="1"))
    ledger = one.plan.ledger()
    assert dead.claim(1, 0)

    def look(batch: Batch) -> None:
        if [row.id for row in batch.rows] == planned_ids(one)[1]:
            assert [receipt.shard for receipt in ledger.committed([0])] == ([0] if len(generator.asked) == 2 else [])

    generator = Scripted(look)
    with one.worker(generator) as working:
        working.place.ledger.owner = replace(working.place.me, token=f"{0:016x}")
        working.work()
    assert len(generator.asked) == 2
    assert len(one.table()) == 4


def test_a_receipt_that_names_rows_that_are_not_there_is_no_endless_loop(tmp_path: Path) -> None:
    one = bench(tmp_path, 4)
    ledger = one.plan.ledger()
    assert ledger.claim(0, 0)
    assert ledger.commit(Receipt(COMMITTED, 0, 0, ledger._me, ok=tuple(range(6))))
    one.work(Scripted())
    assert len(one.receipts()) == 1


def test_rows_counted_of_an_epoch_that_was_taken_away_are_counted_back(tmp_path: Path) -> None:
    one = bench(tmp_path, 4, "plan.batch_sizes=[4]")

    def behave(batch: Batch) -> list[Outcome]:
        if len(generator.asked) == 1:
            assert one.plan.ledger().abandon(0, 0)
        return [Failure(row, "E", "no") if row.id == "2" else image(batch, row) for row in batch.rows]

    generator = Scripted(behave)
    one.work(generator, may_wait=True)
    assert (one.heard.made, one.heard.failed) == (3, 1)
