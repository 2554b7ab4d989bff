"""Rows that the lengths of their texts leave in small batches share padded ones, and are the same pictures."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image as Picture

from batchgen.cost import ConservativeModel
from batchgen.job import load_job
from batchgen.limits import Limits
from batchgen.planned import Planned, plan_manifest
from batchgen.records import Group
from batchgen.sharing import LEAST, padded, share
from tests import families, runs, tiny

LENGTHS = (64, 128, 512)
SETTINGS = ("--set", "sampling.width=64", "--set", "sampling.height=64", "--set", "sampling.steps=1")


def group(text: int, negative: int = 0, side: int = 64) -> Group:
    return Group(side, side, negative > 0, text, "x,e", negative_length=negative)


def shared(counts: dict[Group, int], **limits: int) -> dict[Group, int]:
    """What becomes of groups of so many rows."""
    found = share(list(counts), np.array(list(counts.values())), LENGTHS, ConservativeModel(), Limits(**limits))
    after = Counter(counts)
    for one, leaving, target in zip(counts, found.leaving.tolist(), found.target.tolist(), strict=True):
        if leaving:
            after[one] -= leaving
            after[found.groups[target]] += leaving
    return dict(+after)


def test_rows_beyond_batches_of_four_move_to_lengths_that_more_share() -> None:
    five, seven, many, long = group(5), group(7), group(9), group(70)
    together = dataclasses.replace(group(64), is_padded=True)
    # Those of the long one would be alone.
    assert shared({five: 2, seven: 7, many: 8, long: 3}) == {seven: 4, many: 8, together: 5, long: 3}


def test_groups_that_differ_in_more_than_length_share_nothing() -> None:
    apart = {group(5): 1, group(6, 4): 1, group(7, side=128): 1, dataclasses.replace(group(8), lora="a"): 1}
    assert shared(apart) == apart
    counts = shared({group(5, 3): 1, group(6, 70): 2, group(60, 64): 1})
    assert {(one.lengths, num) for one, num in counts.items()} == {
        (", text up to 64 and 64", 2),
        (", text 6 and 70", 2),
    }


@pytest.mark.parametrize(("most", "moved"), [(1, 0), (2, 2), (3, 2), (4, 6), (32, 6)])
def test_no_more_rows_move_than_batches_can_hold(most: int, moved: int) -> None:
    counts = shared({group(5): 7, group(7): 7}, max_batch=most)
    assert sum(num for one, num in counts.items() if one.is_padded) == moved


def test_a_padded_group_says_so() -> None:
    one = padded(group(129, 1), LENGTHS)
    assert (one.text_length, one.negative_length, one.lengths) == (512, 64, ", text up to 512 and 64")
    assert padded(group(64), LENGTHS).negative_length == 0


def planned(source: Path, kind: str = "qwen") -> Planned:
    keys = ("sampling.width=64", "sampling.height=64")
    return plan_manifest([source], load_job(None, [f"model.path={families.folder(kind)}", *keys]))


def batches(found: Planned) -> list[tuple[Group, int]]:
    cut = found.draft.cut
    return [(found.draft.groups[number], size) for number, size in zip(cut.batch_group, cut.batch_size, strict=True)]


def rows(num: int) -> list[dict[str, object]]:
    """Texts of 1 to 60 letters; every third guided, by negative prompts of 0 to 5."""
    chosen = random.Random(1)
    return [
        {"id": f"r{n}", "prompt": "a" * chosen.randrange(1, 60), "negative_prompt": None if n % 3 else "b" * (n % 6)}
        for n in range(num)
    ]


def test_a_plan_of_mixed_lengths_has_few_small_batches_in_any_order(tmp_path: Path) -> None:
    asked = rows(150)
    found = planned(runs.manifest(tmp_path / "m.parquet", asked))
    in_small = sum(size for _, size in batches(found) if size < LEAST)
    assert (found.num_images, found.draft.cut.batch_padding.sum()) == (150, 0)
    assert in_small <= 2 * (LEAST - 1), "a few of each of the two that are guided or not"
    assert all(one.is_padded or size >= LEAST for one, size in batches(found))
    again = planned(runs.manifest(tmp_path / "again.parquet", asked[::-1]))
    assert again.draft.groups == found.draft.groups
    assert again.draft.rank.tolist()[::-1] == found.draft.rank.tolist()


def test_a_network_that_looks_at_padding_gets_none_but_its_own(tmp_path: Path) -> None:
    found = planned(runs.manifest(tmp_path / "m.parquet", rows(40)), "z-image")
    assert not any(one.is_padded for one in found.draft.groups)


def test_a_run_with_padded_texts_makes_and_repairs_what_diffusers_makes(tmp_path: Path) -> None:
    asked = [{"id": f"r{n}", "prompt": "a fox " * n, "seed": n, "true_cfg_scale": 1.0} for n in range(1, 6)]
    source, out, model = runs.manifest(tmp_path / "m.parquet", asked), tmp_path / "out", families.folder("qwen")
    told = runs.batchgen("plan", source, "--model", model, *SETTINGS)
    assert ("text up to 256" in told.out, "4×1 1×1" in told.out) == (True, True), told.out
    assert runs.run(source, out, *SETTINGS, model=model).code == 0
    made = pq.read_table(out / "metadata.parquet").to_pylist()
    assert [row["batch_size"] for row in made].count(4) == 4
    for row in made:
        one = tiny.row(prompt=row["prompt"], seed=row["seed"], steps=1, true_cfg_scale=1.0, sampler="euler")
        wanted = np.asarray(families.reference("qwen", one), int)
        assert np.abs(np.asarray(Picture.open(out / row["file_name"]), int) - wanted).max() <= 1
    victim = out / made[2]["file_name"]
    victim.write_bytes(b"")
    assert runs.batchgen("verify", out, "--repair").code == 0
    again = {row["id"]: row["pixel_sha256"] for row in pq.read_table(out / "metadata.parquet").to_pylist()}
    assert again == {row["id"]: row["pixel_sha256"] for row in made}
