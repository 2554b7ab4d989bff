"""What every bench has around it: a folder, quiet libraries, and the versions."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
