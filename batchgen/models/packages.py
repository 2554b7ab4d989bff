"""Python packages that a model's tokenizers need beside transformers. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from batchgen.errors import UsageError
from batchgen.models.contents import ModelFolder
from batchgen.wording import listed


def check_packages(folder: ModelFolder) -> None:
    """Raises UsageError for a checked folder whose tokenizers cannot be read for want of a package."""
    missing = sorted({one for one in _needed(folder) if not _is_there(one)})
    if missing:
        raise UsageError(
            f"model {folder.name!r} has a tokenizer that comes as a .model file, which needs {listed(missing)}, not "
            "installed here; install batchgen[sentencepiece]"
        )


def _needed(folder: ModelFolder) -> Iterator[str]:
    for name, component in folder.components.items():
        own = {file for file in folder.files if file.startswith(f"{name}/")} if component.is_tokenizer else set[str]()
        if any(file.endswith(".model") for file in own) and f"{name}/tokenizer.json" not in own:
            yield "sentencepiece"
            if component.library == "transformers":  # It converts what it finds.
                yield "google.protobuf"


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of the package around it
        return False
