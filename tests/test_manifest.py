"""Which files and columns a manifest is, and what is no manifest."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen import manifest
from batchgen.errors import UsageError
from batchgen.manifest import open_manifest
from batchgen.manifest_files import find_files
from tests import runs
from tests.plans import folder, frozen, pattern_job, planned, write


def tree(path: Path, *names: str) -> Path:
    for number, name in enumerate(names):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"prompt": [f"prompt {number}"]}), path / name)
    return path


@pytest.fixture
def files(tmp_path: Path) -> Path:
    path = tree(
        tmp_path, "b.parquet", "a.parquet", "sub/c.parquet", ".hidden.parquet", "_tmp/d.parquet", ".git/e.parquet"
    )
    (path / "README.txt").write_text("no manifest")
    (path / "empty").mkdir()
    return path


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["."], ["a.parquet", "b.parquet", "sub/c.parquet"]),
        (["b.parquet", "a.parquet"], ["b.parquet", "a.parquet"]),
        (["b.parquet", "./b.parquet", "sub/../b.parquet", "."], ["b.parquet", "a.parquet", "sub/c.parquet"]),
        (["*.parquet"], ["a.parquet", "b.parquet"]),
        (["**/*.parquet"], ["_tmp/d.parquet", "a.parquet", "b.parquet", "sub/c.parquet"]),
        (["s*"], ["sub/c.parquet"]),
        ([".hidden.parquet"], [".hidden.parquet"]),
        (["?.parquet", "sub"], ["a.parquet", "b.parquet", "sub/c.parquet"]),
    ],
)
def test_files_folders_and_globs_name_each_file_once(files: Path, names: list[str], found: list[str]) -> None:
    paths = find_files([files / name for name in names])
    assert [str(path.relative_to(files)) for path in paths] == [*dict.fromkeys(found)]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("empty", "folder {path}/empty holds no *.parquet file; {path}/empty holds nothing"),
        ("none-*", "{path}/none-* matches no file; the folder {path} holds .git, .hidden.parquet, README.txt, _tmp"),
        (
            "away/x.parquet",
            "{path}/away/x.parquet matches no file; the folder {path}/away holds nothing: it does not exist",
        ),
    ],
)
def test_a_name_without_a_file_is_told_what_is_there(files: Path, name: str, sentence: str) -> None:
    with pytest.raises(UsageError) as refused:
        find_files([files / "a.parquet", files / name])
    assert sentence.format(path=files) in str(refused.value)


def test_an_empty_name_is_not_the_current_folder(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    ended = runs.batchgen("plan", "")
    assert (ended.code, "a name is empty; name a file, or . for the folder that" in ended.err) == (2, True)


@pytest.mark.parametrize(("number", "end"), [(10, "c09"), (11, "c09 and 1 more"), (13, "c09 and 3 more")])
def test_ten_of_many_names_are_listed(tmp_path: Path, number: int, end: str) -> None:
    for name in range(number):
        (tmp_path / f"c{name:02d}").touch()
    with pytest.raises(UsageError) as refused:
        find_files([tmp_path / "x.parquet"])
    assert str(refused.value).endswith(f"holds {', '.join(f'c{name:02d}' for name in range(9))}, {end}")


def test_a_file_with_glob_letters_in_its_name_is_itself(tmp_path: Path) -> None:
    tree(tmp_path, "a[1].parquet", "a1.parquet")
    assert find_files([tmp_path / "a[1].parquet"]) == (tmp_path / "a[1].parquet",)


_NO_PARQUET = r"m.parquet (is not a Parquet file \(it begins with .*`batchgen import .*csv|cannot be read: .*thrift)"


@pytest.mark.parametrize(
    "content", [b"", b"prompt,width\na cat,64\n", b"PAR1", b"PAR1" + bytes(40) + b"PAR1", bytes(range(100))]
)
def test_what_is_no_parquet_is_said_to_be_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.parquet").write_bytes(content)
    with pytest.raises(UsageError, match=_NO_PARQUET):
        open_manifest([tmp_path / "m.parquet"])


def test_a_manifest_cut_or_altered_anywhere_is_never_a_traceback(tmp_path: Path) -> None:
    prompts = [f"prompt {n} " + "word " * (n % 7) for n in range(200)]
    table = pa.table({"prompt": prompts, "seed": range(200)})
    pq.write_table(table, tmp_path / "whole.parquet", row_group_size=50)
    whole = (tmp_path / "whole.parquet").read_bytes()
    path, num_refused = tmp_path / "m.parquet", 0
    places = np.random.default_rng(0).integers(0, len(whole), 150).tolist()
    damaged = [whole[:place] for place in places[:50]]
    damaged += [whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :] for place in places[50:]]
    for content in damaged:
        path.write_bytes(content)
        try:
            for _ in open_manifest([path]).batches():
                pass
        except UsageError:
            num_refused += 1
    assert num_refused > 50


@pytest.mark.parametrize(
    ("columns", "mapping", "sentence"),
    [
        ({}, {}, "there is no column 'prompt'; found no columns. Name the right one with --set columns.prompt='…'"),
        ({"Prompt": ["a"]}, {}, "found Prompt. Name the right one with --set columns.prompt='Prompt'"),
        ({"caption": ["a"], "n": [1]}, {}, "found caption, n. Name the right one with --set columns.prompt='caption'"),
        ({"prompt": ["a"]}, {"prompt": "text"}, "prompt = 'text': the manifest has no such column; it has prompt"),
        ({"prompt": ["a"], "text": ["b"]}, {"prompt": "text"}, "the manifest also has a column 'prompt'; map that"),
        ({"prompt": ["a"]}, {"negative_prompt": "prompt"}, "found prompt (taken for another name by [columns])"),
    ],
)  # fmt: skip
def test_columns_that_are_not_there_are_named(
    tmp_path: Path, columns: dict[str, Any], mapping: dict[str, str], sentence: str
) -> None:
    with pytest.raises(UsageError) as refused:
        open_manifest(write(tmp_path, columns), mapping)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("mapping", "read"),
    [
        ({"prompt": "caption"}, {"prompt": "c", "n": "n"}),
        ({"prompt": "caption", "negative_prompt": "caption"}, {"prompt": "c", "negative_prompt": "c", "n": "n"}),
        ({"prompt": "caption", "caption": "n"}, {"prompt": "c", "caption": "n"}),
        ({"prompt": "n", "n": "caption"}, {"prompt": "n", "n": "c"}),
    ],
)
def test_columns_are_read_under_the_names_that_the_job_gives_them(
    tmp_path: Path, mapping: dict[str, str], read: dict[str, str]
) -> None:
    opened = open_manifest(write(tmp_path, {"caption": ["c"], "n": ["n"]}), mapping)
    assert [row for batch in opened.batches() for row in batch.to_pylist()] == [read]


def test_a_name_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    with pytest.raises(UsageError, match="column 'prompt' is there twice"):
        open_manifest(write(tmp_path, twice))
    nested = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    with pytest.raises(UsageError, match=r"column 'of\.element\.x' is there twice"):
        open_manifest(write(tmp_path, {"prompt": ["a"], "of": pa.ListArray.from_arrays([0, 1], nested)}))


PAIRS = [
    (pa.int8(), pa.int64(), pa.int64()),
    (pa.int32(), pa.float64(), pa.float64()),
    (pa.string(), pa.large_string(), pa.large_string()),
    (pa.string_view(), pa.dictionary(pa.int32(), pa.string()), pa.large_string()),
    (pa.null(), pa.string(), pa.string()),
    (pa.timestamp("ms"), pa.timestamp("us"), pa.timestamp("us")),
    (pa.list_(pa.int8()), pa.list_(pa.int64()), pa.list_(pa.int64())),
]


@pytest.mark.parametrize(("one", "two", "both"), PAIRS, ids=str)
def test_files_may_differ_in_the_width_and_encoding_of_a_column(
    tmp_path: Path, one: pa.DataType, two: pa.DataType, both: pa.DataType
) -> None:
    values = {"string": ["1", None], "list": [[1], None]}.get(str(both).removeprefix("large_").split("<")[0], [1, None])
    for first, second in ((one, two), (two, one)):
        tables = [
            {"prompt": [f"a {n}", f"b {n}"], "own": pa.nulls(2) if kind == pa.null() else _column(values, kind)}
            for n, kind in enumerate((first, second))
        ]
        opened = open_manifest(write(tmp_path, *tables))
        assert opened.schema.field("own").type.equals(both) or both.num_fields
        columns = [batch.column("own") for batch in opened.batches()]
        assert {column.type for column in columns} == {opened.schema.field("own").type}
        assert [column.is_valid().to_pylist() for column in columns if column.null_count < 2] == [[True, False]] * (
            1 if pa.null() in (one, two) else 2
        )


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_dictionary(kind):
        return pa.array(values).dictionary_encode()
    return pa.array(values, kind)


def test_columns_that_a_file_lacks_are_null_there(tmp_path: Path) -> None:
    one = {"prompt": ["a"], "width": pa.array([72], pa.int16())}
    two = {"note": ["n"], "prompt": ["b"]}
    plan = frozen(tmp_path, one, two, {"prompt": pa.array([], pa.string())})
    assert [(row["prompt"], row["width"], row["carried:note"]) for row in plan.by_position] == [
        ("a", 72, None),
        ("b", 64, "n"),
    ]


@pytest.mark.parametrize(
    ("column", "first", "second"),
    [
        ("prompt", ["a"], [5]),
        ("own", [1], ["a"]),
        ("own", [True], [1]),
        ("own", [{"a": 1}], [[1]]),
        ("seed", ["1"], [1]),
        ("own", ["a"], [b"a"]),
        ("own", [["a"]], [[b"a"]]),
        ("own", [Decimal("123456789012.34")], pa.array([0.5], pa.float32())),
        ("own", [{"a": Decimal("0.1")}], [{"a": 0.5}]),
    ],
)
def test_files_that_disagree_about_a_column_are_named(tmp_path: Path, column: str, first: Any, second: Any) -> None:
    tables = [{"prompt": ["p"], column: values} for values in (first, second)]
    with pytest.raises(UsageError, match=rf"column '{column}' is .* in .*001.parquet but .* in an earlier file"):
        open_manifest(write(tmp_path, *tables))


def test_seeds_stay_exact_whatever_types_the_files_have(tmp_path: Path) -> None:
    seeds: list[pa.Array] = [
        pa.array([2**64 - 1, 2**53 + 1], pa.uint64()),
        pa.array([2**63 - 1, -1], pa.int64()),
        pa.array([3.0, 2.0**53]),
    ]
    plan = frozen(tmp_path, *({"prompt": ["a", "b"], "seed": column} for column in seeds))
    found = [row["seed"] for row in plan.by_position]
    assert found[:3] + found[4:] == [2**64 - 1, 2**53 + 1, 2**63 - 1, 3, 2**53]


def test_a_carried_number_that_the_common_type_cannot_hold_is_named(tmp_path: Path) -> None:
    one, two = {"prompt": ["a"], "own": [2**53 + 1]}, {"prompt": ["b"], "own": [0.5]}
    with pytest.raises(
        UsageError, match=r"column 'own' is int64 in .*000.parquet and double over all files, which does"
    ):
        planned(tmp_path, one, two)


@pytest.mark.parametrize(
    "columns", [{"prompt": pa.array([], pa.string())}, {"prompt": pa.nulls(0), "seed": pa.nulls(0)}]
)
def test_a_manifest_without_rows_is_refused(tmp_path: Path, columns: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"000.parquet holds no row"):
        planned(tmp_path, columns)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5).filter(any), st.integers(1, 4))
def test_every_row_has_its_place(sizes: list[int], read_rows: int) -> None:
    with folder() as path, pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifest, "READ_ROWS", read_rows)
        names = [[f"{file}-{row}" for row in range(size)] for file, size in enumerate(sizes)]
        files = write(path / "m", *({"prompt": pa.array(rows, pa.string())} for rows in names))
        opened = open_manifest([path / "m"])
        rows = [text for batch in opened.batches() for text in batch.column("prompt").to_pylist()]
        assert rows == [text for file in names for text in file]
        assert opened.num_rows == len(rows)
        for number, text in enumerate(rows):
            file, row = opened.place(number)
            assert text == f"{files.index(file)}-{row}"


def test_nested_columns_travel_unchanged(tmp_path: Path) -> None:
    nested = pa.array(
        [[{"a": [1, None], "b": "x"}], None, []], pa.list_(pa.struct([("a", pa.list_(pa.int8())), ("b", pa.string())]))
    )
    pairs = pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int64()))
    plan = frozen(tmp_path, {"prompt": ["a", "b", "c"], "nested": nested, "pairs": pairs})
    rows = plan.by_position
    assert [row["carried:nested"] for row in rows] == nested.to_pylist()
    assert [row["carried:pairs"] for row in rows] == pairs.to_pylist()


def test_a_column_with_a_name_of_ours_is_refused_with_the_way_out(tmp_path: Path) -> None:
    table = {"prompt": ["a"], "sha256": ["x"]}
    with pytest.raises(UsageError, match=r"column 'sha256' has a name .* --set columns.manifest_sha256='sha256'"):
        planned(tmp_path, table)
    done = planned(tmp_path, table, overrides=["columns.manifest_sha256='sha256'"])
    assert done.draft.survey.manifest.carried == ("manifest_sha256",)
    assert pattern_job("columns.manifest_sha256='sha256'").columns == {"manifest_sha256": "sha256"}


def test_the_index_that_pandas_writes_is_no_column(tmp_path: Path) -> None:
    """It comes with the rows that a table was joined or filtered of, and would make every row another one."""
    table = pd.DataFrame({"prompt": ["a", "b", "c"], "own": [1, 2, 3]})
    table.iloc[[1, 2, 0]].to_parquet(tmp_path / "m.parquet")
    assert "__index_level_0__" in pq.read_schema(tmp_path / "m.parquet").names
    manifest = open_manifest([tmp_path / "m.parquet"])
    assert manifest.schema.names == ["prompt", "own"]
    assert manifest.index_columns == ("__index_level_0__",)
    assert [row["own"] for batch in manifest.batches() for row in batch.to_pylist()] == [2, 3, 1]
    ended = runs.batchgen("plan", tmp_path / "m.parquet", "--model", "pattern")
    assert "column '__index_level_0__' is an index of pandas' and left out" in ended.err
    asked = open_manifest([tmp_path / "m.parquet"], {"id": "__index_level_0__"})
    assert asked.schema.names == ["prompt", "own", "id"]
