"""A contact sheet: a run's pictures in manifest order, each with its prompt under it, in one PNG of bounded size."""

from __future__ import annotations

import io
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from textwrap import wrap

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw, ImageFont, ImageOps

from batchgen.codec import decode
from batchgen.errors import BatchgenError, UsageError
from batchgen.filesystem import readable, resumable
from batchgen.finalize import METADATA, METADATA_PARTIAL
from batchgen.parts import part_reader
from batchgen.records import Pixels
from batchgen.rundir import RunDirectory

_PICTURE = 160
"""Pixels of the longer side of a picture in the sheet."""
_GAP = 8
_TEXT = 11
"""Pixels of the letters' height; those that Pillow brings along are Latin."""
_LINE, _NUM_LINES, _LETTERS = 14, 3, 28
"""Height of a line in pixels; lines and letters that a prompt may have."""
_CELL = (_PICTURE + _GAP, _PICTURE + _NUM_LINES * _LINE + _GAP)


@dataclass(frozen=True, slots=True)
class Shown:
    """One picture that is to be shown."""

    part: str
    """Path under the run directory of the part that holds it."""
    member: str
    """Its name there."""
    prompt: str


def write_sheet(run: RunDirectory, target: Path, num_rows: int) -> int:
    """Write a sheet of the first rows that were made, at most `num_rows`, and return their number.

    Raises UsageError for a folder that is no run directory, or has no table of its pictures yet, and BatchgenError for
    a part that is missing or damaged.
    """
    run.index()
    shown = _shown(run, num_rows)
    if not shown:
        raise UsageError(f"{run.path} has no picture to show: no row of it was made")
    buffer = io.BytesIO()
    contact_sheet(_read(run, shown)).save(buffer, "PNG")
    with resumable(target):
        target.write_bytes(buffer.getvalue())
    return len(shown)


def contact_sheet(pictures: Sequence[tuple[Pixels, str]]) -> Image.Image:
    """Pictures with their prompts, row by row, about four wide to three high."""
    columns = math.ceil(math.sqrt(len(pictures) * 4 / 3 * _CELL[1] / _CELL[0]))
    rows = math.ceil(len(pictures) / columns)
    sheet = Image.new("RGB", (columns * _CELL[0] + _GAP, rows * _CELL[1] + _GAP), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(_TEXT)
    for number, (pixels, prompt) in enumerate(pictures):
        x, y = (_GAP + place * size for place, size in zip((number % columns, number // columns), _CELL, strict=True))
        picture = ImageOps.contain(Image.fromarray(pixels), (_PICTURE, _PICTURE), Image.Resampling.BICUBIC)
        sheet.paste(picture, (x + (_PICTURE - picture.width) // 2, y + _PICTURE - picture.height))
        for line, text in enumerate(wrap(prompt, _LETTERS, max_lines=_NUM_LINES, placeholder=" …")):
            draw.text((x, y + _PICTURE + 2 + line * _LINE), text, fill="black", font=font)
    return sheet


def _shown(run: RunDirectory, num_rows: int) -> list[Shown]:
    """The first rows of the run's table, in manifest order."""
    path = next((path for name in (METADATA, METADATA_PARTIAL) if (path := run.path / name).exists()), None)
    if path is None:
        raise UsageError(
            f"{run.path} has no {METADATA} yet, which a run writes when it is done; "
            f"`batchgen finalize {run.path} --partial` writes one of what there is"
        )
    try:
        # Opened by Arrow itself, as in plan_reader.
        with readable(path), pa.OSFile(str(path)) as source:
            table = next(pq.ParquetFile(source).iter_batches(num_rows, columns=["file_name", "prompt"]), None)
    except (OSError, pa.ArrowInvalid) as error:
        raise BatchgenError(f"{path} is damaged: {error}; `batchgen finalize {run.path}` writes it again") from error
    return [_place(row["file_name"], row["prompt"]) for row in table.to_pylist()] if table else []


def _place(file_name: str, prompt: str) -> Shown:
    folder, part, member = PurePosixPath(file_name).parts
    return Shown(f"{folder}/{part}", member, prompt)


def _read(run: RunDirectory, shown: Sequence[Shown]) -> list[tuple[Pixels, str]]:
    """Their pixels and prompts, in their order; every part is read once, as far as it is needed."""
    wanted: defaultdict[str, set[str]] = defaultdict(set)
    for one in shown:
        wanted[one.part].add(one.member)
    found: dict[tuple[str, str], Pixels] = {}
    for part, members in wanted.items():
        left = set(members)
        for name, data in part_reader(run.path / part):
            if name in left:
                found[part, name] = decode(data)
                left.remove(name)
            if not left:
                break
        if left:
            cure = f"`batchgen verify {run.path} --repair` makes it again"
            raise BatchgenError(f"{run.path / part} lacks {min(left)}; {cure}")
    return [(found[one.part, one.member], one.prompt) for one in shown]
