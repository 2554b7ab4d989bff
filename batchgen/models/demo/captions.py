"""The words for a scene: what the demo model is taught to read. Needs no torch."""

from __future__ import annotations

import random
from collections.abc import Iterator

from batchgen.models.demo.scenes import Scene
from batchgen.models.demo.vocabulary import ALSO, COLOURS, PLACES, SHAPES, Thing, emoji, names_of

_BEGINNINGS = ("a picture of", "a drawing of", "an image of", "an icon of", "a photo of", "a cute picture of")
_SIZES = {"small": ("small", "little", "tiny"), "medium": ("",), "large": ("large", "big", "huge"), "paired": ("",)}
_RELATIONS = {
    "left of": ("left of", "to the left of"),
    "right of": ("right of", "to the right of"),
    "above": ("above", "over", "on top of"),
    "below": ("below", "under", "beneath"),
}
_PLACES = {
    "in the middle": ("", "", "in the middle", "in the center"),
    "on the left": ("on the left", "at the left"),
    "on the right": ("on the right", "at the right"),
    "at the top": ("at the top",),
    "at the bottom": ("at the bottom",),
}
_ORDERS = (
    "{what} on a {colour} background",
    "{what} on a {colour} background",
    "{what} on {colour}",
    "{what}, {colour} background",
    "a {colour} background with {what}",
)
_SYLLABLES = ("flo", "rb", "gra", "nim", "zu", "pel", "tok", "wi", "ssa", "bor", "ke", "lu")


def plain(scene: Scene) -> str:
    """The scene in its first wording, for manifests and reports."""
    what = _one(names_of(scene.things[0])[0], _SIZES[scene.size][0])
    if len(scene.things) == 2:
        what = f"{what} {scene.layout} {_one(names_of(scene.things[1])[0])}"
    elif scene.layout != "in the middle":
        what = f"{what} {scene.layout}"
    return f"{what} on {_one(scene.background)} background"


def caption(scene: Scene, rng: random.Random, says_background: bool = True) -> str:
    """The scene in one of many wordings."""
    what = _named(scene.things[0], scene.size, rng)
    if len(scene.things) == 2:
        what = f"{what} {rng.choice(_RELATIONS[scene.layout])} {_named(scene.things[1], scene.size, rng)}"
    else:
        what = f"{what} {rng.choice(_PLACES[scene.layout])}".rstrip()
    if rng.random() < 0.2:
        what = f"{rng.choice(_BEGINNINGS)} {what}"
    if not says_background:
        return what
    colour = rng.choice((scene.background, scene.background, *ALSO.get(scene.background, ())))
    return rng.choice(_ORDERS).format(what=what, colour=colour)


def _named(thing: Thing, size: str, rng: random.Random) -> str:
    names = names_of(thing)
    name = names[0] if rng.random() < 0.6 else rng.choice(names)
    words = [rng.choice(_SIZES[size])] if size in _SIZES else []
    if rng.random() < 0.03:
        words.append("".join(rng.choices(_SYLLABLES, k=rng.randint(1, 3))))
    described = " ".join(word for word in (*words, name) if word)
    start = rng.random()
    return described if start < 0.1 else f"the {described}" if start < 0.2 else _with_article(described)


def _one(name: str, size: str = "") -> str:
    return _with_article(f"{size} {name}".strip())


def _with_article(described: str) -> str:
    """Names such as "eyes" or "jeans" are plural and have none."""
    if described.endswith("s") and not described.endswith("ss"):
        return described
    return f"{'an' if described[0].lower() in 'aeiou' else 'a'} {described}"


def all_texts() -> Iterator[str]:
    """Texts that hold every word of the captions."""
    for one in emoji():
        yield from one.names
    yield from SHAPES
    yield from COLOURS
    for others in (*ALSO.values(), *_SIZES.values(), *_RELATIONS.values(), *_PLACES.values(), _BEGINNINGS, PLACES):
        yield from others
    yield "a an the on background, with"
