"""What a picture of the demo model shows, drawn at random or held out of training. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchgen.models.demo.vocabulary import (
    COMMONEST,
    PLACES,
    RELATIONS,
    SHAPES,
    SIZES,
    Thing,
    colours,
    emoji,
    named,
    names_of,
    num_things,
)

Numbers = npt.NDArray[np.int64]

LAYOUTS = (*PLACES, *RELATIONS)
_CORNERS = np.array([(place, place) for place in PLACES.values()] + list(RELATIONS.values()))
"""Of each layout, two things' places: `[L, 2, 2]`."""
_SIZES = tuple(SIZES)
_NONE = -1
_MARGIN = 3 / 64
JITTER = 2 / 64
"""Shares of the shorter side: what is left free at the edges, and how far a thing may lie from its place."""
_HELD_OUT_OF = 16
"""One in so many pairs of a thing with a background, or with another thing, is never shown in training."""


@dataclass(frozen=True, slots=True)
class Scene:
    """One thing at a place, or two in a relation, on a plain background."""

    background: str
    """A colour."""
    things: tuple[Thing, ...]
    size: str
    layout: str
    """A place for one thing, a relation for two."""


@dataclass(frozen=True, slots=True)
class Scenes:
    """Many scenes; every array is `[N]`, by number of colour, thing, size and layout."""

    background: Numbers
    first: Numbers
    second: Numbers
    """-1 where there is one thing."""
    size: Numbers
    layout: Numbers

    def __len__(self) -> int:
        return len(self.background)

    def __getitem__(self, number: int) -> Scene:
        things = (int(self.first[number]), int(self.second[number]))
        return Scene(
            colours()[self.background[number]],
            tuple(Thing(thing) for thing in things if thing != _NONE),
            _SIZES[self.size[number]],
            LAYOUTS[self.layout[number]],
        )

    def where(self, chosen: npt.NDArray[np.bool_]) -> Scenes:
        """Those that are chosen, `[N]`."""
        return Scenes(*(getattr(self, name)[chosen] for name in self.__slots__))


def gather(scenes: Sequence[Scene]) -> Scenes:
    """Scenes as arrays."""
    rows = [
        (
            colours().index(one.background),
            one.things[0],
            one.things[1] if len(one.things) > 1 else _NONE,
            _SIZES.index(one.size),
            LAYOUTS.index(one.layout),
        )
        for one in scenes
    ]
    return Scenes(*np.array(rows, np.int64).reshape(-1, 5).T)


def boxes(scenes: Scenes, width: int, height: int) -> tuple[Numbers, Numbers, Numbers]:
    """Side `[N]`, and left and upper edge `[N, 2]`, of the things' boxes in a picture, in pixels."""
    shorter = min(width, height)
    side = np.array([box_side(size, shorter) for size in _SIZES])[scenes.size]
    margin = round(_MARGIN * shorter)
    room = np.stack([width - side, height - side], axis=-1)[:, None] - 2 * margin
    corner = margin + np.rint(_CORNERS[scenes.layout] * room).astype(np.int64)
    return side, corner[..., 0], corner[..., 1]


def box_side(size: str, shorter: int) -> int:
    """Pixels of a thing's box in a picture with this shorter side."""
    return round(SIZES[size] * shorter)


def training_scenes(rng: np.random.Generator, number: int) -> Scenes:
    """So many scenes, none of them held out."""
    return _drawn(rng, number, held_out=False)


def held_out_scenes(rng: np.random.Generator, number: int) -> Scenes:
    """So many scenes that training never shows."""
    return _drawn(rng, number, held_out=True)


def _drawn(rng: np.random.Generator, number: int, held_out: bool) -> Scenes:
    found: list[Scenes] = []
    while sum(map(len, found)) < number:
        drawn = _any_scenes(rng, max(number, 1024))
        found.append(drawn.where(is_held_out(drawn) == held_out))
    names = Scenes.__slots__
    return Scenes(*(np.concatenate([getattr(one, name) for one in found])[:number] for name in names))


def _any_scenes(rng: np.random.Generator, number: int) -> Scenes:
    """At most so many: those whose shape would have the background's or the other's colour are left out."""
    kind = rng.choice(4, number, p=(0.6, 0.1, 0.15, 0.15))
    is_pair = kind >= 2
    first = np.where((kind == 1) | (kind == 2), _shapes(rng, number), _emoji(rng, number))
    is_shape = (kind == 2) | ((kind == 3) & (rng.random(number) < 0.3))
    second = np.where(is_shape, _shapes(rng, number), _emoji(rng, number))
    size = np.where(is_pair, 3, rng.choice(3, number, p=(0.2, 0.5, 0.3)))
    place = np.where(size == 2, 0, rng.choice(len(PLACES), number, p=(0.4, 0.15, 0.15, 0.15, 0.15)))
    layout = np.where(is_pair, len(PLACES) + rng.integers(len(RELATIONS), size=number), place)
    background = rng.integers(len(colours()), size=number)
    scenes = Scenes(background, first, np.where(is_pair, second, _NONE), size, layout)
    is_seen = (_colour(first) != background) & (_colour(scenes.second) != background) & (first != scenes.second)
    return scenes.where(is_seen)


def _emoji(rng: np.random.Generator, number: int) -> Numbers:
    is_common = rng.random(number) < 0.7
    return np.where(is_common, rng.integers(COMMONEST, size=number), rng.integers(len(emoji()), size=number))


def _shapes(rng: np.random.Generator, number: int) -> Numbers:
    return len(emoji()) + rng.integers(len(SHAPES) * len(colours()), size=number)


def _colour(thing: Numbers) -> Numbers:
    """A shape's colour; none for an emoji."""
    return np.where(thing >= len(emoji()), (thing - len(emoji())) % len(colours()), _NONE)


def is_held_out(scenes: Scenes) -> npt.NDArray[np.bool_]:
    """Whether the scene has a pair of words that is kept from training, `[N]`."""
    is_pair = scenes.second != _NONE
    backgrounds = num_things() + scenes.background
    found = _is_kept_back(scenes.first, backgrounds) | (is_pair & _is_kept_back(scenes.second, backgrounds))
    low, high = np.minimum(scenes.first, scenes.second), np.maximum(scenes.first, scenes.second)
    is_out: npt.NDArray[np.bool_] = found | (is_pair & _is_kept_back(low, high))
    return is_out


def _is_kept_back(left: Numbers, right: Numbers) -> npt.NDArray[np.bool_]:
    """By the last mixing of SplitMix64 (Steele, Lea and Flood 2014)."""
    mixed = (left.astype(np.uint64) << np.uint64(32)) + right.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    is_kept: npt.NDArray[np.bool_] = (mixed ^ (mixed >> np.uint64(31))) % np.uint64(_HELD_OUT_OF) == 0
    return is_kept


def words_of(scene: Scene) -> str:
    """The scene in one unmistakable line, for manifests and reports."""
    return " | ".join((scene.background, scene.size, scene.layout, *(names_of(thing)[0] for thing in scene.things)))


def scene_of(words: str) -> Scene:
    """The scene that `words_of` wrote. Raises KeyError or ValueError for another text."""
    background, size, layout, *things = words.split(" | ")
    return Scene(background, tuple(named(one) for one in things), size, layout)
