"""Wrong input: one clear sentence, exit code 2, no traceback, and nothing written."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

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


def test_directory_of_another_manifest(tmp_path: Path, source: Path) -> None:
    assert runs.run(source, tmp_path / "out").code == 0
    rows = [{"id": f"row-{n}", "prompt": "another one" if n == 2 else f"prompt number {n}"} for n in range(5)]
    other = runs.manifest(tmp_path / "other.parquet", rows)
    said = refused("run", other, "-o", tmp_path / "out", "--model", "pattern")
    assert "row-2" in said
    assert "another one" in said
    assert "row-4" in said


@pytest.mark.parametrize("command", ["status", "verify", "finalize"])
def test_no_run_directory(tmp_path: Path, command: str) -> None:
    assert "no run directory" in refused(command, tmp_path)


def test_output_is_something_else(tmp_path: Path, source: Path) -> None:
    assert "is a file" in refused("run", source, "-o", source, "--model", "pattern")
    assert "something else" in refused("run", source, "-o", tmp_path, "--model", "pattern")
