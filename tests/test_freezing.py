"""Plans at their edges: digests that begin alike, many files, too many groups, and death at any moment."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen import plans, spill
from batchgen.cost import PatternModel
from batchgen.drafts import draft
from batchgen.errors import UsageError
from batchgen.filesystem import FileSystem
from batchgen.identity import Digests
from batchgen.limits import Limits
from batchgen.plan_index import PlanIndex, load_index
from batchgen.plan_reader import PlanReader, batches
from batchgen.plans import Proposal, freeze
from tests.crashes import Crash, machine
from tests.plans import folder, planned

SMALL = ("plan.batch_sizes=[1, 3]", "plan.shard_images=7")


def prompts(num_rows: int, **columns: Any) -> dict[str, Any]:
    return {"id": [f"{n}" for n in range(num_rows)], "prompt": [f"prompt {n}" for n in range(num_rows)], **columns}


IDS = st.lists(
    st.tuples(st.sampled_from([0, 1, 2**32, 2**32 + 1, 2**64 - 1]), st.sampled_from([0, 1, 2**64 - 1])),
    min_size=1,
    max_size=12,
    unique=True,
)


@given(IDS, st.booleans(), st.data())
def test_rows_whose_digests_begin_alike_are_ordered_by_all_of_them(
    ids: list[tuple[int, int]], has_many_images: bool, data: st.DataObject
) -> None:
    with folder() as path:
        survey = planned(path, prompts(len(ids))).draft.survey
    counts = [data.draw(st.integers(1, 3)) if has_many_images else 1 for _ in ids]
    high, low = (np.array(values, np.uint64) for values in zip(*ids, strict=True))
    survey.ids = Digests(high, low)
    survey.num_images = np.array(counts, np.uint32) if has_many_images else None
    images = [(one, number) for one, count in zip(ids, counts, strict=True) for number in range(count)]
    rank = draft(survey, PatternModel(), Limits()).rank
    assert [images[place] for place in np.argsort(rank)] == sorted(images)


def frozen_at(root: Path, path: Path, num_rows: int) -> tuple[PlanIndex, list[pa.Table]]:
    one = planned(path, prompts(num_rows), overrides=SMALL)
    root.mkdir()
    index = freeze(Proposal(one.draft, one.rejections, "pattern", {}, {}), root, FileSystem())
    reader = PlanReader(root, index)
    return index, [reader.shard(number) for number in index.shards]


def test_many_parts_and_many_files_hold_what_one_file_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, shards = frozen_at(tmp_path / "one", tmp_path, 200)
    monkeypatch.setattr(plans, "SHARDS_PER_FILE", 3)
    monkeypatch.setattr(spill, "PART_ROWS", 11)
    many, others = frozen_at(tmp_path / "many", tmp_path, 200)
    assert others == shards
    assert len(one.files) == 1
    assert [file.num_shards for file in many.files][:-1] == [3] * (len(many.files) - 1)
    assert [file.first_shard for file in many.files] == [3 * number for number in range(len(many.files))]
    assert sum(file.num_shards for file in many.files) == len(many.shards)
    for file in many.files:
        path = tmp_path / "many" / file.name
        assert (file.num_bytes, file.sha256) == (path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        assert pq.read_metadata(path).num_row_groups == file.num_shards
    assert len(os.listdir(tmp_path / "many" / many.folder)) == len(many.files)


@pytest.mark.parametrize(
    ("name", "limit", "what"), [("drafts.MAX_GROUPS", 1, "2 groups"), ("survey.MAX_IMAGES", 3, "3 images")]
)
def test_more_than_a_plan_can_count_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, limit: int, what: str
) -> None:
    module, constant = name.split(".")
    monkeypatch.setattr(importlib.import_module(f"batchgen.{module}"), constant, limit)
    with pytest.raises(UsageError, match=f"{what}.* split it"):
        planned(tmp_path, prompts(3, width=[64, 64, 128]))


@pytest.mark.parametrize("is_after", [False, True])
def test_death_at_any_moment_leaves_a_whole_plan_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_after: bool
) -> None:
    monkeypatch.setattr(plans, "SHARDS_PER_FILE", 2)
    columns = prompts(20)
    columns["prompt"][4] = None
    for dies_at in itertools.count():
        root = tmp_path / f"{dies_at}"
        root.mkdir()
        one = planned(tmp_path, columns, overrides=[*SMALL, "plan.on_bad_row=skip"])
        has_died = False
        with machine(dies_at, is_after=is_after):
            try:
                freeze(Proposal(one.draft, one.rejections, "pattern", {}, {}), root, FileSystem())
            except Crash:
                has_died = True
        found = load_index(root, FileSystem())
        again = planned(tmp_path, columns, overrides=[*SMALL, "plan.on_bad_row=skip"])
        index = freeze(Proposal(again.draft, again.rejections, "pattern", {}, {}), root, FileSystem())
        assert found in (None, index)
        reader = PlanReader(root, index)
        rows = [
            row
            for number in index.shards
            for batch in batches(reader.shard(number), index.groups)
            for row in batch.rows
        ]
        assert sorted(row.id for row in rows) == sorted(set(columns["id"]) - {"4"})
        assert pq.read_table(root / index.folder / plans.REJECTED)["row"].to_pylist() == [4]
        if not has_died:
            break
    assert dies_at > 6
