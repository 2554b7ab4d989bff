"""What the demo model knows by name: emoji, geometric shapes, colours, sizes and places. Needs no torch."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import NewType

FOLDER = Path(__file__).parent
COMMONEST = 300
"""Emoji at the beginning of the vocabulary, which training shows most often."""

Thing = NewType("Thing", int)
"""A place in the vocabulary: emoji first, then every shape in every colour."""

COLOURS: dict[str, tuple[int, int, int]] = {
    "white": (255, 255, 255),
    "black": (24, 24, 24),
    "grey": (150, 150, 150),
    "red": (214, 38, 38),
    "orange": (255, 140, 20),
    "yellow": (255, 221, 60),
    "green": (40, 150, 60),
    "cyan": (70, 205, 215),
    "blue": (45, 85, 210),
    "purple": (125, 55, 170),
    "pink": (250, 150, 190),
    "brown": (125, 80, 45),
}
"""RGB, 0 to 255, of backgrounds and shapes."""
ALSO: dict[str, tuple[str, ...]] = {"grey": ("gray",), "cyan": ("turquoise",), "purple": ("violet",)}
"""Other words for a colour."""

SHAPES = ("circle", "square", "triangle", "diamond", "cross", "hexagon")

SIZES: dict[str, float] = {"small": 0.40625, "medium": 0.625, "large": 0.84375, "paired": 0.421875}
"""Side of a thing's box, as a share of the picture's shorter side. Two things in a picture are "paired"."""

PLACES: dict[str, tuple[float, float]] = {
    "in the middle": (0.5, 0.5),
    "on the left": (0.0, 0.5),
    "on the right": (1.0, 0.5),
    "at the top": (0.5, 0.0),
    "at the bottom": (0.5, 1.0),
}
"""Where one thing's box lies in the room that it leaves: x, y, from the upper left corner."""

RELATIONS: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "left of": ((0.0, 0.5), (1.0, 0.5)),
    "right of": ((1.0, 0.5), (0.0, 0.5)),
    "above": ((0.5, 0.0), (0.5, 1.0)),
    "below": ((0.5, 1.0), (0.5, 0.0)),
}
"""Likewise, of two things."""


@dataclass(frozen=True, slots=True)
class Emoji:
    """An emoji that the model draws."""

    character: str
    names: tuple[str, ...]
    """Unicode's short name, then common other ones; no two emoji share a name."""


@functools.cache
def emoji() -> tuple[Emoji, ...]:
    """All emoji, the commonest names first."""
    entries = json.loads((FOLDER / "vocabulary.json").read_text(encoding="utf-8"))
    return tuple(Emoji(one["character"], tuple(one["names"])) for one in entries)


@functools.cache
def colours() -> tuple[str, ...]:
    """The colours' names in order."""
    return tuple(COLOURS)


def num_things() -> int:
    """Size of the vocabulary."""
    return len(emoji()) + len(SHAPES) * len(COLOURS)


def shape(name: str, colour: str) -> Thing:
    """A shape in a colour."""
    return Thing(len(emoji()) + SHAPES.index(name) * len(COLOURS) + colours().index(colour))


def shape_of(thing: Thing) -> tuple[str, str] | None:
    """Shape and colour; None for an emoji."""
    number = thing - len(emoji())
    return None if number < 0 else (SHAPES[number // len(COLOURS)], colours()[number % len(COLOURS)])


def named(name: str) -> Thing:
    """The thing of a name such as "penguin" or "green triangle". Raises KeyError."""
    return _by_name()[name]


def names_of(thing: Thing) -> tuple[str, ...]:
    """What it is called, its first name first."""
    found = shape_of(thing)
    if found is None:
        return emoji()[thing].names
    return tuple(f"{colour} {found[0]}" for colour in (found[1], *ALSO.get(found[1], ())))


@functools.cache
def _by_name() -> dict[str, Thing]:
    return {name: Thing(number) for number in range(num_things()) for name in names_of(Thing(number))}
