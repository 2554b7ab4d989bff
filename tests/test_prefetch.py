"""`prefetch` from a hub on this machine, and runs afterwards that ask it nothing: real processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchgen.errors import UsageError
from batchgen.models.fetching import fetch_model
from batchgen.models.folder import find_model, pinned
from batchgen.weights import Model
from tests import checkers, families, runs, tiny
from tests.hub import Hub, serving


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    """A repository with the weights in two variants, as pickles too, and with files that no run reads."""
    folder = Path(shutil.copytree(tiny.folder("sd1"), tmp_path / "repository"))
    for weights in folder.glob("*/*.safetensors"):
        shutil.copy(weights, weights.with_suffix(".fp16.safetensors"))
        shutil.copy(weights, weights.with_suffix(".bin"))
    (folder / "README.md").write_text("# words")
    (folder / "v1-5-pruned.safetensors").write_bytes(bytes(50_000))
    with serving(folder) as served:
        yield served


def batchgen(hub: Hub, tmp_path: Path, *words: object) -> runs.Ended:
    environment = {**os.environ, **hub.environment(tmp_path / "home"), "PYTHONPATH": str(runs.ROOT)}
    own = {"BATCHGEN_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "batchgen", *map(str, words)],
        env=environment | own, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    return runs.Ended(ended.returncode, ended.stdout, ended.stderr)


def test_a_run_after_it_makes_no_request(hub: Hub, tmp_path: Path) -> None:
    """Only what a run reads is fetched; planning and a worker then find all of it here."""
    source = runs.prompts(tmp_path / "m.parquet", 2)
    fetched = batchgen(hub, tmp_path, "prefetch", hub.name)
    assert fetched.code == 0, fetched.err
    folder = Path(fetched.closing_line)
    assert folder.name == hub.commit
    assert folder.is_relative_to(tmp_path / "home")
    assert fetched.out.splitlines()[0].startswith(f"{hub.name}: ")
    assert fetched.out.splitlines()[0].endswith(f", commit {hub.commit}")
    assert {name.rsplit(".", 1)[-1] for name in hub.fetched} <= {"json", "txt", "safetensors"}
    assert len([name for name in hub.fetched if name.endswith(".safetensors")]) == 3
    assert not any("fp16" in name or ("/" not in name and name != "model_index.json") for name in hub.fetched)
    hub.requests.clear()
    options = ("--model", hub.name, "--set", "sampling.steps=1", "--set", "engine.device=cpu", "--workers", 1)
    ended = batchgen(hub, tmp_path, "run", source, "-o", "out", *options)
    assert ended.code == 0, ended
    assert hub.requests == []
    assert len(runs.check_images(tmp_path / "out", is_pattern=False)) == 2


def test_a_variant_of_a_job_file(hub: Hub, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(f'[model]\npath = "{hub.name}"\nvariant = "fp16"\n', encoding="utf-8")
    fetched = batchgen(hub, tmp_path, "prefetch", "job.toml")
    assert fetched.code == 0, fetched.err
    weights = [name for name in hub.fetched if name.endswith(".safetensors")]
    assert len(weights) == 3
    assert all(name.endswith(".fp16.safetensors") for name in weights)
    source = runs.prompts(tmp_path / "m.parquet", 2)
    missing = batchgen(hub, tmp_path, "plan", source, "--model", hub.name)
    assert missing.code == 2
    assert f"batchgen prefetch {hub.name}" in missing.err


def test_a_model_that_was_not_fetched_is_an_error_in_seconds(hub: Hub, tmp_path: Path) -> None:
    """And not one request is made for it."""
    source = runs.prompts(tmp_path / "m.parquet", 2)
    started = time.monotonic()
    options = ("--model", hub.name, "--set", "model.variant=fp16", "--set", "model.revision=main")
    ended = batchgen(hub, tmp_path, "run", source, "-o", "out", *options)
    assert ended.code == 2
    assert time.monotonic() - started < 60
    wanted = f"batchgen prefetch {hub.name} --set model.revision=main --set model.variant=fp16"
    assert ended.err.strip().endswith(f"fetch it once, where there is a network: {wanted}"), ended.err
    assert "neither a local folder nor whole in the hub's cache" in ended.err
    assert "local_files_only" not in ended.err
    assert hub.requests == []
    assert not (tmp_path / "out").exists()


def test_what_the_hub_does_not_have(hub: Hub, tmp_path: Path) -> None:
    ended = batchgen(hub, tmp_path, "prefetch", "someone/else")
    assert ended.code == 2
    assert "model 'someone/else' cannot be fetched, the hub gave: " in ended.err
    assert "Traceback" not in ended.err


def test_a_safety_checker_is_fetched_where_it_is_asked_for(tmp_path: Path) -> None:
    source, on = runs.prompts(tmp_path / "m.parquet", 1), ("--set", "engine.safety_checker=true")
    with serving(checkers.folder()) as hub:
        assert batchgen(hub, tmp_path, "prefetch", hub.name).code == 0
        assert not any(name.startswith(("safety_checker/", "feature_extractor/")) for name in hub.fetched)
        missing = batchgen(hub, tmp_path, "plan", source, "--model", hub.name, *on)
        assert missing.code == 2
        command = f"batchgen prefetch {hub.name} --set engine.safety_checker=true"
        assert missing.err.strip().endswith(f"lacks safety_checker/config.json; fetch it again: {command}"), missing.err
        fetched = batchgen(hub, tmp_path, *command.split()[1:])
    assert fetched.code == 0, fetched.err
    found = find_model(Model(path=fetched.closing_line), has_checker=True)
    assert {"safety_checker/model.safetensors", "feature_extractor/preprocessor_config.json"} <= set(found.files)


def test_a_local_folder_is_checked_and_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    ended = runs.batchgen("prefetch", tiny.folder("sd1"))
    assert (ended.code, ended.closing_line) == (0, str(tiny.folder("sd1").resolve()))
    assert (tmp_path / "cache" / "sha256.json").exists()
    with pytest.raises(UsageError, match="'demo' is built in; there is nothing to fetch"):
        fetch_model(Model(path="demo"))
    assert pinned(Model(path=str(tiny.folder("sd1")))).revision is None


def test_a_pipeline_of_no_family_is_fetched_whole(tmp_path: Path) -> None:
    """Its components are known once its model_index.json is there."""
    with serving(families.folder("bria")) as hub:
        assert batchgen(hub, tmp_path, "prefetch", hub.name).code == 0
        wanted = find_model(Model(path=str(families.folder("bria")))).files
        assert set(wanted) <= hub.fetched
