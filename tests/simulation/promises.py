"""What holds whatever happens: looked at when a slot appears, and when everything has ended."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain, count

from batchgen import ledger
from batchgen.ledger import ABANDONED, COMMITTED, TABLE_SUFFIX, Receipt, stem, unstem
from batchgen.marker import SUCCESS
from batchgen.plan_index import PlanIndex, joined
from batchgen.ranges import indices
from batchgen.slots import unsealed
from tests.simulation.files import RUN, digest
from tests.simulation.storage import File, Folder, Place, Storage
from tests.simulation.work import ids_in
from tests.simulation.world import Violation

HIDDEN = RUN / ".run"
PLANS, MENDED = HIDDEN / "plan", HIDDEN / "mended"
RECEIPTS, CLAIMS, WORK, DATA = HIDDEN / "receipts", HIDDEN / "claims", HIDDEN / "work", RUN / "data"
OWN_TABLE = DATA / "metadata.parquet"
TABLES = (RUN / "metadata.parquet", RUN / "failures.parquet", RUN / "README.md")


def require(is_kept: bool, text: str) -> None:
    if not is_kept:
        raise Violation(text)


# Plans


def plans(storage: Storage, below: int | None = None) -> PlanIndex:
    """All plans as they lie there, or those of the first numbers."""
    contents = []
    for number in count() if below is None else range(below):
        file = storage.get(PLANS / f"{number}.json")
        if not isinstance(file, File):
            break
        contents.append(file.content)
    return _joined(tuple(contents))


@lru_cache(1000)
def _joined(contents: tuple[bytes, ...]) -> PlanIndex:
    return joined([PlanIndex.from_bytes(one, PLANS / "0.json") for one in contents])  # type: ignore[arg-type]


def planned_ids(storage: Storage, index: PlanIndex) -> tuple[tuple[str, ...], ...]:
    """The ids of the rows of each shard."""
    return tuple(chain.from_iterable(ids_in(storage.file(PLANS / file.name).content) for file in index.files))


def counting(storage: Storage, index: PlanIndex) -> Iterator[str]:
    """The ids of the rows that no later plan has."""
    for shard, names in enumerate(planned_ids(storage, index)):
        yield from (names[row] for row in index.rows(shard))


def check_plan(storage: Storage, place: Place) -> None:
    """An appended plan is whole when it appears, and takes over what nobody is to make or has taken over."""
    number = int(place.name.removesuffix(".json"))
    index = plans(storage)
    require(index.number == number, f"{place} put over a gap")
    for below in range(number):
        require(storage.is_durable(PLANS / f"{below}.json"), f"{place} put over a plan that is not durable")
    for file in index.files:
        path = PLANS / file.name
        require(storage.is_durable(path), f"{path} is not durable beside {place}")
        require(digest(storage.file(path).content) == file.sha256, f"{path} is not what {place} names")
    taken = [(one.shard, row) for one in index.replaced for row in indices(one.rows)]
    require(len(taken) == len(set(taken)), f"{place} takes over a row again: {sorted(taken)}")
    for one in index.replaced:
        if one.plan == number:
            rows = set(indices(one.rows))
            for receipt in receipts(storage, one.shard):
                if receipt.kind == COMMITTED and not rows.isdisjoint((*receipt.ok, *receipt.failed)):
                    is_durable = storage.is_durable(RECEIPTS / receipt.stem)
                    require(is_durable, f"{place} takes over rows of {receipt.stem}, which is not durable")
                    rows -= {*receipt.ok, *receipt.failed}
            require(not rows, f"{place} takes over open rows of shard {one.shard}: {sorted(rows)}")
    names = sorted(counting(storage, index))
    require(len(names) == len(set(names)), f"{place} plans a row twice: {names}")


# Slots


def receipts(storage: Storage, shard: int) -> list[Receipt]:
    """Of one shard, as they lie there, whatever their order."""
    names = storage.folder(RECEIPTS).names
    found = sorted(place for name in names if (place := unstem(name)) and place[0] == shard)
    return [ledger._receipt(storage.file(RECEIPTS / stem(*place)).content, *place, "") for place in found]


def committed(storage: Storage, index: PlanIndex) -> Iterator[Receipt]:
    for shard in index.shards:
        yield from (one for one in receipts(storage, shard) if one.kind == COMMITTED)


def check_slot(storage: Storage, place: Place, output_format: str) -> None:
    """Called when a name was linked, or the marker renamed."""
    if place.parent is RECEIPTS:
        check_receipt(storage, place)
    elif place.parent is CLAIMS and (claimed := unstem(place.name)):
        shard, epoch = claimed
        closed = [one.epoch for one in receipts(storage, shard)]
        require(closed[:epoch] == list(range(epoch)), f"{place} claimed while an epoch below it is open")
    elif place.parent is PLANS and place.name.endswith(".json"):
        check_plan(storage, place)
    elif place.parent is DATA:
        check_data(storage)
    elif place is RUN / SUCCESS:
        check_marker(storage, output_format)


def check_receipt(storage: Storage, place: Place) -> None:
    shard, epoch = unstem(place.name) or (-1, -1)
    others = receipts(storage, shard)
    mine = next(one for one in others if one.epoch == epoch)
    require(mine.is_readable, f"{place} is no receipt")
    require([one.epoch for one in others[:epoch]] == list(range(epoch)), f"{place} put over an open epoch")
    if mine.kind == COMMITTED:
        index = plans(storage)
        is_planned = shard in index.shards and {*mine.ok, *mine.failed} <= index.rows(shard)
        require(is_planned, f"{place} commits rows that no plan, or a later one, has")
        slot = next(number for number in count() if shard in plans(storage, number + 1).shards)
        for number in range(slot + 1):
            plan = PLANS / f"{number}.json"
            require(storage.is_durable(plan), f"{place} stands on a plan that is not durable")
        rows = rows_of(others)
        require(len(rows) == len(set(rows)), f"{place} commits a row again: {rows}")
        check_part(storage, index, mine)


def check_data(storage: Storage) -> None:
    """A row that is made again is not published while the old image is."""
    if storage.get(PLANS / "1.json") is None:
        return
    places = [DATA / name for name in storage.folder(DATA).names if name != OWN_TABLE.name]
    found = sorted(image.split()[0] for place in places for image in images(content(storage, place).decode()) if image)
    require(len(found) == len(set(found)), f"data/ holds a row twice: {found}")


def rows_of(found: Iterable[Receipt]) -> list[int]:
    return [row for one in found if one.kind == COMMITTED for row in (*one.ok, *one.failed)]


def check_part(storage: Storage, index: PlanIndex, receipt: Receipt, *, is_mended: bool = False) -> None:
    """The bytes that a committed receipt names are on the disk, in the work folder or published; those of rows that a
    later plan has may be gone, and are once parts are mended."""
    table = WORK / f"{receipt.stem}{TABLE_SUFFIX}"
    require(storage.is_durable(table), f"receipt {receipt.stem}: its row table is not durable")
    require(digest(storage.file(table).content) == receipt.table_sha256, f"{table} is not what its receipt names")
    made = index.made(receipt)
    if not made:
        return
    places = [place for place in (WORK / receipt.part, DATA / receipt.part) if storage.get(place) is not None]
    require(any(map(storage.is_durable, places)), f"receipt {receipt.stem}: its part is not durable")
    whole = dict(zip(receipt.ok, images(receipt.part_sha256), strict=True))
    for place in places:
        found = images(content(storage, place).decode(errors="replace"))
        most = [image for row, image in whole.items() if row in made or not is_mended]
        least = {image for row, image in whole.items() if row in made}
        is_right = set(found) >= least and found == [image for image in most if image in found]
        require(is_right, f"{place} is not what its receipt names: {found!r}")


def images(text: str) -> list[str]:
    return text.split(";")[:-1] if text.endswith(";") else [text]


def content(storage: Storage, place: Place) -> bytes:
    one = storage.get(place)
    if isinstance(one, Folder):
        return b"".join(file.content for _, file in sorted(one.names.items()) if isinstance(file, File))
    assert one is not None
    return one.content


# The end


def marked(storage: Storage) -> dict[str, object] | None:
    """The facts of the marker that is there."""
    file = storage.get(RUN / SUCCESS)
    return unsealed(file.content) if isinstance(file, File) else None


def check_marker(storage: Storage, output_format: str) -> None:
    """Of a marker that was just put. One that a plan was appended to meanwhile stands for the plans that it names. It
    names the tables of its plans, in whose place one who knows fewer may have put its own: it will see that, and who
    asks whether the run is finished sees it too."""
    index, marker = plans(storage), marked(storage) or {}
    number = marker.get("plan", index.number)
    assert isinstance(number, int)
    if number < index.number:
        check_settled(storage, plans(storage, number + 1))
        return
    for place, lines in check_parts(storage, index, output_format).items():
        is_named = named(marker).get(place) == hashlib.sha256(json.dumps(lines).encode()).hexdigest()
        fewer = range(1, number + 1) if is_named else ()
        check_table(storage, place, lines, [lines_of(storage, plans(storage, num))[place] for num in fewer])


def named(marker: Mapping[str, object]) -> dict[Place, str]:
    """The sha256 of each file that a marker names."""
    files = marker.get("files", {})
    assert isinstance(files, dict)
    return {RUN / name: sha256 for name, (_, sha256) in files.items()}


def check_settled(storage: Storage, index: PlanIndex) -> None:
    for shard in index.shards:
        rows = set(rows_of(receipts(storage, shard)))
        require(index.rows(shard) <= rows, f"shard {shard} settled {sorted(rows)}")


def check_success(storage: Storage, output_format: str) -> None:
    """All that a finished run promises, durably."""
    for place, lines in check_parts(storage, plans(storage), output_format).items():
        check_table(storage, place, lines)


def check_parts(storage: Storage, index: PlanIndex, output_format: str) -> dict[Place, list[object]]:
    """All that a finished run promises but for its tables; what each of them is to list."""
    check_settled(storage, index)
    parts = set()
    for one in committed(storage, index):
        require(storage.is_durable(RECEIPTS / one.stem), f"receipt {one.stem} is not durable beside {SUCCESS}")
        check_part(storage, index, one, is_mended=True)
        parts |= {one.part} if index.made(one) else set()
    found_names = set(storage.folder(DATA).names) - {OWN_TABLE.name}
    require(found_names == parts, f"data/ holds {sorted(found_names)}, not {sorted(parts)}")
    for part in sorted(parts):
        require(storage.is_durable(DATA / part), f"{DATA / part} is not durable beside {SUCCESS}")
    tables = TABLES if output_format == "webdataset" else (*TABLES, OWN_TABLE)
    lines = lines_of(storage, index)
    return {place: lines[place] for place in tables}


def lines_of(storage: Storage, index: PlanIndex) -> dict[Place, list[object]]:
    """What each table of these plans lists, once all their rows are settled."""
    names, made, failed = planned_ids(storage, index), [], []
    for one in committed(storage, index):
        shard, rows = one.shard, index.rows(one.shard)
        made += [[names[shard][row], shard, row] for row in one.ok if row in rows]
        failed += [[names[shard][row], shard, row] for row in one.failed if row in rows]
    metadata, failures, card = TABLES
    return {
        metadata: sorted(made),
        failures: sorted(failed),
        card: [len(made), len(failed)],
        OWN_TABLE: sorted(made),
    }


def check_table(storage: Storage, place: Place, lines: list[object], others: Iterable[list[object]] = ()) -> None:
    """A table lists these lines, durably, or those of another one that may be there."""
    require(storage.get(place) is not None, f"{place} is missing beside {SUCCESS}")
    listed = json.loads(storage.file(place).content)
    require(listed == lines or listed in others, f"{place} lists {listed}, committed are {lines}")
    require(listed != lines or storage.is_durable(place), f"{place} is not durable beside {SUCCESS}")


def check_quiet(
    storage: Storage, output_format: str, *, is_finished: bool, may_be_old: bool, may_be_others: bool
) -> None:
    """When all have ended: what is taken for a finished run is one; and if nobody was kept from taking an old marker
    away, none stands for less than all plans, or if nobody from looking at what it put there, beside other tables."""
    marker, index = marked(storage), plans(storage)
    if is_finished or (marker is not None and not may_be_old and not may_be_others):
        check_success(storage, output_format)
    if marker is not None and not may_be_old:
        number = marker.get("plan")
        require(number == index.number, f"{SUCCESS} stands for plan {number}, not {index.number}")


def check_planned(storage: Storage, names: Iterable[str]) -> None:
    """Every row of the manifest is planned once."""
    found = sorted(counting(storage, plans(storage)))
    require(found == sorted(names), f"planned are {found}, not {sorted(names)}")


def check_failures(storage: Storage, odd: set[tuple[int, int]], max_deaths: int) -> None:
    """No row failed but those that cannot be encoded, and the suspects of owners that died again and again."""
    for shard in plans(storage).shards:
        found, deaths = receipts(storage, shard), 0
        for one in found:
            deaths = deaths + 1 if one.kind == ABANDONED else deaths
            for row in one.failed:
                is_odd = (shard, row) in odd
                require(is_odd or deaths >= 2 * max_deaths, f"{one.stem} failed row {row} for nothing")


def check_swept(storage: Storage) -> None:
    """After the last finalize nothing lies about that no slot will ever name."""
    index = plans(storage)
    tables = {f"{one.stem}{TABLE_SUFFIX}" for one in committed(storage, index)}
    left = set(storage.folder(WORK).names)
    require(left == tables, f"work/ holds {sorted(left)}, not {sorted(tables)}")
    for folder in (CLAIMS, RECEIPTS, PLANS):
        for name in storage.folder(folder).names:
            has_slot = name.endswith(".tmp") and name.rsplit(".", 2)[0] in storage.folder(folder).names
            require(not has_slot, f"{folder / name} was not swept")
    for name in storage.folder(PLANS).names:
        number, dash, _ = name.partition("-")
        is_of_these = dash and number.isdecimal() and int(number) <= index.number
        require(not is_of_these or name in index.folders, f"{PLANS / name} was not swept")
    require(storage.get(MENDED) is not None, f"{MENDED} is gone")
    for name in storage.folder(MENDED).names:
        require(name.count(".") == 1, f"{MENDED / name} was not swept")
