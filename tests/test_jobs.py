"""Job files that are written to begin with, and what a job is said to come to."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from batchgen.job import load_job
from batchgen.jobs.files import HERE, families, new_file
from batchgen.jobs.origins import toml
from batchgen.models.folder import facts_of
from batchgen.weights import Model
from tests import families as tiny_families
from tests import runs
from tests.test_job import VALUES, keys

UNSET = re.compile(r"(?m)^# (?=\w+ = )")


@pytest.mark.parametrize("family", families())
def test_a_new_file_has_every_key_and_says_what_the_familys_own_says(family: str, tmp_path: Path) -> None:
    text = new_file(family)
    (tmp_path / "job.toml").write_text(text, encoding="utf-8")
    assert load_job(tmp_path / "job.toml") == load_job(HERE / f"{family}.toml")
    every = tomllib.loads(UNSET.sub("", text))
    assert {f"{table}.{key}" for table in every for key in every[table]} == {*keys(), "columns.prompt"}


def test_a_new_files_defaults_are_the_defaults(tmp_path: Path) -> None:
    """What is commented out changes nothing where the key has a default, when its mark is removed."""
    path = tmp_path / "job.toml"
    path.write_text(new_file("demo"), encoding="utf-8")
    plain = load_job(path).model_dump()
    path.write_text(UNSET.sub("", new_file("demo")), encoding="utf-8")
    assert all(
        value in (None, load_job(path).model_dump()[table][key])
        for table, content in plain.items()
        for key, value in content.items()
    )


def test_there_is_a_file_for_every_family_that_the_help_names(tmp_path: Path) -> None:
    help_text = runs.batchgen("job", "init", "--help").out
    (named,) = re.findall(r"FAMILY: (.+?) \[", help_text)
    assert sorted(re.split(r", | or ", named)) == families()
    for family in families():
        assert (runs.ROOT / "jobs" / f"{family}.toml").read_bytes() == (HERE / f"{family}.toml").read_bytes()


TINY = {"sd15": "sd1", "sdxl": "sdxl", "sd3": "sd3", "flux": "flux", "flux2": "klein"}
TINY |= {"qwen-image": "qwen", "z-image": "z-image"}


@pytest.mark.parametrize("family", TINY)
def test_a_familys_file_sets_only_what_the_family_understands(family: str) -> None:
    found = facts_of(Model(path=str(tiny_families.folder(TINY[family]))))
    set_here = tomllib.loads((HERE / f"{family}.toml").read_text(encoding="utf-8")).get("sampling", {})
    assert set_here.keys() <= {*found.columns, "num_images"}
    assert set_here.get("sampler", found.sampler) in found.samplers


def test_a_new_file_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = runs.batchgen("job", "init")
    assert (made.code, made.out) == (0, "demo.toml: edit it, then `batchgen run MANIFEST --job demo.toml`\n")
    source = runs.manifest(tmp_path / "m.parquet", [{"prompt": "a red apple", "width": 64, "height": 64, "steps": 1}])
    assert runs.batchgen("run", source, "--job", "demo.toml").code == 0


def test_a_file_that_is_there_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("mine", encoding="utf-8")
    refused = runs.batchgen("job", "init", "sdxl", "-o", path)
    assert (refused.code, path.read_text()) == (2, "mine")
    assert "is there already; name another file with -o, or replace it with --overwrite" in refused.err
    assert runs.batchgen("job", "init", "sdxl", "-o", path, "--overwrite").code == 0
    assert path.read_text() == new_file("sdxl") == runs.batchgen("job", "init", "sdxl", "-o", "-").out
    lost = runs.batchgen("job", "init", "-o", tmp_path / "none" / "job.toml")
    assert (lost.code, "cannot be written: No such file or directory" in lost.err) == (2, True)


def shown(*words: object) -> dict[str, dict[str, dict[str, Any]]]:
    ended = runs.batchgen("job", "show", "--json", *words)
    assert ended.code == 0, ended.err
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(ended.out)
    return found


def test_each_value_is_shown_with_what_gave_it(tmp_path: Path) -> None:
    """File, option of its own, `--set`, default; the later wins."""
    path = tmp_path / "job.toml"
    path.write_text("[sampling]\nsteps = 5\nwidth = 64\nseed = 0\n[output]\nformat = 'parquet'\n", encoding="utf-8")
    words = ("--job", path, "--model", "pattern", "--format", "files", "--set", "sampling.steps=6")
    found = shown(*words)
    assert found["sampling"]["steps"] == {"value": 6, "from": "--set"}
    assert found["sampling"]["width"] == found["sampling"]["seed"] | {"value": 64} == {"value": 64, "from": str(path)}
    assert found["output"]["format"] == {"value": "files", "from": "--format"}
    assert found["model"]["path"] == {"value": "pattern", "from": "--model"}
    assert found["output"]["image"] == {"value": "png", "from": "default"}
    assert found["sampling"]["guidance_scale"] == {"value": 7.5, "from": "the model's own"}
    assert found["sampling"]["true_cfg_scale"] == {"value": None, "from": "default"}
    assert {f"{table}.{key}" for table in found for key in found[table]} == set(keys())


def test_what_is_shown_is_a_job_file_that_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "again.toml"
    words = [f"--set={name}={toml(value)}" for name, value in VALUES.items() if name != "output.png_info"]
    words += ["--set=columns.prompt=cap\x7ftion", '--set=sampling.negative_prompt="a\\n\\"b\\" é"']
    ended = runs.batchgen("job", "show", *words)
    assert "note: what the model has of its own is not shown: " in ended.err
    path.write_text(ended.out, encoding="utf-8")
    assert load_job(path) == load_job(None, [one.removeprefix("--set=") for one in words])
    path.write_text(runs.batchgen("job", "show").out, encoding="utf-8")
    assert load_job(path) == load_job()


@pytest.mark.parametrize("width", ["sampling.steps=x", "sampling.stepps=3"])
def test_a_wrong_job_is_refused(width: str) -> None:
    ended = runs.batchgen("job", "show", "--set", width)
    assert (ended.code, ended.out) == (2, "")
