"""Finished pictures looked at by the model's safety checker, beside what the device is at work on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.decode import Fault
from batchgen.models.safety import Floats, SafetyChecker
from batchgen.models.transfer import Mark, to_device, to_host
from batchgen.records import UNSAFE, Pixels

CHUNK = 4
"""Pictures looked at at once, always padded to this, so that a finding does not depend on a row's neighbours."""
UNDECIDED = Fault("NotFinite", "the safety checker gives NaN or Inf for the image, which is therefore not judged")


class Safety:
    """One model's checker, on a stream of its own: the next batch, whose steps are queued, goes on meanwhile."""

    def __init__(self, checker: SafetyChecker, device: torch.device) -> None:
        self._checker = checker
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            # A high priority: this batch's results are waited for, the next one's are not yet.
            self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(device))

    def check(self, results: Sequence[Pixels | Fault]) -> list[Pixels | Fault]:
        """A batch's decoded results, with a Fault in the place of each picture that is flagged."""
        pictures = [one for one in results if not isinstance(one, Fault)]
        faults = map(self._fault, self._cosines(pictures))
        return [one if isinstance(one, Fault) else next(faults) or one for one in results]

    def _cosines(self, pictures: Sequence[Pixels]) -> list[Floats]:
        """Of each picture."""
        with torch.cuda.stream(self._stream):
            chunks = [self._start(pictures[start : start + CHUNK]) for start in range(0, len(pictures), CHUNK)]
            Mark(self._device).wait()
        return [cosines for chunk in chunks for cosines in chunk.numpy()]

    def _fault(self, cosines: Floats) -> Fault | None:
        if not np.isfinite(cosines).all():
            return UNDECIDED
        finding = self._checker.judge(cosines)
        return Fault(UNSAFE, str(finding)) if finding else None

    def _start(self, pictures: Sequence[Pixels]) -> Tensor:
        """Queue a chunk; its cosines `[R, C]`, on their way to the host."""
        prepared = self._checker.prepare(pictures)
        padded = torch.cat([prepared, prepared[-1:].expand(CHUNK - len(prepared), -1, -1, -1)])
        return to_host(self._checker.cosines(to_device(padded, self._device))[: len(pictures)])
