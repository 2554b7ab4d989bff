"""Single safetensors files: what their headers tell. Needs no torch."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from batchgen.errors import UsageError

_AGAIN = "fetch or copy the model again"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a safetensors file."""

    num_elements: int
    num_bytes: int


def tensors_of(path: Path) -> Mapping[str, Tensor]:
    """All tensors of a safetensors file by name: 8 bytes of length, little endian, so many of JSON, and the tensors.
    Raises UsageError for a file that is not whole."""
    stat = path.stat()
    return _read(path, stat.st_size, stat.st_mtime_ns)


@cache
def _read(path: Path, size: int, changed_ns: int) -> Mapping[str, Tensor]:
    with path.open("rb") as file:
        try:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, 10**8)))
            entries = {name: one for name, one in header.items() if name != "__metadata__"}
            num_bytes = 8 + length + max((one["data_offsets"][1] for one in entries.values()), default=0)
            found = {name: Tensor(math.prod(one["shape"]), _length(one)) for name, one in entries.items()}
        except (struct.error, ValueError, AttributeError, KeyError, TypeError):
            raise UsageError(f"{path} is no safetensors file; {_AGAIN}") from None
    if size != num_bytes:
        raise UsageError(f"{path} has {size:,} bytes, where its header tells of {num_bytes:,}; {_AGAIN}")
    return found


def _length(entry: Mapping[str, list[int]]) -> int:
    start, end = entry["data_offsets"]
    return end - start


def components_in(path: Path, prefixes: Mapping[str, tuple[str, ...]], components: Iterable[str]) -> frozenset[str]:
    """The components whose weights a single file in its model's original key layout holds, by the beginnings of their
    tensors' names."""
    names = tensors_of(path)
    return frozenset(one for one in components if any(name.startswith(prefixes.get(one, ())) for name in names))
