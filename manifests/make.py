"""Writes the sample manifests beside it: `python manifests/make.py [FOLDER]`.

The same pyarrow writes the same bytes; tests/test_manifests.py holds the committed files equal to this.
"""

from __future__ import annotations

import csv
import sys
from itertools import cycle, islice, product
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

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
THINGS = ("apple", "cube", "bicycle", "teapot", "sailboat", "lantern", "umbrella", "feather", "bridge", "cat")
SCENES = ("on a table", "in the snow")

QUICKSTART = (
    # id, prompt, negative prompt, width, height, steps, guidance scale, seed
    ("red-apple", "a red apple on a wooden table", None, 64, 64, None, None, None),
    ("green-cube", "a green cube on a white floor", None, 64, 64, None, None, None),
    ("blue-sphere", "a blue sphere that floats in fog", None, 64, 64, 4, None, None),
    ("yellow-cone", "a yellow cone beside a red ball", None, 64, 64, 6, 3.0, None),
    ("two-triangles", "two orange triangles, one above the other", None, 64, 64, 8, 1.0, 1),
    ("purple-star", "a purple star on a dark blue sky", "blurry", 64, 64, 8, 5.0, 2),
    ("white-cat", "a white cat asleep on a green cushion", "a dog", 96, 64, 8, 7.5, None),
    ("black-bicycle", "a black bicycle against a brick wall", None, 96, 64, None, None, None),
    ("silver-train", "a silver train that crosses a stone bridge", None, 96, 64, 10, 6.0, 2**32),
    ("orange-sunset", "an orange sunset over a flat sea", None, 96, 64, 4, 1.0, None),
    ("grey-whale", "a grey whale under the surface of the sea", None, 96, 64, 12, 9.0, None),
    ("pink-flamingo", "a pink flamingo that stands on one leg", None, 64, 96, None, None, None),
    ("brown-owl", "a brown owl in a hollow tree", "feathers in the air", 64, 96, 6, 4.5, None),
    ("tall-lighthouse", "a tall lighthouse with red and white stripes", None, 64, 96, 8, 7.5, 7),
    ("green-bottle", "a green bottle with a yellow label", None, 64, 96, 5, 2.0, None),
    ("gold-key", "a gold key that hangs from a string", None, 64, 96, 8, 1.0, 2**53 + 1),
    ("red-umbrella", "a red umbrella in the rain", "people", 96, 96, 8, 6.5, None),
    ("blue-teapot", "a blue teapot and two white cups", None, 96, 96, None, None, None),
    ("three-circles", "three circles: red, yellow and blue", None, 96, 96, 4, 1.0, 3),
    ("snowy-hill", "a hill in the snow with one dark tree", None, 96, 96, 12, 8.0, None),
    ("paper-boat", "a paper boat on a puddle", None, 96, 96, 7, 3.5, 2**64 - 1),
    ("checker-board", "a checker board seen from above", None, 128, 128, 6, 5.0, None),
    ("rainbow-kite", "a kite in the colours of the rainbow — 🪁", None, 128, 128, 8, 7.5, None),
    ("round-window", "a round window that looks out on a garden", "text, letters", 128, 128, 10, 9.0, 11),
)


def quickstart() -> pa.Table:
    """24 rows in five small sizes: what the README's first command makes."""
    return _table(QUICKSTART)


def mixed_sizes() -> pa.Table:
    """200 rows over SDXL's 40 aspect ratios at an eighth of the length, with mixed steps and guidance."""
    subjects = [f"a {colour} {thing} {scene}" for scene, colour, thing in product(SCENES, COLOURS, THINGS)]
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


MANIFESTS = {"quickstart": quickstart, "mixed_sizes": mixed_sizes, "broken": broken}


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
