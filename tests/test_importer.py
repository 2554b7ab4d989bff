"""`import`: every kind of source, exactly, or one sentence on what is wrong."""

from __future__ import annotations

import csv
import io
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen import importer
from batchgen.errors import Interrupted, UsageError
from batchgen.importer import Imported, import_rows
from batchgen.sources import base, tables

DATA = Path(__file__).parent / "data"


def take(name: str, content: str | bytes, **options: Any) -> tuple[Imported, pa.Table]:
    """Import a file of this name and content; the report and the rows."""
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, name), Path(folder, "out.parquet")
        source.write_bytes(content.encode() if isinstance(content, str) else content)
        done = import_rows(str(source), out, **options)
        assert [path.name for path in Path(folder).iterdir() if path.name.endswith(".tmp")] == []
        return done, pq.read_table(out)


def rows_of(name: str, content: str | bytes, **options: Any) -> list[dict[str, Any]]:
    return take(name, content, **options)[1].to_pylist()


def as_jsonl(rows: list[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


# What goes in comes out

TEXT = st.text(st.characters(codec="utf-8"))
PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="\t\n\r"))
SEED = st.none() | st.integers(0, 2**64 - 1)
SIZE = st.none() | st.integers(-(2**31), 2**31 - 1)
SCALE = st.none() | st.floats(allow_nan=False, allow_infinity=False)


def blank_if_none(value: object) -> object:
    return "" if value is None else repr(value) if isinstance(value, float) else value


@given(st.lists(st.tuples(TEXT, TEXT, SEED, SIZE, SCALE), min_size=1))
def test_csv_round_trip(rows: list[tuple[Any, ...]]) -> None:
    names = ("prompt", "note", "seed", "width", "guidance_scale")
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow(names)
    writer.writerows([blank_if_none(value) for value in row] for row in rows)
    done, table = take("a.csv", file.getvalue())
    assert done.rows == len(rows)
    assert [tuple(row.values()) for row in table.to_pylist()] == rows
    assert table.schema.types == [pa.string(), pa.string(), pa.uint64(), pa.int32(), pa.float64()]


@given(st.lists(st.tuples(PLAIN, PLAIN, SEED), min_size=1), st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_tsv_round_trip(rows: list[tuple[Any, ...]], end: str, is_ended: bool) -> None:
    lines = ["\t".join(("prompt", "note", "seed"))]
    lines += ["\t".join(str(blank_if_none(value)) for value in row) for row in rows]
    table = rows_of("a.tsv", end.join(lines) + (end if is_ended else ""))
    assert [tuple(row.values()) for row in table] == rows


NESTED = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.tuples(st.none() | TEXT, st.none() | st.integers(0, 2**64 - 1), SEED, SCALE), min_size=1))
def test_jsonl_round_trip(rows: list[tuple[Any, ...]]) -> None:
    objects = [dict(zip(("prompt", "number", "seed", "scale"), row, strict=True)) for row in rows]
    assert rows_of("a.jsonl", as_jsonl(objects)) == objects


@given(st.lists(st.lists(NESTED, max_size=4), min_size=1))
def test_jsonl_nested_values_are_carried_exactly(values: list[Any]) -> None:
    done, table = take("a.jsonl", as_jsonl([{"prompt": "", "x": value} for value in values]))
    found = [row["x"] for row in table.to_pylist()]
    if any("JSON text" in note for note in done.notes):
        found = [json.loads(value) for value in found]
    assert all(without_nulls(one) == without_nulls(other) for one, other in zip(found, values, strict=True))


def without_nulls(value: Any) -> Any:
    """An Arrow struct has a null where the object has no such key."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else (type(value), value)


def test_many_chunks_make_one_column_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "ROWS_PER_CHUNK", 2)
    objects = [{"prompt": str(n), "x": n, "y": None} for n in range(7)]
    objects += [
        {"prompt": "big", "x": 2**64 - 1, "y": {"a": [1]}},
        {"prompt": "no x", "y": {"a": [2.5], "b": 1}},
    ]
    _, table = take("a.jsonl", as_jsonl(objects))
    assert table.column("x").to_pylist() == [*range(7), 2**64 - 1, None]
    assert table.column("y").to_pylist()[-2:] == [{"a": [1.0], "b": None}, {"a": [2.5], "b": 1}]
    text = "prompt,seed\n" + "".join(f"p{n},{n}\n" for n in range(7))
    assert rows_of("a.csv", text) == [{"prompt": f"p{n}", "seed": n} for n in range(7)]


def test_row_groups_are_bounded(tmp_path: Path) -> None:
    source = tmp_path / "many.txt"
    source.write_text("".join(f"prompt {n}\n" for n in range(150_000)))
    assert import_rows(str(source), tmp_path / "o.parquet").rows == 150_000
    groups = pq.ParquetFile(tmp_path / "o.parquet").metadata
    assert [groups.row_group(n).num_rows for n in range(groups.num_row_groups)] == [65_536, 65_536, 18_928]


# Small print of each kind

SEEDLESS = {"seed": None, "prompt": ""}
CELLS = {
    "leading zeros and blanks stay": ("prompt,id\n a ,007\n", [{"prompt": " a ", "id": "007"}]),
    "quoted line break": ('prompt,x\n"a\nb","say ""hi"""\n', [{"prompt": "a\nb", "x": 'say "hi"'}]),
    "byte order mark, CRLF": ("\ufeffprompt,x\r\na,b\r\n", [{"prompt": "a", "x": "b"}]),
    "lone CR": ("prompt,x\ra,b\rc,d\r", [{"prompt": "a", "x": "b"}, {"prompt": "c", "x": "d"}]),
    "no final newline": ("prompt\na", [{"prompt": "a"}]),
    "NUL": ("prompt\na\x00b\n", [{"prompt": "a\x00b"}]),
    "line separators are text": ("prompt\na\u2028b\x0bc\x1cd\n", [{"prompt": "a\u2028b\x0bc\x1cd"}]),
    "one empty quoted cell": ('prompt\n""\n', [{"prompt": ""}]),
    "derived seeds": (
        "seed,prompt\n-1,\n,b\n0,c\n",
        [SEEDLESS, SEEDLESS | {"prompt": "b"}, {"seed": 0, "prompt": "c"}],
    ),
    "zero fractions of gappy columns": (
        "prompt,width\na,512.0\nb,\n",
        [{"prompt": "a", "width": 512}, {"prompt": "b", "width": None}],
    ),
    "blanks round numbers": ("prompt,width\na, 512 \n", [{"prompt": "a", "width": 512}]),
}


@pytest.mark.parametrize("case", CELLS)
def test_csv_cells(case: str) -> None:
    content, expected = CELLS[case]
    assert rows_of("a.csv", content) == expected


def test_seeds_are_exact() -> None:
    seeds = [0, 2**32, 2**53 + 1, 2**63 - 1, 2**64 - 1]
    as_csv = "prompt,seed\n" + "".join(f"a,{seed}\n" for seed in seeds)
    for name, content in (
        ("a.csv", as_csv),
        ("a.jsonl", as_jsonl([{"prompt": "a", "seed": s} for s in seeds])),
    ):
        assert [row["seed"] for row in rows_of(name, content)] == seeds


def test_tsv_quotes_are_ordinary() -> None:
    text = 'prompt\tx\n"a\tb"\n"" c\t"\n'
    assert rows_of("a.tsv", text) == [{"prompt": '"a', "x": 'b"'}, {"prompt": '"" c', "x": '"'}]


def test_txt_is_verbatim_and_counts_blank_lines() -> None:
    done, table = take("a.txt", 'a "b",\tc \n\n  \r\nprompt\r\n last')
    assert table.column("prompt").to_pylist() == ['a "b",\tc ', "prompt", " last"]
    assert done.notes == ("blank lines that are no rows: 2, the first of them line 2",)


def test_empty_negative_prompt_stays_and_is_told() -> None:
    done, table = take("a.csv", "prompt,negative_prompt\na,\nb,c\n")
    assert table.column("negative_prompt").to_pylist() == ["", "c"]
    assert "1 cells of negative_prompt are empty" in done.notes[0]


def test_jsonl_null_negative_prompt_is_null() -> None:
    _, table = take("a.jsonl", as_jsonl([{"prompt": "a", "negative_prompt": None}, {"prompt": "b"}]))
    assert table.schema.field("negative_prompt").type == pa.string()
    assert table.column("negative_prompt").null_count == 2


def test_jsonl_list_of_no_one_type_is_json_text() -> None:
    objects = [
        {"prompt": "a", "x": [["left of", 0], 2**64]},
        {"prompt": "b", "x": None},
        {"prompt": "c", "x": {}},
    ]
    done, table = take("a.jsonl", as_jsonl(objects))
    assert table.column("x").to_pylist() == ['[["left of", 0], 18446744073709551616]', None, "{}"]
    assert done.notes == ("column x holds lists or objects of no one type: it is carried as JSON text",)


def test_columns_are_mapped_and_others_carried() -> None:
    text = "caption,prompt,size\na cat,short,64\n"
    columns = {"prompt": "caption", "short": "prompt", "width": "size"}
    assert rows_of("a.csv", text, columns=columns) == [{"prompt": "a cat", "short": "short", "width": 64}]


# Faults: one clear sentence each

FAULTS = {
    ("a.csv", ""): "is empty: its first line must name the columns",
    ("b.csv", "prompt,x\n"): "has no rows",
    ("c.csv", "prompt,prompt\na,b\n"): "names columns twice: 'prompt'",
    (
        "d.csv",
        "Prompt,x\na,b\n",
    ): "no column prompt; its columns are 'Prompt', 'x'. Add --column prompt=Prompt",
    ("e.csv", "a,caption_en\na,b\n"): "Add --column prompt=caption_en",
    ("f.csv", "a,b\na,b\n"): "Add --column prompt=NAME",
    ("g.csv", ",prompt\n0,b\n"): "--column index=",
    (
        "semicolons.csv",
        "prompt;width;seed\na;64;3\n",
    ): "one column 'prompt;width;seed' was found; if it has semicolons between its cells, save it with commas",
    ("tabs.csv", "prompt\twidth\na\t64\n"): "if it has tabs between its cells, name it NAME.tsv",
    ("commas.tsv", "prompt,width\na,64\n"): "if it has commas between its cells, name it NAME.csv",
    (
        "h.csv",
        "prompt,x\na\nb,c,d\n",
    ): "2 faults:\n  line 2: 1 cell where the header names 2\n  line 3: 3 cells",
    ("i.csv", "prompt,width\na,3.5\n"): "line 2: column width is '3.5'; a whole number of 32 bits",
    ("j.csv", 'prompt,width\n"a\nb",12x\n'): "line 2: column width is '12x'",
    (
        "k.csv",
        "prompt,seed\na,18446744073709551616\n",
    ): "column seed is '18446744073709551616'; a whole number from",
    ("jj.csv", 'prompt,width\n"a\r\nb\n",1\nc,12x\n'): "line 5: column width is '12x'",
    ("kk.csv", "prompt,seed\na,5.0\n"): "column seed is '5.0'",
    ("l.csv", "prompt,seed\na,-2\n"): "column seed is '-2'",
    ("m.csv", "prompt,guidance_scale\na,nan\nb,1e999\nc,7_5\n"): "3 faults",
    ("n.csv", "prompt,width\na,99999999999\n"): "column width is '99999999999'",
    ("o.csv", "prompt,width\na,٣\n"): "column width is '٣'",
    ("p.csv", 'prompt,x\n"a,b\n'): "the row that begins at line 2 is not csv",
    ("q.csv", 'prompt,x\n"a"b,c\n'): "the row that begins at line 2 is not csv",
    ("r.csv", b"prompt\nok\n\xff\n"): "line 3: byte 0xff at offset 10 is not UTF-8",
    ("s.csv", "prompt\na\n".encode("utf-16")): "line 1: byte 0xff at offset 0 is not UTF-8",
    ("t.csv", "prompt,seed\n" + "a,x\n" * 25): "25 faults:\n  line 2: column seed is 'x'",
    ("a.tsv", 'prompt\tx\n"a\tb\tc"\n'): "line 2: 3 cells where the header names 2",
    ("a.txt", "\n\n"): "has no rows",
    ("a.jsonl", ""): "has no rows",
    ("b.jsonl", "\n"): "has no rows",
    ("c.jsonl", '{"prompt": "a"}\n[1]\n'): "line 2 is [1]; every line must be one object",
    ("d.jsonl", '{"prompt": "a"}\n{"prompt": \n'): "line 2 is not JSON",
    ("e.jsonl", '{"prompt": "a", "x": NaN}\n'): "NaN is no JSON number",
    ("f.jsonl", '{"prompt": "a", "x": 1e999}\n'): "1e999 is beyond a double's range",
    ("g.jsonl", '{"prompt": "a", "x": {"k": 1, "k": 2}}\n'): "the key 'k' stands twice",
    (
        "h.jsonl",
        '{"prompt": "a", "x": 1}\n{"prompt": "b", "x": "y"}\n',
    ): "line 2: column x is 'y', of type string",
    (
        "i.jsonl",
        '{"prompt": "a", "x": -1}\n{"prompt": "b", "x": 9223372036854775808}\n',
    ): "line 1: column x is -1",
    (
        "j.jsonl",
        '{"prompt": "a", "x": 9007199254740993}\n{"prompt": "b", "x": 0.5}\n',
    ): "line 1: column x is 9007",
    ("k.jsonl", '{"prompt": "a", "x": 18446744073709551616}\n'): "an integer outside -2^63 to 2^64-1",
    ("l.jsonl", '{"prompt": "a", "seed": 1.0}\n{"prompt": "b", "seed": "12x"}\n'): "2 faults",
    ("m.jsonl", '{"prompt": 5}\n'): "line 1: column prompt is 5; a text or null is needed",
    ("n.jsonl", '{"prompt": "a", "width": true}\n'): "column width is True",
    ("o.jsonl", '{"prompt": "\\ud800"}\n'): "line 1: column prompt is '\\ud800'",
    ("p.jsonl", '{"prompt": "a", "\\ud800": 1}\n'): "line 1 cannot be taken",
    ("q.jsonl", '{"prompt": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}\n"): "line 1 cannot be taken",
    ("r.jsonl", '{"prompt": "a", "x": [1]}\n{"prompt": "a", "x": "[1]"}\n'): "line 2: column x is '[1]'",
    ("a.json", "[]"): "import takes .csv, .tsv, .txt, .jsonl",
    ("a.parquet", "PAR1"): "is Parquet already",
}


@pytest.mark.parametrize(("name", "content"), FAULTS, ids=[name for name, _ in FAULTS])
def test_fault_is_told_and_nothing_written(name: str, content: str | bytes, tmp_path: Path) -> None:
    source = tmp_path / name
    source.write_bytes(content.encode() if isinstance(content, str) else content)
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError) as error:
        import_rows(str(source), tmp_path / "out" / "o.parquet")
    assert FAULTS[name, content] in str(error.value)
    assert name in str(error.value)
    assert list((tmp_path / "out").iterdir()) == []


def test_faults_are_counted_and_the_first_20_shown(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,seed\n" + "a,x\n" * 25)
    with pytest.raises(UsageError, match="and 5 more") as error:
        import_rows(str(tmp_path / "a.csv"), tmp_path / "o.parquet")
    assert str(error.value).count("line ") == 20


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"prompt": "capton"}, "has no column 'capton'; its columns are 'caption', 'prompt'"),
        ({"prompt": "caption"}, "two columns have one name; rename the other one too: 'prompt'"),
        ({"prompt": "caption", "x": "caption"}, "--column takes a column twice: 'caption'"),
    ],
)
def test_wrong_mapping(columns: dict[str, str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        rows_of("a.csv", "caption,prompt\na,b\n", columns=columns)


def test_existing_file_is_kept_unless_told(tmp_path: Path) -> None:
    source, out = tmp_path / "a.txt", tmp_path / "o.parquet"
    source.write_text("a cat\n")
    out.write_text("precious")
    with pytest.raises(UsageError, match="exists already; name another file, or add --overwrite"):
        import_rows(str(source), out)
    assert out.read_text() == "precious"
    import_rows(str(source), out, overwrite=True)
    assert pq.read_table(out).to_pylist() == [{"prompt": "a cat"}]


def test_output_must_have_a_place_and_a_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a cat\n")
    with pytest.raises(UsageError, match="there is no folder"):
        import_rows(str(tmp_path / "a.txt"), tmp_path / "no" / "o.parquet")
    with pytest.raises(UsageError, match=r"must be named NAME\.parquet"):
        import_rows(str(tmp_path / "a.txt"), tmp_path / "o.pq")


def test_cells_longer_than_csv_s_own_limit_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'a "cat", ' * 30_000
    quoted = text.replace('"', '""')
    assert rows_of("a.csv", f'prompt,x\n"{quoted}",1\n') == [{"prompt": text, "x": "1"}]
    monkeypatch.setattr(tables, "CHARACTERS_PER_CHUNK", 100)
    with pytest.raises(UsageError, match=r"row that begins at line 2 is not csv .field larger than field limit .100"):
        rows_of("a.csv", f'prompt,x\n"{quoted}",1\n')


@pytest.mark.parametrize("name", ["prompts.xlsx", "in/prompts.xlsx", "p.csv.gz", "p.parquet", "a\\b", "a b", "a/b/c"])
def test_a_file_that_is_not_there_is_not_sought_on_the_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importer, "HubTable", lambda *asked: pytest.fail(f"{asked} was sought"))
    with pytest.raises(UsageError, match=f"there is no file {re.escape(name)}; import takes .csv, .tsv"):
        import_rows(name, tmp_path / "o.parquet")


def test_missing_file_and_split_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no file promts\.csv"):
        import_rows("promts.csv", tmp_path / "o.parquet")
    (tmp_path / "a.txt").write_text("a cat\n")
    with pytest.raises(UsageError, match="only a data set has splits"):
        import_rows(str(tmp_path / "a.txt"), tmp_path / "o.parquet", split="train")


def test_failing_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("a cat\n")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("batchgen.filesystem.os.fsync", full)
    with pytest.raises(Interrupted, match="the disk is full"):
        import_rows(str(tmp_path / "a.txt"), tmp_path / "o.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


# Real prompt sets, against an independent reading


def test_parti_prompts(tmp_path: Path) -> None:
    columns = {"prompt": "Prompt"}
    done = import_rows(str(DATA / "parti_prompts.tsv"), tmp_path / "o.parquet", columns=columns)
    lines = (DATA / "parti_prompts.tsv").read_bytes().decode().split("\n")[1:-1]
    assert done.rows == len(lines) == 1632
    table = pq.read_table(tmp_path / "o.parquet")
    assert table.column_names == ["prompt", "Category", "Challenge", "Note"]
    assert [tuple(row.values()) for row in table.to_pylist()] == [tuple(line.split("\t")) for line in lines]
    assert sum('"' in prompt for prompt in table.column("prompt").to_pylist()) == 22


def test_geneval(tmp_path: Path) -> None:
    done = import_rows(str(DATA / "geneval_evaluation_metadata.jsonl"), tmp_path / "o.parquet")
    objects = [json.loads(line) for line in (DATA / "geneval_evaluation_metadata.jsonl").open(encoding="utf-8")]
    assert done.rows == len(objects) == 553
    assert done.columns == ("tag", "include", "prompt", "exclude")
    for row, thing in zip(pq.read_table(tmp_path / "o.parquet").to_pylist(), objects, strict=True):
        assert {**row, "include": json.loads(row["include"])} == {"exclude": None, **thing}


@pytest.mark.parametrize(("name", "num_rows"), [("color", 860), ("complex", 1000)])
def test_t2i_compbench(name: str, num_rows: int, tmp_path: Path) -> None:
    source = DATA / f"t2i_compbench_{name}.txt"
    done = import_rows(str(source), tmp_path / "o.parquet")
    expected = source.read_bytes().decode().removesuffix("\r\n").split("\r\n")
    assert done == Imported(num_rows, ("prompt",), ())
    assert pq.read_table(tmp_path / "o.parquet").column("prompt").to_pylist() == expected


def test_unigenbench(tmp_path: Path) -> None:
    source = DATA / "unigenbench_en.csv"
    columns = {"prompt": "prompt_en", "id": "index"}
    done = import_rows(str(source), tmp_path / "o.parquet", columns=columns)
    with source.open(newline="", encoding="utf-8") as file:
        expected = [tuple(row) for row in csv.reader(file)][1:]
    assert done == Imported(200, ("id", "prompt", "sub_dims_en"), ())
    assert [tuple(row.values()) for row in pq.read_table(tmp_path / "o.parquet").to_pylist()] == expected
    assert all(json.loads(row[2]) for row in expected)


def test_sdxl_sizes_are_40() -> None:
    text = (DATA / "sdxl_sizes.csv").read_text().replace("width,height", "prompt,width,height", 1)
    table = rows_of("a.csv", text.replace("\n", "\na,")[: -len("a,")].replace("a,prompt", "prompt"))
    assert len({(row["width"], row["height"]) for row in table}) == 40
