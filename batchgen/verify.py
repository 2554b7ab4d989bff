"""Every image of a run read again: hashed, decoded, and compared with what its receipt and row table say."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchgen.codec import decode
from batchgen.cores import usable_cores
from batchgen.errors import BatchgenError
from batchgen.ledger import Ledger, Receipt
from batchgen.marker import damaged
from batchgen.parts import part_digest, part_reader
from batchgen.publish import publish, published
from batchgen.rundir import RunDirectory
from batchgen.writer import pixel_sha256

_OWN_TABLES = frozenset({"metadata.parquet"})
"""What lies in `data/` beside parts: the image folder's table."""
_CHECKED = ("status", "id", "image_number", "file_name", "bytes", "sha256", "format", "pixel_sha256")
"""Columns of a row table that images are held against."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is not as it was committed."""

    place: str
    """Path under the run directory."""
    row_id: str
    """"" where no row is concerned."""
    image_number: int
    what: str
    """"missing", "truncated", "altered", "foreign", "unreadable", with the particulars."""


@dataclass(frozen=True, slots=True)
class Verified:
    """What came of a verification."""

    num_images: int
    faults: tuple[Fault, ...]


def verify(run: RunDirectory, on_progress: Callable[[int], object] = lambda images: None) -> Verified:
    """Read all published parts on all cores. Raises UsageError for a folder that is no run directory."""
    index = run.index()
    ledger = Ledger(run.root, run.files)
    faults: list[Fault] = []
    num_images, known = 0, set(_OWN_TABLES)

    def check(receipt: Receipt) -> tuple[list[Fault], int]:
        known.add(receipt.part)
        return _check_part(run, ledger, receipt)

    for fault, images in _spread(check, ledger.committed(index.shards)):
        faults += fault
        num_images += images
        on_progress(images)
    faults += [Fault(name, "", 0, what) for name, what in damaged(run)]
    for name in run.files.names(run.data):
        if name not in known:
            faults.append(Fault(f"data/{name}", "", 0, "foreign: no committed receipt names it"))
    return Verified(num_images, tuple(faults))


def _spread(
    check: Callable[[Receipt], tuple[list[Fault], int]], receipts: Iterable[Receipt]
) -> Iterator[tuple[list[Fault], int]]:
    """`check` of each receipt, in order, on a thread per usable core with a bounded number under way."""
    threads = usable_cores()
    with ThreadPoolExecutor(threads) as pool:
        pending: deque[Future[tuple[list[Fault], int]]] = deque()
        for receipt in receipts:
            pending.append(pool.submit(check, receipt))
            if len(pending) > 2 * threads:
                yield pending.popleft().result()
        yield from (one.result() for one in pending)


def _check_part(run: RunDirectory, ledger: Ledger, receipt: Receipt) -> tuple[list[Fault], int]:
    if not receipt.part:
        return [], 0
    try:
        publish(run, receipt)
        path = ledger.table_path(receipt.shard, receipt.epoch)
        if hashlib.sha256(path.read_bytes()).hexdigest() != receipt.table_sha256:
            return [Fault(f".run/work/{path.name}", "", 0, "altered: its sha256 is another one")], 0
        table = pq.read_table(path, columns=list(_CHECKED))
    except (OSError, ValueError) as error:
        return [Fault(f"data/{receipt.part}", "", 0, f"unreadable: its row table or itself is gone ({error})")], 0
    rows = {Path(one["file_name"]).name: one for one in table.filter(pc.field("status") == "ok").to_pylist()}
    faults, seen = [], set[str]()
    try:
        for name, data in part_reader(published(run, receipt)):
            seen.add(name)
            if name not in rows:
                faults.append(Fault(f"data/{receipt.part}/{name}", "", 0, "foreign: no row of the part has it"))
            elif what := _image_fault(rows[name], data):
                faults.append(_fault(rows[name], what))
    except BatchgenError as error:
        faults.append(Fault(f"data/{receipt.part}", "", 0, f"unreadable: {error}"))
    faults += [_fault(row, "missing") for name, row in rows.items() if name not in seen]
    if not faults and part_digest(published(run, receipt))[1] != receipt.part_sha256:
        what = "altered: its images are whole, what lies beside them is not"
        faults.append(Fault(f"data/{receipt.part}", "", 0, what))
    return faults, len(rows)


def _fault(row: dict[str, Any], what: str) -> Fault:
    return Fault(row["file_name"], row["id"], row["image_number"], what)


def _image_fault(row: dict[str, Any], data: bytes) -> str | None:
    """What is wrong with an image's bytes, None if nothing is."""
    if len(data) < row["bytes"]:
        return f"truncated: {len(data)} of {row['bytes']} bytes"
    if hashlib.sha256(data).hexdigest() != row["sha256"]:
        return "altered: its sha256 is another one"
    try:
        pixels = decode(data)
    except BatchgenError as error:
        return f"unreadable: {error}"
    if row["format"] == "png" and pixel_sha256(pixels) != row["pixel_sha256"]:
        return "altered: its pixels are other ones"
    return None
