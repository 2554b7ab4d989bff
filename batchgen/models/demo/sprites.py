"""The drawings of the vocabulary's things: emoji from a committed sheet, shapes from their outlines. Needs no torch.

`python -m batchgen.models.demo.sprites` makes the sheet and `vocabulary.json` anew, from Debian's packages
fonts-noto-color-emoji (the drawings; SIL Open Font License 1.1), unicode-data (names) and unicode-cldr-core (other
names); the order by commonness needs the package wordfreq. Of the libraries with emoji names (emoji, demoji) each takes
them from the same two Unicode files, which Debian packages by themselves.
"""

from __future__ import annotations

import functools
import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from batchgen.models.demo.vocabulary import COLOURS, FOLDER, SHAPES, Thing, emoji, shape_of

SIDE = 104
"""Pixels of a drawing in the sheet: that of a large thing in a picture of 128 pixels."""
_ROW = 32
_SHEET = FOLDER / "sprites.webp"
_SMOOTH = 8
"""Shapes are drawn so many times larger, then reduced."""

_OUTLINES: dict[str, tuple[tuple[float, float], ...]] = {
    "square": ((0.1, 0.1), (0.9, 0.1), (0.9, 0.9), (0.1, 0.9)),
    "triangle": ((0.5, 0.08), (0.97, 0.9), (0.03, 0.9)),
    "diamond": ((0.5, 0.02), (0.9, 0.5), (0.5, 0.98), (0.1, 0.5)),
    "cross": (
        *((0.35, 0.05), (0.65, 0.05), (0.65, 0.35), (0.95, 0.35), (0.95, 0.65), (0.65, 0.65)),
        *((0.65, 0.95), (0.35, 0.95), (0.35, 0.65), (0.05, 0.65), (0.05, 0.35), (0.35, 0.35)),
    ),
    "hexagon": ((0.27, 0.1), (0.73, 0.1), (0.97, 0.5), (0.73, 0.9), (0.27, 0.9), (0.03, 0.5)),
}
"""Corners in a box of side 1; a circle has none."""

_FONT = Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf")
_FONT_SIZE = 109
"""The only one that its bitmaps of 136x128 pixels have."""
_UNICODE = Path("/usr/share/unicode")
_NUM_EMOJI = 640
_LEFT_OUT = {"Symbols", "Flags", "People & Body", "cat-face", "monkey-face", "place-map"}
"""Groups and subgroups: signs, flags, and drawings that differ too little at 24 pixels."""
_KEPT = {"body-parts", "person-role", "person-fantasy"}
_UNSUITABLE = re.compile(
    r"o’clock|-thirty|oncoming|banknote|pregnant|breast-feeding|person |globe|mailbox|moon face|suit$|bookmark tabs"
)
_OWN_NAMES = {
    "red apple": ("apple",),
    "automobile": ("car",),
    "airplane": ("plane", "aeroplane"),
    "red heart": ("heart",),
    "television": ("TV",),
    "mobile phone": ("phone", "smartphone"),
    "desktop computer": ("computer",),
    "birthday cake": ("cake",),
    "closed book": ("book",),
    "top hat": ("hat",),
    "running shoe": ("shoe",),
    "crescent moon": ("moon",),
    "blossom": ("flower",),
    "hamburger": ("burger",),
    "doughnut": ("donut",),
    "bicycle": ("bike",),
    "deciduous tree": ("tree",),
    "american football": ("football",),
    "sailboat": ("boat",),
    "french fries": ("fries",),
    "steaming bowl": ("noodles",),
    "hot beverage": ("coffee", "tea"),
    "hatching chick": ("chick",),
    "honeybee": ("bee",),
    "lady beetle": ("ladybird", "ladybug"),
    "wrapped gift": ("gift", "present"),
    "ear of corn": ("corn",),
    "jack-o-lantern": ("pumpkin",),
}
"""Names that CLDR gives to several emoji."""
_RESERVED = {"square", "circle", "triangle", "diamond", "cross", "hexagon", *COLOURS}


@functools.cache
def drawings(side: int) -> npt.NDArray[np.uint8]:
    """All things, uint8 `[N, side, side, 4]`, RGBA with straight alpha."""
    return np.stack([np.asarray(_reduced(drawing, side)) for drawing in [*_emoji(), *_shapes()]])


def _reduced(drawing: Image.Image, side: int) -> Image.Image:
    """Pillow weighs colours by their alpha only in "RGBa"."""
    how = Image.Resampling.BOX if side <= SIDE else Image.Resampling.BICUBIC
    return drawing.convert("RGBa").resize((side, side), how).convert("RGBA")


@functools.cache
def _emoji() -> tuple[Image.Image, ...]:
    with Image.open(_SHEET) as sheet:
        places = (divmod(number, _ROW) for number in range(len(emoji())))
        return tuple(
            sheet.crop((x * SIDE, y * SIDE, (x + 1) * SIDE, (y + 1) * SIDE)).convert("RGBA") for y, x in places
        )


@functools.cache
def _shapes() -> tuple[Image.Image, ...]:
    return tuple(_shape(name, rgb) for name in SHAPES for rgb in COLOURS.values())


def _shape(name: str, rgb: tuple[int, int, int]) -> Image.Image:
    large = SIDE * _SMOOTH
    mask = Image.new("L", (large, large))
    draw = ImageDraw.Draw(mask)
    if name == "circle":
        draw.ellipse((0.05 * large, 0.05 * large, 0.95 * large, 0.95 * large), fill=255)
    else:
        draw.polygon([(x * large, y * large) for x, y in _OUTLINES[name]], fill=255)
    made = Image.new("RGBA", (SIDE, SIDE), (*rgb, 255))
    made.putalpha(mask.reduce(_SMOOTH))
    return made


def label(thing: Thing) -> str:
    """For reports: the emoji itself, or shape and colour."""
    found = shape_of(thing)
    return emoji()[thing].character if found is None else f"{found[1]} {found[0]}"


def main() -> None:
    """Write sheet and vocabulary."""
    found = _vocabulary()
    entries = [json.dumps({"character": one, "names": names}, ensure_ascii=False) for one, names in found]
    (FOLDER / "vocabulary.json").write_text("[\n" + ",\n".join(entries) + "\n]\n", encoding="utf-8")
    sheet = Image.new("RGBA", (_ROW * SIDE, -(-len(found) // _ROW) * SIDE))
    font = ImageFont.truetype(_FONT, _FONT_SIZE)
    for number, (character, _) in enumerate(found):
        y, x = divmod(number, _ROW)
        sheet.paste(_glyph(character, font), (x * SIDE, y * SIDE))
    sheet.save(_SHEET, "WEBP", quality=90, method=6)


def _glyph(character: str, font: ImageFont.FreeTypeFont) -> Image.Image:
    drawn = Image.new("RGBA", (136, 136))
    ImageDraw.Draw(drawn).text((0, 4), character, font=font, embedded_color=True)
    square = drawn.crop((3, 3, 133, 133)).convert("RGBa")
    return square.resize((SIDE, SIDE), Image.Resampling.LANCZOS).convert("RGBA")


def _vocabulary() -> list[tuple[str, list[str]]]:
    """Characters and names, the commonest first."""
    from wordfreq import zipf_frequency

    def commonness(name: str) -> float:
        """A name of several words counts as less common than its words make it."""
        return float(zipf_frequency(name.removesuffix(" face"), "en")) - 0.8 * name.count(" ")

    official, keywords = _official(), _keywords()
    uses = Counter(word for character in official for word in keywords[character])
    taken = set(official.values()) | {name for names in _OWN_NAMES.values() for name in names} | _RESERVED
    found: dict[str, list[str]] = {}
    for character, name in official.items():
        own = _OWN_NAMES.get(name, ())
        others = [word for word in keywords[character] if uses[word] == 1 and word not in taken and len(word) > 2]
        same = [word for word in others if re.split(r"[ -]", word)[-1] == re.split(r"[ -]", name)[-1]]
        found[character] = list(dict.fromkeys([name, *own, *same]))[:4]
    ordered = sorted(found, key=lambda one: -max(commonness(name) for name in found[one]))
    return [(one, found[one]) for one in ordered[:_NUM_EMOJI]]


def _official() -> dict[str, str]:
    """Unicode's names, at most three words, of emoji that are one character, in Unicode's order."""
    found: dict[str, str] = {}
    group = subgroup = ""
    for line in (_UNICODE / "emoji" / "emoji-test.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("# group:"):
            group = line.removeprefix("# group:").strip()
        elif line.startswith("# subgroup:"):
            subgroup = line.removeprefix("# subgroup:").strip()
        elif match := re.fullmatch(r"([0-9A-F]+)( FE0F)? +; fully-qualified .* E[\d.]+ (.+)", line):
            name = match[3]
            is_left_out = subgroup not in _KEPT and {group, subgroup} & _LEFT_OUT
            if not is_left_out and name.count(" ") < 3 and not _UNSUITABLE.search(name):
                found[chr(int(match[1], 16))] = name.replace("’", "'")
    return found


def _keywords() -> dict[str, list[str]]:
    tree = ElementTree.parse(_UNICODE / "cldr" / "common" / "annotations" / "en.xml")
    found = {
        str(one.get("cp")): [word.strip().replace("’", "'") for word in (one.text or "").split("|")]
        for one in tree.iter("annotation")
        if one.get("type") is None
    }
    return {character: found.get(character, []) for character in _official()}


if __name__ == "__main__":
    main()
