"""The gallery: a card for each row that is shown, with its picture made small enough to travel inside the page."""

from __future__ import annotations

import base64
import io
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import quote

import pyarrow as pa
from PIL import Image

from batchgen.carried import as_texts
from batchgen.codec import decode
from batchgen.errors import BatchgenError, Interrupted
from batchgen.metadata import CARRIED, PARAMETERS
from batchgen.parts import part_reader
from batchgen.records import Pixels
from batchgen.reporting.rows import GROUP, RowCounts
from batchgen.rundir import RunDirectory
from batchgen.wording import shorten

THUMBNAIL = 320
"""Pixels of the longer side, at most."""
_QUALITY = 75
MOST_TEXT, MOST_VALUES = 20_000, 40_000
"""Characters of one text that a card holds, and of all its values together."""
_OF_MADE = ("file_name", "bytes", "format", "batch_size", "mode", "tokens", "tokens_dropped", "retries", "seconds")


@dataclass(slots=True)
class Card:
    """One row."""

    position: int
    """In the manifest."""
    group: int
    """0 … in the plan."""
    is_failed: bool
    prompt: str
    seed: str
    size: tuple[int, int]
    summary: str
    """The parameters in a line."""
    values: list[tuple[str, str]]
    """All others by name, and the manifest's own columns."""
    reason: str = ""
    """Why it failed, or why its picture is not shown."""
    file_name: str = ""
    picture: str = ""
    """A data URI."""
    link: str = ""
    """Where the whole picture lies, from the page in the run directory; "" where it is in a tar or Parquet file."""


def cards_of(run: RunDirectory, rows: RowCounts, page: Path) -> list[Card]:
    """Failed rows first, then the made ones, both in manifest order. Raises Interrupted where the disk is lost."""
    failed = [card for _, table in rows.failed for card in _cards(table, is_failed=True)]
    made = [card for _, table in rows.made for card in _cards(table, is_failed=False)]
    _add_pictures(run, made, is_beside=page.resolve().parent == run.path.resolve())
    return [*sorted(failed, key=lambda one: one.position), *sorted(made, key=lambda one: one.position)]


def _cards(table: pa.Table, *, is_failed: bool) -> Iterator[Card]:
    texts = {name: as_texts(table[name]) for name in table.schema.names}
    kinds = (*PARAMETERS.names, *(() if is_failed else _OF_MADE))
    shown = [name for name in texts if name != "prompt" and (name in kinds or name.startswith(CARRIED))]
    for number in range(len(table)):
        line = {name: column[number] for name, column in texts.items()}
        line["seconds"] = line["seconds"] and f"{float(line['seconds']):.3g}"
        yield Card(
            position=table["position"][number].as_py(),
            group=table[GROUP][number].as_py(),
            is_failed=is_failed,
            prompt=_bounded(line["prompt"] or ""),
            seed=line["seed"] or "",
            size=(table["width"][number].as_py(), table["height"][number].as_py()),
            summary=_summary(line),
            values=list(_values(line, shown)),
            reason=_bounded(f"{line['error']}: {line['message']}") if is_failed else "",
            file_name=line["file_name"] or "",
        )


def _values(line: Mapping[str, str | None], names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Those that are there, by the names that tables have for them, as long as there is room."""
    room = MOST_VALUES
    for name in names:
        text = line[name]
        if text is not None:
            yield name.removeprefix(CARRIED), shorten(text, max(1, min(MOST_TEXT, room)))
            room -= len(text)


def _summary(line: Mapping[str, str | None]) -> str:
    number = f", image {line['image_number']}" if line["image_number"] != "0" else ""
    return (
        f"{line['width']}×{line['height']}, {line['sampler']}, {line['steps']} steps, "
        f"guidance {line['guidance_scale']}, seed {line['seed']}{number}"
    )


def _bounded(text: str) -> str:
    return shorten(text, MOST_TEXT)


def _add_pictures(run: RunDirectory, cards: Sequence[Card], *, is_beside: bool) -> None:
    """Each part is opened once; a picture that is missing or damaged is said on its card."""
    wanted: defaultdict[str, dict[str, Card]] = defaultdict(dict)
    for card in cards:
        _, part, member = PurePosixPath(card.file_name).parts
        wanted[part][member] = card
        if is_beside and not Path(part).suffix:
            card.link = quote(card.file_name)
    for part, members in wanted.items():
        path = run.data / part
        try:
            for name, data in part_reader(path if path.exists() else run.root / "work" / part, members):
                _add_picture(members[name], data)
        except Interrupted:
            raise
        except BatchgenError as error:
            _say_missing(members.values(), str(error))
        _say_missing(members.values(), f"{path} does not hold it; `batchgen verify` names all that is damaged")


def _add_picture(card: Card, data: bytes) -> None:
    try:
        card.picture = thumbnail(decode(data))
    except BatchgenError as error:
        card.reason = str(error)


def _say_missing(cards: Iterable[Card], why: str) -> None:
    for card in cards:
        if not card.picture and not card.reason:
            card.reason = why


def thumbnail(pixels: Pixels) -> str:
    """A picture made small, as a data URI: WebP, THUMBNAIL pixels at its longer side."""
    image = Image.fromarray(pixels)
    image.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=_QUALITY, method=2)
    return f"data:image/webp;base64,{base64.b64encode(buffer.getvalue()).decode()}"
