"""What a manifest is multiplied by: the values of `--grid NAME=VALUES` and of `--sizes FILE`.

An axis holds few values, all in memory. Each value has a mark, its part of a row's id, which depends on nothing but
the value: a list may grow or be put in another order, and the rows that were there keep their ids.
"""

from __future__ import annotations

import csv
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from batchgen.errors import UsageError
from batchgen.sources import cells
from batchgen.sources.base import lines, shorten, without_end
from batchgen.wording import listed

SIZE = "size"
TEMPLATE = "template"
_SIZE = re.compile(r"\s*([0-9]{1,9})\s*[x×,;\t]\s*([0-9]{1,9})\s*")
_SIZE_HEADER = re.compile(r"\s*width\s*[x×,;\t]\s*height\s*", re.IGNORECASE)
_QUOTED_NOTHING = re.compile(r'(?<![^,\s])""(?![^,\s])')
_NOTHING = "\0"
"""What stands for `""` while csv is read, which does not tell it from nothing. No argument of a program holds it."""
_PLAIN = re.compile(r"[a-z0-9]+( [a-z0-9]+)*")
_NO_WORD = re.compile(r"[^a-z0-9]+")
_MOST_MARK = 40


@dataclass(frozen=True, slots=True)
class Axis:
    """Values that every row is made with, one after another."""

    name: str
    columns: Mapping[str, pa.Array]
    """What a value says in the manifest, by column; all of one length."""
    texts: pa.Array
    """As a template shows them."""
    marks: pa.Array
    """As ids show them: "steps-20"."""

    def __len__(self) -> int:
        return len(self.marks)


def read_grid(option: str) -> Axis:
    """The axis of a `NAME=VALUE,VALUE` or `NAME=@FILE` (a value a line).

    Values of the columns that batchgen knows have their types, others are texts. Raises UsageError.
    """
    name, equals, values = option.partition("=")
    where = f"--grid {shorten(option)}"
    if not (equals and name):
        raise UsageError(f"{where} is not of the form NAME=VALUE,VALUE or NAME=@FILE, such as steps=20,30")
    path = Path(values[1:]) if values.startswith("@") else None
    texts = _of_file(path, where) if path else _of_list(values, where)
    where = f"--grid {name}" + (f", {path}" if path else "")
    return _grid(name, texts, where)


def read_sizes(path: Path) -> Axis:
    """The axis of a file of sizes: `WIDTHxHEIGHT` or `width,height` a line, with or without a header.

    Raises UsageError, with the line of what is no size.
    """
    where = f"--sizes {path}"
    spelled = _of_file(path, where)
    if spelled and _SIZE_HEADER.fullmatch(spelled[0]):
        spelled = spelled[1:]
    _refuse_empty(spelled, where)
    found = [_SIZE.fullmatch(text) for text in spelled]
    wrong = [text for text, one in zip(spelled, found, strict=True) if one is None]
    if wrong:
        raise UsageError(f"{where}: {shorten(wrong[0])} is no size; each line is one, such as 768x512 or 768,512")
    sizes = [(int(one[1]), int(one[2])) for one in found if one]
    widths, heights = zip(*sizes, strict=True)
    marks = [f"{width}x{height}" for width, height in sizes]
    _refuse_twins(marks, where)
    columns = {"width": pa.array(widths, pa.int32()), "height": pa.array(heights, pa.int32())}
    return Axis(SIZE, columns, pa.array(marks), pa.array(marks))


def template_axis(texts: Sequence[str], where: str) -> Axis:
    """The axis of several templates; the column `template` holds each row's."""
    _refuse_twins(texts, where)
    values = pa.array(texts, pa.string())
    return Axis(TEMPLATE, {TEMPLATE: values}, values, _marks(TEMPLATE, texts))


def values_of_file(path: Path, where: str) -> list[str]:
    """The lines of a list, but for blank ones. Raises UsageError if there is none."""
    texts = _of_file(path, where)
    _refuse_empty(texts, where)
    return texts


def mark(value: object) -> str:
    """A value's part of an id: `[a-z0-9-]`, no two values alike.

    Words of lower-case letters and digits and numbers are shown whole; all else carries a hash of its exact text.
    """
    if isinstance(value, int | float):
        return repr(value).removesuffix(".0").replace("+", "").replace("-", "m").replace(".", "-")
    text = str(value)
    if _PLAIN.fullmatch(text) and len(text) <= _MOST_MARK:
        return text.replace(" ", "-")
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return f"{slug(text)}-{digest}".removeprefix("-")


def slug(text: str) -> str:
    """The first words of a text in `[a-z0-9-]`, at most 40 characters; "" if it has none there."""
    words = _NO_WORD.sub("-", text[: 4 * _MOST_MARK].lower()).strip("-")
    return words[:_MOST_MARK].rstrip("-")


def _grid(name: str, texts: list[str], where: str) -> Axis:
    _refuse_empty(texts, where)
    parse = cells.parser(name)
    values: list[object] = []
    for text in texts:
        try:
            value = text if parse is None else parse(text)
        except ValueError as error:
            raise UsageError(f"{where}: {shorten(text)} is not usable: {error}") from None
        if value is None:
            raise UsageError(f"{where}: {shorten(text)} stands for no value; leave it out")
        values.append(value)
    _refuse_twins(values, where)
    kind = cells.TYPES.get(name, pa.string())
    return Axis(name, {name: pa.array(values, kind)}, pa.array(texts, pa.string()), _marks(name, values))


def _marks(name: str, values: Sequence[object]) -> pa.Array:
    return pa.array([f"{name}-{mark(value)}" for value in values], pa.string())


def _of_list(values: str, where: str) -> list[str]:
    """Values between commas, as csv quotes them; the empty text stands as `""`."""
    try:
        found = next(csv.reader([_QUOTED_NOTHING.sub(_NOTHING, values)], strict=True, skipinitialspace=True), [])
    except csv.Error as error:
        raise UsageError(f"{where}: its values are not csv ({error}); a value with a comma stands in quotes") from None
    if found and not all(found):
        raise UsageError(f'{where}: a value between the commas is empty; take a comma out, or write "" for no text')
    return ["" if one == _NOTHING else one.replace(_NOTHING, '"') for one in found]


def _of_file(path: Path, where: str) -> list[str]:
    if not path.is_file():
        raise UsageError(f"{where}: there is no file {path}; a list is a text file with a value a line")
    return [text for line in lines(path) if (text := without_end(line)).strip()]


def _refuse_empty(texts: Sequence[str], where: str) -> None:
    if not texts:
        raise UsageError(f"{where}: the list is empty, and would make no row; give it a value")


def _refuse_twins(values: Sequence[object], where: str) -> None:
    if len(set(values)) == len(values):
        return
    seen: set[object] = set()
    twins = [value for value in values if value in seen or seen.add(value)]  # type: ignore[func-returns-value]
    shown = listed([shorten(value) for value in dict.fromkeys(twins)])
    raise UsageError(
        f"{where}: given more than once, and would make the same rows twice: {shown}; give each value once"
    )
