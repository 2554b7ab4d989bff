"""What a bench of images makes: rows, drawn from a fixed seed, as a manifest and as plain values."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

_SIDES = (
    (512, (2048, 1984, 1920, 1856)),
    (576, (1792, 1728, 1664)),
    (640, (1600, 1536)),
    (704, (1472, 1408)),
    (768, (1344, 1280)),
    (832, (1216, 1152)),
    (896, (1152, 1088)),
    (960, (1088, 1024)),
)
SIZES = (
    *(size for short, longs in _SIDES for long in longs for size in ((short, long), (long, short))),
    (704, 1344),
    (1024, 1024),
)
"""40 shapes of about a megapixel, multiples of 64, as SDXL was trained on (Podell et al. 2023, appendix I)."""
MIXED_GUIDANCE_TENTHS = (40, 90)
_SUBJECTS = ("a red fox", "an old lighthouse", "two paper boats", "a bowl of lemons", "a stone bridge")
_SETTINGS = ("in heavy rain", "at first light", "as a woodcut", "on a market square")


@dataclass(frozen=True, slots=True)
class Wanted:
    """One image to make."""

    prompt: str
    width: int
    height: int
    steps: int
    guidance_scale: float
    sampler: str
    seed: int

    @property
    def size(self) -> tuple[int, int]:
        return self.width, self.height

    @property
    def work(self) -> int:
        """In proportion to the pixels that the network goes over."""
        return self.width * self.height * self.steps


@dataclass(frozen=True, slots=True)
class Workload:
    """`single`: every row of one size, step count and guidance. `mixed`: the 40 sizes over `divisor`, the step counts
    of a range, and guidance 4.0 to 9.0 in tenths, each drawn evenly for every row by itself."""

    rows: int
    sizes: Literal["single", "mixed"]
    side: int
    """Width and height of `single`."""
    divisor: int
    steps: int
    """Of `single`, like the next."""
    guidance: float
    sampler: str
    mixed_steps: tuple[int, int] = (20, 50)
    """First and last of `mixed`."""

    def wanted(self) -> list[Wanted]:
        """The rows, the same for the same workload."""
        random = np.random.default_rng(0)
        return [self._row(random, number) for number in range(self.rows)]

    def _row(self, random: np.random.Generator, number: int) -> Wanted:
        subject, setting = random.choice(_SUBJECTS), random.choice(_SETTINGS)
        width, height, steps, guidance = self.side, self.side, self.steps, self.guidance
        if self.sizes == "mixed":
            width, height = (side // self.divisor for side in SIZES[random.integers(len(SIZES))])
            steps = _drawn(random, *self.mixed_steps)
            guidance = _drawn(random, *MIXED_GUIDANCE_TENTHS) / 10
        prompt = f"{subject} {setting}, number {number}"
        return Wanted(prompt, width, height, steps, guidance, self.sampler, number)


def _drawn(random: np.random.Generator, first: int, last: int) -> int:
    return int(random.integers(first, last, endpoint=True))


def write_manifest(path: Path, wanted: list[Wanted]) -> None:
    """The rows as a Parquet file that `batchgen run` takes."""
    pq.write_table(pa.Table.from_pylist([asdict(one) for one in wanted]), path)
