"""The nouns that cross module borders. Plain data: no torch, no files, no behaviour beyond derived values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

NOISE_BITS = 0xFFFF_FFFF
"""The bits of a seed that torch's CPU generator reads: two seeds that share them share their noise."""

UNSAFE = "Unsafe"
"""The `Failure.error` of an image that the safety checker flagged: made again, it would be the same."""

Pixels = npt.NDArray[np.uint8]
"""One picture, uint8 `[H, W, 3]`, RGB."""


@dataclass(frozen=True, slots=True)
class Group:
    """What one static shape and one update form can serve; with a batch size and a dtype it names a bucket."""

    width: int
    height: int
    is_guided: bool
    text_length: int
    """Tokens per encoded prompt; 0 for a model without a text encoder."""
    form: str
    """The sampler's update form (`models/facts.py`), or "" for one that runs its own update."""
    sampler: str = ""
    steps: int = 0
    """`sampler` and `steps` belong to the key only where `form` is "", else they are empty and per row."""
    skipped: int | None = None
    """Likewise: the steps that an init image stands for (`Facts.skipped`); None without one."""
    negative_length: int | None = None
    """Tokens per encoded negative prompt, 0 where no row is guided; None where no text's length follows the text."""
    lora: str = ""
    """The LoRA set in the weights; "" is none."""
    is_padded: bool = False
    """Whether texts that are shorter are padded to these lengths, and the network is told to look past that."""

    @property
    def lengths(self) -> str:
        """Those of the texts in words, to stand behind others; "" where they do not follow the text."""
        if self.negative_length is None:
            return ""
        text = f", text {'up to ' if self.is_padded else ''}{self.text_length}"
        return text + (f" and {self.negative_length}" if self.negative_length else "")

    @property
    def shape(self) -> Group:
        """The group as far as it decides what runs: LoRA sets change weights, not code."""
        return replace(self, lora="")


@dataclass(frozen=True, slots=True)
class InitImage:
    """The picture that a row begins from, as it was when the row was planned."""

    sha256: str
    """Of the image file, hexadecimal."""
    file: str
    """Where its bytes lie, as an absolute path."""
    name: str | None = None
    """Its path as the manifest gives it; None for bytes without one."""
    offset: int = 0
    """Of the first byte in `file`."""
    num_bytes: int | None = None
    """None: all of `file`."""

    def __str__(self) -> str:
        return self.file if self.num_bytes is None else f"{self.name or 'its bytes'} in {self.file}"


@dataclass(frozen=True, slots=True)
class Row:
    """One image to make, every parameter resolved."""

    index: int
    """Place in its shard's row group; receipts and row tables name rows by it."""
    id: str
    image_number: int
    prompt: str
    negative_prompt: str | None
    """None is the family's own no-negative conditioning, which need not be that of ""."""
    width: int
    height: int
    steps: int
    guidance_scale: float
    sampler: str
    """A name of `models/facts.py` or a diffusers scheduler class."""
    seed: int
    """As given or derived, 0 to 2^64 - 1."""
    true_cfg_scale: float | None = None
    """Scale of guidance by a negative prompt, of families whose guidance_scale means another; None elsewhere."""
    init: InitImage | None = None
    """None: the row begins from noise alone."""
    strength: float | None = None
    """The share of the steps that a row with an init image makes, above 0 to 1; None without one."""
    lora: str = ""
    """The job's LoRA set that it is made with; "" is none."""

    @property
    def noise_seed(self) -> int:
        """The seed's `NOISE_BITS`."""
        return self.seed & NOISE_BITS


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that run together. `size` is the bucket's batch size, the number of lanes of the static shape: lanes beyond
    `rows` are padding, rows beyond it wait for a lane whose row has finished."""

    number: int
    """Place in its shard."""
    size: int
    group: Group
    rows: tuple[Row, ...]

    @property
    def bucket(self) -> Bucket:
        return Bucket(self.group.shape, self.size)


@dataclass(frozen=True, slots=True)
class Bucket:
    """The static shape of a batch: the key of a captured graph."""

    group: Group
    """Its `shape`."""
    size: int
    """Batch size."""

    def __str__(self) -> str:
        guided = "guided" if self.group.is_guided else "unguided"
        shape = f"{self.group.width}x{self.group.height}, batch {self.size}, {guided}"
        return f"{shape}, {self.group.form or 'own update'}{self.group.lengths}"

    @property
    def rows(self) -> int:
        """Of one evaluation of the network, guidance doubling included."""
        return self.size * (2 if self.group.is_guided else 1)

    @property
    def pixels(self) -> int:
        """That one evaluation of the network is about."""
        return self.group.width * self.group.height * self.rows


@dataclass(frozen=True, slots=True)
class Work:
    """What is left to do in a bucket."""

    batches: int
    """Of at most the bucket's size: one with more rows than lanes counts as several."""
    evaluations: int
    """Of whole batches: the sum of each one's longest row, or busiest lane."""


@dataclass(frozen=True, slots=True)
class Image:
    """A row that was made. The generator fills all fields; the writer reads them."""

    row: Row
    pixels: Pixels
    batch_size: int
    mode: str
    """What ran: "eager", "graph", …; "pattern" where no network ran."""
    tokens: int | None
    tokens_dropped: int | None
    seconds: float
    """The batch's wall seconds divided by its rows."""
    retries: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """A row that was tried and could not be made."""

    row: Row
    error: str
    """The exception's class, or "NotFinite", "Constant", "Unsafe", "ProcessDied"."""
    message: str
    retries: int = 0


Outcome = Image | Failure


@dataclass(frozen=True, slots=True)
class Written:
    """An image that lies in a part. The writer fills all fields; row table, receipt and verify read them."""

    index: int
    """`Row.index`."""
    file_name: str
    """Path under the run directory once the part is published, with the member for tar and Parquet parts."""
    bytes: int
    sha256: str
    """Of the image file, hexadecimal."""
    pixel_sha256: str
    """Of the generated RGB bytes, row by row, before any lossy encoding."""
    format: str
    """"png", "jpeg" or "webp"."""
    is_flat: bool
    """No channel spans more than 2 of 255."""
    batch_size: int
    mode: str
    tokens: int | None
    tokens_dropped: int | None
    retries: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Part:
    """A finished, durable part in the work folder, ready for its receipt."""

    path: Path | None
    """None where no image was made: there is nothing to publish."""
    bytes: int
    sha256: str
    """Of the file; of a folder, the digest of what `sha256sum` prints for its files, sorted by name."""
    images: tuple[Written, ...]
    """In the order in which they were added."""
    failures: tuple[Failure, ...]
    """Rows whose picture could not be encoded."""
    write_s: float = 0.0
    """That encoder threads were busy with it, taken together."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A bucket made ready: compiled, captured, or both."""

    bucket: str
    mode: str
    seconds: float
    compile_s: float
    """Of them, compiling."""
    held_bytes: int
    """That the memory reserved on the device grew by."""


@dataclass(frozen=True, slots=True)
class Spent:
    """What making rows took."""

    stage_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by stage, such as "text", "denoise", "decode": on a GPU, the device's."""
    captures: tuple[Captured, ...] = ()
    peak_bytes: int = 0
    """Most memory of the device in use at once since the process began; 0 where none is measured."""
    device_bytes: int = 0
    """All that the device has; 0 where none is measured."""

    def since(self, before: Spent) -> Spent:
        """What was spent beyond an earlier state of the same account."""
        stage_s = {stage: seconds - before.stage_s.get(stage, 0.0) for stage, seconds in self.stage_s.items()}
        return Spent(stage_s, self.captures[len(before.captures) :], self.peak_bytes, self.device_bytes)
