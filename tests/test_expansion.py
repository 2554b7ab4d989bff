"""`import` with grids, sizes and templates: the whole product, the same bytes each time, or one sentence why not."""

from __future__ import annotations

import itertools
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen import product
from batchgen.axes import mark
from batchgen.errors import UsageError
from batchgen.expansion import Expansion, recipe
from batchgen.importer import import_rows
from batchgen.names import file_stem
from batchgen.sources import base
from batchgen.template import read_template
from tests import runs

DATA = Path(__file__).parent / "data"
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\n\r"), min_size=1, max_size=8)
VALUE = TEXT.filter(lambda text: bool(text.strip()))
VALUES = st.lists(VALUE, min_size=1, max_size=4, unique=True)


def table(source: str | None, folder: Path, name: str = "out", **options: Any) -> pa.Table:
    out = folder / f"{name}.parquet"
    done = import_rows(source, out, expansion=Expansion(**options))
    found = pq.read_table(out)
    assert (done.rows, list(done.columns)) == (found.num_rows, found.column_names)
    return found


def rows(source: str | None, folder: Path, name: str = "out", **options: Any) -> list[dict[str, Any]]:
    return list(table(source, folder, name, **options).to_pylist())


def listed(folder: Path, name: str, values: Sequence[str]) -> str:
    """A grid of a file."""
    path = folder / f"{name}.list"
    path.write_bytes("".join(f"{value}\n" for value in values).encode())
    return f"{name}=@{path}"


def csv_of(folder: Path, text: str) -> str:
    (folder / "source.csv").write_text(text, encoding="utf-8")
    return str(folder / "source.csv")


# The product


@settings(max_examples=40, deadline=None)
@given(VALUES, VALUES, st.lists(st.integers(1, 99), min_size=1, max_size=3, unique=True), st.integers(1, 5))
def test_every_combination_once_and_in_order(colors: list[str], things: list[str], steps: list[int], num: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        grid = (
            listed(folder, "color", colors),
            f"steps={','.join(map(str, steps))}",
            listed(folder, "thing", things),
        )
        made = rows(None, folder, templates=("{thing}: {color} {{}}",), grid=grid, num_images=num)
    wanted = [
        {"prompt": f"{thing}: {color} {{}}", "color": color, "steps": step, "thing": thing, "num_images": num}
        for color, step, thing in itertools.product(colors, steps, things)
    ]
    assert [{key: value for key, value in row.items() if key != "id"} for row in made] == wanted
    assert len({row["id"] for row in made}) == len(made)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_ids_depend_on_no_order_and_survive_more_values(data: st.DataObject) -> None:
    lists = {"color": data.draw(VALUES), "thing": data.draw(VALUES), "guidance_scale": ["4", "7.5", "-1e-05"]}
    turned = {name: data.draw(st.permutations(lists[name])) for name in data.draw(st.permutations(list(lists)))}
    turned["thing"] = [*turned["thing"], "one more thing"]
    templates = ("{color} {thing}",)

    def ids(grids: Mapping[str, list[str]], folder: Path, name: str) -> dict[str, dict[str, Any]]:
        found = rows(
            None, folder, name, templates=templates, grid=tuple(listed(folder, *pair) for pair in grids.items())
        )
        return {row["id"]: row for row in found}

    with tempfile.TemporaryDirectory() as name:
        before, after = ids(lists, Path(name), "before"), ids(turned, Path(name), "after")
    assert before.items() <= after.items()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=9), st.integers(1, 7))
def test_rows_of_a_source_keep_their_ids_wherever_they_stand(prompts: list[tuple[str, str]], chunk: int) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        lines = [json.dumps({"prompt": one, "note": other}) + "\n" for one, other in prompts]
        for place, some in (("a", lines), ("b", lines[::-1])):
            (folder / f"{place}.jsonl").write_text("".join(some))
        one = rows(str(folder / "a.jsonl"), folder, "a", grid=("steps=2,3",))
        patch.setattr(product, "ROWS_PER_CHUNK", chunk)
        other = rows(str(folder / "b.jsonl"), folder, "b", grid=("steps=2,3",))
    assert [(row["prompt"], row["note"], row["steps"]) for row in one] == [
        (*pair, steps) for pair in prompts for steps in (2, 3)
    ]
    key = "id"
    assert sorted(one, key=lambda row: row[key]) == sorted(other, key=lambda row: row[key])
    assert len({row["id"] for row in one}) == 2 * len(prompts)


@given(st.lists(VALUE | st.integers(-9, 9) | st.floats(allow_nan=False, allow_infinity=False), unique=True))
def test_marks_are_safe_and_tell_values_apart(values: list[Any]) -> None:
    for kind in (str, int, float):
        some = {one for one in values if type(one) is kind}
        assert len({mark(one) for one in some}) == len(some)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", mark(one)) for one in values)


def test_ids_are_readable_and_become_file_names(tmp_path: Path) -> None:
    source = csv_of(tmp_path, "id,prompt\ncat-07,a cat\n")
    made = rows(source, tmp_path, grid=("steps=20,30", "guidance_scale=4,7.5"))
    assert [row["id"] for row in made] == [
        "cat-07_guidance_scale-4_steps-20", "cat-07_guidance_scale-7-5_steps-20",
        "cat-07_guidance_scale-4_steps-30", "cat-07_guidance_scale-7-5_steps-30",
    ]  # fmt: skip
    assert [file_stem(row["id"], 0) for row in made] == [row["id"] for row in made]


def test_templates_take_columns_and_multiply_when_there_are_several(tmp_path: Path) -> None:
    source = csv_of(tmp_path, "id,animal,seed\na,red fox,1\nb,{curly},2\n")
    (tmp_path / "t.txt").write_text("a photo of a {animal}\n\nseed {seed}: {animal}, {style}\n")
    with pytest.raises(UsageError, match=r"has no \{style\}, so that rows for each style would be the same"):
        rows(source, tmp_path, templates=(f"@{tmp_path / 't.txt'}",), grid=("style=ink,oil",))
    (tmp_path / "t.txt").write_text("{style} of a {animal}\n\nseed {seed}: {animal}, {style}\n")
    made = table(source, tmp_path, templates=(f"@{tmp_path / 't.txt'}",), grid=("style=ink,oil",))
    assert made["prompt"].to_pylist() == [
        "ink of a red fox", "oil of a red fox", "seed 1: red fox, ink", "seed 1: red fox, oil",
        "ink of a {curly}", "oil of a {curly}", "seed 2: {curly}, ink", "seed 2: {curly}, oil",
    ]  # fmt: skip
    assert made.schema.field("seed").type == pa.uint64()
    assert set(made["template"].to_pylist()) == {"{style} of a {animal}", "seed {seed}: {animal}, {style}"}
    assert made["id"].to_pylist()[1].startswith("a_style-oil_template-style-of-a-animal-")


def test_a_template_without_a_grid_keeps_rows_as_they_are(tmp_path: Path) -> None:
    source = csv_of(tmp_path, "prompt,id\na fox,7\na fox,7\n")
    assert rows(source, tmp_path, templates=("{prompt}, ink",), num_images=2) == [
        {"id": "7", "prompt": "a fox, ink", "num_images": 2}
    ] * 2  # fmt: skip


def test_rows_that_are_alike_are_numbered(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a fox\na cat\na fox\n")
    made = rows(str(tmp_path / "a.txt"), tmp_path, grid=("seed=1",))
    first, cat, second = [row["id"] for row in made]
    assert re.fullmatch(r"a-fox-[0-9a-f]{16}_seed-1", first)
    assert second == first.replace("_seed", "-2_seed")
    assert cat.startswith("a-cat-")


def test_a_data_set_is_a_source_like_any_other(tmp_path: Path) -> None:
    data = datasets.Dataset.from_dict({"id": [3, 4], "animal": ["fox", "owl"], "scores": [[1.5], []]})
    data.save_to_disk(str(tmp_path / "set"))
    made = rows(str(tmp_path / "set"), tmp_path, templates=("a {color} {animal}",), grid=("color=red,blue",))
    assert [row["id"] for row in made] == ["3_color-red", "3_color-blue", "4_color-red", "4_color-blue"]
    assert made[2] == {
        "id": "4_color-red", "prompt": "a red owl", "color": "red", "animal": "owl", "scores": []
    }  # fmt: skip


def test_a_product_of_any_size_is_made_a_chunk_at_a_time(tmp_path: Path) -> None:
    """A trillion rows: whatever held more than a chunk of them would never end."""
    grid = tuple(listed(tmp_path, name, [f"{name} {n}" for n in range(1000)]) for name in "abcd")
    asked = Expansion(grid=grid, templates=("{a} {b} {c} {d}",), max_images=10**12)
    made = product.Product(recipe(asked, [], None), "the grid")
    made.read(lambda: base.Nothing().batches({}, []))
    batch = next(made.rows(base.Nothing().batches({}, [])))
    assert batch.num_rows == base.ROWS_PER_CHUNK
    assert batch.column("prompt")[65_000].as_py() == "a 0 b 0 c 65 d 0"


def test_long_rows_make_short_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "CHARACTERS_PER_CHUNK", 40_000)
    (tmp_path / "p.txt").write_text("".join(f"{letter * 10_000}\n" for letter in "abc"))
    rows(str(tmp_path / "p.txt"), tmp_path, grid=("seed=1,2,3,4,5",))
    groups = pq.ParquetFile(tmp_path / "out.parquet").metadata
    assert [groups.row_group(n).num_rows for n in range(groups.num_row_groups)] == [3, 3, 3, 3, 3]


# Sizes


def test_each_row_in_all_sizes_or_in_one_that_its_id_draws(tmp_path: Path) -> None:
    sizes = DATA / "sdxl_sizes.csv"
    pairs = {tuple(map(int, line.split(","))) for line in sizes.read_text().split()[1:]}
    (tmp_path / "p.txt").write_text("".join(f"prompt {n}\n" for n in range(400)))
    every = rows(str(tmp_path / "p.txt"), tmp_path, sizes=sizes)
    assert len(every) == 400 * len(pairs) == 16_000
    assert {(row["width"], row["height"]) for row in every[: len(pairs)]} == pairs
    assert {row["prompt"] for row in every[: len(pairs)]} == {"prompt 0"}
    assert every[0]["id"].endswith(f"_{every[0]['width']}x{every[0]['height']}")
    one = rows(str(tmp_path / "p.txt"), tmp_path, "one", sizes=sizes, one_size=True)
    drawn = {row["id"]: (row["width"], row["height"]) for row in one}
    assert set(drawn.values()) == pairs
    (tmp_path / "p.txt").write_text("".join(f"prompt {n}\n" for n in reversed(range(399))))
    again = rows(str(tmp_path / "p.txt"), tmp_path, "again", sizes=sizes, one_size=True)
    assert {row["id"]: (row["width"], row["height"]) for row in again}.items() <= drawn.items()


@pytest.mark.parametrize(
    "text", ["768x512\n512×768\n", "Width,Height\n768,512\n 512 , 768 \n\n", "768\t512\r\n512;768"]
)
def test_sizes_are_spelled_in_many_ways(text: str, tmp_path: Path) -> None:
    (tmp_path / "sizes.txt").write_text(text, encoding="utf-8")
    made = rows(None, tmp_path, grid=("prompt=a cat",), sizes=tmp_path / "sizes.txt")
    assert [(row["width"], row["height"]) for row in made] == [(768, 512), (512, 768)]
    assert made[0]["id"] == "prompt-a-cat_768x512"


def test_the_empty_text_is_a_value_if_it_is_quoted(tmp_path: Path) -> None:
    ended = runs.batchgen(
        "import", "-o", tmp_path / "m.parquet", "--template", "a {c} fox",
        "--grid", 'negative_prompt="",blurry', "--grid", 'c="big, ""red""", "",tall',
    )  # fmt: skip
    assert ended.code == 0, ended.err
    rows = pq.read_table(tmp_path / "m.parquet").to_pylist()
    assert [(row["negative_prompt"], row["prompt"]) for row in rows] == [
        (negative, f"a {color} fox") for negative in ("", "blurry") for color in ('big, "red"', "", "tall")
    ]
    assert len({row["id"] for row in rows}) == len(rows)


# Errors

OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"templates": ("a {colour}",), "grid": ("color=red",)}, "{color} stands in no --template; did you mean colour?"),
    ({"templates": ("a {colour} {color}",), "grid": ("color=red",)}, "no 'colour' for {colour}; did you mean {color}?"),
    ({"templates": ("a {thing} {color}",), "grid": ("color=red",)}, "--grid thing=VALUE,VALUE or --grid thing=@FILE"),
    ({"templates": ("a {red|blue} fox",)}, "for one of several words write {word} and --grid word=red,blue"),
    ({"templates": ("a { fox",)}, "a literal brace is written twice, {{ or }}"),
    ({"templates": ("a } fox",)}, "a literal brace is written twice, {{ or }}"),
    ({"templates": ("a {} fox",)}, "{} names nothing; write {name}, or {{}} for two literal braces"),
    ({"templates": ("a {n:03d}",), "grid": ("n=1",)}, "{n:03d} asks for a format"),
    ({"templates": ("a {n!r}",), "grid": ("n=1",)}, "{n!r} asks for a format"),
    ({"templates": ("a {n.real}",), "grid": ("n=1",)}, "{n} stands in no --template"),
    ({"templates": ("@none.txt",)}, "--template '@none.txt': there is no file none.txt; a list is a text file"),
    ({"templates": ("a {c}", "a {c}"), "grid": ("c=x",)}, "--template: given more than once"),
    ({"templates": ("a {c}",), "grid": ("c=@none.txt",)}, "there is no file none.txt; a list is a text file with a"),
    ({"templates": ("a {c}",), "grid": ("c=@EMPTY",)}, "the list is empty, and would make no row"),
    ({"templates": ("a {c}",), "grid": ("c=",)}, "the list is empty, and would make no row; give it a value"),
    ({"templates": ("a {c}",), "grid": ("c=a,,b",)}, "a value between the commas is empty; take a comma out"),
    ({"templates": ("a {c}",), "grid": ('c="a',)}, "its values are not csv"),
    ({"templates": ("a {c}",), "grid": ("c=a,b,a",)}, "given more than once, and would make the same rows twice: 'a';"),
    ({"templates": ("a {c}",), "grid": ("c=a", "c=b")}, "gives each row its c, which --grid c gives already; leave"),
    ({"templates": ("a",), "grid": ("c=a",)}, "{c} stands in no --template; known columns are"),
    ({"templates": ("a",), "grid": ("steps=20,20.0",)}, "would make the same rows twice: 20"),
    ({"templates": ("a",), "grid": ("steps=20,x",)}, "--grid steps: 'x' is not usable: a whole number of 32 bits"),
    ({"templates": ("a",), "grid": ("stpes=20",)}, "no column that batchgen knows, and {stpes} stands in no"),
    ({"templates": ("a",), "grid": ("stpes=20",)}, "did you mean steps?"),
    ({"templates": ("a",), "grid": ("seed=-1",)}, "'-1' stands for no value; leave it out"),
    ({"templates": ("a",), "grid": ("steps",)}, "is not of the form NAME=VALUE,VALUE or NAME=@FILE"),
    ({"templates": ("a",), "grid": ("id=a,b",)}, "each row's id names its values already; leave it out"),
    ({"templates": ("a",), "grid": ("num_images=1,2",)}, "--num-images N gives each row as many"),
    ({"templates": ("a {model}",), "grid": ("model=x",)}, "batchgen's own tables have a column of this name"),
    ({"templates": ("a",), "grid": ("prompt=x",)}, "has no {prompt}, and the prompts that are there would be lost"),
    ({"templates": ("a",), "one_size": True}, "add --sizes FILE"),
    ({"templates": ("a",), "sizes": Path("none.csv")}, "--sizes none.csv: there is no file none.csv"),
    ({"templates": ("a",), "sizes": Path("SIZES"), "grid": ("width=8",)}, "its width, which --grid width gives"),
    ({"templates": ("a",), "sizes": Path("WRONG")}, "'12' is no size; each line is one, such as 768x512"),
    ({"templates": ("a",), "sizes": Path("HEADER")}, "the list is empty"),
    ({"templates": ("a",), "sizes": Path("SIZES"), "one_size": True}, "draws for many rows, and there is one"),
    ({"grid": ("steps=2,3",)}, "there are no prompts: name a source, or add --template or --grid prompt=@FILE"),
    ({}, "there are no prompts"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "sentence"), OPTIONS, ids=[str(n) for n in range(len(OPTIONS))])
def test_what_cannot_be_meant_is_told_and_nothing_written(
    options: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {"EMPTY": "\n \n", "SIZES": "8x8", "WRONG": "8x8\n12\n", "HEADER": "width,height\n"}.items():
        Path(name).write_text(text)
    with pytest.raises(UsageError) as error:
        rows(None, tmp_path, **options)
    assert sentence in str(error.value)
    assert not [path for path in tmp_path.iterdir() if "parquet" in path.name]


@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        ("id,prompt\na,x\nb,y\na,z\n", {"grid": ("steps=2,3",)}, "ids stand in more than one row: 'a' (rows 1, 3)"),
        ("id,prompt\n,x\n", {"grid": ("steps=2,3",)}, "an id is ''; every row needs one"),
        ("steps,prompt\n2,x\n", {"grid": ("steps=2,3",)}, "source.csv has as a column already; leave one of them out"),
        ("width,prompt\n2,x\n", {"sizes": Path("SIZES")}, "--sizes gives each row its width, which"),
        ("num_images,prompt\n2,x\n", {"num_images": 2}, "--num-images gives each row its num_images, which"),
        ("color,prompt\nred,x\n", {"templates": ("a {color}",)}, "has no {prompt}, and the prompts that are there"),
        ("color\nred\n", {"templates": ("a {colr}",)}, "no 'colr' for {colr}; did you mean {color}?"),
        ("color\nred\n", {"grid": ("steps=2",)}, "no column prompt; its columns are 'color'"),
        ("color,seed\nred,1\nblue,\n", {"templates": ("{color} {seed}",)}, "{seed} has nothing to show in row 2"),
        ("color,guidance_scale\nred,1\n", {"templates": ("{color} {guidance_scale}",)}, "the column is of type double"),
        ("prompt\n", {"grid": ("steps=2",)}, "has no rows"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_source_is_told(
    text: str, options: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("SIZES").write_text("8x8\n")
    with pytest.raises(UsageError) as error:
        rows(csv_of(tmp_path, text), tmp_path, **options)
    assert sentence in str(error.value)
    assert not list(tmp_path.glob("*parquet*"))


def test_an_absurd_product_is_counted_and_refused_before_anything_is_read(tmp_path: Path) -> None:
    grid = tuple(listed(tmp_path, name, [str(n) for n in range(1000)]) for name in "abcd")
    with pytest.raises(UsageError) as error:
        rows(None, tmp_path, templates=("{a}{b}{c}{d}",), grid=grid, num_images=8)
    assert str(error.value) == (
        "this would be 1,000,000,000,000 rows for 8,000,000,000,000 images (1,000 of a × 1,000 of b × 1,000 of c × "
        "1,000 of d × 8 images each), beyond the bound of 10,000,000 images; give fewer values, or allow it with "
        "--max-images 8000000000000"
    )
    (tmp_path / "p.txt").write_text("a\nb\nc\n")
    with pytest.raises(UsageError, match=r"6 rows for 6 images \(3 rows of the source × 2 of steps\), beyond the"):
        rows(str(tmp_path / "p.txt"), tmp_path, grid=("steps=1,2",), max_images=5)
    assert len(rows(str(tmp_path / "p.txt"), tmp_path, grid=("steps=1,2",), max_images=6)) == 6


def test_options_of_a_source_need_one(tmp_path: Path) -> None:
    for options in ({"columns": {"prompt": "x"}}, {"split": "train"}):
        with pytest.raises(UsageError, match="is for a SOURCE, and there is none"):
            import_rows(None, tmp_path / "o.parquet", expansion=Expansion(templates=("a",)), **options)  # type: ignore[arg-type]


@given(st.text())
def test_any_template_is_read_or_refused_in_a_sentence(text: str) -> None:
    try:
        template = read_template(text)
    except UsageError:
        with pytest.raises(UsageError, match="--template"):
            read_template(text)
    else:
        filled = template.filled(lambda name: pa.array([f"<{name}>"]), 1).to_pylist()
        wanted = "".join(literal + ("" if name is None else f"<{name}>") for literal, name in template.pieces)
        assert filled == [wanted]


# As one command


def test_many_rows_are_one_command_the_same_each_time_and_can_be_run(tmp_path: Path) -> None:
    for name, num in (("color", 40), ("animal", 50), ("place", 60)):
        listed(tmp_path, name, [f"{name} {n}" for n in range(num)])
    words = ["--template", "a {color} {animal} in {place}", "--sizes", DATA / "sdxl_sizes.csv", "--one-size"]
    words += [word for name in ("color", "animal", "place") for word in ("--grid", f"{name}=@{tmp_path / name}.list")]
    ended = [runs.batchgen("import", "-o", tmp_path / f"{n}.parquet", *words) for n in range(2)]
    assert [one.code for one in ended] == [0, 0], ended
    assert "120,000 rows in" in ended[0].out
    assert (tmp_path / "0.parquet").read_bytes() == (tmp_path / "1.parquet").read_bytes()
    groups = pq.ParquetFile(tmp_path / "0.parquet").metadata
    assert [groups.row_group(n).num_rows for n in range(groups.num_row_groups)] == [65_536, 54_464]
    few = runs.batchgen(
        "import", "-o", tmp_path / "few.parquet", "--template", "a {color} fox", "--grid", "color=red,blue",
        "--grid", "steps=2,3", "--num-images", "2",
    )  # fmt: skip
    assert "4 rows, 2 images each in" in few.out
    assert runs.run(tmp_path / "few.parquet", tmp_path / "out").code == 0
    lines = runs.check_images(tmp_path / "out")
    assert {(line["prompt"], line["steps"], line["color"], line["image_number"]) for line in lines} == {
        (f"a {color} fox", steps, color, n) for color in ("red", "blue") for steps in (2, 3) for n in (0, 1)
    }
    assert len({line["seed"] for line in lines}) == 8
