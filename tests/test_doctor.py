"""What `doctor` finds: here, on machines that are made up, and in models and disks that are amiss."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batchgen.doctor import machine, model, torch_probe, work
from batchgen.doctor.findings import Finding, text
from batchgen.doctor.torch_probe import Gpu, Probe, Torch
from batchgen.doctor.work import Need
from batchgen.filesystem import FileSystem
from batchgen.job import load_job
from batchgen.models import demo
from tests import families, runs, tiny

H200 = Gpu("NVIDIA H200", 140 * 10**9, 150 * 10**9)


def doctor(*words: object) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit code and findings by name."""
    ended = runs.batchgen("doctor", "--json", *words)
    found = json.loads(ended.out)
    assert found["is_fit"] == (ended.code == 0)
    assert all(one["advice"] for one in found["findings"] if one["state"] != "ok")
    return ended.code, {one["name"]: one for one in found["findings"]}


def test_this_machine_is_fit_for_the_demo(tmp_path: Path) -> None:
    """Whatever it lacks beside: a GPU, a Slurm."""
    import torch

    code, found = doctor()
    assert code == 0, found
    assert found["torch"]["facts"]["version"] == torch.__version__
    assert {
        "Python",
        "machine",
        "GPU",
        "diffusers",
        "transformers",
        "model",
        "columns",
        "disk",
        "Slurm",
    } <= found.keys()
    assert found["model"]["facts"]["family"] == "stable-diffusion"
    assert found["model"]["facts"]["columns"][0] == "prompt"
    assert 10**6 < found["model"]["facts"]["parameters"] < 10**8


def test_it_says_so_in_words_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    ended = runs.batchgen("doctor", "pattern")
    assert (ended.code, ended.closing_line) == (0, "nothing amiss")
    assert re.search(r"(?m)^ok     model         pattern: family pattern", ended.out)
    assert max(map(len, ended.out.splitlines())) <= 120
    ended = runs.batchgen("doctor", "no/such")
    assert (ended.code, ended.closing_line) == (3, "1 thing amiss")
    assert re.search(r"(?m)^amiss  model .*neither a local folder nor whole", ended.out)
    assert re.search(r"(?m)^ +→ fetch it once, where there is a network: batchgen prefetch no/such$", ended.out)


def test_torch_is_not_imported_into_the_command() -> None:
    code = (
        "import atexit, sys\nsys.argv = ['batchgen', 'doctor']\n"
        "heavy = ('torch', 'diffusers', 'transformers')\n"
        "atexit.register(lambda: print([one for one in heavy if one in sys.modules]))\n"
        "from batchgen.cli import main\nmain()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.splitlines()[-1]) == (0, "[]")


def test_the_oldest_versions_are_those_that_the_package_asks_for() -> None:
    project = tomllib.loads((runs.ROOT / "pyproject.toml").read_text())["project"]
    asked = dict(one.split(">=") for one in project["dependencies"])
    assert {name: asked[name] for name in machine.OLDEST} == machine.OLDEST
    assert project["requires-python"] == f">={'.'.join(map(str, machine.PYTHON))}"


@pytest.mark.parametrize(
    ("found", "state", "words"),
    [
        (Torch("2.13.0+cpu"), "ok", "2.13.0+cpu, built for CPUs only"),
        (Torch("2.11.0", "12.8"), "ok", "built for CUDA 12.8"),
        (Torch("2.9.1", "12.8"), "amiss", "2.11 or newer is needed"),
        (Torch("1.13.1"), "amiss", "2.11 or newer is needed"),
        (Torch(), "amiss", "not installed"),
        (Torch(error="libcudart.so.12: cannot open"), "amiss", "it cannot be imported: libcudart.so.12: cannot open"),
    ],
)
def test_torch(found: Torch, state: str, words: str) -> None:
    told = machine.torch(found, is_needed=True)
    assert told.state == state
    assert words in f"{told.found}; {told.advice}"
    assert machine.torch(found, is_needed=False).state == {"ok": "ok", "amiss": "note"}[state]


@pytest.mark.parametrize(
    ("found", "num_seen", "state", "words"),
    [
        (Torch("2.13.0", "12.8", (H200,)), 1, "ok", "cuda:0, NVIDIA H200, 140 GB of 150 GB free"),
        (Torch("2.13.0", "12.8", (Gpu("A", 10**9, 80 * 10**9),)), 1, "note", "another process holds most"),
        (Torch("2.13.0+cpu"), 2, "amiss", "the driver sees 2 GPUs, but torch cannot use them: torch is built for CPUs"),
        (Torch("2.13.0", "13.0", error="driver too old"), 1, "amiss", "driver too old; update the NVIDIA driver"),
        (Torch(), 1, "amiss", "torch is not there; install torch by the command"),
        (Torch("2.13.0", "12.8", error="Found no NVIDIA driver"), 0, "note", "none; rows are made on the CPU"),
        (Torch("2.13.0+cpu"), 0, "note", "none; rows are made on the CPU"),
    ],
)
def test_gpus(found: Torch, num_seen: int, state: str, words: str) -> None:
    (told,) = (one for one in machine.gpus(found, is_wanted=True, num_seen=num_seen) if one.name == "GPU")
    assert told.state == state
    assert words in f"{told.found}; {told.advice}"
    assert all(one.state != "amiss" for one in machine.gpus(found, is_wanted=False, num_seen=num_seen))


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("import sys; sys.exit('no such library')", "its process ended with code 1 and said: no such library"),
        ("import os; os.kill(os.getpid(), 11)", "its process ended with code -11 and said: nothing"),
        ("import time; time.sleep(60)", "it has not answered for 0 s"),
    ],
)
def test_a_torch_that_crashes_or_hangs_is_said(program: str, error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_probe, "TIMEOUT_S", 0.4 if "sleep" in program else 60.0)
    assert Probe(program).result() == Torch(error=error)


def broken(folder: Path, change: Callable[[Path], object]) -> Path:
    """A copy of the demo model with one of its files of weights changed."""
    shutil.copytree(demo.WEIGHTS, folder)
    change(next(folder.glob("unet/*.safetensors")))
    return folder


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (Path.unlink, "lacks diffusion_pytorch_model.safetensors"),
        (lambda path: os.truncate(path, path.stat().st_size - 1), "where its header tells of"),
        (lambda path: os.truncate(path, 5), "is no safetensors file"),
        (lambda path: path.write_bytes(b"\x04" + bytes(7) + b"[42]"), "is no safetensors file"),
    ],
)
def test_a_model_that_is_not_whole(tmp_path: Path, change: Callable[[Path], object], words: str) -> None:
    facts, told = model.known(load_job(None, [f"model.path={broken(tmp_path / 'model', change)}"]))
    assert (facts, told.state, words in told.found) == (None, "amiss", True), told
    assert told.advice


def test_a_manifest_is_not_looked_at_without_its_model(tmp_path: Path) -> None:
    code, found = doctor("no/such", "--manifest", runs.prompts(tmp_path / "m.parquet", 3))
    assert (code, found["manifest"]["state"], found["manifest"]["found"]) == (3, "note", "not looked at")


def test_weights_that_do_not_fit() -> None:
    job = load_job()
    facts, _ = model.known(job)
    assert facts is not None
    assert list(model.room(job, facts, [H200], 10**6)) == []
    (gpu,) = model.room(job, facts, [Gpu("small", 10**6, 10**6)], 10**12)
    (cpu,) = model.room(job, facts, [], 10**6)
    assert (gpu.state, cpu.state) == ("amiss", "amiss")
    assert gpu.facts["weights_bytes"] * 2 == cpu.facts["weights_bytes"]
    assert "offload" in gpu.advice
    own = tiny.job(families.folder("pag"))
    (gpu,) = model.room(own, model.known(own)[0], [Gpu("small", 10**5, 10**5)], 10**12)
    assert "offload" not in gpu.advice


def test_a_manifest_is_held_against_the_disk(tmp_path: Path) -> None:
    source = runs.prompts(tmp_path / "m.parquet", 30, width=64, height=64)
    code, found = doctor("pattern", "--manifest", source, "-o", tmp_path / "new" / "out")
    assert (code, found["manifest"]["facts"]) == (0, {"images": 30, "rejected": 0})
    facts = found["disk"]["facts"]
    assert (facts["path"], facts["needed_bytes"]) == (str(tmp_path), 30 * 64 * 64 * 1.5)
    assert facts["needed_files"] >= 30
    assert list(tmp_path.iterdir()) == [source]
    code, found = doctor("pattern", "--manifest", runs.ROOT / "manifests" / "broken.parquet")
    assert (code, found["manifest"]["state"]) == (3, "amiss")
    assert "cannot be made as asked" in found["manifest"]["found"]
    assert "row 2: width = 63" in found["manifest"]["facts"]["error"]


def test_a_run_is_looked_at_with_its_own_job(tmp_path: Path) -> None:
    source, out = runs.prompts(tmp_path / "m.parquet", 6), tmp_path / "out"
    assert runs.run(source, out).code == 0
    code, found = doctor("-o", out)
    assert (code, found["model"]["facts"]["name"], found["run"]["facts"]) == (
        0,
        "pattern",
        {"rows": 6, "outstanding": 0},
    )
    assert (found["disk"]["facts"]["needed_bytes"], found["disk"]["facts"]["needed_files"]) == (0, 0)


@pytest.mark.parametrize(
    ("need", "change", "words"),
    [
        (Need(9, 10**6, 10), {}, ""),
        (Need(9, 10**9, 10), {}, "make room"),
        (Need(9, 10, 10**6), {}, "write tars"),
        (Need(9, 10, 10**6), {"f_files": 0, "f_favail": 0}, ""),
        (None, {}, ""),
    ],
)
def test_room_on_the_disk(
    need: Need | None, change: dict[str, int], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has = {"f_bavail": 10**5, "f_frsize": 1000, "f_files": 10**6, "f_favail": 1000} | change
    monkeypatch.setattr("os.statvfs", lambda place: SimpleNamespace(**has))
    told = work.disk(tmp_path / "a" / "b", need)
    assert (told.state, words in told.advice) == ("amiss" if words else "ok", True)


def test_a_disk_without_links_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: FileSystem, source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(FileSystem, "link", refuse)
    told = work.disk(tmp_path, None)
    assert (told.state, "cannot link files" in told.advice) == ("amiss", True)
    assert list(tmp_path.iterdir()) == []


def test_slurm_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.slurm().state == "note"
    assert "there is no sbatch here" in machine.slurm().found
    program = tmp_path / "sbatch"
    program.write_text("#!/bin/sh\necho slurm 24.11.5\n", encoding="utf-8")
    program.chmod(0o755)
    assert machine.slurm() == Finding("Slurm", "ok", "slurm 24.11.5", facts={"version": "slurm 24.11.5"})


def test_a_long_finding_is_wrapped() -> None:
    lines = text([Finding("a", "amiss", "word " * 40, "do this " * 20)], 60).splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[-1] == "1 thing amiss"
