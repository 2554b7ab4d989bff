"""Text of any script in a picture: each letter in the first font that has it, Pillow's own first, then those of
matplotlib and of this machine."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from unicodedata import category, normalize

from fontTools.ttLib import TTFont
from PIL import ImageDraw, ImageFont

from batchgen.wording import shorten

_OUTLINES = ("glyf", "CFF ", "CFF2")
"""Tables that hold letters of any size; a font of bitmaps alone has none of them."""
_UNSEEN = ("Cc", "Cf", "Mn")
"""Categories of Unicode whose characters may well have no shape of their own: controls, joiners, marks."""


@dataclass(frozen=True, slots=True)
class _Source:
    """A font: a file, or Pillow's own, and what characters it has."""

    path: Path | None
    letters: frozenset[int]

    def at(self, size: int) -> ImageFont.FreeTypeFont:
        return _pillows(size) if self.path is None else ImageFont.truetype(self.path, size)


@dataclass(slots=True)
class Letters:
    """A height of letters, in pixels."""

    size: int
    missing: set[str] = field(default_factory=set)
    """Letters that were drawn or measured and that no font here has."""
    _fonts: dict[_Source, ImageFont.FreeTypeFont] = field(default_factory=dict)

    def draw(self, draw: ImageDraw.ImageDraw, place: tuple[int, int], text: str) -> None:
        """Write a line in black; the place is its upper left corner."""
        x, baseline = float(place[0]), place[1] + self._font(_first()).getmetrics()[0]
        for font, piece in self._pieces(text):
            draw.text((x, baseline), piece, fill="black", font=font, anchor="ls")
            x += font.getlength(piece)

    def width(self, text: str) -> float:
        """Pixels of a line."""
        return sum(font.getlength(piece) for font, piece in self._pieces(text))

    def fitting(self, text: str, width: int) -> str:
        """A text in one line of so many pixels, cut where it is longer."""
        text = shorten(" ".join(text.split()), 300)
        return next(cut for num in range(len(text), -1, -1) if self.width(cut := shorten(text, max(1, num))) <= width)

    def wrapped(self, text: str, width: int, num_lines: int) -> list[str]:
        """A text in at most so many lines, cut where it is longer. Lines end between words, or where a word is wider
        than a line."""
        words = shorten(" ".join(text.split()), 300).split(" ")
        lines: list[str] = []
        while words and len(lines) < num_lines - 1:
            num = len(words)
            while num > 1 and self.width(" ".join(words[:num])) > width:
                num -= 1
            line = " ".join(words[:num])
            length = len(line)
            while length > 1 and self.width(line[:length]) > width:
                length -= 1
            lines.append(line[:length])
            words = ([line[length:]] if length < len(line) else []) + words[num:]
        return [*lines, self.fitting(" ".join(words), width)] if words else lines

    def _pieces(self, text: str) -> Iterator[tuple[ImageFont.FreeTypeFont, str]]:
        """A text in pieces of one font each, as long as a font has the letters: blanks of a script that is read from
        right to left stay in it. What no font has is drawn as Pillow's own draws what it lacks, if it is a letter."""
        source, piece = _first(), ""
        for letter in normalize("NFC", text):
            found = source if ord(letter) in source.letters else self._source(letter)
            if found is None:
                continue
            if found != source and piece:
                yield self._font(source), piece
                piece = ""
            source, piece = found, piece + letter
        if piece:
            yield self._font(source), piece

    def _source(self, letter: str) -> _Source | None:
        """Where a letter is from; None for one that is not drawn."""
        source = _having(ord(letter))
        if source is None and category(letter) not in _UNSEEN:
            self.missing.add(letter)
            return _first()
        return source

    def _font(self, source: _Source) -> ImageFont.FreeTypeFont:
        if source not in self._fonts:
            self._fonts[source] = source.at(self.size)
        return self._fonts[source]


@cache
def _having(character: int) -> _Source | None:
    """The first font that has a character."""
    own = _first()
    if character in own.letters:
        return own
    return next((one for path in _files() if (one := _read(path)) and character in one.letters), None)


@cache
def _first() -> _Source:
    """Pillow's own font, which is Latin."""
    with TTFont(io.BytesIO(_pillows(10).font_bytes), lazy=True) as font:
        return _Source(None, frozenset(font.getBestCmap()))


def _pillows(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont)
    return font


@cache
def _files() -> tuple[Path, ...]:
    """All font files: those that come with matplotlib, then this machine's."""
    # A second and a cache on disk, for which only a text that is not Latin pays.
    from matplotlib import font_manager, get_data_path

    own = Path(get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")
    return (
        own,
        *sorted(map(Path, font_manager.findSystemFonts()), key=lambda path: ("Regular" not in path.stem, path)),
    )


@cache
def _read(path: Path) -> _Source | None:
    """The first font of a file; None if it holds none that Pillow draws at any size."""
    try:
        with TTFont(path, fontNumber=0, lazy=True) as font:
            cmap = font.getBestCmap() if any(table in font for table in _OUTLINES) else None
            source = _Source(path, frozenset(cmap)) if cmap else None
        if source is not None:
            source.at(10)
    except Exception:
        # fontTools and FreeType raise errors of many kinds for files of other people; the next font is as good.
        return None
    return source
