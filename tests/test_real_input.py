"""Real prompt sets through the whole program: nothing lost, nothing swapped, and every reader opens the result."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import runs, tiny

DATA = Path(__file__).parent / "data"


def sdxl_sizes(divisor: int) -> list[tuple[int, int]]:
    """The forty sizes, made smaller: multiples of 8, at least 64."""
    with (DATA / "sdxl_sizes.csv").open() as file:
        sizes = [(int(row["width"]), int(row["height"])) for row in csv.DictReader(file)]
    assert len(sizes) == 40
    return [(max(64, width // divisor // 8 * 8), max(64, height // divisor // 8 * 8)) for width, height in sizes]


def parti(path: Path, divisor: int, num: int | None = None) -> Path:
    """PartiPrompts, imported, with sizes drawn from the forty."""
    ended = runs.batchgen("import", DATA / "parti_prompts.tsv", "-o", path, "--column", "prompt=Prompt")
    assert ended.code == 0
    table = pq.read_table(path)
    assert len(table) == 1632
    sizes, draw = sdxl_sizes(divisor), random.Random(0)
    drawn = [sizes[draw.randrange(40)] for _ in range(len(table))]
    table = table.append_column("width", pa.array([width for width, _ in drawn]))
    table = table.append_column("height", pa.array([height for _, height in drawn]))
    pq.write_table(table.slice(0, num), path)
    return path


def check_loads(out: Path) -> None:
    """`load_dataset` gives each image once, with its own caption and size."""
    lines = runs.by_id(out)
    data = datasets.load_dataset(str(out), split="train", cache_dir=str(out.parent / "cache"))
    key = "id" if "id" in data.column_names else "__key__"
    assert len(data) == len(lines)
    for sample in data:
        image = sample["image"] if "image" in sample else sample["png"]
        told = sample if "prompt" in sample else sample["json"]
        line = lines[told[key] if key in told else told["id"]]
        assert told["prompt"] == line["prompt"]
        assert image.size == (line["width"], line["height"])


@pytest.mark.parametrize(("output", "divisor"), [("files", 4), ("webdataset", 8), ("parquet", 8)])
def test_all_of_parti_prompts(tmp_path: Path, output: str, divisor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    source = parti(tmp_path / "parti.parquet", divisor)
    assert runs.run(source, tmp_path / "out", "--format", output).code == 0
    lines = runs.check_images(tmp_path / "out")
    assert [line["prompt"] for line in lines] == pq.read_table(source)["prompt"].to_pylist()
    assert [line["Category"] for line in lines] == pq.read_table(source)["Category"].to_pylist()
    assert len({line["seed"] for line in lines}) == 1632
    check_loads(tmp_path / "out")


def test_another_order_of_rows(tmp_path: Path) -> None:
    """The same ids, seeds and pixels, whatever the order in which the rows were imported."""
    source = parti(tmp_path / "parti.parquet", 8, 400)
    table = pq.read_table(source)
    order = list(range(len(table)))
    random.Random(1).shuffle(order)
    pq.write_table(table.take(order), tmp_path / "shuffled.parquet")
    for name in ("parti", "shuffled"):
        assert runs.run(tmp_path / f"{name}.parquet", tmp_path / name).code == 0
    one, two = runs.by_id(tmp_path / "parti"), runs.by_id(tmp_path / "shuffled")
    assert one.keys() == two.keys()
    for name, line in one.items():
        assert {key: line[key] for key in ("prompt", "seed", "pixel_sha256", "batch_size")} == {
            key: two[name][key] for key in ("prompt", "seed", "pixel_sha256", "batch_size")
        }


def test_a_network_makes_sixty_four_of_them(tmp_path: Path) -> None:
    source = parti(tmp_path / "parti.parquet", 16, 64)
    sets = ("--set", "sampling.steps=2", "--set", "engine.device=cpu")
    assert runs.run(source, tmp_path / "out", *sets, model=tiny.folder("sd1")).code == 0
    lines = runs.check_images(tmp_path / "out", is_pattern=False)
    assert len(lines) == 64
    assert len({line["pixel_sha256"] for line in lines}) == 64
    check_loads(tmp_path / "out")
