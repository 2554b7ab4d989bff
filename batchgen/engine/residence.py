"""Where the text encoders lie while they have nothing to do; what they make of a text is the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from batchgen.models.contents import ModelFolder
from batchgen.models.family import Family
from batchgen.models.loading import empty, fill
from batchgen.models.unchanged import Unchanged

Kind = Literal["gpu", "offload", "load"]


class Residence:
    """On the device, in host memory (`offload`), or on disk alone (`load`), from where they are read for each shard."""

    def __init__(self, kind: Kind, model: Family, folder: ModelFolder) -> None:
        self._kind = kind
        self._model = model
        self._folder = folder
        own = (path for name, path in folder.paths.items() if name.partition("/")[0] in folder.encoders)
        self._files = Unchanged(own if kind == "load" else ())
        if kind == "offload":
            self._move(torch.device("cpu"))

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """The encoders are on the device for the time of the block. Raises UsageError for weights that are gone or
        others by now."""
        try:
            self._bring()
            yield
        finally:
            self._take_away()

    def _bring(self) -> None:
        if self._kind == "offload":
            self._move(self._model.device)
        elif self._kind == "load":
            self._files.check()
            fill(self._model.encoders, self._folder, self._model.dtype, self._model.device)

    def _take_away(self) -> None:
        if self._kind == "offload":
            self._move(torch.device("cpu"))
        elif self._kind == "load":
            for encoder in self._model.encoders:
                empty(encoder)

    def _move(self, device: torch.device) -> None:
        for encoder in self._model.encoders:
            encoder.to(device)
