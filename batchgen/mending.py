"""Published parts without the rows that later plans have taken over, so that each reader sees each row once.

Image folders lose files. A tar or Parquet file is written anew from its whole images, named with its size and hash by
a write-once slot, `.run/mended/<shard>-<epoch>.<plan>`, and put in the old one's place; receipts stay as they are.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchgen.errors import BatchgenError, Interrupted
from batchgen.filesystem import readable, resumable
from batchgen.formats import CONTAINERS, Member, folder_digest
from batchgen.ledger import Ledger, Receipt
from batchgen.parts import part_reader
from batchgen.plan_index import PlanIndex
from batchgen.plan_reader import PlanReader, rows_of
from batchgen.publish import publish, published
from batchgen.records import Written
from batchgen.rundir import RunDirectory
from batchgen.slots import NO_SLOT, sealed, unsealed

WITHDRAWN = "withdrawn"
"""Under `.run/`: what lay in `data/` and was not the run's."""


@dataclass(frozen=True, slots=True)
class Content:
    """What a published part must be."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class _Slot:
    file: str
    """Under `.run/mended/`; "" for a plan that a later one has overtaken."""
    content: Content


def content_of(run: RunDirectory, index: PlanIndex, receipt: Receipt, made: pa.Table) -> Content:
    """Size and digest of a part as the plans leave it; `made` are its rows that count."""
    plans = index.takers(receipt)
    if not plans:
        return Content(receipt.part_bytes, receipt.part_sha256)
    if not Path(receipt.part).suffix:
        files = [(Path(one["file_name"]).name, one["sha256"]) for one in made.to_pylist()]
        return Content(pc.sum(made["bytes"]).as_py() or 0, folder_digest(files))
    slot = _read(run, _slot_path(run, receipt, plans[-1]))
    return slot.content if slot else Content(0, "")


def mend(run: RunDirectory, index: PlanIndex, ledger: Ledger) -> None:
    """Bring every part that lost rows to later plans into the form that these leave it. Doing it twice is harmless.

    Raises BatchgenError where an image that is to stay cannot be read.
    """
    if index.replaced:
        ledger.refresh()  # What later plans took over has receipts.
    try:
        for shard in sorted({one.shard for one in index.replaced}):
            for receipt in ledger.state(shard).committed:
                if receipt.part and index.takers(receipt):
                    publish(run, receipt)
                    _mend(run, index, ledger, receipt)
    except (BatchgenError, FileNotFoundError) as error:
        newer = None if isinstance(error, Interrupted) else run.newer(index)
        if newer is None:
            raise
        # What is missing here may be so since another brought the parts into the form that these plans leave them.
        mend(run, newer, ledger)


def _mend(run: RunDirectory, index: PlanIndex, ledger: Ledger, receipt: Receipt) -> None:
    path, made = published(run, receipt), index.made(receipt)
    *earlier, last = index.takers(receipt)
    if path.suffix:
        for plan in earlier:
            _overtake(run, receipt, plan)
    if not made or run.files.is_link(path):
        _take_out(run, index, ledger, receipt, path)
        return
    table = part_table(ledger, receipt, made)
    if not path.suffix:
        _thin_out(run, path, {Path(name).name for name in table["file_name"].to_pylist()}, ledger, receipt)
        return
    slot_path = _slot_path(run, receipt, last)
    slot = _read(run, slot_path)
    if slot is None:
        slot = _put(run, index, receipt, table, slot_path)
    _bring_in(run, slot, path)


def _bring_in(run: RunDirectory, slot: _Slot, path: Path) -> None:
    """Put what is left of a part in its place, unless a later plan has overtaken the one that left it."""
    if slot.file:
        with suppress(FileNotFoundError):  # It is in its place already.
            run.files.replace(run.root / "mended" / slot.file, path)


def _take_out(run: RunDirectory, index: PlanIndex, ledger: Ledger, receipt: Receipt, path: Path) -> None:
    """Remove a whole part; what lies in its place and is none is moved out of `data/`."""
    found = run.files.stat(path)
    is_none = found is not None and found.is_folder == bool(path.suffix)
    if is_none or run.files.is_link(path):
        move_out(run, path)
    elif path.suffix:
        run.files.remove_any(path)
    else:
        _take_out_folder(run, index, ledger, receipt, path)


def _take_out_folder(run: RunDirectory, index: PlanIndex, ledger: Ledger, receipt: Receipt, path: Path) -> None:
    """Remove an image folder, or what is known to be the part's of one that holds anything else. It leaves `data/`
    first, in which nothing of it may be left by one that dies here."""
    names, own = run.files.names(path), _own(ledger, receipt)
    images = [name for name in names if name in own and _is_file(run, path / name)]
    if images != names:
        moved = move_out(run, path)
        for name in images:
            run.files.remove(moved / name)
        return
    aside = run.root / "mended" / f"{receipt.stem}.{index.number}.{secrets.token_hex(8)}"
    with suppress(FileNotFoundError):  # Another was first.
        run.files.replace(path, aside)
    run.files.remove_any(aside)


def _thin_out(run: RunDirectory, folder: Path, keep: set[str], ledger: Ledger, receipt: Receipt) -> None:
    """Take what later plans have out of an image folder; what never was the part's is left to `verify`."""
    gone = _own(ledger, receipt) - keep
    for name in run.files.names(folder):
        if name in gone and _is_file(run, folder / name):
            run.files.remove(folder / name)
        elif name in gone:
            move_out(run, folder / name)
    if run.files.is_folder(folder):
        run.files.sync_folder(folder)


def _own(ledger: Ledger, receipt: Receipt) -> set[str]:
    """The names of a part's images, none where they are not known any more."""
    try:
        table = read_row_table(ledger, receipt, ["file_name"])
    except Interrupted:
        raise
    except BatchgenError:
        return set()
    return {Path(name).name for name in table["file_name"].to_pylist() if name}


def _is_file(run: RunDirectory, path: Path) -> bool:
    return not run.files.is_link(path) and not run.files.is_folder(path)


def move_out(run: RunDirectory, path: Path) -> Path:
    """Move what is not the run's, or not known to be, out of `data/`; where it lies then, unless another was first."""
    target = run.root / WITHDRAWN / f"{path.name}.{secrets.token_hex(4)}"
    run.files.make_folder(target.parent)
    with resumable(path), suppress(FileNotFoundError):
        run.files.rename(path, target)  # A link itself, and a pipe: both may be moved and not be opened.
        run.files.sync_folder(target.parent)
    return target


def _overtake(run: RunDirectory, receipt: Receipt, plan: int) -> None:
    """Let nobody bring in what an earlier plan left of a part any more."""
    path = _slot_path(run, receipt, plan)
    if _read(run, path) is None:
        run.files.put_if_absent(path, _slot_bytes(secrets.token_hex(8), "", Content(0, "")))
    slot = _read(run, path)
    if slot is not None and slot.file:
        run.files.remove(run.root / "mended" / slot.file)


def _put(run: RunDirectory, index: PlanIndex, receipt: Receipt, table: pa.Table, slot_path: Path) -> _Slot:
    """Write what is left of a part and put its slot; the slot that is there then."""
    token = secrets.token_hex(8)
    file = run.root / "mended" / f"{slot_path.name}.{token}{Path(receipt.part).suffix}"
    content = rewrite(run, index, receipt, table, file)
    if not run.files.put_if_absent(slot_path, _slot_bytes(token, file.name, content)):
        run.files.remove_any(file)
    slot = _read(run, slot_path)
    if slot is None:
        raise BatchgenError(f"{slot_path} cannot be read; remove it if no worker is running")
    return slot


def rewrite(run: RunDirectory, index: PlanIndex, receipt: Receipt, table: pa.Table, target: Path) -> Content:
    """Write a tar or Parquet part again, of the images of `table` as they lie in `data/`, durably."""
    path = published(run, receipt)
    shard = PlanReader(run.plans, index).shard(receipt.shard)
    rows = rows_of(shard)
    wanted = {Path(line["file_name"]).name: line for line in table.to_pylist()}
    with resumable(target):
        container = CONTAINERS[index.output_format](target, shard, index.model)
        try:
            for name, data in _whole_images(path, wanted):
                line = wanted[name]
                written = Written(**{field: line[field] for field in Written.__dataclass_fields__})
                container.append(Member(rows[line["index"]], name, data, written))
            content = Content(*container.close())
        except BaseException:
            container.abort()
            run.files.remove_any(target)
            raise
        run.files.sync_folder(target.parent)
    return content


def _whole_images(path: Path, wanted: Mapping[str, dict[str, Any]]) -> Iterator[tuple[str, bytes]]:
    """The wanted images of a part. Raises BatchgenError, at the end, if one is not as it was committed."""
    missing = dict.fromkeys(wanted)
    images = part_reader(path)
    while True:
        try:
            name, data = next(images)
        except Interrupted:
            raise
        except (StopIteration, BatchgenError):
            break
        if name in missing and hashlib.sha256(data).hexdigest() == wanted[name]["sha256"]:
            del missing[name]
            yield name, data
    if missing:
        raise BatchgenError(
            f"{path}: {next(iter(missing))!r} is damaged or missing, and the part cannot be written anew without it; "
            "`batchgen verify --repair` has it made again"
        )


def part_table(ledger: Ledger, receipt: Receipt, made: frozenset[int]) -> pa.Table:
    """Those rows of a part's row table that were made and count, in the part's order."""
    table = read_row_table(ledger, receipt)
    return table.filter(pc.is_in(table["index"], pa.array(sorted(made), pa.int32())))


def read_row_table(ledger: Ledger, receipt: Receipt, columns: Sequence[str] | None = None) -> pa.Table:
    """The row table of a committed part. Raises BatchgenError if it is not what the receipt names."""
    path = ledger.table_path(receipt.shard, receipt.epoch)
    try:
        # Held by Arrow itself, as in plan_reader.
        with readable(path), pa.OSFile(str(path)) as file:
            content = file.read_buffer()
        if hashlib.sha256(content).hexdigest() != receipt.table_sha256:
            raise ValueError("its sha256 is another one")
        return pq.read_table(pa.BufferReader(content), columns=None if columns is None else list(columns))
    except (OSError, ValueError) as error:
        raise BatchgenError(
            f"{path}, the row table of a committed part, cannot be read ({error}); "
            "`batchgen verify --repair` has its rows made again"
        ) from error


def sweep_mended(run: RunDirectory, index: PlanIndex) -> None:
    """Remove files that no slot will ever bring in, once all parts are mended."""
    for name in run.files.names(run.root / "mended"):
        _, *words = name.split(".")
        if len(words) > 1 and words[0].isdecimal() and int(words[0]) <= index.number:
            run.files.remove_any(run.root / "mended" / name)


def _slot_path(run: RunDirectory, receipt: Receipt, plan: int) -> Path:
    return run.root / "mended" / f"{receipt.stem}.{plan}"


def _slot_bytes(token: str, file: str, content: Content) -> bytes:
    return sealed(token, {"file": file, "bytes": content.num_bytes, "sha256": content.sha256})


def _read(run: RunDirectory, path: Path) -> _Slot | None:
    content = run.files.read(path)
    if content is None:
        return None
    try:
        fields = unsealed(content)
        file, size, sha256 = fields["file"], fields["bytes"], fields["sha256"]
        if isinstance(file, str) and isinstance(size, int) and isinstance(sha256, str) and Path(file).name == file:
            return _Slot(file, Content(size, sha256))
    except NO_SLOT:
        pass
    raise BatchgenError(f"{path} cannot be read; remove it if no worker is running")
