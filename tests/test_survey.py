"""Whole manifests surveyed: ids, seeds and duplicates against a reading in plain Python, one row at a time."""

from __future__ import annotations

import json
import random
import struct
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen import manifest, survey
from batchgen.checks import BadCell, Rules
from batchgen.errors import UsageError
from batchgen.manifest import open_manifest
from batchgen.models.facts import PATTERN
from batchgen.survey import Survey
from tests.plans import folder, frozen, pattern_job, planned, write

M64 = 2**64 - 1
GOLDEN = 0x9E37_79B9_7F4A_7C15
Digest = tuple[int, int]


def mixed(value: int) -> int:
    """SplitMix64's finaliser, on Python's integers."""
    value = (value ^ value >> 30) * 0xBF58_476D_1CE4_E5B9 & M64
    value = (value ^ value >> 27) * 0x94D0_49BB_1331_11EB & M64
    return value ^ value >> 31


def longer(digest: Digest, value: Digest) -> Digest:
    high = mixed((digest[0] * GOLDEN + value[0]) & M64)
    return high, mixed(((digest[1] ^ high) * GOLDEN + value[1]) & M64)


def of_text(text: str) -> Digest:
    number = xxhash.xxh3_128_intdigest(text.encode())
    return number >> 64, number & M64


def of_number(number: int) -> Digest:
    return mixed((number + GOLDEN) & M64), mixed(number & M64 ^ GOLDEN)


def of_value(name: str, value: Any) -> Digest:
    if isinstance(value, list):
        return of_text(json.dumps(value))
    if name == "guidance_scale":
        return of_number(int.from_bytes(struct.pack("<d", value), "little"))
    return of_text(value) if isinstance(value, str) else of_number(value)


def of_row(row: dict[str, Any]) -> Digest:
    total = (0, 0)
    for name in sorted(row):
        if row[name] is not None and not (name == "seed" and row[name] == -1):
            total = longer(longer(total, of_text(name)), of_value(name, row[name]))
    return total


def derived(row_id: Digest, image: int, run_seed: int) -> int:
    high, low = longer(row_id, of_number(image))
    return mixed(high ^ mixed((low + mixed((run_seed + GOLDEN) & M64)) & M64)) >> 32


def images_of(rows: list[dict[str, Any]], run_seed: int) -> list[tuple[str, int, int]]:
    """Id, image number and seed of every image, seeds as first drawn."""
    seen, found = Counter[Digest](), []
    for row in rows:
        digest = of_text(row["id"]) if "id" in row else of_row(row)
        if "id" not in row:
            seen[digest] += 1
            digest = longer(digest, of_number(seen[digest] - 1)) if seen[digest] > 1 else digest
        seed = None if row.get("seed") in (None, -1) else row["seed"]
        for image in range(row.get("num_images") or 1):
            drawn = derived(digest, image, run_seed if seed is None else seed % 2**32)
            name = row["id"] if "id" in row else f"{digest[0]:016x}{digest[1]:016x}"
            found.append((name, image, drawn if seed is None or image else seed))
    return found


TYPES = {
    "id": pa.string(),
    "prompt": pa.string(),
    "negative_prompt": pa.string(),
    "width": pa.int32(),
    "steps": pa.int16(),
    "guidance_scale": pa.float64(),
    "seed": pa.decimal128(20, 0),
    "num_images": pa.int8(),
    "score": pa.int64(),
    "caption": pa.string(),
    "tags": pa.list_(pa.int32()),
}
VALUES: dict[str, Any] = {
    "prompt": st.sampled_from(["", "a cat", "🐉龍é", "a\x00b"]),
    "negative_prompt": st.sampled_from(["", "blurry", None]),
    "width": st.sampled_from([64, 72, None]),
    "steps": st.sampled_from([1, 20, None]),
    "guidance_scale": st.sampled_from([1.5, 7.5, None]),
    "seed": st.sampled_from([None, -1, 0, 7, 2**32, 2**53 + 1, M64]),
    "num_images": st.sampled_from([1, 2, 3, None]),
    "score": st.sampled_from([-1, 0, 2**40, None]),
    "caption": st.sampled_from(["", "x", None]),
    "tags": st.sampled_from([[], [1], [1, 2], None]),
}


@st.composite
def manifests(draw: st.DrawFn) -> list[dict[str, Any]]:
    without = draw(st.sets(st.sampled_from(list(VALUES)[1:]), max_size=4))
    columns = {name: VALUES[name] for name in VALUES if name not in without}
    rows = draw(st.lists(st.fixed_dictionaries(columns), min_size=1, max_size=8))
    if draw(st.integers(0, 3)) == 0:
        rows = [{"id": f"row {number}", **row} for number, row in enumerate(rows)]
    return rows


def table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.table({name: pa.array([row[name] for row in rows], TYPES[name]) for name in rows[0]})


def surveyed(*tables: pa.Table | dict[str, Any], overrides: tuple[str, ...] = ()) -> tuple[Survey, list[BadCell]]:
    bad: list[BadCell] = []
    with folder() as path:
        opened = open_manifest(write(path, *tables))
        return survey.survey(opened, Rules(pattern_job(*overrides), PATTERN), bad.extend), bad


@given(manifests(), st.integers(0, M64), st.integers(1, 8))
def test_ids_and_seeds_are_those_that_the_design_says(rows: list[dict[str, Any]], seed: int, read_rows: int) -> None:
    with folder() as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "READ_ROWS", read_rows)
        patch.setattr(survey, "_SLICE", read_rows)
        plan = frozen(path, table(rows), overrides=[f"sampling.seed={seed}"])
    assert [(row["id"], row["image_number"], row["seed"]) for row in plan.by_position] == images_of(rows, seed)


@given(manifests(), st.randoms(use_true_random=False), st.data())
def test_the_digest_of_all_rows_tells_any_change_but_their_order(
    rows: list[dict[str, Any]], shuffle: random.Random, data: st.DataObject
) -> None:
    moved = list(rows)
    shuffle.shuffle(moved)
    start = data.draw(st.integers(0, len(rows)))
    digest = surveyed(table(rows))[0].rows_digest
    assert surveyed(*(table(some) for some in (moved[:start], moved[start:]) if some))[0].rows_digest == digest
    place, name = data.draw(st.integers(0, len(rows) - 1)), data.draw(st.sampled_from(list(rows[0])))
    value = data.draw(VALUES[name]) if name in VALUES else "another"
    changed = [dict(row, **{name: value}) if number == place else row for number, row in enumerate(rows)]

    def said(row: dict[str, Any]) -> Any:
        """Whatever a run would make of the row, and what it is called by."""
        if "id" not in row:
            return of_row(row)
        defaults = {"width": 64, "steps": 20, "guidance_scale": 7.5, "num_images": 1, "seed": -1}
        return [(key, defaults.get(key, "null") if value is None else value) for key, value in row.items()]

    is_same = Counter(map(str, map(said, rows))) == Counter(map(str, map(said, changed)))
    assert (surveyed(table(changed))[0].rows_digest == digest) == is_same


def test_a_digest_does_not_tell_how_a_missing_seed_is_spelled() -> None:
    base = {"prompt": ["a", "b"], "id": ["x", "y"]}
    seeds: list[Any] = [pa.array([-1, None], pa.int64()), ["-1", "-1"], pa.nulls(2)]
    assert len({surveyed(base | {"seed": column})[0].rows_digest for column in seeds}) == 1


IDS = st.lists(st.sampled_from(["a", "b", "1", "2", "A", "é", "e\u0301"]), min_size=1, max_size=12)


@given(IDS, st.integers(0, 12), st.integers(1, 5), st.sets(st.integers(0, 11)))
def test_every_id_that_is_there_twice_is_named_with_the_others(
    ids: list[str], cut: int, read_rows: int, bad_rows: set[int]
) -> None:
    prompts = [None if number in bad_rows else "a" for number in range(len(ids))]
    both = pa.table({"prompt": pa.array(prompts, pa.string()), "id": pa.array(ids, pa.string())})
    second = both.slice(cut).cast(pa.schema([("prompt", pa.large_string()), ("id", pa.large_string())]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "READ_ROWS", read_rows)
        found, bad = surveyed(both.slice(0, cut), second)
    good = [number for number in range(len(ids)) if number not in bad_rows]
    wanted = []
    for number in good:
        others = [str(other) for other in good if other != number and ids[other] == ids[number]]
        if others:
            rule = f"must be unique; manifest row {', '.join(others[:3])} has it too"
            wanted.append(BadCell(number, "id", repr(ids[number]), rule))
    assert [cell for cell in bad if cell.column == "id"] == wanted
    left = [number for number in good if [ids[one] for one in good].count(ids[number]) == 1]
    assert np.flatnonzero(found.is_good).tolist() == left
    assert len(found.ids) == len(found.group) == found.num_images_total == len(left)
    assert found.ids.hex().to_pylist() == ["{:016x}{:016x}".format(*of_text(ids[number])) for number in left]


def test_one_id_for_all_rows_is_told_quickly() -> None:
    """The others of each row are the first few, not all."""
    _, bad = surveyed({"prompt": ["a"] * 20_000, "id": ["x"] * 20_000})
    assert len(bad) == 20_000
    assert bad[2].rule == "must be unique; manifest row 0, 1, 3 has it too"
    assert bad[-1].rule == "must be unique; manifest row 0, 1, 2 has it too"


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([None, 1, 2, 2**32 + 1]), st.integers(1, 2)), min_size=1)
)
def test_explicit_seeds_that_repeat_are_counted(rows: list[tuple[str, int | None, int]]) -> None:
    prompts, seeds, counts = zip(*rows, strict=True)
    found, _ = surveyed({"prompt": prompts, "seed": pa.array(seeds, pa.uint64()), "num_images": counts})
    noise = [(prompt, seed % 2**32) for prompt, seed, _ in rows if seed is not None]
    assert found.num_repeated_noise == len(noise) - len(set(noise))


def test_more_images_than_a_plan_can_count_are_refused_before_they_are_listed() -> None:
    with pytest.raises(UsageError, match=r"asks for 5,000,000,000 images; one run takes 4,294,967,295: split it"):
        surveyed({"prompt": ["a"] * 5_000, "num_images": [1_000_000] * 5_000})


def test_progress_counts_every_row_once(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "READ_ROWS", 3)
    opened, told = open_manifest(write(tmp_path, {"prompt": ["a"] * 7}, {"prompt": ["b"] * 2})), list[int]()
    survey.survey(opened, Rules(pattern_job(), PATTERN), lambda cells: None, told.append)
    assert (sum(told), max(told)) == (9, 3)


@settings(max_examples=20)
@given(st.integers(1, 60), st.sets(st.integers(0, 59), max_size=4), st.integers(1, 9))
def test_all_bad_cells_are_kept_and_the_first_are_shown(num_rows: int, good: set[int], read_rows: int) -> None:
    with folder() as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "READ_ROWS", read_rows)
        prompts = pa.array(["a" if number in good else None for number in range(num_rows)], pa.string())
        done = planned(path, {"prompt": prompts}, {"prompt": ["b"], "steps": [0]}, overrides=["plan.on_bad_row=skip"])
        bad = [f"{number}: prompt = None must be text" for number in range(num_rows) if number not in good]
        bad.append("0: steps = 0 must be a whole number from 1 to 1000")
        first, *lines = done.rejections.message(done.draft.survey.num_rejected).splitlines()
        assert first.startswith(f"{len(bad)} of {num_rows + 1} manifest rows")
        assert [line.split(" row ")[1] for line in lines[: len(bad)][:20]] == bad[:20]
        assert lines[20:-1] == [f"  … and {len(bad) - 20} more"] * (len(bad) > 20)
        assert done.rejections.num_cells == len(bad)
