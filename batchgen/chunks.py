"""How many images are decoded at once."""

from __future__ import annotations

MOST_DECODED = 16
"""Images at once. One H200, torch 2.11, compiled, milliseconds an image: SD1.5 at 512x512 8.7, 6.5 and 6.4 at 4, 10 and
20 at once, SDXL at 1024x1024 37 and 30 at 4 and 10."""
_CPU_DECODED = 4
_BYTES_PER_PIXEL = 1300
"""Of the peak of a float16 decode: 5.5 GB for 16 images of 512x512, 21 GB for 16 of 1024x1024."""
_MEMORY_SHARE = 1 / 6


def most_decoded(width: int, height: int, memory_bytes: int | None) -> int:
    """Images of a size, in pixels, that may be decoded at once by a device with so much memory; None is a CPU."""
    if memory_bytes is None:
        return _CPU_DECODED
    fitting = int(_MEMORY_SHARE * memory_bytes / (_BYTES_PER_PIXEL * width * height))
    return max(1, min(MOST_DECODED, fitting))


def chunk_of(size: int, most: int) -> int:
    """Parts of one size that a batch falls into with the least padding: 40 images, at most 16 at once, in 3 of 14."""
    return -(-size // -(-size // most))
