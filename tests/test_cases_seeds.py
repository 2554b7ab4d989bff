"""Seeds and neighbours, from the manifest to the image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from batchgen import codec
from batchgen.checks import Rules
from batchgen.job import load_job
from batchgen.manifest import open_manifest
from batchgen.models import facts, sd
from batchgen.records import Pixels, Row
from batchgen.survey import survey
from tests import runs, tiny

SEEDS = [0, 2**32, 2**53 + 1, 2**63 - 1, 2**64 - 1]
SMALL = ("--set", "sampling.width=64", "--set", "sampling.height=64", "--set", "sampling.steps=3")


def tiny_run(source: Path, out: Path, *sets: str) -> dict[str, Pixels]:
    """Run the tiny Stable Diffusion pipeline: each image's pixels by id."""
    options = [word for one in sets for word in ("--set", one)]
    ended = runs.run(source, out, *SMALL, "--set", "engine.device=cpu", *options, model=tiny.folder("sd1"))
    assert ended.code == 0, ended.err
    files = runs.images(out)
    lines = runs.check_images(out, is_pattern=False)
    return {line["id"]: codec.decode(files[line["file_name"]]) for line in lines}


def difference(left: Pixels, right: Pixels) -> int:
    return int(np.abs(left.astype(int) - right.astype(int)).max())


def seeded(path: Path, seeds: list[int], sampler: str | None = None) -> Path:
    rows = [{"id": f"s{n}", "prompt": f"a cat, number {n}", "seed": seed} for n, seed in enumerate(seeds)]
    return runs.manifest(path, [row | {"sampler": sampler} for row in rows] if sampler else rows)


@pytest.fixture
def noises(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, int], list[torch.Tensor]]:
    """Every noise that is drawn while the test runs, by id and seed, in the order drawn."""
    drawn: dict[tuple[str, int], list[torch.Tensor]] = {}
    own = sd.StableDiffusion.noise

    def noise(self: sd.StableDiffusion, row: Row, generator: torch.Generator) -> torch.Tensor:
        made = own(self, row, generator)
        drawn.setdefault((row.id, row.seed), []).append(made.clone())
        return made

    monkeypatch.setattr(sd.StableDiffusion, "noise", noise)
    return drawn


@pytest.mark.parametrize("sampler", ["ddim", "euler_ancestral"])
def test_case_1_and_8_the_batch_size_does_not_matter(tmp_path: Path, sampler: str, noises: Any) -> None:
    """Nor does it for the noise of an ancestral sampler's steps."""
    source = seeded(tmp_path / "m.parquet", [1, 2, 3, 4, 5], sampler)
    alone = tiny_run(source, tmp_path / "one", "plan.batch_sizes=[1]")
    drawn_alone = dict(noises)
    noises.clear()
    together = tiny_run(source, tmp_path / "four", "plan.batch_sizes=[1, 4]")
    assert sorted(line["batch_size"] for line in runs.metadata(tmp_path / "four")) == [1, 4, 4, 4, 4]
    assert {line["batch_size"] for line in runs.metadata(tmp_path / "one")} == {1}
    assert noises.keys() == drawn_alone.keys()
    assert {len(one) for one in noises.values()} == ({1} if sampler == "ddim" else {4})
    for key, drawn in noises.items():
        for left, right in zip(drawn, drawn_alone[key], strict=True):
            assert torch.equal(left, right)
    assert max(difference(alone[name], together[name]) for name in alone) <= 1
    assert min(difference(alone["s0"], alone[name]) for name in alone if name != "s0") > 1


def test_case_2_rows_without_a_seed(tmp_path: Path) -> None:
    """Each row alone, with the seed that was recorded given explicitly, makes the same image."""
    schema = pa.schema([("id", pa.string()), ("prompt", pa.string()), ("seed", pa.int64())])
    rows = [{"id": name, "prompt": "a cat", "seed": seed} for name, seed in (("a", None), ("b", -1), ("c", None))]
    derived = tiny_run(runs.manifest(tmp_path / "m.parquet", rows, schema), tmp_path / "out", "plan.batch_sizes=[1]")
    recorded = {line["id"]: line["seed"] for line in runs.metadata(tmp_path / "out")}
    assert len(set(recorded.values())) == 3
    assert all(0 <= seed < 2**32 for seed in recorded.values())
    for name, seed in recorded.items():
        row = [{"id": name, "prompt": "a cat", "seed": seed}]
        alone = tiny_run(runs.manifest(tmp_path / f"{name}.parquet", row), tmp_path / name)
        assert (alone[name] == derived[name]).all()


def test_case_2_without_the_column(tmp_path: Path) -> None:
    source = runs.manifest(tmp_path / "m.parquet", {"prompt": ["a", "b", "c"]})
    assert runs.run(source, tmp_path / "out").code == 0
    assert len({line["seed"] for line in runs.check_images(tmp_path / "out")}) == 3


@pytest.mark.parametrize("image", ["png", "jpeg", "webp"])
@pytest.mark.parametrize("output", runs.FORMATS)
def test_case_3_seven_prompts_in_threes(tmp_path: Path, output: str, image: str) -> None:
    source = runs.prompts(tmp_path / "m.parquet", 7)
    sets = ("plan.batch_sizes=[1, 3]", "output.encoders=4", f"output.image={image}")
    options = [word for one in sets for word in ("--set", one)]
    ended = runs.run(source, tmp_path / "out", "--format", output, *options)
    assert ended.code == 0, ended.err
    lines = runs.check_images(tmp_path / "out")
    assert [line["id"] for line in lines] == [f"row-{n}" for n in range(7)]
    assert [line["prompt"] for line in lines] == [f"prompt number {n}" for n in range(7)]
    assert {line["format"] for line in lines} == {image}
    assert sorted(line["batch_size"] for line in lines) == [1, 3, 3, 3, 3, 3, 3]


def test_case_4_one_prompt_eight_times(tmp_path: Path) -> None:
    source = runs.manifest(tmp_path / "m.parquet", {"prompt": ["the same prompt"] * 8})
    assert runs.run(source, tmp_path / "one").code == 0
    workers = [runs.start(source, tmp_path / "two", "--set", "plan.shard_images=1") for _ in range(2)]
    assert [worker.wait().code for worker in workers] == [0, 0]
    one, two = (runs.check_images(tmp_path / name) for name in ("one", "two"))
    assert len({line["seed"] for line in one}) == 8
    assert sorted(line["seed"] for line in one) == sorted(line["seed"] for line in two)
    assert runs.pixels(tmp_path / "one") == runs.pixels(tmp_path / "two")


def test_case_5_equal_seeds_in_one_batch(tmp_path: Path) -> None:
    rows = [{"id": name, "prompt": "a cat", "seed": seed} for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    made = tiny_run(runs.manifest(tmp_path / "m.parquet", rows), tmp_path / "out", "plan.batch_sizes=[1, 3]")
    assert {line["batch_size"] for line in runs.metadata(tmp_path / "out")} == {3}
    assert (made["a"] == made["b"]).all()
    assert difference(made["a"], made["c"]) > 1


def test_case_6_a_long_neighbour(tmp_path: Path) -> None:
    made = {}
    for name, neighbour in (("short", "another cat"), ("long", tiny.LONG)):
        rows = [{"id": "a", "prompt": "a cat", "seed": 7}, {"id": "b", "prompt": neighbour, "seed": 8}]
        made[name] = tiny_run(runs.manifest(tmp_path / f"{name}.parquet", rows), tmp_path / name)
        assert {line["batch_size"] for line in runs.metadata(tmp_path / name)} == {2}
    assert (made["short"]["a"] == made["long"]["a"]).all()
    assert difference(made["short"]["b"], made["long"]["b"]) > 1


@pytest.mark.parametrize("output", runs.FORMATS)
def test_case_7_seeds_are_exact(tmp_path: Path, output: str) -> None:
    columns = {"id": [str(n) for n in range(5)], "prompt": ["a cat"] * 5, "seed": pa.array(SEEDS, pa.uint64())}
    ended = runs.run(runs.manifest(tmp_path / "m.parquet", columns), tmp_path / "out", "--format", output)
    assert ended.code == 0, ended.err
    lines = runs.check_images(tmp_path / "out")
    assert [line["seed"] for line in lines] == SEEDS
    assert [line["noise_seed"] for line in lines] == [seed % 2**32 for seed in SEEDS]
    assert "repeat another one's prompt, parameters and noise seed" in ended.err


def test_case_7_equal_noise_is_equal(tmp_path: Path, noises: Any) -> None:
    made = tiny_run(seeded(tmp_path / "m.parquet", [0, 2**32, 1]), tmp_path / "out")
    low, high, other = (noises[f"s{n}", seed][0] for n, seed in enumerate([0, 2**32, 1]))
    assert torch.equal(low, high)
    assert not torch.equal(low, other)
    assert len(made) == 3


@pytest.mark.parametrize(
    "seeds",
    [
        pa.array([1.0, 3.5]),
        pa.array(["1", "12x"]),
        pa.array(["1", str(2**64)]),
        pa.array([1, -2]),
        pa.array([1.0, float(2**60)]),
    ],
    ids=["3.5", "12x", "2**64", "-2", "a float beyond 2**53"],
)
def test_case_7_other_seeds_are_refused(tmp_path: Path, seeds: pa.Array) -> None:
    source = runs.manifest(tmp_path / "m.parquet", {"prompt": ["a", "b"], "seed": seeds})
    ended = runs.run(source, tmp_path / "out")
    assert ended.code == 2
    assert f"{source} row 1: seed = {seeds[1].as_py()!r} must be a whole number from 0 to 2^64 - 1" in ended.err
    assert "row 0" not in ended.err
    assert not (tmp_path / "out").exists()


def test_case_7_a_million_rows_of_one_prompt(tmp_path: Path) -> None:
    """Of a million seeds of 32 bits, about 116 meet another when first drawn."""
    source = runs.manifest(tmp_path / "m.parquet", {"prompt": pa.repeat("the same prompt", 1_000_000)})
    surveyed = survey(open_manifest([source]), Rules(load_job(), facts.PATTERN), lambda bad: None)
    no_seed = np.zeros(1_000_000, np.uint64)
    (images,) = surveyed.images(0, 1_000_000, 1_000_000)
    drawn = surveyed.seeds(images, no_seed, no_seed.astype(bool))
    assert drawn.is_derived.all()
    assert 50 < len(surveyed.redrawn.rows) < 200
    seeds = drawn.seeds.copy()
    seeds[surveyed.redrawn.rows] = surveyed.redrawn.seeds
    assert len(np.unique(seeds % 2**32)) == 1_000_000


def test_case_36_steps_of_each_row(tmp_path: Path) -> None:
    """Rows of 5, 10 and 20 steps in one batch: each equals its run alone."""
    rows = [{"id": f"s{n}", "prompt": f"cat {n}", "seed": n, "steps": steps} for n, steps in enumerate((5, 10, 20))]
    source = runs.manifest(tmp_path / "m.parquet", rows)
    together = tiny_run(source, tmp_path / "three", "plan.batch_sizes=[3]")
    assert {line["batch_size"] for line in runs.metadata(tmp_path / "three")} == {3}
    alone = tiny_run(source, tmp_path / "one", "plan.batch_sizes=[1]")
    assert max(difference(alone[name], together[name]) for name in alone) <= 1
