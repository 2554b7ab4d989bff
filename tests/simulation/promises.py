"""What holds whatever happens: looked at when a slot appears, and when everything has ended."""

from __future__ import annotations

import json
from collections.abc import Iterable

from batchgen import ledger
from batchgen.ledger import ABANDONED, COMMITTED, TABLE_SUFFIX, Receipt, stem, unstem
from batchgen.marker import SUCCESS
from tests.simulation.files import RUN, digest
from tests.simulation.storage import File, Folder, Place, Storage
from tests.simulation.world import Violation

HIDDEN = RUN / ".run"
RECEIPTS, CLAIMS, WORK, DATA = HIDDEN / "receipts", HIDDEN / "claims", HIDDEN / "work", RUN / "data"
OWN_TABLE = DATA / "metadata.parquet"
TABLES = (RUN / "metadata.parquet", RUN / "failures.parquet", RUN / "README.md")


def require(is_kept: bool, text: str) -> None:
    if not is_kept:
        raise Violation(text)


def receipts(storage: Storage, shard: int) -> list[Receipt]:
    """Of one shard, as they lie there, whatever their order."""
    names = storage.folder(RECEIPTS).names
    found = sorted(place for name in names if (place := unstem(name)) and place[0] == shard)
    return [ledger._receipt(storage.file(RECEIPTS / stem(*place)).content, *place) for place in found]


def check_slot(storage: Storage, place: Place, shard_rows: tuple[int, ...], output_format: str) -> None:
    """Called when a name was linked, or the marker renamed."""
    if place.parent is RECEIPTS:
        check_receipt(storage, place)
    elif place.parent is CLAIMS and (claimed := unstem(place.name)):
        shard, epoch = claimed
        closed = [one.epoch for one in receipts(storage, shard)]
        require(closed[:epoch] == list(range(epoch)), f"{place} claimed while an epoch below it is open")
    elif place is RUN / SUCCESS:
        check_success(storage, shard_rows, output_format)


def check_receipt(storage: Storage, place: Place) -> None:
    shard, epoch = unstem(place.name) or (-1, -1)
    others = receipts(storage, shard)
    mine = next(one for one in others if one.epoch == epoch)
    require(mine.is_readable, f"{place} is no receipt")
    require([one.epoch for one in others[:epoch]] == list(range(epoch)), f"{place} put over an open epoch")
    if mine.kind == COMMITTED:
        require(storage.is_durable(HIDDEN / "plan" / "0.json"), f"{place} stands on a plan that is not durable")
        rows = rows_of(others)
        require(len(rows) == len(set(rows)), f"{place} commits a row again: {rows}")
        check_part(storage, mine)


def rows_of(found: Iterable[Receipt]) -> list[int]:
    return [row for one in found if one.kind == COMMITTED for row in (*one.ok, *one.failed)]


def check_part(storage: Storage, receipt: Receipt) -> None:
    """The bytes that a committed receipt names are on the disk, in the work folder or published."""
    table = WORK / f"{receipt.stem}{TABLE_SUFFIX}"
    require(storage.is_durable(table), f"receipt {receipt.stem}: its row table is not durable")
    require(digest(storage.file(table).content) == receipt.table_sha256, f"{table} is not what its receipt names")
    if receipt.part:
        places = [place for place in (WORK / receipt.part, DATA / receipt.part) if storage.get(place) is not None]
        require(any(map(storage.is_durable, places)), f"receipt {receipt.stem}: its part is not durable")
        for place in places:
            found = content(storage, place)
            require(digest(found) == receipt.part_sha256, f"{place} is not what its receipt names: {found!r}")


def content(storage: Storage, place: Place) -> bytes:
    one = storage.get(place)
    if isinstance(one, Folder):
        return b"".join(file.content for _, file in sorted(one.names.items()) if isinstance(file, File))
    assert one is not None
    return one.content


def check_success(storage: Storage, shard_rows: tuple[int, ...], output_format: str) -> None:
    """All that a finished run promises, durably."""
    made: list[tuple[int, int]] = []
    failed: list[tuple[int, int]] = []
    parts = set()
    for shard, num_rows in enumerate(shard_rows):
        found = receipts(storage, shard)
        require(sorted(rows_of(found)) == list(range(num_rows)), f"shard {shard} settled {rows_of(found)}")
        for one in found:
            if one.kind == COMMITTED:
                require(storage.is_durable(RECEIPTS / one.stem), f"receipt {one.stem} is not durable beside {SUCCESS}")
                check_part(storage, one)
                made += [(shard, row) for row in one.ok]
                failed += [(shard, row) for row in one.failed]
                parts |= {one.part} - {""}
    found_names = set(storage.folder(DATA).names) - {OWN_TABLE.name}
    require(found_names == parts, f"data/ holds {sorted(found_names)}, not {sorted(parts)}")
    tables = TABLES if output_format == "webdataset" else (*TABLES, OWN_TABLE)
    for place in (*tables, *(DATA / part for part in sorted(parts))):
        require(storage.get(place) is not None, f"{place} is missing beside {SUCCESS}")
        require(storage.is_durable(place), f"{place} is not durable beside {SUCCESS}")
    for place, rows in zip(tables, (made, failed, None, made), strict=False):
        if rows is None:
            continue
        listed = [tuple(row) for row in json.loads(storage.file(place).content)]
        require(listed == sorted(rows), f"{place} lists {listed}, committed are {sorted(rows)}")


def check_failures(storage: Storage, shard_rows: tuple[int, ...], odd_shard: int, max_deaths: int) -> None:
    """No row failed but the one that cannot be encoded, and the suspects of owners that died again and again."""
    for shard in range(len(shard_rows)):
        found, deaths = receipts(storage, shard), 0
        for one in found:
            deaths = deaths + 1 if one.kind == ABANDONED else deaths
            for row in one.failed:
                is_odd = (shard, row) == (odd_shard, 0)
                require(is_odd or deaths >= 2 * max_deaths, f"{one.stem} failed row {row} for nothing")


def check_swept(storage: Storage, shard_rows: tuple[int, ...]) -> None:
    """After the last finalize nothing lies about that no slot will ever name."""
    committed = [one for shard in range(len(shard_rows)) for one in receipts(storage, shard) if one.kind == COMMITTED]
    tables = {f"{one.stem}{TABLE_SUFFIX}" for one in committed}
    left = set(storage.folder(WORK).names)
    require(left == tables, f"work/ holds {sorted(left)}, not {sorted(tables)}")
    for folder in (CLAIMS, RECEIPTS):
        for name in storage.folder(folder).names:
            has_slot = name.endswith(".tmp") and name.rsplit(".", 2)[0] in storage.folder(folder).names
            require(not has_slot, f"{folder / name} was not swept")
