import datetime

import pyarrow as pa

from batchgen.metadata import (
    RESERVED,
    carried_fields,
    failed_rows,
    failures_schema,
    made_rows,
    metadata_schema,
    row_table,
    row_table_schema,
)
from batchgen.records import Failure, Written
from tests.shards import SEEDS, make_row, make_shard

ROWS = [make_row(index, f"prompt {index}", seed=seed) for index, seed in enumerate(SEEDS)]
CARRIED = {
    "caption.de": pa.array(["Apfel", None, "", "x", "y"]),
    "kind": pa.array(["a", "b", "a", None, "b"]).dictionary_encode(),
    "when": pa.array([datetime.date(2024, 2, 29)] * 5),
    "scores": pa.array([[1.5], [], None, [2.5, None], [0.0]]),
}
SHARD = make_shard(ROWS, CARRIED)
FAILED = Failure(ROWS[3], "RowError", "too long", retries=2)


def written(index: int) -> Written:
    return Written(index, f"data/{index}.png", 10, "a", "b", "png", False, 4, "eager", 5, 0, 1, 0.5)


def the_table() -> pa.Table:
    return row_table(SHARD, "a model", [written(4), written(0)], [FAILED])


def test_a_row_table_has_one_schema_whatever_it_holds() -> None:
    fields = carried_fields(SHARD.schema)
    assert [field.name for field in fields] == list(CARRIED)
    assert the_table().schema == row_table_schema(fields)
    assert row_table(SHARD, "a model", [], []).schema == row_table_schema(fields)


def test_made_rows_are_those_of_the_shard() -> None:
    made = made_rows(the_table())
    assert made.schema == metadata_schema(carried_fields(SHARD.schema))
    for line, index in zip(made.to_pylist(), (4, 0), strict=True):
        row = ROWS[index]
        for name in ("id", "prompt", "negative_prompt", "width", "steps", "guidance_scale", "seed"):
            assert line[name] == getattr(row, name)
        assert line["noise_seed"] == row.noise_seed
        assert (line["asked_width"], line["model"], line["file_name"]) == (63, "a model", f"data/{index}.png")
        for name, column in CARRIED.items():
            assert line[name] == column[index].as_py()


def test_failed_rows_say_why() -> None:
    failed = failed_rows(the_table())
    assert failed.schema == failures_schema(carried_fields(SHARD.schema))
    (line,) = failed.to_pylist()
    assert (line["id"], line["seed"], line["retries"]) == ("row-3", 2**63 - 1, 2)
    assert (line["error"], line["message"]) == ("RowError", "too long")


def test_a_failed_row_has_no_file_and_a_made_one_no_error() -> None:
    lines = {line["index"]: line for line in the_table().to_pylist()}
    assert lines[3]["file_name"] is lines[3]["sha256"] is lines[3]["seconds"] is None
    assert lines[0]["error"] is lines[0]["message"] is None
    assert [lines[index]["position"] for index in (4, 0, 3)] == [0, 4, 1]
    assert set(lines) == {0, 3, 4}


def test_no_published_name_can_be_taken_by_a_column_of_the_manifest() -> None:
    assert set(metadata_schema([]).names) | set(failures_schema([]).names) <= RESERVED
