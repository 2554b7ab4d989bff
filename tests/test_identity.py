"""Who a row is: ids that depend on its content alone, and seeds that do not meet."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen import identity, manifest, survey
from batchgen.checks import Rules
from batchgen.columns import is_given, is_text, plain, retyped
from batchgen.errors import UsageError
from batchgen.identified import identify
from batchgen.identity import (
    Digests,
    Redrawn,
    Sources,
    column_digests,
    derived_seeds,
    mix,
    noise_keys,
    num_repeats,
    occurrences,
    repeated,
    row_digests,
    settle_seeds,
    text_digests,
)
from batchgen.models.facts import PATTERN
from tests.arrow import any_column
from tests.plans import folder, frozen, pattern_job

PROMPTS = ["a cat", "a dog", "a cat", "", "🐉龍é", "🐉龍e\u0301", "a cat"]
COLUMNS: dict[str, list[Any]] = {
    "prompt": PROMPTS,
    "width": [64, 64, 64, 72, None, 64, 64],
    "steps": [20, 20, 20, 1, 20, None, 20],
    "guidance_scale": [7.5, 7.5, 7.5, None, 1.0, 0.5, 7.5],
    "seed": [None, 3, None, -1, 5, 7, -1],
    "caption": ["x", "y", "x", "z", None, "w", "x"],
    "score": [1, 2, 1, None, 5, 6, 1],
}


def ids_of(*tables: pa.Table, overrides: tuple[str, ...] = ()) -> dict[tuple[Any, ...], list[tuple[str, int]]]:
    """The (id, seed) pairs of equal rows, sorted, by what their rows say."""
    found: dict[tuple[Any, ...], list[tuple[str, int]]] = {}
    with folder() as path:
        for row in frozen(path, *tables, overrides=overrides).rows:
            key = (row["prompt"], row["width"], row["steps"], row["carried:caption"], row["carried:score"])
            found.setdefault(key, []).append((row["id"], row["seed"]))
    return {key: sorted(value) for key, value in found.items()}


def table(order: list[int] | None = None, **types: pa.DataType) -> pa.Table:
    order = list(range(len(PROMPTS))) if order is None else order
    return pa.table({name: pa.array([values[n] for n in order], types.get(name)) for name, values in COLUMNS.items()})


def spelled(order: list[int], names: list[str]) -> pa.Table:
    """Whole numbers as texts and floats, texts in other encodings, columns in another order."""
    base = table(order)
    columns = {
        "prompt": base["prompt"].cast(pa.large_string()).dictionary_encode(),
        "width": base["width"].cast(pa.float64()),
        "steps": base["steps"].cast(pa.string()),
        "guidance_scale": base["guidance_scale"].cast(pa.float32()),
        "seed": base["seed"].cast(pa.int8()),
        "caption": base["caption"].cast(pa.string_view()),
        "score": base["score"].cast(pa.uint8()),
    }
    return pa.table({name: columns[name] for name in names})


IDS = ids_of(table())


def test_equal_rows_have_ids_and_seeds_of_their_own() -> None:
    pairs = [pair for of_row in IDS.values() for pair in of_row]
    assert len({row_id for row_id, _ in pairs}) == len({seed for _, seed in pairs}) == len(PROMPTS)
    assert sorted(map(len, IDS.values())) == [1, 1, 1, 1, 3]
    assert all(len(row_id) == 32 and int(row_id, 16) >= 0 for row_id, _ in pairs)


@given(st.permutations(range(len(PROMPTS))), st.permutations(list(COLUMNS)))
def test_ids_and_seeds_do_not_depend_on_order_or_spelling(order: list[int], names: list[str]) -> None:
    assert ids_of(spelled(order, names)) == IDS


@pytest.mark.parametrize("read_rows", [1, 2, 3])
def test_ids_do_not_depend_on_files_or_batches(read_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "READ_ROWS", read_rows)
    monkeypatch.setattr(survey, "_SLICE", read_rows)
    assert ids_of(table()) == IDS
    for cut in range(1, len(PROMPTS)):
        rest = spelled(list(range(cut, len(PROMPTS))), list(COLUMNS))
        rest = rest.set_column(rest.schema.get_field_index("steps"), "steps", rest["steps"].cast(pa.int16()))
        assert ids_of(table(list(range(cut))), rest) == IDS


def test_null_columns_do_not_matter_and_others_do() -> None:
    assert ids_of(table().append_column("more", pa.nulls(len(PROMPTS)))) == IDS
    more = ids_of(table().append_column("more", pa.array([0] * len(PROMPTS))))
    named = ids_of(table().rename_columns([name.replace("guidance_scale", "cfg") for name in COLUMNS]))
    assert not {pair for of in more.values() for pair in of} & {pair for of in IDS.values() for pair in of}
    assert {pair for of in named.values() for pair in of} != {pair for of in IDS.values() for pair in of}


@given(st.integers(0, len(PROMPTS) - 1), st.sampled_from(list(COLUMNS)))
def test_any_change_changes_the_id_of_its_row_alone(row: int, column: str) -> None:
    changed = {name: list(values) for name, values in COLUMNS.items()}
    other = {"prompt": "new", "width": 128, "steps": 9, "guidance_scale": 3.0, "seed": 99, "caption": "new", "score": 9}
    changed[column][row] = other[column]
    # Ids of equal rows count them; a column of numbers tells the rows apart.
    apart = pa.array(range(len(PROMPTS)))
    before, after = (
        Rules(pattern_job(), PATTERN).check(pa.RecordBatch.from_pydict(columns | {"n": apart}), 0)
        for columns in (COLUMNS, changed)
    )
    ids = [identify(checked, ["ddim"], [""]).ids.hex().to_pylist() for checked in (before, after)]
    assert [old != new for old, new in zip(*ids, strict=True)] == [n == row for n in range(len(PROMPTS))]


@given(st.integers(1, 4).flatmap(any_column), st.data())
def test_digests_of_any_column_follow_its_values(column: pa.Array, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(column))))
    own = [(int(a), int(b)) for a, b in zip(*_pairs(column_digests(column)), strict=True)]
    moved = (
        column.take(pa.array(order))
        if "view" not in str(column.type)
        else pa.concat_arrays([column[n : n + 1] for n in order])
    )
    assert [(int(a), int(b)) for a, b in zip(*_pairs(column_digests(moved)), strict=True)] == [own[n] for n in order]
    sliced = column_digests(column.slice(1))
    assert list(zip(sliced.high.tolist(), sliced.low.tolist(), strict=True)) == own[1:]


def _pairs(digests: Digests) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    return digests.high, digests.low


@given(st.lists(st.none() | st.binary(max_size=3), max_size=8), st.integers(0, 8))
def test_text_digests_are_those_of_each_value(values: list[bytes | None], times: int) -> None:
    """Whether values are hashed one by one or the distinct ones alone."""
    column = pa.array(values * (times + 1), pa.binary())
    one_by_one = [text_digests(pa.array([value], pa.binary())) for value in values]
    digests = text_digests(column)
    assert digests.high.tolist() == [int(one.high[0]) for one in one_by_one] * (times + 1)
    assert digests.low.tolist() == [int(one.low[0]) for one in one_by_one] * (times + 1)


@given(st.integers(1, 3).flatmap(any_column))
def test_digests_differ_where_values_do(column: pa.Array) -> None:
    """Two values that are the same are written the same, broken text as its bytes."""
    digests = column_digests(column).hex().to_pylist()
    written = [retyped(plain(column.slice(n, 1)), _as_bytes).to_string() for n in range(len(column))]
    given_ones = [n for n in range(len(column)) if is_given(column)[n]]
    for one, two in itertools.combinations(given_ones, 2):
        assert (digests[one] == digests[two]) == (written[one] == written[two])


def _as_bytes(kind: pa.DataType) -> pa.DataType:
    return pa.large_binary() if is_text(kind) else kind


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", [None, "UTC", "Asia/Kolkata"])
def test_times_are_the_same_in_every_unit(unit: str, zone: str | None) -> None:
    times = pa.array([0, 86_400, 1_700_000_000], pa.timestamp("s", zone))
    assert column_digests(times.cast(pa.timestamp(unit, zone))).hex() == column_digests(times).hex()
    if unit in ("us", "ns"):
        halves = pa.array([1_500_000, 10, 100_000_000], pa.timestamp("us", zone))
        digests = column_digests(halves.cast(pa.timestamp(unit, zone))).hex().to_pylist()
        assert digests == column_digests(halves).hex().to_pylist()
        assert len({*digests, *column_digests(times).hex().to_pylist()}) == 6


def test_a_seed_of_minus_one_is_as_good_as_none() -> None:
    seeds: list[Any] = [pa.array([-1, None], pa.int64()), ["-1", None], [-1.0, None], pa.nulls(2)]
    one, *others = (_frozen_rows({"prompt": ["a", "b"], "seed": column}) for column in seeds)
    assert others == [one] * 3
    assert _frozen_rows({"prompt": ["a", "b"]}) == one


def test_zero_guidance_is_zero_whatever_its_sign() -> None:
    one, other = (_frozen_rows({"prompt": ["a"], "guidance_scale": [zero]}) for zero in (0.0, -0.0))
    assert one == other


def test_a_column_that_is_not_there_is_as_good_as_null() -> None:
    empty = row_digests({"a": pa.nulls(2), "b": pa.array([None, "x"])}, 2, {})
    without = row_digests({"b": pa.array([None, "x"])}, 2, {})
    assert empty.hex() == without.hex()
    swapped = row_digests({"a": pa.array([None, "x"])}, 2, {})
    assert swapped.hex()[1] != without.hex()[1]


@given(st.lists(st.integers(0, 3)))
def test_occurrences_and_repeats(values: list[int]) -> None:
    array = np.array(values, np.uint64)
    digests = Digests(mix(array % np.uint64(2)), array)
    assert occurrences(digests).tolist() == [values[:n].count(value) for n, value in enumerate(values)]
    assert repeated(array).tolist() == [n for n, value in enumerate(values) if values.count(value) > 1]
    assert num_repeats(array) == len(values) - len(set(values))


VECTORS = [
    ((0, 0), 0, 0, 0, 0xC5EB6E27),
    ((0, 0), 0, 0, 1, 0x72A29B98),
    ((0, 0), 1, 0, 0, 0x5CED787E),
    ((1, 2), 0, 0, 0, 0x6FF114D7),
    ((1, 2), 3, 2**64 - 1, 2, 0x847F682A),
    ((2**64 - 1, 2**63), 0, 42, 0, 0x341C357D),
]


@pytest.mark.parametrize(("row_id", "image", "run_seed", "salt", "seed"), VECTORS)
def test_derived_seeds_are_those_of_all_versions(
    row_id: tuple[int, int], image: int, run_seed: int, salt: int, seed: int
) -> None:
    """A change here changes the images of every manifest without seeds."""
    digests = Digests(np.array([row_id[0]], np.uint64), np.array([row_id[1]], np.uint64))
    (found,) = derived_seeds(digests, np.array([image], np.uint64), np.array([run_seed], np.uint64), salt).tolist()
    assert found == seed


def test_ids_and_seeds_of_a_manifest_are_those_of_all_versions() -> None:
    rows = [(row["id"], row["seed"]) for row in _frozen_rows({"prompt": ["a cat", "a cat"], "id": ["1", "2"]})]
    assert rows == [("1", 1020830914), ("2", 1739301120)]
    rows = [(row["id"], row["seed"]) for row in _frozen_rows({"prompt": ["a cat", "a cat"], "steps": [20, 20]})]
    assert rows == [
        ("3d575fc38e2f09039be193006a79af98", 36622336),
        ("30b1d2cc0c85b03add008e03f93185f4", 3982248617),
    ]


def _frozen_rows(columns: dict[str, Any], *overrides: str) -> list[dict[str, Any]]:
    with folder() as path:
        return frozen(path, columns, overrides=overrides).by_position


def test_a_hundred_thousand_rows_of_one_prompt_have_as_many_seeds() -> None:
    rows = Digests(mix(np.arange(100_000, dtype=np.uint64)), np.zeros(100_000, np.uint64))
    seeds = derived_seeds(rows, np.zeros(100_000, np.uint64), np.zeros(100_000, np.uint64))
    assert seeds.max() < 2**32
    assert 0.49 < np.unpackbits(seeds.astype(np.uint32).view(np.uint8)).mean() < 0.51
    keys = noise_keys(np.ones(100_000, np.uint32), seeds)
    redrawn = _settled(rows, keys, np.ones(100_000, bool))
    seeds[redrawn.rows] = redrawn.seeds
    assert len(np.unique(seeds)) == 100_000


def _settled(rows: Digests, keys: np.ndarray[Any, Any], is_derived: np.ndarray[Any, Any]) -> Redrawn:
    def sources(images: np.ndarray[Any, Any]) -> Sources:
        zeros = np.zeros(len(images), np.uint64)
        return Sources(rows.take(images), zeros, zeros)

    return settle_seeds(keys, is_derived, sources)


BITS = 4
Image = tuple[int, int, int | None]
"""Id, content, explicit seed."""


def few_bits(draw: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments: draw(*arguments) & np.uint64(2**BITS - 1)


def drawn(row_id: int, salt: int) -> int:
    digest, zero = Digests(mix(np.array([row_id], np.uint64)), np.zeros(1, np.uint64)), np.zeros(1, np.uint64)
    return int(derived_seeds(digest, zero, zero, salt)[0]) & (2**BITS - 1)


def settle_by_hand(images: list[Image]) -> dict[int, int]:
    """Seeds by place, settled as the design says: explicit ones stay, then the lowest id; the others are salted with
    1, 2, … in the order of their ids, away from every seed that was drawn first and every one drawn again."""
    rank = [int(mix(np.array([row_id], np.uint64))[0]) for row_id, _, _ in images]
    first = [drawn(row_id, 0) if seed is None else seed for row_id, _, seed in images]
    taken = {(content, seed) for (_, content, _), seed in zip(images, first, strict=True)}
    seeds = dict(enumerate(first))
    for place in sorted(range(len(images)), key=lambda n: rank[n]):
        row_id, content, explicit = images[place]
        rivals = [n for n in range(len(images)) if n != place and (images[n][1], first[n]) == (content, first[place])]
        if explicit is None and any(images[n][2] is not None or rank[n] < rank[place] for n in rivals):
            salt = 1
            while (content, drawn(row_id, salt)) in taken:
                salt += 1
            seeds[place] = drawn(row_id, salt)
            taken.add((content, seeds[place]))
    return seeds


IMAGES = st.lists(
    st.tuples(st.integers(0, 1000), st.integers(0, 2), st.none() | st.integers(0, 2**BITS - 1)),
    max_size=16,
    unique_by=lambda image: image[0],
).filter(lambda images: all(sum(one[1] == content for one in images) <= 8 for content in range(3)))


@given(IMAGES, st.randoms(use_true_random=False))
def test_seeds_settle_as_by_hand_whatever_the_order(images: list[Image], shuffle: random.Random) -> None:
    with pytest.MonkeyPatch.context() as patch:
        wanted = settle_by_hand(images)
        order = list(range(len(images)))
        shuffle.shuffle(order)
        patch.setattr(identity, "derived_seeds", few_bits(derived_seeds))
        rows = Digests(mix(np.array([images[n][0] for n in order], np.uint64)), np.zeros(len(order), np.uint64))
        zeros = np.zeros(len(order), np.uint64)
        explicit = [images[n][2] for n in order]
        is_derived = np.array([seed is None for seed in explicit], bool)
        seeds = np.where(
            is_derived,
            identity.derived_seeds(rows, zeros, zeros),
            np.array([seed or 0 for seed in explicit], np.uint64),
        )
        contents = np.array([images[n][1] for n in order], np.uint32)
        redrawn = _settled(rows, noise_keys(contents, seeds), is_derived)
        assert is_derived[redrawn.rows].all()
        seeds[redrawn.rows] = redrawn.seeds
        assert {place: int(seed) for place, seed in zip(order, seeds, strict=True)} == wanted
        settled = [(images[n][1], int(seed)) for n, seed in zip(order, seeds, strict=True) if images[n][2] is None]
        assert len(set(settled)) == len(settled)


def test_num_images_gives_each_image_a_number_and_a_seed_of_its_own() -> None:
    columns = {
        "prompt": ["a", "b", "a"],
        "id": ["x", "y", "z"],
        "num_images": [3, 1, 2],
        "seed": [str(2**64 - 1), None, None],
    }
    rows = _frozen_rows(columns)
    assert [(row["id"], row["image_number"]) for row in rows] == [
        ("x", 0), ("x", 1), ("x", 2), ("y", 0), ("z", 0), ("z", 1),
    ]  # fmt: skip
    seeds = [row["seed"] for row in rows]
    assert seeds[0] == 2**64 - 1
    assert len(set(seeds)) == 6
    assert max(seeds[1:]) < 2**32
    again = _frozen_rows({name: values[::-1] for name, values in columns.items()}, "sampling.steps=9")
    assert {(row["id"], row["image_number"]): row["seed"] for row in again} == {
        (row["id"], row["image_number"]): row["seed"] for row in rows
    }
    assert [row["seed"] for row in _frozen_rows(columns, "sampling.seed=1")][1:3] == seeds[1:3]
    assert [row["seed"] for row in _frozen_rows(columns, "sampling.seed=1")][3:] != seeds[3:]


def test_explicit_seeds_are_kept_even_where_their_noise_meets() -> None:
    rows = _frozen_rows({"prompt": ["a"] * 3, "seed": pa.array([0, 2**32, 0], pa.uint64())})
    assert [row["seed"] for row in rows] == [0, 2**32, 0]


def test_a_row_that_no_draw_gives_a_seed_of_its_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """More draws than a plan that grows would recognise."""
    monkeypatch.setattr(identity, "derived_seeds", lambda ids, number, seed, salt=0: np.full(len(ids), 7, np.uint64))
    rows = Digests(np.arange(2, dtype=np.uint64), np.arange(2, dtype=np.uint64))
    keys = noise_keys(np.zeros(2, np.uint32), np.full(2, 7, np.uint64))
    with pytest.raises(UsageError, match=r"64 draws have given a row no seed of its own: .* give them seeds"):
        _settled(rows, keys, np.ones(2, bool))
