"""The manifest's own columns: of any Arrow type, also where Python has no value for what they hold."""

from __future__ import annotations

import json
import tarfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.carried import as_texts
from batchgen.columns import is_garbled
from batchgen.verify import verify
from tests import runs
from tests.arrow import any_column
from tests.plans import finished


def viewed(values: list[int | None], kind: pa.DataType, storage: pa.DataType = None) -> pa.Array:
    return pa.array(values, storage or pa.int64()).view(kind)


def listed(column: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(range(len(column) + 1), pa.int32()), column)


YEAR_12001 = 3_664_000
DATES = viewed([YEAR_12001, -(10**7), None], pa.date32(), pa.int32())
NANOSECONDS = viewed([1_234_567_891, 0, None], pa.timestamp("ns"))
TEXTS: dict[str, tuple[pa.Array, str | None]] = {
    "date": (DATES, "12001-09-10"),
    "instant": (viewed([YEAR_12001 * 86_400_000, 0, None], pa.timestamp("ms")), "12001-09-10 00:00:00.000"),
    "beyond": (viewed([2**62, 0, None], pa.timestamp("us")), "<value out of range: 4611686018427387904>"),
    "nanoseconds": (NANOSECONDS, "1970-01-01 00:00:01.234567891"),
    "zoned": (viewed([1, 2, None], pa.timestamp("us", "No/Where")), "1970-01-01 00:00:00.000001Z"),
    "time": (viewed([1, 2, None], pa.time64("ns")), "00:00:00.000000001"),
    "interval": (viewed([2**62, -1, None], pa.duration("s")), str(2**62)),
    "decimal": (pa.array([Decimal(10) ** 27, Decimal(1), None], pa.decimal128(38, 10)), f"{10**27}.0000000000"),
    "dates": (listed(DATES), '["12001-09-10"]'),
    "struct": (
        pa.StructArray.from_arrays([DATES, NANOSECONDS, pa.array([b"\xff", None, b""])], names=["a", "b", "c"]),
        '{"a": "12001-09-10", "b": "1970-01-01 00:00:01.234567891", "c": "ff"}',
    ),
    "map": (
        pa.MapArray.from_arrays(pa.array(range(4), pa.int32()), pa.array(["x", "y", "z"]), DATES),
        '[["x", "12001-09-10"]]',
    ),
    "numbers": (pa.array([[float("nan"), -float("inf"), 1.5], [], None]), '["nan", "-inf", 1.5]'),
}
"""By column: its values, and how a tar's JSON spells the first of them."""
TABLE = pa.table({"prompt": ["a", "b", "c"], **{name: column for name, (column, _) in TEXTS.items()}})


@pytest.mark.parametrize("format_name", runs.FORMATS)
def test_values_that_python_cannot_hold_reach_the_metadata_unchanged(tmp_path: Path, format_name: str) -> None:
    run, ending = finished(tmp_path, TABLE, overrides=[f"output.format={format_name}"])
    assert ending.exit_code == 0
    found = pq.read_table(run.path / "metadata.parquet", columns=TABLE.schema.names)
    assert found.schema.types == TABLE.schema.types
    for name in found.schema.names:
        assert str(found[name].combine_chunks()) == str(TABLE[name].combine_chunks())
    assert verify(run).faults == ()
    if format_name == "webdataset":
        sample = next(one for one in samples(run.path) if one["prompt"] == "a")
        assert {name: sample[name] for name in TEXTS} == {name: text for name, (_, text) in TEXTS.items()}


def samples(out: Path) -> list[dict[str, Any]]:
    found = []
    for path in (out / "data").iterdir():
        with tarfile.open(path) as tar:
            texts = [tar.extractfile(one) for one in tar if one.name.endswith(".json")]
            found += [json.loads(text.read(), parse_constant=pytest.fail) for text in texts if text is not None]
    return found


def test_values_that_python_cannot_hold_are_told_apart(tmp_path: Path) -> None:
    source, out = tmp_path / "m.parquet", tmp_path / "out"
    table = TABLE.append_column("id", pa.array(["x", "y", "z"]))
    pq.write_table(table, source)
    assert runs.run(source, out).code == 0
    other = table.set_column(table.schema.names.index("date"), "date", DATES.take(pa.array([0, 0, 2])))
    pq.write_table(other, source)
    said = runs.run(source, out).err
    assert "row 'y': date '-25410-12-06' there, '12001-09-10' now\n" in said


@settings(max_examples=200)
@given(st.data())
def test_any_column_has_a_text(data: st.DataObject) -> None:
    column = data.draw(any_column(2))
    if not is_garbled(column).any():
        assert [text is None for text in as_texts(column)] == [not one.is_valid for one in column]
