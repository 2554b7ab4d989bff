"""Wrong input: one clear sentence, exit code 2, no traceback, and nothing written."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchgen import rundir
from batchgen.errors import UsageError
from batchgen.job import load_job
from batchgen.runner import run_job
from tests import runs, tiny


def refused(*args: object) -> str:
    ended = runs.batchgen(*args)
    assert ended.code == 2, ended
    assert "Traceback" not in ended.err
    return ended.err


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return runs.prompts(tmp_path / "m.parquet", 4)


def test_unknown_key_names_the_near_one(tmp_path: Path, source: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text("[plan]\nmax_bach = 4\n")
    said = refused("run", source, "-o", tmp_path / "out", "--job", job)
    assert "plan.max_bach" in said
    assert "max_batch" in said


@pytest.mark.parametrize("text", ['[plan]\nmax_batch = "four"\n', "[plan]\nmax_batch = true\n", "[plan\n"])
def test_wrong_type_or_syntax(tmp_path: Path, source: Path, text: str) -> None:
    job = tmp_path / "job.toml"
    job.write_text(text)
    assert str(job) in refused("plan", source, "--job", job)


@pytest.mark.parametrize("file", ["unet/diffusion_pytorch_model.safetensors", "vae/config.json", "model_index.json"])
def test_model_folder_that_lacks_a_file(tmp_path: Path, source: Path, file: str) -> None:
    folder = shutil.copytree(tiny.folder("sd1"), tmp_path / "model")
    (folder / file).unlink()
    assert Path(file).name in refused("run", source, "-o", tmp_path / "out", "--model", folder)
    assert not (tmp_path / "out").exists()


def test_directory_of_another_job(tmp_path: Path, source: Path) -> None:
    assert runs.run(source, tmp_path / "out").code == 0
    said = refused("run", source, "-o", tmp_path / "out", "--model", "pattern", "--set", "sampling.steps=7")
    assert "sampling.steps" in said
    assert "7" in said


def test_a_key_that_the_run_s_version_did_not_know_has_its_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, keys = runs.prompts(tmp_path / "m.parquet", 2), rundir._keys
    with monkeypatch.context() as earlier:
        earlier.setattr(
            rundir, "_keys", lambda job: {k: value for k, value in keys(job).items() if k != "output.png_info"}
        )
        assert runs.run(source, tmp_path / "out").code == 0
    assert runs.run(source, tmp_path / "out").code == 0
    said = refused("run", source, "-o", tmp_path / "out", "--model", "pattern", "--set", "output.png_info=true")
    assert "output.png_info: false there, true now" in said


def test_a_run_that_no_worker_began_may_go(tmp_path: Path) -> None:
    """Such as one whose LoRA turned out to fit no layer; not one whose images lie nowhere but in `.run/work` yet."""
    source, out = runs.manifest(tmp_path / "m.parquet", {"prompt": ["fault: raise"]}), tmp_path / "out"
    faults = ("--model", "pattern", "--set", "model.variant=faults")
    assert runs.batchgen("run", source, "-o", out, *faults).code == 3
    shutil.rmtree(out / "data", ignore_errors=True)
    assert "remove it" not in refused("run", source, "-o", out, "--model", "pattern")
    for claim in (out / ".run" / "claims").iterdir():
        claim.unlink()
    said = refused("run", source, "-o", out, "--model", "pattern")
    assert said.splitlines()[-1].endswith("-o DIR; no worker has begun it: remove it to begin anew")


class TestAnotherManifest:
    """The rows that differ are named; a changed one with its columns, old and new."""

    def rows(self, num: int = 4) -> list[dict[str, Any]]:
        return [{"id": f"row-{n}", "prompt": f"prompt number {n}", "steps": 20, "note": "x"} for n in range(num)]

    def differences(self, folder: Path, rows: list[dict[str, Any]], *args: object) -> list[str]:
        """What is said of rows that take the place of `self.rows()`."""
        source, out = folder / "m.parquet", folder / "out"
        assert runs.run(runs.manifest(source, self.rows()), out, *args).code == 0
        before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
        said = refused("run", runs.manifest(source, rows), "-o", out, "--model", "pattern", *args)
        first, *lines, last = said.splitlines()
        assert first == f"batchgen: {out} is the run directory of another job; it differs in"
        grown = (
            ", or with --extend to make the added rows too" if [line[:12] for line in lines] == ["  rows added"] else ""
        )
        assert last == f"Give the same manifest and options to resume it{grown}, or another directory with -o DIR"
        assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
        return [line.strip() for line in lines]

    def test_changed(self, tmp_path: Path) -> None:
        rows = self.rows()
        rows[2] |= {"prompt": "another one", "steps": 30}
        assert self.differences(tmp_path, rows) == [
            "rows changed: 1 ('row-2')",
            "row 'row-2': prompt 'prompt number 2' there, 'another one' now; steps 20 there, 30 now",
        ]

    def test_its_own_column_changed(self, tmp_path: Path) -> None:
        """It would not change a pixel, but stand in no metadata."""
        rows = self.rows()
        rows[0]["note"] = "y"
        assert self.differences(tmp_path, rows) == ["rows changed: 1 ('row-0')", "row 'row-0': note 'x' there, 'y' now"]

    def test_grown(self, tmp_path: Path) -> None:
        assert self.differences(tmp_path, self.rows(7)) == ["rows added: 3 ('row-4', 'row-5', 'row-6')"]
        assert "rows added: 9 ('row-4', 'row-5', 'row-6', 'row-7', 'row-8' and 4 more)" in refused(
            "run", runs.manifest(tmp_path / "m.parquet", self.rows(13)), "-o", tmp_path / "out", "--model", "pattern"
        )

    def test_shrunk_and_exchanged(self, tmp_path: Path) -> None:
        rows = [*self.rows()[1:], {"id": "new", "prompt": "prompt number 0", "steps": 20, "note": "x"}]
        assert self.differences(tmp_path, rows) == ["rows removed: 1 ('row-0')", "rows added: 1 ('new')"]

    def test_more_images_of_a_row(self, tmp_path: Path) -> None:
        rows = [row | {"num_images": 3 if row["id"] == "row-1" else 1} for row in self.rows()]
        assert self.differences(tmp_path, rows) == ["rows added: 2 ('row-1' image 1, 'row-1' image 2)"]

    def test_a_wrong_row_mended(self, tmp_path: Path) -> None:
        source, out = tmp_path / "m.parquet", tmp_path / "out"
        skip = ("-o", out, "--model", "pattern", "--on-bad-row", "skip")
        bad = [row | {"steps": 0} if row["id"] == "row-3" else row for row in self.rows()]
        assert runs.batchgen("run", runs.manifest(source, bad), *skip).code == 3
        said = refused("run", runs.manifest(source, self.rows()), *skip)
        assert "rows rejected: 1 there, 0 now" in said
        assert "rows added: 1 ('row-3')" in said

    def test_another_mapping_of_the_same_file(self, tmp_path: Path) -> None:
        source, out = runs.manifest(tmp_path / "m.parquet", self.rows()), tmp_path / "out"
        assert runs.run(source, out, "--set", "columns.prompt=prompt").code == 0
        mapping = ("--set", "columns.prompt=note", "--set", "columns.manifest_prompt=prompt")
        said = refused("run", source, "-o", out, "--model", "pattern", *mapping)
        assert "row 'row-0': prompt 'prompt number 0' there, 'x' now" in said

    def test_the_same_rows_in_other_files_resume(self, tmp_path: Path) -> None:
        """Order, types, names of columns and files do not count."""
        source, out = runs.manifest(tmp_path / "m.parquet", self.rows()), tmp_path / "out"
        assert runs.run(source, out).code == 0
        folder = tmp_path / "parts"
        folder.mkdir()
        table = pq.read_table(source).rename_columns(["id", "caption", "steps", "note"])
        table = table.set_column(2, "steps", table["steps"].cast("int8"))
        pq.write_table(table.slice(2), folder / "a.parquet")
        pq.write_table(table.slice(0, 2), folder / "b.parquet")
        again = runs.run(folder, out, "--set", "columns.prompt=caption")
        assert (again.code, again.closing_line.split()[0]) == (0, "4"), again.err


@pytest.mark.parametrize("command", ["status", "verify", "finalize"])
def test_no_run_directory(tmp_path: Path, source: Path, command: str) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        assert f"{place} is no run directory" in refused(command, place)
    assert str(source) in refused(command, source)
    assert sorted(tmp_path.iterdir()) == [source]


def test_output_is_something_else(tmp_path: Path, source: Path) -> None:
    assert "is a file" in refused("run", source, "-o", source, "--model", "pattern")
    assert "something else" in refused("run", source, "-o", tmp_path, "--model", "pattern")
    assert "Not a directory" in refused("run", source, "-o", source / "out", "--model", "pattern")
    assert "name too long" in refused("run", source, "-o", tmp_path / ("o" * 300), "--model", "pattern")
    assert "name too long" in refused("run", "m" * 300, "-o", tmp_path / "out", "--model", "pattern")
    assert sorted(tmp_path.iterdir()) == [source]


def test_a_plan_that_cannot_be_read(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    assert runs.run(source, out).code == 0
    (out / ".run" / "plan" / "0.json").write_text("{")
    for words in (["run", source, "-o", out, "--model", "pattern"], ["status", out], ["verify", out]):
        assert "0.json is not a plan's index" in refused(*words)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--model", "no/such/folder"], "there is no model folder 'no/such/folder'"),
        (["--model", "patern"], "did you mean 'pattern'?"),
        (
            ["--model", "pattern", "--set", "sampling.sampler=eulr"],
            "sampling.sampler: 'eulr' is no sampler; did you mean 'euler'?",
        ),
        (["--model", "pattern", "--set", "model.variant=fp16"], 'the pattern model knows only "faults"'),
        (["--model", "pattern", "--set", "model.dtype=float16"], "model.dtype = 'float16' has no effect"),
        (["--model", "demo", "--set", "model.revision=main"], "model.revision = 'main' has no effect"),
        (["--model", "m" * 300], "cannot be used: File name too long"),
        (["--model", "pattern", "--set", "plan.max_batch"], "is not of the form table.key=value"),
        (["--model", "pattern", "--set", "output.format=zip"], "output.format = 'zip' is not usable"),
        (["--model", "pattern", "--job", "none.toml"], "none.toml cannot be read"),
        (["--model", "pattern", "--set", "plan.profile=none.json"], "none.json"),
        (["--model", "pattern", "--formt", "files"], "--format"),
        (["--model", "pattern", "--grace", "0"], "batchgen: --grace 0.0 is not usable: Input should be greater than 0"),
        (["--model", "pattern", "--grace", "nan"], "batchgen: --grace 'NaN' is not usable"),
        (["--model", "🐉"], "there is no model folder '🐉'"),
        (["--model", "pattern", "--grace", "soon"], "'soon' is not a valid float"),
        (["--model", "pattern", "--set", "plan.batch_sizes=[8]", "--set", "plan.max_batch=4"], "leaves no size"),
    ],
)
def test_options(tmp_path: Path, source: Path, args: list[str], said: str) -> None:
    assert said in refused("run", source, "-o", tmp_path / "out", *args)
    assert not (tmp_path / "out").exists()


def test_model_of_the_job_is_loaded_once_the_directory_is_right(tmp_path: Path, source: Path) -> None:
    """A device that is not there is a user's mistake too."""
    said = refused("run", source, "-o", tmp_path / "out", "--model", "demo", "--set", "engine.device=cuda:99")
    assert "engine.device = 'cuda:99' is not there" in said


def test_step_counts_that_a_sampler_cannot_make(tmp_path: Path) -> None:
    """Found before a model loads: by what diffusers' timesteps would be."""
    wrong = [("deis", 1000), ("LCMScheduler", 51), ("ddim", 1000), ("deis", 999)]
    rows = [{"prompt": "a", "sampler": sampler, "steps": steps} for sampler, steps in wrong]
    said = refused("run", runs.manifest(tmp_path / "m.parquet", rows), "-o", tmp_path / "out", "--model", "pattern")
    assert "2 of 4 manifest rows cannot be made as asked" in said
    assert "row 0: steps = 1000 cannot be made: 1000 steps of deis do not fit this model's schedule" in said
    assert (
        "row 1: steps = 51 cannot be made: 51 steps of LCMScheduler do not fit this model's schedule; the nearest"
        in said
    )
    args = ("--model", "pattern", "--set", "sampling.steps=1000", "--set", "sampling.sampler=deis")
    said = refused("plan", runs.prompts(tmp_path / "n.parquet", 1), *args)
    assert "1 of 1 manifest row cannot be made as asked (rows count from 0):\n" in said
    assert said.splitlines()[1].endswith("schedule; the nearest number that can is 999")


def test_a_model_with_a_tokenizer_says_what_it_cuts(source: Path) -> None:
    said = "note: the model reads 75 tokens of a prompt: longer ones are cut, and counted in the closing lines"
    assert said in runs.batchgen("plan", source, "--model", tiny.folder("sd1")).err
    assert said not in runs.batchgen("plan", source, "--model", "pattern").err


NOT_UTF8 = os.fsdecode(b"m\xff")


@pytest.mark.parametrize(
    "args",
    [
        ["run", NOT_UTF8],
        ["run", "m.parquet", "-o", NOT_UTF8],
        ["run", "m.parquet", "--job", NOT_UTF8],
        ["bench", "plan", "--rows", "10", "--folder", NOT_UTF8],
        ["status", NOT_UTF8],
        ["import", NOT_UTF8, "-o", "m.parquet"],
    ],
)
def test_names_that_are_not_utf8(source: Path, monkeypatch: pytest.MonkeyPatch, args: list[str]) -> None:
    monkeypatch.chdir(source.parent)
    Path(NOT_UTF8).mkdir()
    assert refused(*args) == "batchgen: the argument 'm\\udcff' is not UTF-8; rename what it names\n"
    assert sorted(Path().iterdir()) == [Path("m.parquet"), Path(NOT_UTF8)]


def test_names_that_are_not_utf8_within_a_folder_or_given_to_the_library(tmp_path: Path, source: Path) -> None:
    shutil.copy(source, source.with_name(f"{NOT_UTF8}.parquet"))
    assert r"m\udcff.parquet' is not UTF-8; rename it" in refused("plan", tmp_path, "--model", "pattern")
    with pytest.raises(UsageError, match=r"the run directory's name .* is not UTF-8"):
        run_job([source], tmp_path / NOT_UTF8, load_job(None, ["model.path=pattern"]))


def test_a_file_with_brackets_in_its_name_is_itself(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(source.parent)
    source.rename("a[1].parquet")
    assert runs.batchgen("run", "a[1].parquet", "--model", "pattern").code == 0
    assert Path("a[1]-out/metadata.parquet").is_file()


def test_several_files_need_a_directory(tmp_path: Path, source: Path) -> None:
    other = runs.prompts(tmp_path / "n.parquet", 1)
    assert "say where the results go with -o DIR" in refused("run", source, other, "--model", "pattern")
