"""The machine and what is installed on it: nothing here depends on a model or a manifest."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from batchgen.cores import usable_cores
from batchgen.doctor.findings import Finding, State
from batchgen.doctor.torch_probe import Torch
from batchgen.errors import BatchgenError, UsageError
from batchgen.gpus import visible_gpus
from batchgen.slurm import programs
from batchgen.wording import counted, first_line, shorten, sized

PYTHON = (3, 11)
OLDEST: Mapping[str, str] = {"torch": "2.11", "diffusers": "0.40", "transformers": "5.10"}
"""A test holds these equal to what the package asks for."""
_INSTALL = "install batchgen anew (`pip install .`), which brings what it needs"
_INSTALL_TORCH = "install torch by the command that https://pytorch.org/get-started/locally/ gives"


def python() -> Finding:
    """Python's version, and the system."""
    found = f"{platform.python_version()} ({sys.executable}), {platform.system()} {platform.machine()}"
    facts = {"version": platform.python_version(), "system": platform.system()}
    if platform.system() != "Linux":
        return Finding("Python", "amiss", found, "batchgen runs on Linux only", facts)
    if sys.version_info < PYTHON:
        return Finding("Python", "amiss", found, f"install Python {'.'.join(map(str, PYTHON))} or newer", facts)
    return Finding("Python", "ok", found, facts=facts)


def machine() -> Finding:
    """Cores and memory that a run may use."""
    cores, free, total = usable_cores(), *memory()
    found = f"{counted(cores, 'usable core')}, {sized(free)} of {sized(total)} memory free"
    return Finding("machine", "ok", found, facts={"cores": cores, "free_bytes": free, "total_bytes": total})


def memory() -> tuple[int, int]:
    """Bytes of the machine's memory that are free, caches counted as free, and all."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii") if Path("/proc/meminfo").exists() else ""
    kb = {name: int(number) for name, number in re.findall(r"(\w+):\s+(\d+) kB", lines)}
    return 1024 * kb.get("MemAvailable", 0), 1024 * kb.get("MemTotal", 0)


def libraries(*, is_needed: bool) -> Iterator[Finding]:
    """diffusers and transformers, without importing them."""
    for name in ("diffusers", "transformers"):
        try:
            yield _versioned(name, version(name), is_needed=is_needed)
        except PackageNotFoundError:
            yield Finding(name, "amiss" if is_needed else "note", "not installed", _INSTALL)


def torch(found: Torch, *, is_needed: bool) -> Finding:
    """torch itself."""
    bad: State = "amiss" if is_needed else "note"
    if not found.version and not found.error:
        return Finding("torch", bad, "not installed", f"{_INSTALL_TORCH}; only `pattern` runs without it")
    if not found.version:
        return Finding("torch", bad, f"it cannot be imported: {found.error}", _INSTALL_TORCH)
    built = f"built for CUDA {found.cuda}" if found.cuda else "built for CPUs only"
    one = _versioned("torch", found.version, is_needed=is_needed)
    return Finding("torch", one.state, f"{one.found}, {built}", one.advice, {**one.facts, "cuda": found.cuda})


def _versioned(name: str, installed: str, *, is_needed: bool) -> Finding:
    facts = {"version": installed, "oldest": OLDEST[name]}
    if _numbers(installed) < _numbers(OLDEST[name]):
        state: State = "amiss" if is_needed else "note"
        return Finding(name, state, installed, f"{OLDEST[name]} or newer is needed: {_INSTALL}", facts)
    return Finding(name, "ok", installed, facts=facts)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(one) for one in re.findall(r"[0-9]+", text.partition("+")[0])[:2])


def gpus(found: Torch, *, is_wanted: bool, num_seen: int | None = None) -> Iterator[Finding]:
    """The GPUs that torch sees; or why it sees none, though the driver sees `num_seen` (asked if None)."""
    for number, one in enumerate(found.gpus):
        text = f"cuda:{number}, {one.name}, {sized(one.free_bytes)} of {sized(one.total_bytes)} free"
        facts = {"name": one.name, "free_bytes": one.free_bytes, "total_bytes": one.total_bytes}
        is_taken = one.free_bytes < one.total_bytes / 2
        advice = "another process holds most of its memory: `nvidia-smi` shows which" if is_taken else ""
        yield Finding("GPU", "note" if is_taken else "ok", text, advice, facts)
    if found.gpus:
        yield from _compiler()
        return
    num_seen = _num_seen() if num_seen is None else num_seen
    if not num_seen:
        yield Finding("GPU", "note", "none", "rows are made on the CPU: minutes an image for a real model")
        return
    why = found.error or ("torch is built for CPUs only" if found.version else "torch is not there")
    advice = "update the NVIDIA driver, or install a torch that is built for it" if found.cuda else _INSTALL_TORCH
    text = f"the driver sees {counted(num_seen, 'GPU')}, but torch cannot use them: {why}"
    yield Finding("GPU", "amiss" if is_wanted else "note", text, f"{advice}; until then rows are made on the CPU")


def _num_seen() -> int:
    try:
        return len(visible_gpus())
    except UsageError:
        return 0


def _compiler() -> Iterator[Finding]:
    """What torch.compile needs beside torch."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if compiler and header.exists():
        yield Finding("compiler", "ok", f"{compiler}, {header}")
        return
    missing = " and no ".join([*([] if compiler else ["C compiler"]), *([] if header.exists() else [f"{header}"])])
    advice = "compiled modes need both (Debian: gcc and python3-dev); without them runs are graph or eager, and slower"
    yield Finding("compiler", "note", f"no {missing}", advice)


def slurm() -> Finding:
    """Whether `submit` works from here. The controller is not asked."""
    try:
        said = programs.version()
    except BatchgenError as error:
        advice = "`submit` works on a machine of a cluster only; runs do not need it"
        return Finding("Slurm", "note", shorten(first_line(error), 120), advice)
    return Finding("Slurm", "ok", said, facts={"version": said})
