"""Every image of a run read again: hashed, decoded, and compared with what its receipt and row table say."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from batchgen.balance import take_balance
from batchgen.codec import decode
from batchgen.cores import usable_cores
from batchgen.errors import BatchgenError, Interrupted
from batchgen.ledger import Ledger, Receipt
from batchgen.marker import SUCCESS, read_marker, stands_for
from batchgen.marker import damaged as damaged_files
from batchgen.mending import content_of, read_row_table
from batchgen.parts import others, part_digest, part_reader
from batchgen.plan_index import PlanIndex
from batchgen.presence import present, require_present
from batchgen.publish import publish, published
from batchgen.rundir import RunDirectory
from batchgen.sweeping import is_stray
from batchgen.wording import counted, first_line
from batchgen.writer import pixel_sha256

_OWN_TABLES = {"files": ("metadata.parquet",)}
"""What lies in `data/` beside parts, by `[output] format`: the image folder's table."""
_CHECKED = ("index", "id", "image_number", "file_name", "bytes", "sha256", "format", "pixel_sha256")
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
    """"missing", "truncated", "altered", "damaged", "foreign", "uncommitted", "unreadable", with the particulars."""
    is_curable: bool = True
    """Whether `repair` can do something about it: not about what never was the run's."""

    @property
    def kind(self) -> str:
        return self.what.partition(":")[0]


@dataclass(frozen=True, slots=True)
class Checked:
    """What came of one part."""

    receipt: Receipt
    num_images: int
    faults: tuple[Fault, ...] = ()
    rows: frozenset[int] = frozenset()
    """Those to be made again, by index."""
    is_altered: bool = False
    """The part has whole images, but is not what it was."""


@dataclass(frozen=True, slots=True)
class Verified:
    """What came of a verification."""

    num_images: int
    faults: tuple[Fault, ...]
    damaged: tuple[Checked, ...]
    """Parts with faults."""

    @property
    def kinds(self) -> dict[str, int]:
        """Faults by kind, the commonest first."""
        return dict(Counter(fault.kind for fault in self.faults).most_common())

    def line(self) -> str:
        """`7 images checked, 2 faults: 1 missing, 1 altered`."""
        kinds = ", ".join(f"{number:,} {kind}" for kind, number in self.kinds.items())
        line = f"{counted(self.num_images, 'image')} checked, {counted(len(self.faults), 'fault')}"
        return f"{line}: {kinds}" if kinds else line

    def as_json(self) -> str:
        """For programs: images, faults by kind, and every fault."""
        faults = [{"kind": fault.kind} | asdict(fault) for fault in self.faults]
        return json.dumps({"images": self.num_images, "kinds": self.kinds, "faults": faults}, ensure_ascii=False)


def verify(run: RunDirectory, on_progress: Callable[[int], object] = lambda images: None) -> Verified:
    """Read all published parts on all cores. Raises UsageError for a folder that is no run directory, Interrupted where
    the disk is lost: then nothing is said of what lies on it."""
    run.index()
    with present(run):
        found = _verify(run, on_progress)
        if found.faults:
            require_present(run)
    return found


def _verify(run: RunDirectory, on_progress: Callable[[int], object]) -> Verified:
    # Before plans and receipts are read: a running worker publishes nothing that they do not name by then, and whoever
    # finalizes the run puts no marker for rows that they leave outstanding.
    there, marker = set(run.files.names(run.data)), read_marker(run)
    index = run.index()
    ledger = Ledger(run.root, run.files, plan=index.token)
    damaged: list[Checked] = []
    num_images, known = 0, set(_OWN_TABLES.get(index.output_format, ()))

    def check(receipt: Receipt) -> Checked:
        if index.made(receipt):
            known.add(receipt.part)
        return _check_part(run, index, ledger, receipt)

    for checked in _spread(check, ledger.committed(index.shards)):
        num_images += checked.num_images
        on_progress(checked.num_images)
        if checked.faults:
            damaged.append(checked)
    faults = [fault for one in damaged for fault in one.faults]
    faults += _unreadable_receipts(index, ledger)
    faults += [Fault(name, "", 0, what) for name, what in damaged_files(run)]
    if marker is not None and marker.get("plan") == index.number:
        faults += _marker_fault(index, ledger, marker)
    faults += [_unnamed(ledger, name) for name in run.files.names(run.data) if name in there - known]
    return Verified(num_images, tuple(faults), tuple(damaged))


def _marker_fault(index: PlanIndex, ledger: Ledger, marker: Mapping[str, Any]) -> Iterator[Fault]:
    balance = take_balance(index, ledger)
    if not stands_for(marker, balance) and ledger.files.is_folder(ledger.root / "receipts"):
        ledger.refresh()
        balance = take_balance(index, ledger)
    if not stands_for(marker, balance):
        yield Fault(SUCCESS, "", 0, f"altered: by it the run is finished, by its receipts {balance.line()}")


def _unreadable_receipts(index: PlanIndex, ledger: Ledger) -> Iterator[Fault]:
    """Those of shards that still have rows to be made: others cost nothing any more."""
    for state in ledger.states(index.shards):
        for receipt in state.receipts if index.left(state) else ():
            if not receipt.is_readable:
                what = "damaged: it cannot be read, and its rows are made again"
                yield Fault(f".run/receipts/{receipt.stem}", "", 0, what)


def _unnamed(ledger: Ledger, name: str) -> Fault:
    if is_stray(ledger, name):
        what = "uncommitted: its receipt is another one or cannot be read; it is moved to .run/withdrawn"
        return Fault(f"data/{name}", "", 0, what)
    return Fault(f"data/{name}", "", 0, "foreign: no committed receipt names it", is_curable=False)


def _spread(check: Callable[[Receipt], Checked], receipts: Iterable[Receipt]) -> Iterator[Checked]:
    """`check` of each receipt, in order, on a thread per core with a bounded number under way."""
    threads = usable_cores()
    with ThreadPoolExecutor(threads) as pool:
        pending: deque[Future[Checked]] = deque()
        for receipt in receipts:
            pending.append(pool.submit(check, receipt))
            if len(pending) > 2 * threads:
                yield pending.popleft().result()
        yield from (one.result() for one in pending)


def _check_part(run: RunDirectory, index: PlanIndex, ledger: Ledger, receipt: Receipt) -> Checked:
    made = index.made(receipt)
    rows = made | index.rows(receipt.shard).intersection(receipt.failed)
    if not rows:
        return Checked(receipt, 0)
    try:
        publish(run, receipt)
        table = read_row_table(ledger, receipt, _CHECKED)
    except Interrupted:
        raise
    except (BatchgenError, OSError) as error:
        place = f".run/work/{ledger.table_path(receipt.shard, receipt.epoch).name}"
        what = f"damaged: {error.__cause__ or error}"
        return Checked(receipt, len(made), (Fault(place, "", 0, what),), rows)
    table = table.filter(pc.is_in(table["index"], pa.array(sorted(made), pa.int32())))
    return _check_images(run, index, receipt, table)


def _check_images(run: RunDirectory, index: PlanIndex, receipt: Receipt, table: pa.Table) -> Checked:
    rows = {Path(one["file_name"]).name: one for one in table.to_pylist()}
    if not rows:
        return Checked(receipt, 0)
    path, faults, bad, seen = published(run, receipt), list[Fault](), set[int](), set[str]()
    if run.files.is_link(path):
        fault = Fault(f"data/{receipt.part}", "", 0, "foreign: a symbolic link lies in its place")
        return Checked(receipt, len(rows), (fault,), index.made(receipt))
    try:
        for name, data in part_reader(path):
            if name not in rows:
                what = "foreign: no row of the part has it"
                faults.append(Fault(f"data/{receipt.part}/{name}", "", 0, what, is_curable=bool(path.suffix)))
            elif what := _image_fault(rows[name], data) or ("foreign: a second one of its name" * (name in seen)):
                faults.append(_fault(rows[name], what))
                bad.add(rows[name]["index"])
            seen.add(name)
        for name in [] if path.suffix else others(path):
            what = "foreign: it is no file"
            faults.append(Fault(f"data/{receipt.part}/{name}", "", 0, what, is_curable=False))
    except Interrupted:
        raise
    except BatchgenError as error:
        what = "missing" if run.files.stat(path) is None else f"unreadable: {first_line(error.__cause__ or error)}"
        faults.append(Fault(f"data/{receipt.part}", "", 0, what))
    missing = [row for name, row in rows.items() if name not in seen]
    faults += [_fault(row, "missing") for row in missing]
    bad |= {row["index"] for row in missing}
    if not faults and part_digest(path)[1] != content_of(run, index, receipt, table).sha256:
        what = "altered: its images are whole, what lies beside them is not"
        faults.append(Fault(f"data/{receipt.part}", "", 0, what))
    is_altered = bool(faults and path.suffix)
    return Checked(receipt, len(rows), tuple(faults), frozenset(bad), is_altered)


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
