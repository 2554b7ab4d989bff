"""What buckets were measured to cost on the GPUs that this user has run on: kept beside the hash cache, so that the
next plan predicts instead of guessing."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from batchgen.cost import Measurement, Profile
from batchgen.models.hashes import cache_dir

_log = logging.getLogger(__name__)
_KNOWN = TypeAdapter(dict[str, tuple[Measurement, ...]])
"""By GPU model."""
_DRIVER = Path("/proc/driver/nvidia/gpus")


def remember(architecture: str, gpu: str, measured: Iterable[Measurement]) -> None:
    """Keep measurements; a bucket that was measured before takes the new figures."""
    known = _read(architecture)
    buckets = {_bucket(one): one for one in (*known.get(gpu, ()), *measured)}
    content = {**known, gpu: tuple(buckets.values())}
    path = _file(architecture)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8", suffix=".tmp") as file:
            json.dump({name: [asdict(one) for one in lines] for name, lines in content.items()}, file)
        os.replace(file.name, path)
    except OSError as error:
        _log.warning("measured costs cannot be kept in %s: %s", path, error)


def recall(architecture: str) -> Profile | None:
    """The profile of this machine's GPU; on a machine without one, that of the only GPU model ever used. None if
    nothing fits."""
    known = _read(architecture)
    here = gpu_name()
    if here is None and len(known) == 1:
        here = next(iter(known))
    if here is None or not known.get(here):
        return None
    return Profile(f"measured earlier on {here}", known[here])


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
