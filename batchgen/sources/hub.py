"""A Hugging Face data set: a name on the hub, or a local folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchgen.errors import UsageError
from batchgen.sources import cells
from batchgen.sources.base import ROWS_PER_CHUNK
from batchgen.wording import first_line

_HUB_TIMEOUT_S = 5.0
_IMAGES_AT_ONCE = 64
"""Rows read at a time, where each holds an image file."""
_MEDIA = ("Image", "Audio", "Video", "Pdf", "Nifti", "Mesh")


@dataclass(slots=True)
class HubTable:
    """One split of a data set. `datasets` keeps its own copy on disk; memory stays flat."""

    name: str
    split: str | None
    image: str | None = None
    """The column of pictures that is carried; the others are not."""
    names: list[str] = field(init=False)
    _data: Any = field(init=False)
    _left: list[str] = field(init=False)

    def __post_init__(self) -> None:
        found = _load(self.name)
        self._data = _one_split(found, self.name, self.split)
        features = self._data.features.items()
        self._left = [name for name, one in features if _is_media(one) and not self._is_carried(name, one)]
        self.names = [name for name in self._data.column_names if name not in self._left]

    def batches(self, renamed: Mapping[str, str], notes: list[str]) -> Iterator[pa.RecordBatch]:
        data = self._data.select_columns(self.names).with_format("arrow")
        has_images = self.image is not None and _is_media(self._data.features[self.image])
        for table in data.iter(batch_size=_IMAGES_AT_ONCE if has_images else ROWS_PER_CHUNK):
            columns = {renamed[name]: self._settled(table[name], renamed[name]) for name in self.names}
            yield pa.record_batch(list(columns.values()), names=list(columns))
        if self._left:
            images = [name for name in self._left if type(self._data.features[name]).__name__ == "Image"]
            hint = f"; --column image={images[0]} takes one in, for rows to begin from" if images else ""
            notes.append(f"pictures, sound and other media are not carried: {', '.join(self._left)}{hint}")

    def _is_carried(self, name: str, feature: Any) -> bool:
        return name == self.image and type(feature).__name__ == "Image"

    def _settled(self, column: pa.ChunkedArray, name: str) -> pa.Array:
        array = column.combine_chunks()
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.chunks)
        if name not in cells.TYPES or (name == "image" and pa.types.is_struct(array.type)):
            return array.cast(pa.string()) if pa.types.is_null(array.type) else array
        try:
            return cells.settle(name, array)
        except (ValueError, pa.ArrowInvalid) as error:
            raise UsageError(f"data set {self.name}: column {name} cannot be taken: {error}") from None


def _load(name: str) -> Any:
    import datasets

    try:
        if (Path(name) / "state.json").is_file() or (Path(name) / "dataset_dict.json").is_file():
            return datasets.load_from_disk(name)
        if Path(name).is_dir():
            return datasets.load_dataset(name)
        return _from_hub(name)
    except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"{name} is no file or folder here, and cannot be loaded as a data set: {error}"
            if not Path(name).is_dir()
            else f"the folder {name} cannot be loaded as a data set: {error}"
        ) from None


def _from_hub(name: str) -> Any:
    """A data set of the hub, or what the local cache has of it. Asked first, the hub says in seconds that it does not
    answer; `datasets` would try for half a minute."""
    import datasets

    reason = _refusal(name)
    if not reason:
        return datasets.load_dataset(name)
    with _offline():
        try:
            return datasets.load_dataset(name)
        except (datasets.exceptions.DatasetsError, OSError, ValueError, RuntimeError):
            raise UsageError(
                f"{name} is no file or folder here, and cannot be loaded as a data set: the hub gave: {reason}; and "
                "the local cache does not have it. Check the name, the network and, for a data set that asks for "
                "consent, the token (hf auth login)"
            ) from None


def _refusal(name: str) -> str:
    """Why the hub does not give a data set, "" if it does."""
    from huggingface_hub import HfApi

    try:
        HfApi().dataset_info(name, timeout=_HUB_TIMEOUT_S)
    except Exception as error:  # the hub package's HTTP client, and so its errors, differ between its versions
        return first_line(error)
    return ""


@contextmanager
def _offline() -> Iterator[None]:
    """Let `datasets` and the hub's package read their caches alone, for the time of the block."""
    import datasets
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def _one_split(found: Any, name: str, split: str | None) -> Any:
    import datasets

    if isinstance(found, datasets.Dataset):
        if split is not None and str(found.split) != split:
            raise UsageError(f"data set {name} was saved as one table; leave --split {split} out")
        return found
    splits = list(found)
    if split is None and len(splits) == 1:
        return found[splits[0]]
    if split not in splits:
        asked = "no split was named" if split is None else f"it has no split {split!r}"
        raise UsageError(f"data set {name}: {asked}; add --split with one of: {', '.join(splits)}")
    return found[split]


def _is_media(feature: Any) -> bool:
    """Whether a feature, or anything inside it, is a picture, sound or other media."""
    if isinstance(feature, dict):
        return any(map(_is_media, feature.values()))
    if isinstance(feature, list | tuple):
        return any(map(_is_media, feature))
    inner = getattr(feature, "feature", None)
    return type(feature).__name__ in _MEDIA or (inner is not None and _is_media(inner))
