"""What every bench has around it: a folder, quiet libraries, the versions, and its file of figures."""

from __future__ import annotations

import json
import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import diffusers
import PIL
import torch
import transformers

from batchgen.version import VERSION


@contextmanager
def workplace(folder: Path | None) -> Iterator[Path]:
    """The named folder, made if need be, else one that is removed afterwards."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="batchgen-bench-") as scratch:
        yield Path(scratch)


def quieten() -> None:
    """Errors only from diffusers and transformers, for the rest of the process."""
    for logger in (diffusers.utils.logging, transformers.utils.logging):
        logger.set_verbosity_error()
        logger.disable_progress_bar()


def versions() -> dict[str, str]:
    """Of everything that the figures depend on."""
    return {
        "batchgen": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        "diffusers": diffusers.__version__,
        "transformers": transformers.__version__,
        "pillow": PIL.__version__,
    }


def save(report: Any, path: Path | None) -> None:
    """Write what a report, a dataclass, has so far, so that a bench that is cut short leaves it."""
    if path:
        path.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
