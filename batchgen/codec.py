"""Image files: pixels and a row's parameters to bytes, and back. The one seam to Pillow.

The parameters travel as one JSON text: in PNG as the iTXt chunk "batchgen", in JPEG and WebP as the EXIF
UserComment (there in ASCII, with JSON's own escapes, because EXIF has no UTF-8); in PNG also, if asked for, in the
form that other tools read (`infotext`). Bytes depend on pixels, parameters and Pillow's version alone.
"""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from PIL import ExifTags, Image, PngImagePlugin

from batchgen import infotext
from batchgen.errors import BatchgenError, RowError
from batchgen.job import Output
from batchgen.records import Pixels

_KEYWORD = "batchgen"
_PNG_LEVEL = 4
"""Of zlib. A 1024x1024 picture with the spectrum of a photograph, one core, zlib-ng as in Pillow's wheels:
level 1 gives 2.25 MB in 0.13 s, 4 gives 2.14 MB in 0.17 s, 9 gives no less than 4."""
_WEBP_METHOD = 2
"""The same picture at quality 95: method 2 gives 0.53 MB in 0.10 s, the default 4 gives 0.53 MB in 0.24 s."""
_ASCII = b"ASCII\0\0\0"
"""The character code that begins a UserComment (Exif 3.0, 4.6.6)."""
_MAX_EXIF_BYTES = 65533
"""A JPEG segment's length, 16 bits, counts itself."""
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def encode(pixels: Pixels, parameters: Mapping[str, Any] | None, output: Output) -> bytes:
    """One image file, with what `output` says of the parameters inside; None embeds nothing.

    Raises RowError if the format cannot hold the picture or its parameters.
    """
    image = Image.fromarray(pixels)
    buffer = io.BytesIO()
    try:
        if output.image == "png":
            image.save(buffer, "PNG", compress_level=_PNG_LEVEL, pnginfo=_png_text(parameters, output))
        elif output.image == "jpeg":
            image.save(buffer, "JPEG", quality=output.quality, exif=_exif(parameters, output))
        else:
            image.save(buffer, "WEBP", quality=output.quality, method=_WEBP_METHOD, exif=_exif(parameters, output))
    except (ValueError, OSError) as error:
        raise RowError(_cannot_hold(image, parameters, output, error)) from error
    return buffer.getvalue()


def read_parameters(data: bytes) -> dict[str, Any]:
    """The parameters inside an image file.

    Raises BatchgenError if the file is no image of ours or nothing is embedded.
    """
    with _damage_named(), Image.open(io.BytesIO(data)) as image:
        if image.format == "PNG":
            image.load()
            text = image.info.get(_KEYWORD)
        else:
            comment = image.getexif().get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.UserComment)
            text = comment.removeprefix(_ASCII) if isinstance(comment, bytes) else None
        if text is None:
            raise ValueError("no parameters are embedded in it")
        parameters: dict[str, Any] = json.loads(text)
        return parameters


def decode(data: bytes) -> Pixels:
    """The pixels of an image file, every byte of it read.

    Raises BatchgenError for a file that is cut short, continues after its end or, as far as its format can
    tell, has changed: PNG has a checksum per chunk, JPEG and WebP have none, so that a changed byte of theirs
    may only show in the file's sha256.
    """
    with _damage_named():
        _check_container(data)
        with Image.open(io.BytesIO(data)) as image:
            return np.asarray(image.convert("RGB"))


def _png_text(parameters: Mapping[str, Any] | None, output: Output) -> PngImagePlugin.PngInfo:
    info = PngImagePlugin.PngInfo()
    if parameters is not None and output.embed:
        info.add_itxt(_KEYWORD, json.dumps(parameters, ensure_ascii=False))
    if parameters is not None and output.png_info:
        info.add_text(infotext.KEYWORD, infotext.infotext(parameters))
    return info


def _exif(parameters: Mapping[str, Any] | None, output: Output) -> bytes:
    if parameters is None or not output.embed:
        return b""
    exif = Image.Exif()
    exif[ExifTags.IFD.Exif] = {ExifTags.Base.UserComment: _ASCII + json.dumps(parameters).encode("ascii")}
    return exif.tobytes()


def _cannot_hold(image: Image.Image, parameters: Mapping[str, Any] | None, output: Output, error: Exception) -> str:
    num_bytes = len(_exif(parameters, output))
    if output.image == "jpeg" and num_bytes > _MAX_EXIF_BYTES:
        return (
            f"the row's parameters take {num_bytes:,} bytes as EXIF and JPEG holds {_MAX_EXIF_BYTES:,}; "
            'shorten the prompt, or set output.image to "png" or "webp", or output.embed to false'
        )
    return f"a picture of {image.width}x{image.height} cannot be written as {output.image}: {error}"


@contextmanager
def _damage_named() -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError, SyntaxError, EOFError, struct.error) as error:
        raise BatchgenError(f"the image file is damaged: {error}") from error


def _check_container(data: bytes) -> None:
    """That the file ends where its format says, and that PNG's checksums hold. Raises ValueError."""
    if data.startswith(_PNG_SIGNATURE):
        _check_png(data)
    elif data.startswith(b"RIFF"):
        (num_bytes,) = struct.unpack_from("<I", data, 4)
        if num_bytes + 8 != len(data):
            raise ValueError(f"it has {len(data):,} bytes where its header says {num_bytes + 8:,}")
    elif not (data.startswith(b"\xff\xd8") and data.endswith(b"\xff\xd9")):
        raise ValueError("it is neither a PNG nor a WebP file nor a whole JPEG file")


def _check_png(data: bytes) -> None:
    # Pillow skips the checksums of image data and of the last chunk.
    at, kind = len(_PNG_SIGNATURE), b""
    while at < len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        body_end = at + 8 + length
        (expected,) = struct.unpack_from(">I", data, body_end)
        if zlib.crc32(data[at + 4 : body_end]) != expected:
            raise ValueError(f"its {kind.decode('latin-1')!r} chunk at byte {at:,} does not match its checksum")
        at = body_end + 4
    if kind != b"IEND":
        raise ValueError(f"it ends after {len(data):,} bytes without an end mark")
