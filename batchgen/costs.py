"""What buckets were measured to cost on the GPUs that this user has run on: kept beside the hash cache, so that the
next plan predicts instead of guessing."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from batchgen.cost import Measurement, Profile
from batchgen.models.hashes import cache_dir

_log = logging.getLogger(__name__)
_KNOWN = TypeAdapter(dict[str, tuple[Measurement, ...]])
"""By GPU model and torch version; the latest last."""
_WITH = " with torch "
_DRIVER = Path("/proc/driver/nvidia/gpus")


def remember(architecture: str, gpu: str, torch: str, measured: Iterable[Measurement]) -> None:
    """Keep measurements of a GPU model under a torch version; a bucket that was measured before takes the new
    figures."""
    known, key = _read(architecture), f"{gpu}{_WITH}{torch}"
    buckets: dict[Measurement, Measurement] = {}
    for one in (*known.pop(key, ()), *measured):
        buckets.pop(_bucket(one), None)
        buckets[_bucket(one)] = one
    content = {**known, key: tuple(buckets.values())}
    path = _file(architecture)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8", suffix=".tmp") as file:
            try:
                json.dump({name: [asdict(one) for one in lines] for name, lines in content.items()}, file)
                file.close()
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        _log.warning("measured costs cannot be kept in %s: %s", path, error)


def recall(architecture: str, mode: str) -> Profile | None:
    """The profile of this machine's GPU under the installed torch. On a machine without a GPU, that of the only GPU
    model ever used; without torch, the latest. Of a bucket the figures in `mode` count, else those of its last run.
    None if nothing fits."""
    known = {key: lines for key, lines in _read(architecture).items() if lines}
    gpus = {key.split(_WITH)[0] for key in known}
    gpu = gpu_name() or (gpus.pop() if len(gpus) == 1 else None)
    torch = _torch()
    fitting = [key for key in known if key == f"{gpu}{_WITH}{torch or key.split(_WITH)[-1]}"]
    if not fitting:
        return None
    lines = sorted(known[fitting[-1]], key=lambda one: one.mode == mode)
    latest = {replace(_bucket(one), mode=""): one for one in lines}
    return Profile(f"measured earlier on {fitting[-1]}", tuple(latest.values()))


def _torch() -> str | None:
    """The installed version of torch, which is not loaded for it; None without it."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def gpu_name() -> str | None:
    """The model of this machine's first GPU as its driver names it; None without one. Needs no torch."""
    for path in sorted(_DRIVER.glob("*/information")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name == "Model":
                return value.strip()
    return None


def _bucket(one: Measurement) -> Measurement:
    return replace(one, fixed_s=0.0, evaluation_s=0.0, peak_bytes=None, weights_bytes=None, device_bytes=None)


def _read(architecture: str) -> dict[str, tuple[Measurement, ...]]:
    try:
        return _KNOWN.validate_json(_file(architecture).read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValidationError) as error:
        _log.warning("measured costs in %s cannot be read and are measured again: %s", _file(architecture), error)
        return {}


def _file(architecture: str) -> Path:
    return cache_dir() / "costs" / f"{architecture}.json"
