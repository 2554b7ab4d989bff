"""The Python API, as a notebook uses it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchgen
from batchgen.errors import UsageError
from tests import runs

SCRIPT = """
import batchgen
job = batchgen.load_job(None, ["model.path=pattern"])
for _ in range(2):
    assert batchgen.plan("m.parquet", job).draft.cut.num_rows == 3
    assert batchgen.run("m.parquet", "out", job).balance.done == 3
print(batchgen.__version__)
"""

NOTEBOOK = """
job = batchgen.load_job(None, ["model.path=pattern"])
print(batchgen.run("m.parquet", "out", job).balance.done)
"""


def test_the_api_does_what_it_says_twice(tmp_path: Path) -> None:
    """In a process of its own: what a test has imported before would hide a name that a module takes."""
    pq.write_table(pa.table({"prompt": ["a", "b", "c"]}), tmp_path / "m.parquet")
    environment = {"PYTHONPATH": str(Path(__file__).parent.parent), "PATH": ""}
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "out" / "_SUCCESS").exists()


def test_options_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    job = batchgen.load_job(None, ["model.path=pattern"])
    assert batchgen.run(runs.prompts(tmp_path / "m.parquet", 2), job=job).balance.done == 2
    source = runs.prompts(tmp_path / "m.parquet", 3)
    with pytest.raises(UsageError, match="--extend to make the added rows too"):
        batchgen.run(source, "m-out", job)
    ending = batchgen.run([source], "m-out", job, extend=True, workers=1)
    assert (ending.balance.done, ending.exit_code) == (3, 0)
    assert len(runs.check_images(tmp_path / "m-out")) == 3
    with pytest.raises(UsageError, match="leave one out"):
        batchgen.run(source, "m-out", job, gpus=2, workers=2)
    for others, said in (({"workers": 0}, "--workers 0 is not usable"), ({"gpus": 0}, "it names no GPU")):
        monkeypatch.setattr("batchgen.launcher.visible_gpus", lambda: ("0",))
        with pytest.raises(UsageError, match=said):
            batchgen.run(source, "m-out", job, **others)
    assert capsys.readouterr().out == ""


def test_a_notebook_shows_a_bar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.prompts(tmp_path / "m.parquet", 3)
    for name, value in {"PYTHONPATH": runs.ROOT, "IPYTHONDIR": tmp_path, "JUPYTER_RUNTIME_DIR": tmp_path}.items():
        monkeypatch.setenv(name, str(value))
    cell = nbformat.v4.new_code_cell(SCRIPT.splitlines()[1] + NOTEBOOK)
    book = nbformat.v4.new_notebook(cells=[cell])
    options = {"timeout": 200, "kernel_name": "python3", "resources": {"metadata": {"path": str(tmp_path)}}}
    nbclient.NotebookClient(book, store_widget_state=True, **options).execute()
    shown, *_, said = cell.outputs
    assert "application/vnd.jupyter.widget-view+json" in shown.data
    assert said.text == "3\n"
    widgets = book.metadata.widgets["application/vnd.jupyter.widget-state+json"]["state"].values()
    bars = [one["state"] for one in widgets if one["model_name"] == "FloatProgressModel"]
    texts = [one["state"]["value"].replace("\u2007", " ") for one in widgets if one["model_name"] == "HTMLModel"]
    assert (3, 3, "success") in [(one["value"], one["max"], one["bar_style"]) for one in bars]
    assert "100%" in texts
    assert any(re.fullmatch(r" 3/3 images, in \d\d:\d\d, 0 failed, 0 captures", text) for text in texts)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda job: batchgen.load_job(5), "takes the path of a job file, and not of type int"),
        (lambda job: batchgen.load_job({"model": {}}), "and not of type dict; overrides are for single keys"),
        (lambda job: batchgen.load_job(None, "model.path=pattern"), "overrides are a list of texts"),
        (lambda job: batchgen.load_job(None, [5]), "overrides are a list of texts"),
        (lambda job: batchgen.load_job(None, None), "overrides are a list of texts"),
        (lambda job: batchgen.load_job(None, {"model.path": "pattern"}), "overrides are a list of texts"),
        (lambda job: batchgen.plan("m.parquet", "job.toml"), "job is what load_job gives, .* not of type str"),
        (lambda job: batchgen.run("m.parquet", "out", {}), "job is what load_job gives, .* not of type dict"),
        (lambda job: batchgen.plan(5, job), "a manifest is the path of a Parquet file, .* not of type int"),
        (lambda job: batchgen.plan(pa.table({"prompt": ["a"]}), job), "not of type Table; write rows to one first"),
        (lambda job: batchgen.plan([{"prompt": "a"}], job), "not of type list; write rows to one first"),
        (lambda job: batchgen.plan(b"m.parquet", job), "not of type bytes"),
        (lambda job: batchgen.plan("", job), "a name is empty; name a file, or . for the folder that you are in"),
        (lambda job: batchgen.plan([], job), "no file was named"),
        *(
            (lambda job, workers=workers: batchgen.run("m.parquet", "out", job, workers=workers), "from 1 to 64")
            for workers in (0, -2, 1.5, "2", True, 65)
        ),
    ],
)
def test_wrong_types_are_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Any, why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    runs.prompts(tmp_path / "m.parquet", 1)
    with pytest.raises(UsageError, match=why):
        call(batchgen.load_job(None, ["model.path=pattern"]))
    assert not (tmp_path / "out").exists()


def test_an_empty_name_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of the shell that is not set."""
    monkeypatch.chdir(tmp_path)
    runs.prompts(tmp_path / "m.parquet", 1)
    for command in ("plan", "run"):
        ended = runs.batchgen(command, "", "--model", "pattern")
        assert ended.code == 2
        assert "a name is empty" in ended.err
