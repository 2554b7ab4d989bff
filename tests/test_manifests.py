"""The sample manifests and job files that are committed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest

from batchgen.checks import Rules
from batchgen.job import load_job
from batchgen.models.demo.captions import plain
from batchgen.models.demo.scenes import gather, is_held_out, scene_of
from batchgen.models.facts import Facts, SamplerFacts

ROOT = Path(__file__).parent.parent
NAMES = ("quickstart", "mixed_sizes", "thousand", "broken")


@pytest.fixture(scope="module")
def make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make", ROOT / "manifests" / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_committed_file_is_what_the_script_writes(name: str, make: ModuleType) -> None:
    # NaN is not equal to itself, so rows are compared as text.
    assert repr(pq.read_table(ROOT / f"manifests/{name}.parquet")) == repr(make.MANIFESTS[name]())


def test_script_writes_the_same_bytes_twice(make: ModuleType, tmp_path: Path) -> None:
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        make.write(folder)
    for name in NAMES:
        assert (tmp_path / f"one/{name}.parquet").read_bytes() == (tmp_path / f"two/{name}.parquet").read_bytes()


def test_no_manifest_is_without_its_test() -> None:
    assert {path.stem for path in (ROOT / "manifests").glob("*.parquet")} == set(NAMES)


def test_quickstart_is_small_and_mixed() -> None:
    rows = pq.read_table(ROOT / "manifests/quickstart.parquet").to_pylist()
    assert len(rows) == len({row["id"] for row in rows}) == 24
    sizes = {(row["width"], row["height"]) for row in rows}
    assert sizes == {(64, 64), (96, 64), (64, 96), (96, 96), (128, 128)}
    assert all(row["guidance_scale"] > 1 for row in rows if row["negative_prompt"] is not None)
    assert {row["seed"] for row in rows} >= {None, 2**32, 2**53 + 1, 2**64 - 1}


def bad_ids(name: str) -> set[str]:
    facts = Facts(
        family="any", size_multiple=8, min_size=64, width=64, height=64, steps=8, guidance_scale=7.5,
        sampler="ddim", text_length=0, samplers={"ddim": SamplerFacts("DDIMScheduler")},
    )  # fmt: skip
    table = pq.read_table(ROOT / f"manifests/{name}.parquet").combine_chunks()
    bad = Rules(load_job(), facts).check(table.to_batches()[0], 0).bad
    return {table.column("id")[cell.row].as_py() for cell in bad}


def test_every_broken_row_and_no_other_is_refused() -> None:
    rows = pq.read_table(ROOT / "manifests/broken.parquet").column("id").to_pylist()
    assert bad_ids("broken") == {row for row in rows if not row.startswith("good-") and row != "twice"}
    assert rows.count("twice") == 2
    assert bad_ids("quickstart") == bad_ids("mixed_sizes") == bad_ids("thousand") == set()


def test_mixed_sizes_has_five_rows_of_each_of_40() -> None:
    rows = pq.read_table(ROOT / "manifests/mixed_sizes.parquet").to_pylist()
    sizes = [(row["width"], row["height"]) for row in rows]
    assert len(set(sizes)) == 40
    assert all(sizes.count(size) == 5 and size[0] % 8 == size[1] % 8 == 0 for size in sizes)
    assert len({row["id"] for row in rows}) == len({row["prompt"] for row in rows}) == 200


def test_thousand_is_of_scenes_that_are_held_out() -> None:
    table = pq.read_table(ROOT / "manifests/thousand.parquet")
    scenes = [scene_of(words) for words in table["scene"].to_pylist()]
    assert len(scenes) == 1000
    assert is_held_out(gather(scenes)).all()
    assert table["prompt"].to_pylist() == [plain(scene) for scene in scenes]


@pytest.mark.parametrize("path", sorted((ROOT / "jobs").glob("*.toml")), ids=lambda path: path.name)
def test_job_file_is_short_and_loads(path: Path) -> None:
    load_job(path)
    assert len(path.read_text(encoding="utf-8").splitlines()) < (100 if path.name == "all.toml" else 25)
