"""Init images: image files that rows begin from, looked at when a manifest is checked and read when a row is made.

What diffusers' `load_image` does is done here too: a picture is turned upright as its EXIF data say, and taken as RGB
without its transparency. It is brought to its row's size as the pipelines' image processor does it, by Lanczos.
"""

from __future__ import annotations

import hashlib
import io
import stat
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageOps, TiffImagePlugin, UnidentifiedImageError

from batchgen.errors import RowError
from batchgen.filesystem import lost
from batchgen.records import Failure, InitImage, Pixels, Row

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
MAX_BYTES = 2**28
"""Of an image file."""
MAX_PIXELS = 2**26
"""Of an init image."""
READERS = 8
"""Threads: reading waits for the disk, and Pillow decodes and resizes without the interpreter."""
warnings.filterwarnings("ignore", module=r"PIL\.")
"""Pillow warns of metadata that it cannot read, and of pictures of more than MAX_PIXELS, which are refused."""
_WIDE = ("I", "F")
"""Pillow's modes of more than 8 bits a channel begin so; turned into RGB they would be cut, not scaled."""
_TURNED = range(5, 9)
"""EXIF orientations that swap width and height."""
_TURNING = frozenset((b"eXIf", b"iTXt", b"tEXt", b"zTXt"))
"""Chunks of a PNG that may hold one: EXIF, XMP, or EXIF as text."""
_PNG_SIGNATURE = 8
"""Bytes before the first chunk."""


class BadInitImage(RowError):
    """A row's init image is not to be had, or no picture. The message says of the picture what is wrong."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look at an image file found."""

    sha256: bytes
    width: int
    height: int
    """Upright."""


def look(path: Path) -> Seen:
    """Hash an image file and read its header. Raises BadInitImage; Interrupted where the disk is lost."""
    with _opened(path) as file, _named_faults():
        digest = hashlib.file_digest(file, "sha256").digest()
        file.seek(0)
        return Seen(digest, *_size(file))


def look_at_bytes(content: bytes) -> Seen:
    """As `look`, of an image file's content."""
    _check_length(len(content))
    with _named_faults():
        return Seen(hashlib.sha256(content).digest(), *_size(io.BytesIO(content)))


def read(row: Row) -> Pixels:
    """A row's init image in the row's size, every byte of its file read. Raises BadInitImage for one that cannot be
    read or is another one than was planned; Interrupted where the disk is lost."""
    assert row.init is not None
    try:
        content = _content(row.init)
        if hashlib.sha256(content).hexdigest() != row.init.sha256:
            raise BadInitImage(
                f"is another picture than was planned, whose sha256 began with {row.init.sha256[:12]}; put that one "
                "back and retry, or plan in a new run directory"
            )
        with _named_faults():
            return _pixels(content, row.width, row.height)
    except BadInitImage as error:
        raise BadInitImage(f"init image {row.init} {error}") from error


def read_all(rows: Sequence[Row]) -> dict[int, Pixels | Failure]:
    """The init images of those rows that have one, by `Row.index`, or why a row cannot be made."""
    some = [row for row in rows if row.init is not None]
    if not some:
        return {}
    with ThreadPoolExecutor(min(READERS, len(some))) as pool:
        return dict(zip((row.index for row in some), pool.map(_read_or_fail, some), strict=True))


def _read_or_fail(row: Row) -> Pixels | Failure:
    try:
        return read(row)
    except BadInitImage as error:
        return Failure(row, type(error).__name__, str(error))


def _content(init: InitImage) -> bytes:
    with _opened(Path(init.file), is_bounded=init.num_bytes is None) as file:
        file.seek(init.offset)
        return file.read(-1 if init.num_bytes is None else init.num_bytes)


@contextmanager
def _opened(path: Path, *, is_bounded: bool = True) -> Iterator[io.BufferedReader]:
    """A regular file: what else lies at a path, such as a pipe, might be waited for without end."""
    try:
        with lost(path):
            found = path.stat()
            if not stat.S_ISREG(found.st_mode):
                raise BadInitImage("is no file")
            if is_bounded:
                _check_length(found.st_size)
            with path.open("rb") as file:
                yield file
    except FileNotFoundError:
        raise BadInitImage("is not there") from None
    except OSError as error:
        raise BadInitImage(f"cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # A NUL in the path, which no file has.
        raise BadInitImage(f"is no path: {error}") from None


def _check_length(num_bytes: int) -> None:
    if not num_bytes:
        raise BadInitImage("is empty")
    if num_bytes > MAX_BYTES:
        raise BadInitImage(f"has {num_bytes:,} bytes; at most {MAX_BYTES:,} are read")


@contextmanager
def _named_faults() -> Iterator[None]:
    """Whatever Pillow raises over a file's content, as a BadInitImage; what the disk raises as it comes."""
    try:
        yield
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise BadInitImage(f"has more than {MAX_PIXELS:,} pixels; make it smaller") from None
    except UnidentifiedImageError:
        raise BadInitImage(f"is no picture; {', '.join(FORMATS[:-1])} and {FORMATS[-1]} are read") from None
    except OSError as error:
        if error.errno is not None:
            raise
        raise BadInitImage(f"is damaged: {error}") from None
    except (ValueError, SyntaxError, EOFError, TypeError, KeyError, IndexError, OverflowError) as error:
        raise BadInitImage(f"is damaged: {error}") from None


def _size(file: io.BufferedReader | io.BytesIO) -> tuple[int, int]:
    """Width and height, upright, by the header where that tells."""
    with Image.open(file, formats=FORMATS) as image:
        _check_kind(image)
        size = image.size
        if isinstance(image, TiffImagePlugin.TiffImageFile):
            # Pillow has turned its size already, or has not, by its version.
            size = image.tag_v2[TiffImagePlugin.IMAGEWIDTH], image.tag_v2[TiffImagePlugin.IMAGELENGTH]
        # A PNG's own method decodes all pixels to see what is behind them.
        exif = Image.Image.getexif(image) if image.format == "PNG" and not _goes_on(file) else image.getexif()
        return size[::-1] if exif.get(ExifTags.Base.Orientation) in _TURNED else size


def _goes_on(file: io.BufferedReader | io.BytesIO) -> bool:
    """Whether a PNG has chunks behind its pixels that may say how it is turned. A chunk is its length, its name, so
    many bytes and four more (PNG specification, 5.3)."""
    before, names = file.tell(), list[bytes]()
    file.seek(_PNG_SIGNATURE)
    while len(head := file.read(8)) == 8:
        names.append(head[4:])
        file.seek(int.from_bytes(head[:4]) + 4, io.SEEK_CUR)
    file.seek(before)
    behind = names[names.index(b"IDAT") :] if b"IDAT" in names else []
    return not _TURNING.isdisjoint(behind)


def _check_kind(image: Image.Image) -> None:
    if image.width * image.height > MAX_PIXELS:
        raise BadInitImage(f"is {image.width}x{image.height}; at most {MAX_PIXELS:,} pixels are read: make it smaller")
    if image.mode.startswith(_WIDE):
        raise BadInitImage(f"has more than 8 bits a channel (Pillow's mode {image.mode}); write it with 8")


def _pixels(content: bytes, width: int, height: int) -> Pixels:
    with Image.open(io.BytesIO(content), formats=FORMATS) as image:
        _check_kind(image)
        upright = ImageOps.exif_transpose(image).convert("RGB")
    return np.array(upright.resize((width, height), Image.Resampling.LANCZOS))
