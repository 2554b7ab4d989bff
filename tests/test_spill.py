"""Reordering through the disk against a plain sort."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen import spill
from batchgen.spill import Reorder, part_bounds
from tests.arrow import any_column
from tests.plans import folder


@given(st.integers(0, 30), st.data(), st.randoms(use_true_random=False))
def test_rows_come_out_as_a_sort_would_have_them(num_rows: int, data: st.DataObject, shuffle: random.Random) -> None:
    ranks = list(range(num_rows))
    shuffle.shuffle(ranks)
    inner = data.draw(st.sets(st.integers(0, num_rows)))
    bounds = np.array(sorted({0, num_rows} | inner))
    cuts = sorted(data.draw(st.lists(st.integers(0, num_rows), max_size=4)))
    schema = pa.schema([("text", pa.large_string()), ("kind", pa.dictionary(pa.int32(), pa.string()))])
    with folder() as path:
        reorder = Reorder(path, schema, bounds)
        for start, end in zip([0, *cuts], [*cuts, num_rows], strict=True):
            some = ranks[start:end]
            kinds = pa.array([f"k{rank % 3}" for rank in some], pa.string()).dictionary_encode()
            table = pa.table([pa.array([f"row {rank}" for rank in some], pa.large_string()), kinds], schema=schema)
            reorder.add(table, np.array(some, np.uint32))
        parts = list(reorder.parts())
        assert [part.num_rows for part in parts] == np.diff(bounds).tolist()
        rows = [row for part in parts for row in part.to_pylist()]
        assert rows == [{"text": f"row {rank}", "kind": f"k{rank % 3}"} for rank in range(num_rows)]
        assert all(part.schema == schema for part in parts)
        assert list(path.iterdir()) == []


@given(st.integers(1, 5).flatmap(any_column))
def test_columns_of_any_type_survive(column: pa.Array) -> None:
    if "view" in str(column.type):
        return
    table = pa.table({"own": column})
    ranks = np.arange(len(column), dtype=np.uint32)[::-1].copy()
    with folder() as path:
        reorder = Reorder(path, table.schema, np.array([0, len(column)]))
        reorder.add(table, ranks)
        (part,) = reorder.parts()
        wanted = table.take(pa.array(ranks)).combine_chunks()
        assert part["own"].to_string(window=50) == wanted["own"].to_string(window=50)


@given(st.lists(st.integers(1, 9), max_size=60), st.integers(1, 20), st.integers(1, 5))
def test_parts_begin_and_end_at_edges(sizes: list[int], part_rows: int, max_parts: int) -> None:
    edges = np.append(0, np.cumsum(sizes)).astype(np.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spill, "PART_ROWS", part_rows)
        patch.setattr(spill, "MAX_PARTS", max_parts)
        bounds = part_bounds(edges).tolist()
    assert set(bounds) <= set(edges.tolist())
    assert bounds[-1] == edges[-1]
    assert bounds == sorted(set(bounds))
    assert len(bounds) - 1 <= max_parts
    largest = max(np.diff(bounds), default=0)
    assert largest <= max(part_rows, -(-int(edges[-1]) // max_parts)) + max(sizes, default=0)
