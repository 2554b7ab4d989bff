"""A model without a network: it paints into each picture, readably, which row made it.

The top left 64x64 pixels are a grid of 16x16 cells of 4x4 pixels, dark or light: 256 bits, row by row, most
significant first. They survive JPEG and WebP. The rest of the picture is coloured by the prompt and says in
plain words what it is.
"""

from __future__ import annotations

import colorsys
import hashlib
import json
import os
import signal
import struct
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image as PILImage
from PIL import ImageDraw, ImageFont

from batchgen.cost import Measurement
from batchgen.errors import RowError
from batchgen.generator import Dropped, Pending
from batchgen.pictures import read_all
from batchgen.records import Batch, Failure, Image, Outcome, Pixels, Row, Spent
from batchgen.weights import Model

MIN_SIZE = 64
MAX_SIZE = 65535
_CELL = 4
_CELLS = 16
_FIELDS = struct.Struct(">QHH6s6s4s")
_CHECKSUM = struct.Struct(">I")
_SLICE_S = 0.02


@dataclass(frozen=True, slots=True)
class Reading:
    """What a picture says of its row. Hashes are hexadecimal."""

    seed: int
    width: int
    height: int
    id_hash: str
    """Of id and image number."""
    prompt_hash: str
    parameters_hash: str
    """Of negative prompt, steps, guidance scale and sampler, and of the hash of an init image and its strength; a null
    negative prompt is not ""."""


class PatternGenerator:
    """The generator of `model.path = "pattern"`.

    With `variant = "faults"` rows whose prompt begins with "fault:" go wrong as it says: "fault: raise",
    "fault: raise once" (per process and row), "fault: exit" (SIGKILL), "fault: nan", "fault: flat",
    "fault: slow SECONDS".
    """

    versions: Mapping[str, str] = {"pattern": "1"}

    def __init__(self, model: Model) -> None:
        self._obeys_faults = model.variant == "faults"
        self._raised: set[tuple[str, int]] = set()
        self._paint_s = 0.0

    def prepare(self, batches: Sequence[Batch], should_drop: Callable[[], bool]) -> None:
        """Nothing is shared between rows."""

    def submit(self, batch: Batch, should_drop: Callable[[], bool]) -> Pending:
        """Paint at once. Raises Dropped between two steps, and what a row's fault raises."""
        outcomes = self._paint(batch, should_drop)
        return lambda: outcomes

    def measurements(self) -> Sequence[Measurement]:
        """None: no GPU has a part in it."""
        return ()

    def spent(self) -> Spent:
        """One stage, "paint"."""
        return Spent({"paint": self._paint_s})

    def _paint(self, batch: Batch, should_drop: Callable[[], bool]) -> list[Outcome]:
        started = time.monotonic()
        read = read_all(batch.rows)
        bad = {index: one for index, one in read.items() if isinstance(one, Failure)}
        failures = {row: bad.get(row.index) or self._obey(row, should_drop) for row in batch.rows}
        for _ in range(max(row.steps for row in batch.rows)):
            _stop_if(should_drop)
        pictures = {row: paint(row) for row in batch.rows if failures[row] is None}
        seconds = (time.monotonic() - started) / len(batch.rows)
        self._paint_s += time.monotonic() - started
        return [
            failures[row] or Image(row, pictures[row], batch.size, "pattern", None, None, seconds) for row in batch.rows
        ]

    def _obey(self, row: Row, should_drop: Callable[[], bool]) -> Failure | None:
        if not (self._obeys_faults and row.prompt.startswith("fault:")):
            return None
        match row.prompt.removeprefix("fault:").split():
            case ["raise"]:
                raise RuntimeError(f"row {row.id!r} raises, as its prompt says")
            case ["raise", "once"]:
                self._raise_once(row)
            case ["exit"]:
                os.kill(os.getpid(), signal.SIGKILL)
            case ["nan"]:
                return Failure(row, "NotFinite", "the latents hold NaN, as the prompt says")
            case ["flat"]:
                return Failure(row, "Constant", "every pixel is the same, as the prompt says")
            case ["slow", seconds] if seconds.replace(".", "", 1).isdecimal():
                _sleep(float(seconds), should_drop)
            case _:
                raise RowError(
                    f"row {row.id!r}: prompt {row.prompt!r} names no known fault; known are "
                    "raise, raise once, exit, nan, flat, slow SECONDS"
                )
        return None

    def _raise_once(self, row: Row) -> None:
        key = (row.id, row.image_number)
        if key not in self._raised:
            self._raised.add(key)
            raise RuntimeError(f"row {row.id!r} raises once, as its prompt says")


def expected(row: Row) -> Reading:
    """What the picture of a row must say."""
    others = [row.negative_prompt, row.steps, row.guidance_scale, row.sampler]
    others += [] if row.init is None else [row.init.sha256, row.strength]
    return Reading(
        seed=row.seed,
        width=row.width,
        height=row.height,
        id_hash=_hash([row.id, row.image_number], 6),
        prompt_hash=_hash(row.prompt, 6),
        parameters_hash=_hash(others, 4),
    )


def read_pattern(pixels: Pixels) -> Reading:
    """What a picture says.

    Raises ValueError if it is no pattern, is damaged, or has another size than it says.
    """
    num_pixels = _CELLS * _CELL
    if min(pixels.shape[:2]) < num_pixels:
        raise ValueError(f"a picture of shape {pixels.shape} is too small for a pattern of 64x64 pixels")
    luma = pixels[:num_pixels, :num_pixels].mean(axis=2)
    cells = luma.reshape(_CELLS, _CELL, _CELLS, _CELL).mean(axis=(1, 3))
    code = np.packbits(cells > 127).tobytes()
    body, checksum = code[: _FIELDS.size], code[_FIELDS.size :]
    if _CHECKSUM.unpack(checksum)[0] != zlib.crc32(body):
        raise ValueError("the picture's pattern does not match its checksum")
    seed, width, height, id_hash, prompt_hash, parameters_hash = _FIELDS.unpack(body)
    if (height, width) != pixels.shape[:2]:
        raise ValueError(f"the pattern says {width}x{height}, the picture's shape is {pixels.shape}")
    return Reading(seed, width, height, id_hash.hex(), prompt_hash.hex(), parameters_hash.hex())


def paint(row: Row) -> Pixels:
    """A row's picture, `[H, W, 3]`: a function of the row alone.

    Raises RowError for a size that holds no pattern.
    """
    if not (MIN_SIZE <= row.width <= MAX_SIZE and MIN_SIZE <= row.height <= MAX_SIZE):
        raise RowError(
            f"row {row.id!r} asks for {row.width}x{row.height}; "
            f"the pattern model paints {MIN_SIZE} to {MAX_SIZE} pixels a side"
        )
    reading = expected(row)
    dark, light = _colours(reading.prompt_hash)
    picture = PILImage.fromarray(_background(row, dark, light))
    _write_words(ImageDraw.Draw(picture), row)
    pixels = np.array(picture)
    cells = np.unpackbits(np.frombuffer(_code(reading), np.uint8)).reshape(_CELLS, _CELLS)
    grid = cells.repeat(_CELL, axis=0).repeat(_CELL, axis=1)
    pixels[: _CELLS * _CELL, : _CELLS * _CELL] = np.where(grid[..., None] == 1, light, dark)
    return pixels


def _code(reading: Reading) -> bytes:
    body = _FIELDS.pack(
        reading.seed,
        reading.width,
        reading.height,
        bytes.fromhex(reading.id_hash),
        bytes.fromhex(reading.prompt_hash),
        bytes.fromhex(reading.parameters_hash),
    )
    return body + _CHECKSUM.pack(zlib.crc32(body))


def _colours(prompt_hash: str) -> tuple[Pixels, Pixels]:
    """A dark and a light colour of one hue, far enough apart for the grid to be read."""
    hue = int(prompt_hash[:4], 16) / 0xFFFF
    dark, light = colorsys.hls_to_rgb(hue, 0.15, 0.9), colorsys.hls_to_rgb(hue, 0.9, 0.9)
    return (np.array(dark) * 255).astype(np.uint8), (np.array(light) * 255).astype(np.uint8)


def _background(row: Row, dark: Pixels, light: Pixels) -> Pixels:
    """Bands of the two colours whose width the seed gives, `[H, W, 3]`."""
    period = 24 + row.seed % 41
    down, across = np.ogrid[: row.height, : row.width]
    level = np.linspace(0.15, 0.5, period)[:, None]
    band = (dark + (light.astype(float) - dark) * level).astype(np.uint8)
    picture: Pixels = band[(down + across) % period]
    return picture


def _write_words(draw: ImageDraw.ImageDraw, row: Row) -> None:
    # The bitmap font: its pixels do not depend on FreeType's version. It knows Latin-1 only.
    font = ImageFont.load_default_imagefont()
    words = [row.id, f"seed {row.seed}", f"{row.width}x{row.height}", *_wrapped(row.prompt, row.width // 7)]
    for number, line in enumerate(words):
        draw.text((4, _CELLS * _CELL + 4 + 12 * number), _ascii(line), fill="white", font=font)


def _wrapped(text: str, max_chars: int) -> list[str]:
    return [text[start : start + max_chars] for start in range(0, min(len(text), 4 * max_chars), max_chars)]


def _ascii(text: str) -> str:
    return "".join(char if " " <= char <= "~" else "?" for char in text)


def _hash(value: object, num_bytes: int) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=num_bytes).hexdigest()


def _stop_if(should_drop: Callable[[], bool]) -> None:
    if should_drop():
        raise Dropped


def _sleep(seconds: float, should_drop: Callable[[], bool]) -> None:
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        _stop_if(should_drop)
        time.sleep(min(left, _SLICE_S))
