"""Real prompt sets through the whole program: nothing lost, nothing swapped, and every reader opens the result."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest

from batchgen import codec
from batchgen.writer import pixel_sha256
from tests import runs, tiny

DATA = Path(__file__).parent / "data"
OWN = ("Category", "Challenge", "Note")
"""The set's own columns."""


def sdxl_sizes(divisor: int) -> list[tuple[int, int]]:
    """The forty sizes, made smaller: multiples of 8, at least 64."""
    with (DATA / "sdxl_sizes.csv").open() as file:
        sizes = [(int(row["width"]), int(row["height"])) for row in csv.DictReader(file)]
    assert len(sizes) == 40
    return [(max(64, width // divisor // 8 * 8), max(64, height // divisor // 8 * 8)) for width, height in sizes]


def parti(path: Path, divisor: int, num: int = 1632, order: int | None = None) -> Path:
    """PartiPrompts, imported, with sizes drawn from the forty; `order` shuffles the lines."""
    header, *lines = (DATA / "parti_prompts.tsv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1632
    sizes, draw = sdxl_sizes(divisor), random.Random(0)
    deck = [size for _ in range(-(-num // 40)) for size in draw.sample(sizes, 40)]
    lines = [f"{line}\t{width}\t{height}" for line, (width, height) in zip(lines[:num], deck, strict=False)]
    if order is not None:
        random.Random(order).shuffle(lines)
    table = path.with_suffix(".tsv")
    table.write_text("\n".join([f"{header}\twidth\theight", *lines, ""]), encoding="utf-8")
    ended = runs.batchgen("import", table, "-o", path, "--column", "prompt=Prompt")
    assert (ended.code, ended.out.split()[0]) == (0, f"{num:,}"), ended
    return path


def check_table(source: Path, out: Path) -> None:
    """The metadata are the manifest's rows in its order, its own columns and all."""
    names = ["prompt", "width", "height", *OWN]
    asked, made = pq.read_table(source), pq.read_table(out / "metadata.parquet")
    assert made.select(names).to_pylist() == asked.select(names).to_pylist()


def check_loads(out: Path, cache: Path) -> None:
    """`load_dataset` gives each image once, with its own caption, size and pixels."""
    lines = runs.by_id(out)
    opened = datasets.load_dataset(str(out), split="train", cache_dir=str(cache))
    seen = set()
    for sample in opened:
        told = sample.get("json", sample)
        line = lines[told["id"]]
        seen.add(line["id"])
        assert {name: told[name] for name in ("prompt", *OWN)} == {name: line[name] for name in ("prompt", *OWN)}
        assert (told["width"], told["height"]) == (line["width"], line["height"])
        picture = np.asarray(sample["png" if "png" in sample else "image"])
        assert pixel_sha256(picture) == line["pixel_sha256"]
    assert (len(opened), seen) == (len(lines), set(lines))


@pytest.mark.parametrize("output", runs.FORMATS)
def test_all_of_parti_prompts(tmp_path: Path, output: str) -> None:
    source = parti(tmp_path / "parti.parquet", 8)
    assert runs.run(source, tmp_path / "out", "--format", output).code == 0
    lines = runs.check_images(tmp_path / "out")
    assert len({line["seed"] for line in lines}) == 1632
    check_table(source, tmp_path / "out")
    check_loads(tmp_path / "out", tmp_path / "cache")


def test_each_of_the_forty_sizes(tmp_path: Path) -> None:
    source = parti(tmp_path / "parti.parquet", 1, 40)
    assert runs.run(source, tmp_path / "out").code == 0
    lines = runs.check_images(tmp_path / "out")
    assert sorted((line["width"], line["height"]) for line in lines) == sorted(sdxl_sizes(1))
    check_table(source, tmp_path / "out")


def test_another_order_of_rows(tmp_path: Path) -> None:
    """The same ids, seeds and pixels, whatever the order in which the rows were imported."""
    made = {}
    for name, order in (("parti", None), ("shuffled", 1)):
        source = parti(tmp_path / f"{name}.parquet", 16, order=order)
        assert runs.run(source, tmp_path / name, "--format", "webdataset").code == 0
        check_table(source, tmp_path / name)
        made[name] = runs.by_id(tmp_path / name)
    assert list(made["parti"]) != list(made["shuffled"])
    for key in ("prompt", "seed", "pixel_sha256", "batch_size", *OWN):
        assert {name: line[key] for name, line in made["parti"].items()} == {
            name: line[key] for name, line in made["shuffled"].items()
        }


def test_a_network_makes_sixty_four_of_them(tmp_path: Path) -> None:
    """Each is what diffusers' own pipeline makes of that row alone."""
    source, out = parti(tmp_path / "parti.parquet", 16, 64), tmp_path / "out"
    sets = ("--set", "sampling.steps=2", "--set", "engine.device=cpu")
    assert runs.run(source, out, *sets, model=tiny.folder("sd1")).code == 0
    lines, files = runs.check_images(out, is_pattern=False), runs.images(out)
    facts = tiny.engine("sd1").facts
    for line in lines:
        made = codec.decode(files[line["file_name"]])
        wanted = np.asarray(tiny.reference(tiny.pipeline("sd1"), runs.as_row(line), facts, "pil")[0])
        assert np.abs(made.astype(int) - wanted.astype(int)).max() <= 1
    assert len({line["pixel_sha256"] for line in lines}) == 64
    check_table(source, out)
    check_loads(out, tmp_path / "cache")
