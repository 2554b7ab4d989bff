"""Prompts, sizes, ids and files in: what is made of them, and what is refused before a model loads."""

from __future__ import annotations

import json
import shutil
import unicodedata
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset

from batchgen import runner
from tests import runs, tiny

AWKWARD = [
    "x" * 300,
    "a/b",
    "../../x",
    "CON",
    unicodedata.normalize("NFC", "🐉龍é"),
    unicodedata.normalize("NFD", "🐉龍é"),
    "a\nb",
    "a\x00b",
    "<script>alert(1)</script>",
    "--ar 4:5",
    "A",
    "a",
    "",
    "   ",
    ".",
    "..",
    "~",
    "C:\\x",
    "v1.0.png",
]


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a model is loaded."""

    def loaded(job: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(runner, "open_generator", loaded)


def refused(source: Path | str, out: Path, *args: object) -> str:
    """What is said where a manifest is refused: nothing is written, no model loaded, nothing but a sentence shown."""
    ended = runs.run(source, out, *args)
    assert ended.code == 2, ended.err
    assert "Traceback" not in ended.err
    assert not out.exists()
    assert runs.batchgen("plan", source, "--model", "pattern", *args).code == 2
    return ended.err


class TestCase9:
    """A prompt that is longer than the model reads."""

    source_prompts = ("a short one", " ".join(f"word{n}" for n in range(100)), tiny.LONG)

    def run(self, folder: Path, *args: str) -> runs.Ended:
        source = runs.manifest(folder / "m.parquet", {"id": ["a", "b", "c"], "prompt": list(self.source_prompts)})
        return runs.run(source, folder / "out", "--set", "engine.device=cpu", *args, model=tiny.folder("sd1"))

    def test_is_counted(self, tmp_path: Path) -> None:
        ended = self.run(tmp_path, "--set", "sampling.steps=1")
        assert ended.code == 0
        tokenizer = tiny.pipeline("sd1").tokenizer
        for line in runs.metadata(tmp_path / "out"):
            num_tokens = len(tokenizer(line["prompt"], add_special_tokens=False).input_ids)
            assert line["tokens"] == min(num_tokens, 75)
            assert line["tokens_dropped"] == max(num_tokens - 75, 0)
        dropped = [line["tokens_dropped"] > 0 for line in runs.metadata(tmp_path / "out")]
        assert dropped == [False, True, True]
        assert "2 of the images were made of prompts that were cut" in ended.err
        again = self.run(tmp_path, "--set", "sampling.steps=1")
        assert "2 of the images were made of prompts that were cut" in again.err
        assert "2 of the images were made of prompts that were cut" in runs.batchgen("status", tmp_path / "out").out

    def test_is_refused_if_asked(self, tmp_path: Path, no_model: None) -> None:
        ended = self.run(tmp_path, "--on-truncate", "error")
        assert ended.code == 2
        assert "2 prompts are longer than the model reads" in ended.err
        assert f"{tmp_path / 'm.parquet'} row 1: prompt has" in ended.err
        assert "row 2: prompt has" in ended.err
        assert "row 0" not in ended.err
        assert not (tmp_path / "out").exists()

    def test_short_prompts_pass(self, tmp_path: Path) -> None:
        source = runs.manifest(tmp_path / "m.parquet", {"prompt": ["a short one"]})
        ended = runs.batchgen("plan", source, "--model", tiny.folder("sd1"), "--on-truncate", "error")
        assert ended.code == 0


class TestCase10:
    """Sizes that a model cannot do, for one that needs multiples of 8."""

    sizes = ((1080, 1920), (63, 64), (0, 64), (64, -8), (None, None), (100, 60))

    def source(self, folder: Path, sizes: Any = None) -> Path:
        rows = [
            {"id": f"s{n}", "prompt": "a", "width": width, "height": height}
            for n, (width, height) in enumerate(sizes or self.sizes)
        ]
        texts, numbers = [("id", pa.string()), ("prompt", pa.string())], [("width", pa.int64()), ("height", pa.int64())]
        schema = pa.schema(texts + numbers)
        return runs.manifest(folder / "m.parquet", rows, schema)

    def test_are_refused(self, tmp_path: Path, no_model: None) -> None:
        said = refused(self.source(tmp_path), tmp_path / "out")
        named = [line.split("m.parquet ")[1] for line in said.splitlines() if "m.parquet row" in line]
        rule = "must be a multiple of 8, at least 64 (--set plan.size_policy=round rounds)"
        assert sorted(line for line in named if not line.startswith(("row 2", "row 3"))) == [
            f"row 1: width = 63 {rule}",
            f"row 5: height = 60 {rule}",
            f"row 5: width = 100 {rule}",
        ]
        assert any(line.startswith("row 2: width = 0 must be") for line in named)
        assert any(line.startswith("row 3: height = -8 must be") for line in named)
        assert len(named) == 5

    def test_are_rounded_only_if_asked(self, tmp_path: Path) -> None:
        assert "row 2: width = 0" in refused(self.source(tmp_path), tmp_path / "out", "--size-policy", "round")
        source = self.source(tmp_path, [self.sizes[n] for n in (0, 1, 4, 5)])
        assert "row 1: width = 63" in refused(source, tmp_path / "out")
        assert runs.run(source, tmp_path / "out", "--size-policy", "round").code == 0
        lines = runs.check_images(tmp_path / "out")
        assert [(one["asked_width"], one["asked_height"]) for one in lines] == [
            (1080, 1920), (63, 64), (64, 64), (100, 60),
        ]  # fmt: skip
        assert [(one["width"], one["height"]) for one in lines] == [(1080, 1920), (64, 64), (64, 64), (104, 64)]


class TestCase11:
    """What is no prompt, and what is one."""

    @pytest.mark.parametrize(
        ("prompts", "rule"),
        [
            (pa.array(["a", None]), "prompt = None must not be null"),
            (pa.array([["a"], ["b"]]), "prompt = ['b'] must be UTF-8 text; the column's type is list"),
            (pa.array([4, 5]), "prompt = 5 must be UTF-8 text; the column's type is int64"),
            (pa.array([b"a", b"b"]), "prompt = b'b' must be UTF-8 text; the column's type is binary"),
            (pa.nulls(2), "prompt = None must not be null"),
        ],
        ids=["null", "lists", "numbers", "bytes", "nulls only"],
    )
    def test_is_refused_with_its_row(self, tmp_path: Path, no_model: None, prompts: pa.Array, rule: str) -> None:
        source = runs.manifest(tmp_path / "m.parquet", {"prompt": prompts})
        assert f"{source} row 1: {rule}" in refused(source, tmp_path / "out")

    def test_empty_and_blank_ones_are_prompts(self, tmp_path: Path) -> None:
        texts = ["", "  ", "\t\n", "a\x00b"]
        assert runs.run(runs.manifest(tmp_path / "m.parquet", {"prompt": texts}), tmp_path / "out").code == 0
        assert [line["prompt"] for line in runs.check_images(tmp_path / "out")] == texts

    @pytest.mark.parametrize("output", runs.FORMATS)
    def test_a_null_negative_prompt_is_not_the_empty_one(self, tmp_path: Path, output: str) -> None:
        columns = {"id": ["a", "b"], "prompt": ["x", "x"], "seed": [1, 1], "negative_prompt": [None, ""]}
        source = runs.manifest(tmp_path / "m.parquet", columns)
        assert runs.run(source, tmp_path / "out", "--format", output).code == 0
        assert [line["negative_prompt"] for line in runs.check_images(tmp_path / "out")] == [None, ""]

    def test_an_empty_prompt_and_a_nul_in_a_real_model(self, tmp_path: Path) -> None:
        source = runs.manifest(tmp_path / "m.parquet", {"prompt": ["", "a\x00b"]})
        options = ("--set", "sampling.steps=1", "--set", "engine.device=cpu")
        assert runs.run(source, tmp_path / "out", *options, model=tiny.folder("sd1")).code == 0
        assert [line["prompt"] for line in runs.check_images(tmp_path / "out", is_pattern=False)] == ["", "a\x00b"]


class TestCase12:
    """Files that are no manifest: the message names what was found."""

    def test_no_rows(self, tmp_path: Path) -> None:
        source = runs.manifest(tmp_path / "m.parquet", {"prompt": pa.array([], pa.string())})
        assert f"{source} holds no row" in refused(source, tmp_path / "out")

    def test_another_columns_name(self, tmp_path: Path) -> None:
        source = runs.manifest(tmp_path / "m.parquet", {"Prompt": ["a"], "size": [1]})
        said = refused(source, tmp_path / "out")
        assert "there is no column 'prompt'; found Prompt, size" in said
        assert "--set columns.prompt='Prompt'" in said
        assert runs.run(source, tmp_path / "out", "--set", "columns.prompt='Prompt'").code == 0

    def test_a_glob_without_a_match(self, tmp_path: Path) -> None:
        (tmp_path / "prompts.csv").write_text("prompt\na\n")
        said = refused(tmp_path / "*.parquet", tmp_path / "out")
        assert "matches no file" in said
        assert "holds prompts.csv" in said

    def test_a_csv_by_another_name(self, tmp_path: Path) -> None:
        (tmp_path / "m.parquet").write_text("prompt\na cat\n")
        said = refused(tmp_path / "m.parquet", tmp_path / "out")
        assert "m.parquet is not a Parquet file (it begins with b'prompt\\na cat\\n')" in said
        assert "batchgen import" in said

    def test_a_name_without_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "there.parquet").touch()
        said = refused(tmp_path / "not-there.parquet", tmp_path / "out")
        assert "not-there.parquet matches no file" in said
        assert "there.parquet" in said.split("holds")[1]

    def test_a_truncated_file(self, tmp_path: Path) -> None:
        whole = runs.prompts(tmp_path / "m.parquet", 100).read_bytes()
        (tmp_path / "m.parquet").write_bytes(whole[: len(whole) // 2])
        assert "m.parquet is not a Parquet file" in refused(tmp_path / "m.parquet", tmp_path / "out")


def test_case_13_an_id_twice(tmp_path: Path, no_model: None) -> None:
    source = runs.manifest(tmp_path / "m.parquet", {"id": ["a", "b", "a"], "prompt": ["x", "y", "z"]})
    said = refused(source, tmp_path / "out")
    assert f"{source} row 0: id = 'a' must be unique; manifest row 2 has it too" in said
    assert f"{source} row 2: id = 'a' must be unique; manifest row 0 has it too" in said
    assert "row 1" not in said


def test_bad_rows_may_be_left_out(tmp_path: Path) -> None:
    """They are written to rejected.parquet, and the exit code says that something is missing."""
    columns = {"id": ["a", "b", "a", "d"], "prompt": ["x", "y", "z", None]}
    source = runs.manifest(tmp_path / "m.parquet", columns)
    ended = runs.run(source, tmp_path / "out", "--on-bad-row", "skip")
    assert ended.code == 3
    assert ended.closing_line == "4 rows = 1 done + 0 failed + 3 rejected + 0 outstanding"
    assert [line["id"] for line in runs.check_images(tmp_path / "out")] == ["b"]
    rejected = pq.read_table(tmp_path / "out" / "rejected.parquet").to_pylist()
    assert [(one["row"], one["id"], one["prompt"]) for one in rejected] == [
        (0, "a", "x"),
        (2, "a", "z"),
        (3, "d", None),
    ]
    assert [one["faults"] for one in rejected] == [
        ["id = 'a' must be unique; manifest row 2 has it too"],
        ["id = 'a' must be unique; manifest row 0 has it too"],
        ["prompt must not be null"],
    ]
    assert {one["file"] for one in rejected} == {str(source)}


def test_case_14_two_equal_rows(tmp_path: Path) -> None:
    source = runs.manifest(tmp_path / "m.parquet", {"prompt": ["x", "x"], "steps": [5, 5]})
    assert runs.run(source, tmp_path / "out").code == 0
    lines = runs.check_images(tmp_path / "out")
    assert len({line["id"] for line in lines}) == 2
    assert len({line["seed"] for line in lines}) == 2
    assert len({line["pixel_sha256"] for line in lines}) == 2


@pytest.mark.parametrize("output", runs.FORMATS)
def test_case_15_texts_that_harm(tmp_path: Path, output: str) -> None:
    """As prompts and as ids at once: verbatim in the metadata, and no file outside of the run directory."""
    folder = tmp_path / "deep" / "deeper" / "here"
    folder.mkdir(parents=True)
    rows = [{"id": text, "prompt": text, "negative_prompt": text, "own": text} for text in AWKWARD]
    source = runs.manifest(folder / "m.parquet", rows)
    ended = runs.run(source, folder / "out", "--format", output)
    assert ended.code == 0, ended.err
    lines = runs.check_images(folder / "out")
    for name in ("id", "prompt", "negative_prompt", "own"):
        assert [line[name] for line in lines] == AWKWARD
    assert len({line["file_name"].casefold() for line in lines}) == len(AWKWARD)
    shutil.rmtree(folder / "out")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [source]


@pytest.mark.parametrize("output", runs.FORMATS)
def test_case_16_ids_with_one_long_beginning(tmp_path: Path, output: str) -> None:
    ids = ["i" * 200 + "a", "i" * 200 + "b"]
    source = runs.manifest(tmp_path / "m.parquet", {"id": ids, "prompt": ["x", "y"]})
    assert runs.run(source, tmp_path / "out", "--format", output).code == 0
    assert [line["id"] for line in runs.check_images(tmp_path / "out")] == ids


def test_case_17_dots_in_a_tar(tmp_path: Path) -> None:
    ids = ["v1.0", "v1.5", "v1", "v1.5.png"]
    source = runs.manifest(tmp_path / "m.parquet", {"id": ids, "prompt": [f"prompt of {name}" for name in ids]})
    assert runs.run(source, tmp_path / "out", "--format", "webdataset").code == 0
    wanted = {line["id"]: line["pixel_sha256"] for line in runs.check_images(tmp_path / "out")}
    tars = sorted(str(path) for path in (tmp_path / "out" / "data").glob("*.tar"))
    samples = list(webdataset.WebDataset(tars, shardshuffle=False, empty_check=False))
    by_webdataset = {json.loads(sample["json"])["id"]: json.loads(sample["json"])["pixel_sha256"] for sample in samples}
    assert all({"png", "json"} <= sample.keys() for sample in samples)
    assert (len(samples), by_webdataset) == (4, wanted)
    opened = datasets.load_dataset(str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "cache"))
    assert {one["json"]["id"]: one["json"]["pixel_sha256"] for one in opened} == wanted
    assert opened.num_rows == 4


def test_num_images(tmp_path: Path) -> None:
    """Each image of a row is an image of its own, with a seed and a file of its own."""
    source = runs.manifest(tmp_path / "m.parquet", {"id": ["a", "b"], "prompt": ["x", "y"], "num_images": [3, 1]})
    ended = runs.run(source, tmp_path / "out")
    assert ended.closing_line == "4 rows = 4 done + 0 failed + 0 rejected + 0 outstanding"
    lines = runs.check_images(tmp_path / "out")
    assert [(line["id"], line["image_number"]) for line in lines] == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
    assert len({line["seed"] for line in lines}) == 4
