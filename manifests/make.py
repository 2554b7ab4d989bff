"""Writes the sample manifests beside it: `python manifests/make.py [FOLDER]`.

The same pyarrow writes the same bytes; tests/test_manifests.py holds the committed files equal to this.
"""

from __future__ import annotations

import csv
import sys
from itertools import cycle, islice, product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.models.demo.captions import plain
from batchgen.models.demo.scenes import Scene, held_out_scenes, words_of
from batchgen.models.demo.vocabulary import named

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("prompt", pa.string()),
        ("negative_prompt", pa.string()),
        ("width", pa.int32()),
        ("height", pa.int32()),
        ("steps", pa.int32()),
        ("guidance_scale", pa.float64()),
        ("seed", pa.uint64()),
    ]
)

SDXL_SIZES = Path(__file__).parent.parent / "tests" / "data" / "sdxl_sizes.csv"

COLOURS = ("red", "green", "blue", "yellow", "purple", "orange", "white", "black", "pink", "grey")
THINGS = ("apple", "fox", "bicycle", "rocket", "sailboat", "balloon", "umbrella", "feather", "tree", "cat")
SIZES = ("small", "large")

QUICKSTART = (
    # id, prompt, negative prompt, width, height, steps, guidance scale, seed
    ("red-apple", "a small red apple on a blue background", None, 64, 64, 8, None, None),
    ("penguin", "a large penguin on a cyan background", None, 64, 64, 8, None, None),
    ("green-triangle", "a green triangle left of a yellow circle on a white background", None, 64, 64, 8, 4.0, None),
    ("rocket", "a rocket on a purple background", None, 64, 64, 9, 3.0, None),
    ("pizza", "a picture of a large pizza on a green background", None, 64, 64, 8, 2.0, 1),
    ("any-fox", "a fox", "a white background", 64, 64, 9, 5.0, 2),
    ("cat-and-dog", "a cat left of a dog on a yellow background", None, 96, 64, 8, 4.0, None),
    ("bicycle", "a bicycle on the right on a pink background", None, 96, 64, None, None, None),
    ("train", "a train on the left on a grey background", None, 96, 64, 8, 6.0, 2**32),
    ("sunset", "sunset, orange background", None, 96, 64, 6, 1.0, None),
    ("whale", "a whale on a blue background", None, 96, 64, 9, 5.0, None),
    ("flamingo", "a flamingo at the top on a white background", None, 64, 96, None, None, None),
    ("owl", "a large owl", "a black background", 64, 96, 8, 4.5, None),
    ("rainbow-sun", "a sun above a rainbow on a blue background", None, 64, 96, 9, 5.0, 7),
    ("bottle", "a baby bottle at the bottom, brown background", None, 64, 96, 8, 2.0, None),
    ("key", "a key on a black background", None, 64, 96, 8, 1.0, 2**53 + 1),
    ("umbrella", "an umbrella on a red background", None, 96, 96, 8, 4.5, None),
    ("cactus", "the cactus on a cyan background", None, 96, 96, None, None, None),
    ("red-cross", "a large red cross on a white background", None, 96, 96, 8, 1.0, 3),
    ("tree", "a big tree on a pink background", "a small tree", 96, 96, 9, 5.0, None),
    ("boat", "a sailboat below a cloud on a cyan background", None, 96, 96, 9, 3.5, 2**64 - 1),
    ("unicorn", "a unicorn on a purple background", None, 128, 128, 6, 4.0, None),
    ("kite", "a kite 🪁 on a green background", None, 128, 128, 6, None, None),
    ("guitar", "a huge guitar, no text", "text, letters", 128, 128, 6, 5.0, 11),
)


def quickstart() -> pa.Table:
    """24 rows in five small sizes: what the README's first command makes."""
    return _table(QUICKSTART)


def mixed_sizes() -> pa.Table:
    """200 rows over SDXL's 40 aspect ratios at an eighth of the length, with mixed steps and guidance."""
    subjects = [
        plain(Scene(colour, (named(thing),), size, "in the middle"))
        for size, colour, thing in product(SIZES, COLOURS, THINGS)
    ]
    sizes = islice(cycle(_small_sizes()), len(subjects))
    steps = cycle((4, 6, 8, 12, None, 8, 5))
    scales = cycle((7.5, 1.0, 5.0, None, 3.0))
    rows = [
        (f"mixed-{number:03d}", prompt, None, width, height, step, scale, None)
        for number, (prompt, (width, height), step, scale) in enumerate(
            zip(subjects, sizes, steps, scales, strict=False)
        )
    ]
    return _table(rows)


def broken() -> pa.Table:
    """Rows that cannot be made as asked, one rule each, between three that can."""
    nan, infinity = float("nan"), float("inf")
    rows = (
        # id, prompt, negative prompt, width, height, steps, guidance scale, seed, number of images, sampler
        ("good-1", "a red apple", None, 64, 64, 8, 7.5, -1, 1, None),
        ("null-prompt", None, None, 64, 64, 8, 7.5, -1, 1, None),
        ("odd-width", "a red apple", None, 63, 64, 8, 7.5, -1, 1, None),
        ("zero-width", "a red apple", None, 0, 64, 8, 7.5, -1, 1, None),
        ("negative-height", "a red apple", None, 64, -8, 8, 7.5, -1, 1, None),
        ("zero-steps", "a red apple", None, 64, 64, 0, 7.5, -1, 1, None),
        ("negative-steps", "a red apple", None, 64, 64, -3, 7.5, -1, 1, None),
        ("guidance-nan", "a red apple", None, 64, 64, 8, nan, -1, 1, None),
        ("guidance-infinite", "a red apple", None, 64, 64, 8, infinity, -1, 1, None),
        ("seed-below", "a red apple", None, 64, 64, 8, 7.5, -7, 1, None),
        ("no-images", "a red apple", None, 64, 64, 8, 7.5, -1, 0, None),
        ("unknown-sampler", "a red apple", None, 64, 64, 8, 7.5, -1, 1, "eulr"),
        ("ignored-negative", "a red apple", "a worm", 64, 64, 8, 1.0, -1, 1, None),
        ("good-2", "", None, 64, 64, 8, 7.5, 5, 1, None),
        ("twice", "a green cube", None, 64, 64, 8, 7.5, -1, 1, None),
        ("good-3", "a blue sphere", None, 64, 64, 8, 7.5, -1, 2, None),
        ("twice", "a yellow cone", None, 64, 64, 8, 7.5, -1, 1, None),
    )
    schema = SCHEMA.set(SCHEMA.get_field_index("seed"), pa.field("seed", pa.int64()))
    schema = schema.append(pa.field("num_images", pa.int32())).append(pa.field("sampler", pa.string()))
    return _table(rows, schema)


def thousand() -> pa.Table:
    """1,000 scenes in pairs of words that the demo model was never shown, for its judge: `scene` says what is right."""
    number = 1000
    scenes = held_out_scenes(np.random.default_rng(6), number)
    sizes = cycle(((64, 64), (96, 64), (64, 64), (64, 96), (96, 96)))
    asked = [scenes[one] for one in range(number)]
    table = _table(
        [
            (f"held-out-{one:04d}", plain(scene), None, *size, None, None, None)
            for one, (scene, size) in enumerate(zip(asked, sizes, strict=False))
        ]
    )
    return table.append_column("scene", pa.array([words_of(scene) for scene in asked]))


MANIFESTS = {"quickstart": quickstart, "mixed_sizes": mixed_sizes, "thousand": thousand, "broken": broken}


def write(folder: Path) -> None:
    """All sample manifests into `folder`."""
    for name, table in MANIFESTS.items():
        pq.write_table(table(), folder / f"{name}.parquet", compression="zstd", store_schema=False)


def _table(rows: tuple[tuple[object, ...], ...] | list[tuple[object, ...]], schema: pa.Schema = SCHEMA) -> pa.Table:
    columns = zip(*rows, strict=True)
    return pa.table([pa.array(c, t) for c, t in zip(columns, schema.types, strict=True)], schema=schema)


def _small_sizes() -> list[tuple[int, int]]:
    """The 40 sizes that SDXL was trained on, divided by eight."""
    with SDXL_SIZES.open(newline="", encoding="utf-8") as file:
        return [(int(row["width"]) // 8, int(row["height"]) // 8) for row in csv.DictReader(file)]


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
