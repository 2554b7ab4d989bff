"""A contact sheet: pictures of a run in manifest order, each with its prompt under it, in one PNG of bounded size."""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw, ImageOps

from batchgen.codec import decode
from batchgen.errors import BatchgenError, UsageError
from batchgen.filesystem import readable
from batchgen.finalize import METADATA, METADATA_PARTIAL
from batchgen.letters import Letters
from batchgen.parts import part_reader
from batchgen.records import Pixels
from batchgen.rundir import RunDirectory
from batchgen.selection import Selection
from batchgen.targets import check_target, write_target

_PICTURE = 160
"""Pixels of the longer side of a picture in the sheet."""
_GAP = 8
_BATCH_ROWS = 4096
_TEXT, _TITLE = 11, 20
"""Pixels of the letters' height."""
_LINE, _NUM_LINES = 14, 3
"""Height of a line in pixels; lines that a prompt may have."""
_TITLE_LINE = 36
_CELL = (_PICTURE + _GAP, _PICTURE + _NUM_LINES * _LINE + _GAP)


@dataclass(frozen=True, slots=True)
class Shown:
    """One picture that is to be shown."""

    part: str
    """Path under the run directory of the part that holds it."""
    member: str
    """Its name there."""
    prompt: str


@dataclass(frozen=True, slots=True)
class Sheet:
    """What was written."""

    num_pictures: int
    missing_letters: str
    """Letters of prompts and title that no font of this machine has."""


def write_sheet(
    run: RunDirectory, target: Path, num_rows: int, selected: Selection | None = None, title: str = ""
) -> Sheet:
    """Write a sheet of the first rows that were made and are selected, at most `num_rows`.

    Raises UsageError for a folder that is no run directory, or has no table of its pictures yet, and for a selection
    that none of them passes; BatchgenError for a part that is missing or damaged.
    """
    check_target(target, ".png")
    run.index()
    selected = selected or Selection()
    shown = _shown(run, num_rows, selected)
    if not shown:
        what = "none of its images is selected" if selected.columns else "no row of it was made"
        raise UsageError(f"{run.path} has no picture to show: {what}")
    buffer, missing = io.BytesIO(), set[str]()
    contact_sheet(_read(run, shown), title, missing).save(buffer, "PNG")
    write_target(target, buffer.getvalue())
    return Sheet(len(shown), "".join(sorted(missing)))


def contact_sheet(
    pictures: Sequence[tuple[Pixels, str]], title: str = "", missing: set[str] | None = None
) -> Image.Image:
    """Pictures with their prompts, row by row, about four wide to three high, under a title if there is one.

    Letters that no font here has are added to `missing`.
    """
    missing = set() if missing is None else missing
    letters, title_letters = Letters(_TEXT, missing), Letters(_TITLE, missing)
    columns = math.ceil(math.sqrt(len(pictures) * 4 / 3 * _CELL[1] / _CELL[0]))
    rows = math.ceil(len(pictures) / columns)
    top = _TITLE_LINE if title else 0
    sheet = Image.new("RGB", (columns * _CELL[0] + _GAP, top + rows * _CELL[1] + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    title_letters.draw(draw, (_GAP, _GAP), title_letters.fitting(title, sheet.width - 2 * _GAP))
    for number, (pixels, prompt) in enumerate(pictures):
        x, y = (_GAP + place * size for place, size in zip((number % columns, number // columns), _CELL, strict=True))
        y += top
        picture = _small(pixels)
        sheet.paste(picture, (x + (_PICTURE - picture.width) // 2, y + _PICTURE - picture.height))
        for number, line in enumerate(letters.wrapped(prompt, _PICTURE, _NUM_LINES)):
            letters.draw(draw, (x, y + _PICTURE + 2 + number * _LINE), line)
    return sheet


def _small(pixels: Pixels) -> Image.Image:
    """A picture in the size of the sheet's; one that has it stays as it is."""
    return ImageOps.contain(Image.fromarray(pixels), (_PICTURE, _PICTURE), Image.Resampling.BICUBIC)


def _shown(run: RunDirectory, num_rows: int, selected: Selection) -> list[Shown]:
    """The first rows of the run's table that are selected, in manifest order."""
    path = next((path for name in (METADATA, METADATA_PARTIAL) if (path := run.path / name).exists()), None)
    if path is None:
        raise UsageError(
            f"{run.path} has no {METADATA} yet, which a run writes when it is done; "
            f"`batchgen finalize {run.path} --partial` writes one of what there is"
        )
    try:
        # Opened by Arrow itself, as in plan_reader.
        with readable(path), pa.OSFile(str(path)) as source:
            lines = list(islice(_lines(pq.ParquetFile(source), selected), num_rows))
    except (OSError, pa.ArrowInvalid) as error:
        raise BatchgenError(f"{path} is damaged: {error}; `batchgen finalize {run.path}` writes it again") from error
    return [_place(line["file_name"], line["prompt"]) for line in lines]


def _lines(table: pq.ParquetFile, selected: Selection) -> Iterator[dict[str, str]]:
    selected.check(table.schema_arrow)
    columns = ["file_name", "prompt"]
    for batch in table.iter_batches(_BATCH_ROWS, columns=sorted({*columns, *selected.columns})):
        yield from selected.of(pa.table(batch)).select(columns).to_pylist()


def _place(file_name: str, prompt: str) -> Shown:
    folder, part, member = PurePosixPath(file_name).parts
    return Shown(f"{folder}/{part}", member, prompt)


def _read(run: RunDirectory, shown: Sequence[Shown]) -> list[tuple[Pixels, str]]:
    """Their pixels, made small one by one, and prompts, in their order; every part is read once, as far as it is
    needed. Raises BatchgenError for what is missing or damaged."""
    wanted: defaultdict[str, set[str]] = defaultdict(set)
    for one in shown:
        wanted[one.part].add(one.member)
    found: dict[tuple[str, str], Pixels] = {}
    for part, members in wanted.items():
        left, at = set(members), run.path / part
        try:
            for name, data in part_reader(at, members):
                at = run.path / part / name
                found[part, name] = np.asarray(_small(decode(data)))
                left.discard(name)
                if not left:
                    break
            if left:
                raise BatchgenError(f"{min(left)} is not there")
        except BatchgenError as error:
            cure = f"`batchgen verify {run.path} --repair` makes it again"
            raise BatchgenError(f"{at}: {error}; {cure}") from error
    return [(found[one.part, one.member], one.prompt) for one in shown]
