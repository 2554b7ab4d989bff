"""Says what a picture of the demo model shows, by comparing it with the drawings. Needs neither torch nor the font.

The background is the named colour nearest to the picture's edge. The thing is the drawing, of all the vocabulary,
nearest by its pixels to the box where it was asked to lie, shifted by a few pixels at most.
`python -m batchgen.models.demo.judge DIRECTORY` judges a finished run whose manifest has a column `scene`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from PIL import Image

from batchgen.models.demo.scenes import JITTER, Scene, boxes, gather, scene_of, words_of
from batchgen.models.demo.sprites import drawings, label
from batchgen.models.demo.vocabulary import COLOURS, COMMONEST, Thing, colours, emoji
from batchgen.records import Pixels

_SHORTER = 64
"""Pixels of the shorter side that larger pictures are reduced to."""
_EDGE = 2
"""Pixels at each side of a picture that are background, or nearly all of them."""
_REACH = round(JITTER * _SHORTER) + 1
"""Pixels that a thing may lie off its place: one more than the drawn ones do."""

_FULL = np.float32(255)

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one picture shows where a scene was asked for."""

    asked: Scene
    background: str
    things: tuple[Thing, ...]

    @property
    def has_background(self) -> bool:
        return self.background == self.asked.background

    @property
    def has_things(self) -> bool:
        return self.things == self.asked.things


@dataclass(frozen=True, slots=True)
class _Drawings:
    """All things in one size, for distances to patches `[side, side, 3]` over any background."""

    colour: Floats
    """`[N, side * side * 3]`, weighed by alpha."""
    clear: Floats
    """One minus alpha, `[N, side * side]`."""

    def nearest(self, patches: Floats, background: Floats) -> int:
        """The thing with the least squared distance to any of patches `[P, side, side, 3]` over RGB `[3]`."""
        num = len(patches)
        over = self.colour.reshape(*self.clear.shape, 3) @ background + self.clear * np.square(background).sum() / 2
        own = np.square(self.colour).sum(1) + 2 * (self.clear * over).sum(1)
        common = patches.reshape(num, -1) @ self.colour.T + (patches @ background).reshape(num, -1) @ self.clear.T
        distance = np.square(patches).reshape(num, -1).sum(1)[:, None] - 2 * common + own
        return int(distance.min(0).argmin())


def judge(picture: Pixels, scene: Scene) -> Verdict:
    """What a picture shows at the scene's places."""
    scale = _SHORTER / min(picture.shape[:2])
    height, width = (round(side * scale) for side in picture.shape[:2])
    reduced = Image.fromarray(picture).resize((width, height), Image.Resampling.BOX)
    pixels = np.asarray(reduced, np.float32) / _FULL
    background = _edge_colour(pixels)
    (side,), (lefts,), (uppers,) = boxes(gather([scene]), width, height)
    things = tuple(
        Thing(_drawings(int(side)).nearest(_patches(pixels, int(side), left, upper), background))
        for left, upper, _ in zip(lefts, uppers, scene.things, strict=False)
    )
    distances = [np.square(background - rgb).sum() for rgb in _palette()]
    return Verdict(scene, colours()[int(np.argmin(distances))], things)


@functools.lru_cache(maxsize=4)
def _drawings(side: int) -> _Drawings:
    rgba = drawings(side).astype(np.float32) / _FULL
    alpha = rgba[..., 3:]
    return _Drawings((rgba[..., :3] * alpha).reshape(len(rgba), -1), (np.float32(1) - alpha).reshape(len(rgba), -1))


@functools.cache
def _palette() -> Floats:
    return np.array(list(COLOURS.values()), np.float32) / _FULL


def _edge_colour(pixels: Floats) -> Floats:
    """The median of the pixels at the picture's edge, RGB `[3]`."""
    edge = np.ones(pixels.shape[:2], bool)
    edge[_EDGE:-_EDGE, _EDGE:-_EDGE] = False
    return np.median(pixels[edge], axis=0).astype(np.float32)


def _patches(pixels: Floats, side: int, left: int, upper: int) -> Floats:
    """The boxes near a place, as far as they lie inside the picture: `[P, side, side, 3]`."""
    height, width = pixels.shape[:2]
    return np.stack(
        [
            pixels[y : y + side, x : x + side]
            for y in range(max(upper - _REACH, 0), min(upper + _REACH, height - side) + 1)
            for x in range(max(left - _REACH, 0), min(left + _REACH, width - side) + 1)
        ]
    )


def report(verdicts: Iterable[Verdict]) -> dict[str, Any]:
    """Shares of right ones, over all and over emoji with the commonest names, and every mistake in words."""
    all_of = list(verdicts)
    singles = [one for one in all_of if len(one.asked.things) == 1]
    is_shape = [min(one.asked.things) >= len(emoji()) for one in all_of]
    common = [one for one in singles if one.asked.things[0] < COMMONEST]
    mistakes = [one for one in all_of if not (one.has_background and one.has_things)]
    return {
        "pictures": len(all_of),
        "background": _share(one.has_background for one in all_of),
        "shapes": _share(one.has_things for one, is_one in zip(all_of, is_shape, strict=True) if is_one),
        "emoji": _share(one.has_things for one in singles if one.asked.things[0] < len(emoji())),
        "common_emoji": _share(one.has_things for one in common),
        "pairs": _share(one.has_things for one in all_of if len(one.asked.things) == 2),
        "mistakes": [[words_of(one.asked), one.background, *map(label, one.things)] for one in mistakes],
    }


def _share(right: Iterable[bool]) -> dict[str, float | int | None]:
    each = list(right)
    return {"of": len(each), "right": sum(each), "share": round(sum(each) / len(each), 4) if each else None}


def judge_run(directory: Path) -> Iterator[Verdict]:
    """Judge the rows of a finished run in the `files` format that have a `scene`. Raises click.UsageError where there
    is no such run."""
    import pyarrow.parquet as pq

    table = directory / "metadata.parquet"
    if not table.exists() or "scene" not in pq.read_schema(table).names:
        raise click.UsageError(
            f"{directory} is no finished run whose manifest has a column `scene`; make one: "
            "batchgen run manifests/thousand.parquet"
        )
    rows = pq.read_table(table, columns=["file_name", "scene"]).to_pylist()
    for row in rows:
        if row["scene"] is not None:
            with Image.open(directory / row["file_name"]) as image:
                yield judge(np.asarray(image.convert("RGB")), scene_of(row["scene"]))


@click.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(directory: Path) -> None:
    """Say what share of the pictures of a run shows what was asked for, as JSON."""
    click.echo(json.dumps(report(judge_run(directory)), indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
