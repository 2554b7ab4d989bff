"""Plans as they are frozen: the manifest's rows, resolved, each once, in one order whatever the manifest's."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen import manifest, plans, spill
from batchgen.errors import UsageError
from batchgen.metadata import CARRIED
from batchgen.models.facts import PATTERN
from batchgen.plan_index import PlanIndex, load_index
from batchgen.plan_reader import PlanReader, batches
from batchgen.records import Group
from batchgen.rundir import RunDirectory, open_run
from batchgen.runner import run_job
from tests.plans import Frozen, folder, frozen, pattern_job, write
from tests.processes import PROCESSES

LINES = st.fixed_dictionaries(
    {
        "prompt": st.sampled_from(["a cat", "a dog", ""]),
        "negative_prompt": st.sampled_from([None, ""]),
        "width": st.sampled_from([None, 64, 128]),
        "height": st.sampled_from([None, 64, 96]),
        "steps": st.sampled_from([None, 1, 20, 30]),
        "guidance_scale": st.sampled_from([None, 1.0, 7.5]),
        "sampler": st.sampled_from([None, "heun", "UniPCMultistepScheduler"]),
        "seed": st.sampled_from([None, -1, 0, 2**63 - 1]),
        "num_images": st.sampled_from([None, 1, 3]),
        "own": st.sampled_from(["x", None]),
    }
)
TYPES = {
    "width": pa.int32(),
    "height": pa.int32(),
    "steps": pa.int32(),
    "guidance_scale": pa.float64(),
    "seed": pa.int64(),
}
DEFAULTS = {"width": 64, "height": 64, "steps": 20, "guidance_scale": 7.5, "sampler": "ddim"}


def table_of(lines: Sequence[dict[str, Any]]) -> pa.Table:
    columns = {name: [line[name] for line in lines] for name in lines[0]}
    types = {**TYPES, "num_images": pa.int32()}
    return pa.table({name: pa.array(values, types.get(name, pa.string())) for name, values in columns.items()})


def resolved(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each image of the manifest must be, but for its derived parts."""
    return [
        {name: DEFAULTS[name] if line[name] is None else line[name] for name in DEFAULTS}
        | {"prompt": line["prompt"], "negative_prompt": line["negative_prompt"], "carried:own": line["own"]}
        | {"image_number": number}
        for line in lines
        for number in range(line["num_images"] or 1)
    ]


def without(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


@settings(max_examples=20)
@given(st.lists(LINES, min_size=1, max_size=12), st.integers(1, 4), st.integers(1, 5))
def test_a_frozen_plan_holds_the_rows_of_its_manifest(
    lines: list[dict[str, Any]], read_rows: int, part_rows: int
) -> None:
    with folder() as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "READ_ROWS", read_rows)
        patch.setattr(spill, "PART_ROWS", part_rows)
        patch.setattr(plans, "SHARDS_PER_FILE", 2)
        done = frozen(path, table_of(lines), overrides=["plan.shard_images=4", "plan.max_batch=2"])
        rows, wanted = done.by_position, resolved(lines)
        assert [row["position"] for row in rows] == list(range(len(wanted))) == list(range(done.index.num_rows))
        for row, one in zip(rows, wanted, strict=True):
            assert {name: row[name] for name in one} == one
            assert (row["asked_width"], row["asked_height"]) == (row["width"], row["height"])
        explicit = [line["seed"] for line in lines for n in range(line["num_images"] or 1) if not n]
        firsts = [row["seed"] for row in rows if row["image_number"] == 0]
        assert all(want in (None, -1, seed) for want, seed in zip(explicit, firsts, strict=True))
        assert len({(row["id"], row["image_number"]) for row in rows}) == len(rows)
        check_shards(done)


def check_shards(done: Frozen) -> None:
    """A shard is one row group; its batches are whole, of one group, and what `batches` yields."""
    assert [shard.num_rows for shard in done.shards] == list(done.index.shard_rows)
    groups_in_files = 0
    for file in done.index.files:
        path = done.run.plans / file.name
        assert path.stat().st_size == file.num_bytes
        assert pq.ParquetFile(path).num_row_groups == file.num_shards
        assert file.first_shard == groups_in_files
        groups_in_files += file.num_shards
    assert groups_in_files == len(done.shards)
    for shard in done.shards:
        found = list(batches(shard, done.index.groups))
        assert [batch.number for batch in found] == list(range(len(found)))
        assert [row.index for batch in found for row in batch.rows] == list(range(shard.num_rows))
        for batch in found:
            assert 0 < len(batch.rows) <= batch.size
            for row, line in zip(
                batch.rows, (shard.slice(row.index, 1).to_pylist()[0] for row in batch.rows), strict=True
            ):
                assert all(getattr(row, name) == line[name] for name in ("id", "prompt", "seed", "steps", "sampler"))
                form = PATTERN.sampler_facts(row.sampler).form
                own = (row.sampler, row.steps) if not form else ("", 0)
                assert batch.group == Group(row.width, row.height, row.guidance_scale > 1, 0, form, *own)
    areas = [row["width"] * row["height"] for row in done.rows]
    assert areas == sorted(areas, reverse=True)


@settings(max_examples=20)
@given(st.lists(LINES, min_size=2, max_size=12), st.randoms(use_true_random=False), st.booleans())
def test_the_order_of_the_manifest_does_not_matter(
    lines: list[dict[str, Any]], shuffle: random.Random, has_ids: bool
) -> None:
    if has_ids:
        lines = [{"id": f"row {n}", **line} for n, line in enumerate(lines)]
    moved = list(lines)
    shuffle.shuffle(moved)
    with folder() as one, folder() as two:
        plans = [frozen(path, table_of(some)) for path, some in ((one, lines), (two, moved))]
        first, second = ([without(row, "position") for row in done.rows] for done in plans)
        assert first == second
        assert plans[0].index.shard_rows == plans[1].index.shard_rows
        assert plans[0].index.fingerprint["manifest.rows"] == plans[1].index.fingerprint["manifest.rows"]


@settings(max_examples=20)
@given(st.lists(LINES, min_size=1, max_size=6), st.data())
def test_batches_leave_out_what_is_settled(lines: list[dict[str, Any]], data: st.DataObject) -> None:
    with folder() as path:
        done = frozen(path, table_of(lines))
    for shard in done.shards:
        skip = frozenset(data.draw(st.sets(st.integers(0, shard.num_rows - 1))))
        left = [row for batch in batches(shard, done.index.groups, skip) for row in batch.rows]
        every = [row for batch in batches(shard, done.index.groups) for row in batch.rows]
        assert left == [row for row in every if row.index not in skip]
        assert all(batch.rows for batch in batches(shard, done.index.groups, skip))


def prompts(num: int) -> pa.Table:
    return pa.table({"prompt": [f"prompt {n}" for n in range(num)], "own": list(range(num))})


def open_plan(path: str) -> tuple[PlanIndex, list[str]]:
    run = RunDirectory(Path(path) / "run")
    return open_run(run, [Path(path) / "m" / "000.parquet"], pattern_job()), sorted(run.files.names(run.plans))


@pytest.mark.parametrize("pool", ["threads", "processes"])
def test_of_several_planners_one_wins_and_all_use_its_plan(tmp_path: Path, pool: str) -> None:
    write(tmp_path / "m", prompts(50))
    if pool == "threads":
        with ThreadPoolExecutor(8) as threads:
            found = [index for index, _ in threads.map(open_plan, [str(tmp_path)] * 8)]
    else:
        with PROCESSES.Pool(3) as processes:
            found = [index for index, _ in processes.map(open_plan, [str(tmp_path)] * 3, chunksize=1)]
    assert all(index == found[0] for index in found)
    index, names = open_plan(str(tmp_path))
    assert set(names) == {"0.json", index.folder}
    reader = PlanReader(tmp_path / "run" / ".run" / "plan", index)
    texts = [text for number in index.shards for text in reader.shard(number)["prompt"].to_pylist()]
    assert sorted(texts) == sorted(f"prompt {n}" for n in range(50))


def test_a_planner_that_is_late_by_a_whole_run_uses_its_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other run has swept the folder into which this one still writes."""
    files, run, real = write(tmp_path / "m", prompts(5)), RunDirectory(tmp_path / "run"), plans._write_file

    def late(*arguments: Any) -> Any:
        monkeypatch.setattr(plans, "_write_file", real)
        assert run_job(files, run.path, pattern_job()).balance.done == 5
        return real(*arguments)

    monkeypatch.setattr(plans, "_write_file", late)
    index = open_run(run, files, pattern_job())
    assert index == run.index()
    assert set(run.files.names(run.plans)) == {"0.json", index.folder}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Frozen:
    table = prompts(40).append_column("width", pa.array([64, 128] * 20))
    return frozen(tmp_path_factory.mktemp("plan"), table, overrides=["plan.shard_images=8"])


def test_an_index_reads_back_as_it_was(done: Frozen) -> None:
    path = done.run.plans / "0.json"
    assert PlanIndex.from_bytes(done.index.to_bytes("token"), path) == done.index
    assert load_index(done.run.plans, done.run.files) == done.index
    assert json.loads(path.read_bytes()).keys() >= {"token", "files", "groups", "fingerprint"}
    assert load_index(done.run.plans / "none", done.run.files) is None
    assert list(done.index.shards) == list(range(len(done.shards)))


CONTENTS = st.binary(max_size=30) | st.sampled_from([b"{}", b"[]", b"null", b'{"token": 1}', b"\xff", b'"x"'])


@given(CONTENTS)
def test_an_index_that_cannot_be_read_is_named(content: bytes) -> None:
    with pytest.raises(UsageError, match=r"0.json is not a plan's index that this version of batchgen can read"):
        PlanIndex.from_bytes(content, Path("run/.run/plan/0.json"))


def test_an_index_cut_short_or_of_another_shape_is_named(done: Frozen) -> None:
    whole = done.index.to_bytes("token")
    fields = json.loads(whole)
    others = [{**fields, "more": 1}, without(fields, "groups"), {**fields, "files": [{}]}, {**fields, "groups": [1]}]
    for content in [*(whole[:n] for n in range(0, len(whole), 97)), *(json.dumps(one).encode() for one in others)]:
        with pytest.raises(UsageError, match="is not a plan's index"):
            PlanIndex.from_bytes(content, Path("0.json"))


def test_a_damaged_plan_file_is_named_and_never_read_as_other_rows(done: Frozen, tmp_path: Path) -> None:
    (file,) = done.index.files
    whole = (done.run.plans / file.name).read_bytes()
    path = tmp_path / file.name
    path.parent.mkdir()
    reader, num_refused = PlanReader(tmp_path, done.index), 0
    places = np.random.default_rng(1).integers(0, len(whole), 120).tolist()
    for content in [whole[:place] for place in places[:20]] + [
        whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :] for place in places[20:]
    ]:
        path.write_bytes(content)
        for number in done.index.shards:
            try:
                shard = reader.shard(number)
            except UsageError as error:
                num_refused += 1
                assert "the plan cannot be read" in str(error)  # noqa: PT017
            else:
                assert shard.equals(done.shards[number])
    assert num_refused > 100
    path.unlink()
    with pytest.raises(UsageError, match="start a new run directory"):
        reader.shard(0)


def test_a_worker_reads_one_row_group(done: Frozen, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    real = pq.ParquetFile.read_row_group

    def noted(file: pq.ParquetFile, number: int, *arguments: Any, **options: Any) -> pa.Table:
        read.append(number)
        return real(file, number, *arguments, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", noted)
    monkeypatch.setattr(pq.ParquetFile, "read", None)
    PlanReader(done.run.plans, done.index).shard(3)
    assert read == [3]


def test_carried_dictionaries_that_grow_from_batch_to_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "READ_ROWS", 3)
    kinds = [f"kind {n}" for n in range(10)]
    table = pa.table({"prompt": [f"p{n}" for n in range(10)], "own": pa.array(kinds).dictionary_encode()})
    samplers = pa.array(["ddim", "heun", "euler", "pndm", "deis"] * 2)
    rows = frozen(tmp_path, table.append_column("sampler", samplers)).by_position
    assert [row[f"{CARRIED}own"] for row in rows] == kinds
    assert [row["sampler"] for row in rows] == samplers.to_pylist()


@settings(max_examples=6)
@given(st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=6))
def test_a_fingerprint_of_rows_tells_any_change(texts: list[str]) -> None:
    prints = set()
    variants: list[dict[str, Any]] = [{"prompt": texts}, {"prompt": [*texts, "a"]}, {"prompt": ["c", *texts[1:]]}]
    for extra in ({"width": [128]}, {"seed": [3]}, {"num_images": [2]}, {"steps": [3]}, {"sampler": ["heun"]}):
        ((name, (value,)),) = extra.items()
        variants.append({"prompt": texts, name: [value] * len(texts)})
    for variant in variants:
        with folder() as path:
            prints.add(frozen(path, variant).index.fingerprint["manifest.rows"])
    assert len(prints) == len(variants)


@pytest.mark.parametrize("place", ["../0.parquet", "/etc/0.parquet", "a/../../b", "..", "/"])
@pytest.mark.parametrize("name", ["folder", "rejected", "files"])
def test_an_index_whose_files_lie_elsewhere_is_refused(tmp_path: Path, name: str, place: str) -> None:
    """Whatever is read or swept by it lies under the plan's folder."""
    index = frozen(tmp_path, {"prompt": ["a"]}).index
    changed = {"files": tuple(replace(one, name=place) for one in index.files)} if name == "files" else {name: place}
    content = replace(index, **changed).to_bytes("token")
    with pytest.raises(UsageError, match=r"0\.json is not a plan's index"):
        PlanIndex.from_bytes(content, Path("0.json"))
