"""Committed parts brought from `.run/work/` into `data/`. Doing it twice is harmless."""

from __future__ import annotations

from pathlib import Path

from batchgen.errors import BatchgenError
from batchgen.ledger import Ledger, Receipt
from batchgen.rundir import RunDirectory


def published(run: RunDirectory, receipt: Receipt) -> Path:
    """Where a committed part lies once it is published."""
    return run.data / receipt.part


def publish(run: RunDirectory, receipt: Receipt) -> None:
    """Give the part of a committed receipt its place in `data/`, if it has not got it: files by link, folders by
    rename. Raises BatchgenError for a part that is lost."""
    if not receipt.part:
        return
    source, target = run.root / "work" / receipt.part, published(run, receipt)
    try:
        _publish(run, receipt, source, target)
    except FileNotFoundError as error:
        if run.files.stat(run.data) is None and run.files.stat(source) is not None:
            # Somebody removed it with all that was in it; `finalize` and `verify` name what is missing there.
            run.files.make_folder(run.data)
            _publish(run, receipt, source, target)
            return
        # Another published it, and it was taken out again where a plan was appended that has all its rows.
        run.files.sync_folder(run.plans)
        ledger = Ledger(run.root, run.files, plan=receipt.plan)
        whole = ledger.receipt(receipt.shard, receipt.epoch)  # The one at hand may have no rows.
        if whole is None or run.index().made(whole):
            raise BatchgenError(
                f"{target}, which a receipt names, is missing, and so is what it is made of ({error.filename}); "
                "`batchgen verify --repair` has its images made again"
            ) from error


def _publish(run: RunDirectory, receipt: Receipt, source: Path, target: Path) -> None:
    if run.files.stat(source) is None:
        return
    if run.files.is_link(target):
        run.files.remove(target)  # It would hide the part, or lead out of the run directory.
    if Path(receipt.part).suffix:
        run.files.publish_file(source, target)
        run.files.remove(source)
    elif run.files.stat(target) is None:
        run.files.publish_folder(source, target)
