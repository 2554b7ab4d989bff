"""Faults to be planted into the product's modules, each of which a search must find. None is ever in the product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from batchgen import epoch, finalize, runner, worker
from batchgen.epoch import Epoch
from batchgen.errors import BatchgenError
from batchgen.filesystem import FileStat, FileSystem, resumable
from batchgen.ledger import ABANDONED, COMMITTED, FOLDERS, Ledger, Receipt, ShardState
from batchgen.ledger import stem as stem_of
from batchgen.marker import SUCCESS, put_marker
from batchgen.records import Part
from batchgen.worker import Worker
from tests.simulation import files as disk
from tests.simulation import work
from tests.simulation.files import SimulatedFiles
from tests.simulation.world import World

Plant = Callable[[pytest.MonkeyPatch], None]
PLANTS: dict[str, Plant] = {}


def plant(name: str) -> Callable[[Plant], Plant]:
    def add(one: Plant) -> Plant:
        PLANTS[name] = one
        return one

    return add


# The disk


@plant("no fsync of files")
def no_fsync(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedFiles, "sync_open", lambda self, file, path: None)


@plant("no fsync of folders")
def no_folder_fsync(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedFiles, "sync_folder", lambda self, path: None)


@plant("no fsync of row tables")
def no_table_fsync(patch: pytest.MonkeyPatch) -> None:
    def write_table(path: Any, table: bytes) -> str:
        files = disk.my_files()
        with resumable(path):
            files.append(disk.create_anew(files, path), path, table)
        return disk.digest(table)

    patch.setattr(epoch, "write_table", write_table)


@plant("a folder that another makes is taken for durable")
def folder_of_another(patch: pytest.MonkeyPatch) -> None:
    def make_folder(self: Any, path: Any) -> None:
        with resumable(path):
            if not self.is_folder(path):
                self.make_folder(path.parent)
                self.mkdir(path)
                self.sync_folder(path.parent)

    patch.setattr(FileSystem, "make_folder", make_folder)


@plant("the probe's link is made, its reply lost, and its name taken for another's")
def probe_unsure(patch: pytest.MonkeyPatch) -> None:
    def probe(self: Any, place: Any) -> None:
        one = place / f"probe.{World.now.token()}.tmp"
        self.write(one, b"probe")
        with resumable(place):
            self.link(one, one.with_suffix(".link"))

    patch.setattr(FileSystem, "probe", probe)


# Slots


@plant("claim by rename")
def claim_by_rename(patch: pytest.MonkeyPatch) -> None:
    def put_if_absent(self: Any, path: Any, content: bytes) -> bool:
        temp = path.with_name(f"{path.name}.{World.now.token()}.tmp")
        with resumable(path):
            self.write(temp, content)
            if self.stat(path) is not None:
                self.remove(temp)
                return False
            self.rename(temp, path)
            self.sync_folder(path.parent)
        return True

    patch.setattr(FileSystem, "put_if_absent", put_if_absent)


def put_by(patch: pytest.MonkeyPatch, settle: Callable[[Any, Any, bytes], bool]) -> None:
    """Slots whose outcome, where `link` raised an error, is what `settle` says."""

    def put_if_absent(self: Any, path: Any, content: bytes) -> bool:
        temp = path.with_name(f"{path.name}.{World.now.token()}.tmp")
        with resumable(path):
            self.write(temp, content)
            try:
                self.link(temp, path)
                is_ours = True
            except OSError:
                is_ours = settle(self, path, content)
            self.remove(temp)
            self.sync_folder(path.parent)
        return is_ours

    patch.setattr(FileSystem, "put_if_absent", put_if_absent)


@plant("an error of link is taken for a lost slot")
def error_is_loss(patch: pytest.MonkeyPatch) -> None:
    put_by(patch, lambda files, path, content: False)


@plant("a slot that exists is taken for one's own")
def slot_is_mine(patch: pytest.MonkeyPatch) -> None:
    put_by(patch, lambda files, path, content: files.read(path) is not None)


# Epochs


def dead_instead(patch: pytest.MonkeyPatch, close: Callable[[Worker, ShardState], None]) -> None:
    """Workers that do `close` to a dead owner's epoch and go on as if it were abandoned, without reading it again."""

    def claimable(self: Worker, shard: int) -> ShardState | None:
        place = self.place
        state = place.ledger.state(shard)
        while state.is_claimed and len(state.settled) < place.reader.index.shard_rows[shard]:
            if place.ledger.dead_because(state, place.job.run.stale_after_s) is None:
                return None
            close(self, state)
            closed = Receipt(ABANDONED, shard, state.epoch, place.me)
            state = replace(state, receipts=(*state.receipts, closed), claim=None, is_claimed=False)
        return state

    patch.setattr(Worker, "_claimable", claimable)


@plant("abandoned without check")
def abandoned_without_check(patch: pytest.MonkeyPatch) -> None:
    dead_instead(patch, lambda one, state: one.place.ledger.abandon(state.shard, state.epoch) and None)


@plant("a dead owner's epoch is left open")
def left_open(patch: pytest.MonkeyPatch) -> None:
    dead_instead(patch, lambda one, state: None)


@plant("epoch reused")
def epoch_reused(patch: pytest.MonkeyPatch) -> None:
    def abandon(self: Ledger, shard: int, number: int) -> bool:
        self.files.remove(self.claim_path(shard, number))
        return True

    patch.setattr(Ledger, "abandon", abandon)


@plant("heartbeat used as truth")
def heartbeat_is_truth(patch: pytest.MonkeyPatch) -> None:
    """An owner whose claim was touched lately commits without looking at the slot."""

    def commit(self: Ledger, receipt: Receipt) -> bool:
        path = self.receipt_path(receipt.shard, receipt.epoch)
        age_s = self.heartbeat_age_s(receipt.shard, receipt.epoch)
        if receipt.kind != COMMITTED or age_s is None or age_s > 60:
            return real(self, receipt)
        content = self.files.read(path)
        if content is not None:
            self.files.remove(path)
        return real(self, receipt)

    real = Ledger.commit
    patch.setattr(Ledger, "commit", commit)


@plant("receipt before part")
def receipt_before_part(patch: pytest.MonkeyPatch) -> None:
    class Early(Epoch):
        def _finish(self) -> Receipt | None:
            part: Any = self._part
            if part._images:
                table = work.row_table(self._table, "", part._images, [*self._failures, *part._failures])
                data = b"".join(part._contents.values())
                early = Part(part._path, len(data), disk.digest(data), tuple(part._images), tuple(part._failures))
                before = list(self._failures)
                self._failures += part._failures
                self._place.ledger.commit(self._receipt(early, disk.digest(table)))
                self._failures = before
            return super()._finish()

    patch.setattr(worker, "Epoch", Early)


@plant("part thrown away after any refusal")
def part_thrown_away(patch: pytest.MonkeyPatch) -> None:
    """A commit that raises has not happened, so the part is of no use."""

    class Hasty(Epoch):
        def close(self) -> bool:
            try:
                return super().close()
            except Exception:
                self._part.discard()
                raise

    patch.setattr(worker, "Epoch", Hasty)


@plant("an owner that was overtaken does not look again for the receipt that it saw absent")
def overtaken_unseen(patch: pytest.MonkeyPatch) -> None:
    def is_thrown_away(self: Any, error: Exception) -> bool:
        self._heart.stop()
        self._part.discard()
        receipt = self._place.ledger.receipt(self._shard, self._number)
        is_another = not isinstance(error, BatchgenError) and receipt is not None and receipt.by != self._place.me
        if is_another:
            self._throw_away()
        return is_another

    patch.setattr(Epoch, "_is_thrown_away", is_thrown_away)


@plant("a former epoch forgotten")
def former_forgotten(patch: pytest.MonkeyPatch) -> None:
    def close_former(self: Worker) -> bool:
        former, self._former = self._former, None
        return former is not None

    patch.setattr(Worker, "_close_former", close_former)


@plant("rows settled before are made again")
def made_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(worker, "batches", lambda shard, groups, skip, root: work.batches(shard, groups))


# Publication


@plant("the work folder's name goes before the published one is durable")
def published_too_lightly(patch: pytest.MonkeyPatch) -> None:
    def publish_file(self: Any, source: Any, target: Any) -> None:
        with resumable(target):
            try:
                self.link(source, target)
            except (FileExistsError, FileNotFoundError):
                if self.stat(target) is None:
                    raise

    patch.setattr(FileSystem, "publish_file", publish_file)


@plant("a name seen absent is taken for absent after another may have made it")
def absent_by_hearsay(patch: pytest.MonkeyPatch) -> None:
    def publish_folder(self: Any, source: Any, target: Any) -> None:
        with resumable(target):
            try:
                self.rename(source, target)
            except FileNotFoundError:
                if not self.is_folder(target):
                    raise
            self.sync_folder(target.parent)

    patch.setattr(FileSystem, "publish_folder", publish_folder)


@plant("a part is published before its receipt")
def published_before_receipt(patch: pytest.MonkeyPatch) -> None:
    class Eager(Epoch):
        def _finish(self) -> Receipt | None:
            receipt = super()._finish()
            if receipt is not None:
                epoch.publish(self._place.run, receipt)
            return receipt

    patch.setattr(worker, "Epoch", Eager)
    patch.setattr(finalize, "withdraw", lambda run, ledger: None)


@plant("_SUCCESS before the tables")
def success_before_tables(patch: pytest.MonkeyPatch) -> None:
    def withdraw(run: Any, ledger: Ledger) -> None:
        put_marker(run, {}, {})
        real(run, ledger)

    real = finalize.withdraw
    patch.setattr(finalize, "withdraw", withdraw)


@plant("_SUCCESS upon a receipt that its putter has not synced")
def success_upon_sand(patch: pytest.MonkeyPatch) -> None:
    def put_if_absent(self: Any, path: Any, content: bytes) -> bool:
        self.is_putting = True
        try:
            return real_put(self, path, content)
        finally:
            self.is_putting = False

    def sync_folder(self: Any, path: Any) -> None:
        if path.name != "receipts" or getattr(self, "is_putting", False):
            real_sync(self, path)

    real_put, real_sync = SimulatedFiles.put_if_absent, SimulatedFiles.sync_folder
    patch.setattr(SimulatedFiles, "put_if_absent", put_if_absent)
    patch.setattr(SimulatedFiles, "sync_folder", sync_folder)


@plant("receipts upon a plan that its putter has not synced")
def receipts_upon_sand(patch: pytest.MonkeyPatch) -> None:
    def make_folders(self: Ledger) -> None:
        for name in FOLDERS:
            self.files.make_folder(self.root / name)

    patch.setattr(Ledger, "make_folders", make_folders)


@plant("a _SUCCESS that came after the balance is taken for an old one")
def success_of_another(patch: pytest.MonkeyPatch) -> None:
    def stat(self: Any, path: Any) -> Any:
        found = real(self, path)
        if path.name == SUCCESS and not hasattr(self, "was_asked"):
            self.was_asked = True
            return found or FileStat(0, 0.0)
        return found

    real = SimulatedFiles.stat
    patch.setattr(SimulatedFiles, "stat", stat)


@plant("_SUCCESS is removed before it is put again")
def success_removed(patch: pytest.MonkeyPatch) -> None:
    def replace_file(self: Any, source: Any, target: Any) -> None:
        if target.name == SUCCESS:
            self.remove(target)
        real(self, source, target)

    real = SimulatedFiles.replace
    patch.setattr(SimulatedFiles, "replace", replace_file)


@plant("_SUCCESS while rows are outstanding")
def success_too_early(patch: pytest.MonkeyPatch) -> None:
    def balance(*arguments: Any) -> Any:
        found = real(*arguments)
        return replace(found, outstanding=found.held)

    real = runner.take_balance
    patch.setattr(runner, "take_balance", balance)
    patch.setattr(finalize, "take_balance", balance)


@plant("sweep before receipt")
def sweep_before_receipt(patch: pytest.MonkeyPatch) -> None:
    """A part without a receipt is taken for one that nobody will commit."""

    def withdraw(run: Any, ledger: Ledger) -> None:
        real(run, ledger)
        named = {stem_of(one.shard, one.epoch) for one in ledger.committed(run.index().shards)}
        for name in run.files.names(run.root / "work"):
            if name.split(".")[0] not in named:
                run.files.remove_any(run.root / "work" / name)

    real = finalize.withdraw
    patch.setattr(finalize, "withdraw", withdraw)


@plant("receipts read twice by finalize")
def receipts_read_twice(patch: pytest.MonkeyPatch) -> None:
    def sources(run: Any, index: Any, receipts: Any, ledger: Ledger) -> Any:
        return work.sources(run, index, tuple(ledger.committed(index.shards)), ledger)

    patch.setattr(finalize, "_sources", sources)
