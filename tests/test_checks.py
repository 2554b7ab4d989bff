"""Every row of random manifests against rules written down once more, cell by cell, in plain Python."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.checks import BadCell, Checked, Rules
from batchgen.errors import UsageError
from batchgen.identified import identify
from batchgen.job import Job
from batchgen.metadata import CARRIED
from batchgen.models.facts import PATTERN
from batchgen.planned import plan_manifest
from batchgen.rundir import RunDirectory, open_run
from tests.arrow import any_column, garbled, scalars_columns, through_parquet
from tests.plans import folder, frozen, pattern_job, planned
from tests.test_columns import finite_number, whole_number

SAMPLERS = ("ddim", "heun", "EulerDiscreteScheduler")
LIKELY: dict[str, list[Any]] = {
    "prompt": ["a", "", "b", "a\x00b", None],
    "negative_prompt": ["", "blurry", None],
    "width": [64, 72, 63, 0, None, 32768, 32776],
    "height": [128, 100, 56, None],
    "steps": [1, 1000, 1001, 0, None],
    "guidance_scale": [7.5, 1.0, 0.0, None, float("nan")],
    "sampler": [*SAMPLERS, "DDIM", "", None],
    "seed": [0, 7, -1, -2, None],
    "num_images": [1, 2, 0, None],
}
"""Values near the edges of what is allowed, by column; other types are drawn beside them."""


@st.composite
def tables(draw: st.DrawFn) -> tuple[dict[str, pa.Array], list[dict[str, Any]]]:
    """Random parameter columns, and their rows as Python values."""
    size = draw(st.integers(1, 5))
    names = ["prompt", *draw(st.lists(st.sampled_from(list(LIKELY)[1:]), unique=True))]
    columns: dict[str, tuple[pa.Array, list[Any]]] = {}
    for name in names:
        if draw(st.integers(0, 3)):
            values = draw(st.lists(st.sampled_from(LIKELY[name]), min_size=size, max_size=size))
            columns[name] = pa.array(values), values
        else:
            columns[name] = draw(scalars_columns(size))
    rows = [{name: values[number] for name, (_, values) in columns.items()} for number in range(size)]
    return {name: column for name, (column, _) in columns.items()}, rows


JOBS = st.sampled_from(
    [
        pattern_job(),
        pattern_job("plan.size_policy=round", "sampling.steps=7"),
        pattern_job("sampling.negative_prompt=blurry", "sampling.guidance_scale=0.5", "sampling.width=96"),
        pattern_job("sampling.negative_prompt=blurry", "sampling.sampler=heun", "sampling.num_images=3"),
    ]
)


@dataclass
class Wanted:
    """What must come of one row."""

    bad: set[str] = field(default_factory=set)
    values: dict[str, Any] = field(default_factory=dict)


def resolve(row: dict[str, Any], job: Job) -> Wanted:
    """The rules of the manifest, once more."""
    wanted, given = Wanted(), job.sampling

    def number(name: str, default: int, least: int, most: int) -> int | None:
        if row.get(name) is None:
            return default
        found = whole_number(row[name])
        return found if found is not None and least <= found <= most else None

    def take(name: str, value: Any) -> None:
        wanted.values[name] = value
        if value is None:
            wanted.bad.add(name)

    take("prompt", row["prompt"] if isinstance(row["prompt"], str) else None)
    take("steps", number("steps", given.steps or 20, 1, 1000))
    take("num_images", number("num_images", given.num_images, 1, 1_000_000))
    for name in ("width", "height"):
        asked = number(name, getattr(given, name) or 64, 0, 32768)
        size = asked
        if asked and job.plan.size_policy == "round":
            size = max(64, math.floor(asked / 8 + 0.5) * 8)
        take(name, size if size is not None and size >= 64 and size % 8 == 0 else None)
        wanted.values[f"asked_{name}"] = asked
    seed = row.get("seed")
    exact = whole_number(seed) if seed is not None else None
    if seed is not None and (exact is None or exact < -1):
        wanted.bad.add("seed")
    wanted.values["seed"] = None if exact == -1 else exact
    default = 7.5 if given.guidance_scale is None else given.guidance_scale
    guidance = default if row.get("guidance_scale") is None else finite_number(row["guidance_scale"])
    take("guidance_scale", guidance)
    sampler = given.sampler or "ddim" if row.get("sampler") is None else row["sampler"]
    take("sampler", sampler if isinstance(sampler, str) and sampler in PATTERN.samplers else None)
    negative = row.get("negative_prompt")
    has_no_effect = bool(negative) and guidance is not None and guidance <= 1
    if (negative is not None and not isinstance(negative, str)) or has_no_effect:
        wanted.bad.add("negative_prompt")
    elif negative is None and guidance is not None and guidance > 1:
        negative = given.negative_prompt
    wanted.values["negative_prompt"] = negative
    return wanted


def check(columns: dict[str, pa.Array], job: Job, first_row: int = 0) -> tuple[Checked, Rules]:
    rules = Rules(job, PATTERN)
    return rules.check(pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns)), first_row), rules


@given(tables(), JOBS)
def test_every_cell_is_resolved_or_named_once(pair: tuple[dict[str, pa.Array], list[dict[str, Any]]], job: Job) -> None:
    columns, rows = pair
    checked, rules = check(columns, job, 100)
    wanted = [resolve(row, job) for row in rows]
    named = Counter((cell.row - 100, cell.column) for cell in checked.bad)
    assert named == Counter((number, name) for number, one in enumerate(wanted) for name in one.bad)
    assert checked.is_good.tolist() == [not one.bad for one in wanted]
    for number, one in enumerate(wanted):
        if one.bad:
            continue
        found = {name: getattr(checked, name)[number] for name in one.values if name not in ("seed", "sampler")}
        found = {name: value.as_py() if isinstance(value, pa.Scalar) else value for name, value in found.items()}
        found["sampler"] = rules.samplers[checked.sampler[number]]
        found["seed"] = int(checked.seed[number]) if checked.has_seed[number] else None
        assert found == one.values


KNOWN = "known: ddim, pndm, euler, euler_ancestral, heun, deis, dpmpp_2m, dpmpp_2m_karras"
KNOWN += ", or a scheduler's class in diffusers, such as UniPCMultistepScheduler"


def bad_of(column: str, values: Any, *overrides: str, **others: list[Any]) -> list[BadCell]:
    size = len(values)
    columns = {"prompt": pa.array([f"prompt {n}" for n in range(size)])}
    columns |= {name: pa.array(other) for name, other in others.items()}
    columns[column] = values if isinstance(values, pa.Array) else pa.array(values)
    return check(columns, pattern_job(*overrides))[0].bad


@pytest.mark.parametrize(
    ("column", "values", "rule"),
    [
        ("prompt", pa.array([["a"], ["b"]]), "must be UTF-8 text; the column's type is list<item: string>"),
        ("prompt", pa.array([5, 6]), "must be UTF-8 text; the column's type is int64"),
        ("prompt", garbled([b"\xff", b"\xc3"], pa.string()), "must be UTF-8 text; the column's type is string"),
        ("seed", ["3.5", "12x"], "must be a whole number from 0 to 2^64 - 1, or -1 or null for a derived seed"),
        ("seed", [str(2**64), "-2"], "must be a whole number from 0 to 2^64 - 1, or -1 or null for a derived seed"),
        ("seed", [3.5, 2.0**64], "must be a whole number from 0 to 2^64 - 1, or -1 or null for a derived seed"),
        (
            "seed",
            pa.array([True, False]),
            "must be a whole number from 0 to 2^64 - 1, or -1 or null for a derived seed",
        ),
        ("guidance_scale", [float("nan"), -math.inf], "must be a finite number"),
        ("guidance_scale", ["high", "nan"], "must be a finite number"),
        ("steps", [0, 1001], "must be a whole number from 1 to 1000"),
        ("num_images", [-1, 1_000_001], "must be a whole number from 1 to 1000000"),
        ("width", [-8, 32_776], "must be a whole number of pixels up to 32768"),
        ("height", [63, 0], "must be a multiple of 8, at least 64 (--set plan.size_policy=round rounds)"),
        ("sampler", ["ddin", "ddi"], "is no sampler; did you mean 'ddim'? (" + KNOWN + ")"),
        ("id", pa.array([1.0, 2.0]), "must be text or a whole number; the column's type is double"),
        ("id", pa.nulls(2), "must be text or a whole number: give every row an id, or drop the column"),
        ("caption", garbled([b"\xff", b"\xc3"], pa.large_string()), "must be UTF-8 text"),
    ],
)
def test_each_rule_names_row_column_value_and_itself(column: str, values: Any, rule: str) -> None:
    bad = bad_of(column, values)
    assert [(cell.row, cell.column) for cell in bad] == [(0, column), (1, column)]
    assert [cell.rule for cell in bad] == [rule.format(value=cell.value) for cell in bad]
    shown = values.to_pylist() if isinstance(values, pa.Array) and "UTF-8" not in rule else values
    if isinstance(shown, list):
        assert [cell.value for cell in bad] == [repr(value) for value in shown]


def test_broken_text_is_shown_as_its_bytes() -> None:
    assert [cell.value for cell in bad_of("prompt", garbled([b"ok\xff"], pa.string()))] == [r"b'ok\xff'"]


def test_a_negative_prompt_without_effect_is_named_only_where_guidance_is_known() -> None:
    bad = bad_of("negative_prompt", ["x", "", "x"], guidance_scale=[1.0, 1.0, float("nan")])
    assert [(cell.row, cell.column) for cell in bad] == [(2, "guidance_scale"), (0, "negative_prompt")]


def test_a_size_that_only_the_default_makes_wrong_says_so() -> None:
    (cell,) = bad_of("id", ["a"], "sampling.width=100")
    assert (cell.column, cell.value) == ("width", "100")
    assert cell.rule.endswith("the default is 100")


def test_the_value_in_force_is_named_where_the_cell_is_null() -> None:
    (cell,) = bad_of("width", pa.array([None, 64], pa.int32()), "sampling.width=100")
    assert (cell.row, cell.column, cell.value) == (0, "width", "100")


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint64(), pa.string(), pa.dictionary(pa.int8(), pa.int64())], ids=str)
def test_ids_are_texts_or_whole_numbers(kind: pa.DataType) -> None:
    column = pa.array([1, 2], pa.int64())
    column = column.dictionary_encode() if pa.types.is_dictionary(kind) else column.cast(kind)
    checked, _ = check({"prompt": pa.array(["a", "b"]), "id": column}, pattern_job())
    assert checked.id_texts is not None
    assert checked.id_texts.to_pylist() == ["1", "2"]
    assert not checked.bad


def test_a_model_that_is_never_guided_refuses_negative_prompts() -> None:
    """It runs the network once per step whatever the guidance scale: a negative prompt would be ignored."""
    facts = replace(PATTERN, guided_above=None)
    columns = {"prompt": ["a"] * 3, "negative_prompt": ["blurry", "", None], "guidance_scale": [7.5, 7.5, 7.5]}
    checked = Rules(pattern_job(), facts).check(pa.RecordBatch.from_pydict(columns), 0)
    rule = "has no effect: this model is never guided"
    assert checked.bad == [BadCell(0, "negative_prompt", "'blurry'", rule)]
    assert checked.negative_prompt.to_pylist()[1:] == ["", None]
    with pytest.raises(UsageError, match=f"sampling.negative_prompt {rule}; leave it out"):
        Rules(pattern_job("sampling.negative_prompt=blurry"), facts)


class TestTrueGuidance:
    """Of a family whose guidance_scale is distilled into its network: a negative prompt has a scale of its own."""

    FACTS = replace(PATTERN, guiding="true_cfg_scale", true_cfg_scale=1.0, needs_negative=True)

    def checked(self, columns: dict[str, list[object]], *overrides: str, **changes: object) -> Checked:
        rules = Rules(pattern_job(*overrides), replace(self.FACTS, **changes))
        return rules.check(pa.RecordBatch.from_pydict({"prompt": ["a"] * len(*columns.values()), **columns}), 0)

    def test_a_row_is_guided_by_a_scale_and_a_negative_prompt(self) -> None:
        scales, negatives = [4.0, 4.0, 1.0, None], ["blurry", "", None, None]
        batch = {"prompt": ["a"] * 4, "true_cfg_scale": scales, "negative_prompt": negatives}
        checked = Rules(pattern_job(), self.FACTS).check(pa.RecordBatch.from_pydict(batch), 0)
        assert checked.bad == []
        assert checked.is_guided.tolist() == [True, True, False, False]
        assert checked.true_cfg_scale.tolist() == [4.0, 4.0, 1.0, 1.0]
        assert checked.guidance_scale.tolist() == [7.5] * 4

    def test_one_without_the_other_is_refused(self) -> None:
        (cell,) = self.checked({"true_cfg_scale": [4.0, None]}).bad
        assert (cell.row, cell.column, cell.value) == (0, "true_cfg_scale", "4.0")
        assert "without a negative_prompt" in cell.rule
        (cell,) = self.checked({"negative_prompt": ["blurry", ""]}).bad
        assert cell.rule == "has no effect at this row's true_cfg_scale: this model is guided above 1"

    def test_the_jobs_defaults_count(self) -> None:
        both = "sampling.true_cfg_scale=4.0", "sampling.negative_prompt=blurry"
        assert self.checked({"true_cfg_scale": [None, 1.0]}, *both).is_guided.tolist() == [True, False]
        assert len(self.checked({"negative_prompt": [None, ""]}, both[0]).bad) == 1

    def test_a_familys_own_default_asks_for_nothing(self) -> None:
        found = self.checked({"negative_prompt": [None, ""]}, true_cfg_scale=4.0)
        assert (found.bad, found.is_guided.tolist()) == ([], [False, True])

    def test_scales_that_a_family_ignores_are_refused(self) -> None:
        rule = "has no effect: this model takes no such scale"
        columns = {"guidance_scale": [3.5, 0.0, None]}
        assert [cell.rule for cell in self.checked(columns, takes_guidance_scale=False).bad] == [rule]
        checked = Rules(pattern_job(), PATTERN).check(
            pa.RecordBatch.from_pydict({"prompt": ["a"] * 2, "true_cfg_scale": [4.0, None]}), 0
        )
        assert [(cell.column, cell.rule) for cell in checked.bad] == [("true_cfg_scale", rule)]
        with pytest.raises(UsageError, match=f"sampling.true_cfg_scale {rule}; leave it out"):
            Rules(pattern_job("sampling.true_cfg_scale=4.0"), PATTERN)


def test_a_model_that_takes_no_negative_prompt_refuses_one() -> None:
    facts, rule = replace(PATTERN, takes_negative=False), "has no effect: this model takes no negative prompt"
    columns = {"prompt": ["a"] * 2, "negative_prompt": ["blurry", None], "guidance_scale": [7.5, 7.5]}
    checked = Rules(pattern_job(), facts).check(pa.RecordBatch.from_pydict(columns), 0)
    assert checked.bad == [BadCell(0, "negative_prompt", "'blurry'", rule)]
    assert checked.is_guided.tolist()[1]
    with pytest.raises(UsageError, match=f"sampling.negative_prompt {rule}; leave it out"):
        Rules(pattern_job("sampling.negative_prompt=blurry"), facts)


def test_a_size_beyond_what_the_network_takes_is_refused() -> None:
    rules = Rules(pattern_job(), replace(PATTERN, max_size=128))
    checked = rules.check(pa.RecordBatch.from_pydict({"prompt": ["a"] * 2, "width": [128, 136]}), 0)
    assert [(cell.row, cell.column) for cell in checked.bad] == [(1, "width")]
    assert "at least 64 and at most 128" in checked.bad[0].rule


@pytest.mark.parametrize(
    ("key", "value", "most"), [("steps", 1001, 1000), ("width", 32_776, 32_768), ("num_images", 1_000_001, 1_000_000)]
)
def test_a_default_that_no_row_may_have_is_refused(key: str, value: int, most: int) -> None:
    with pytest.raises(UsageError, match=f"sampling.{key} = {value} must be a whole number from 1 to {most}"):
        Rules(pattern_job(f"sampling.{key}={value}"), PATTERN)


def test_every_bad_cell_is_named_with_its_file_and_row() -> None:
    with folder() as path:
        one = {"prompt": ["a", None, "b"], "seed": ["1", "x", "2"], "id": ["a", "b", "c"]}
        two = {"prompt": ["c", "d"], "seed": ["-2", "3"], "id": ["d", "a"]}
        done = planned(path, one, two, overrides=["plan.on_bad_row=skip"])
        done.rejections.write(path / "rejected.parquet", RunDirectory(path).files)
        rejected = pq.read_table(path / "rejected.parquet").to_pylist()
        first, second = (str(path / "manifest" / f"00{n}.parquet") for n in (0, 1))
        seed = "must be a whole number from 0 to 2^64 - 1, or -1 or null for a derived seed"
        wanted = [
            (first, 0, "a", ["id = 'a' must be unique; manifest row 4 has it too"]),
            (first, 1, None, ["prompt = None must be text", f"seed = 'x' {seed}"]),
            (second, 0, "c", [f"seed = '-2' {seed}"]),
            (second, 1, "d", ["id = 'a' must be unique; manifest row 0 has it too"]),
        ]
        assert [tuple(row[name] for name in ("file", "row", "prompt", "faults")) for row in rejected] == wanted
        message = done.rejections.message(done.draft.survey.num_rejected)
        assert message.startswith("4 of 5 manifest rows cannot be made as asked (rows count from 0):")
        for file, row, _, faults in wanted:
            for fault in faults:
                assert f"  {file} row {row}: {fault}" in message


def test_a_person_is_shown_the_first_of_many() -> None:
    with folder() as path, pytest.raises(UsageError) as refused:
        planned(path, {"prompt": pa.array([None] * 50, pa.string())})
    lines = str(refused.value).splitlines()
    assert len(lines) == 23
    assert lines[0].startswith("50 of 50 manifest rows")
    assert lines[-2] == "  … and 30 more"


@pytest.mark.parametrize("column", [None, "id"])
def test_a_manifest_of_bad_rows_alone_is_planned_as_nothing(column: str | None) -> None:
    table = {"prompt": pa.array([None, None], pa.string())} | ({column: ["a", "a"]} if column else {})
    with folder() as path:
        with pytest.raises(UsageError, match="2 of 2 manifest rows"):
            planned(path, table)
        plan = frozen(path, table, overrides=["plan.on_bad_row=skip"])
        assert (plan.index.num_rows, plan.index.num_rejected, plan.rows) == (0, 2, [])


NAMES = st.sampled_from(["id", *LIKELY, "caption", "a.b", "", "🐉", "rows"]) | st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=4
)


@given(st.data(), st.sampled_from(["skip", "stop"]))
def test_any_schema_is_planned_or_refused_in_a_sentence(data: st.DataObject, on_bad: str) -> None:
    size = data.draw(st.integers(0, 3))
    names = ["prompt", *data.draw(st.lists(NAMES, max_size=4))]
    columns = [pa.array([f"prompt {n}" for n in range(size)])]
    columns += [data.draw(any_column(size) | scalars_columns(size).map(lambda pair: pair[0])) for _ in names[1:]]
    content = through_parquet(pa.Table.from_arrays(columns, names=names))
    if content is None:
        return
    with folder() as path:
        (path / "m.parquet").write_bytes(content)
        job = pattern_job(f"plan.on_bad_row={on_bad}", "sampling.num_images=2")
        try:
            index = open_run(RunDirectory(path / "run"), [path / "m.parquet"], job)
        except UsageError:
            pass
        else:
            assert index.num_rejected <= size


@given(st.integers(1, 3).flatmap(any_column))
def test_a_carried_column_is_carried_unchanged(column: pa.Array) -> None:
    size = len(column)
    content = through_parquet(pa.table({"prompt": [f"prompt {n}" for n in range(size)], "own": column}))
    if content is None:
        return
    with folder() as path:
        (path / "m.parquet").write_bytes(content)
        try:
            plan_manifest([path / "m.parquet"], pattern_job())
        except UsageError as error:
            if "must be UTF-8 text" in str(error):
                return
            raise
        asked = pq.read_table(path / "m.parquet")
        plan = frozen(path, asked)
        rows = pa.concat_tables(plan.shards).sort_by("position")
        own, kept = asked["own"].combine_chunks(), rows[f"{CARRIED}own"].combine_chunks()
        kept = kept.cast(own.type) if own.type != kept.type else kept
        assert kept.to_string(window=100) == own.to_string(window=100)


class TestLoras:
    SETS = 'model.loras={pixel = [{path = "p.safetensors"}], "b c" = [{path = "b.safetensors"}]}'

    def test_a_row_has_the_set_that_it_names_else_the_jobs(self) -> None:
        rules = Rules(pattern_job(self.SETS, "sampling.lora=b c"), PATTERN)
        batch = pa.RecordBatch.from_pydict({"prompt": ["a"] * 4, "lora": ["pixel", "", None, "pixl"]})
        checked = rules.check(batch, 0)
        assert [rules.loras[one] for one in checked.lora[:3]] == ["pixel", "", "b c"]
        (cell,) = checked.bad
        assert (cell.row, cell.column, cell.value) == (3, "lora", "'pixl'")
        assert cell.rule == "is no LoRA set of this job; model.loras has 'pixel', 'b c'"

    def test_a_default_that_is_none_of_the_sets_is_refused(self) -> None:
        with pytest.raises(UsageError, match=r"sampling\.lora = 'x' is no LoRA set of this job, which has none"):
            Rules(pattern_job("sampling.lora=x"), PATTERN)

    def test_rows_without_a_set_keep_their_seeds_whatever_the_job_has(self) -> None:
        batch = pa.RecordBatch.from_pydict({"prompt": ["a"] * 2, "lora": ["", "pixel"]})
        rules = Rules(pattern_job(self.SETS), PATTERN)
        with_sets = identify(rules.check(batch, 0), rules.samplers, rules.loras).content
        plain = Rules(pattern_job(), PATTERN)
        checked = plain.check(batch.select(["prompt"]), 0)
        without = identify(checked, plain.samplers, plain.loras).content
        assert [with_sets[0] == without[0], with_sets[1] == without[1]] == [True, False]
