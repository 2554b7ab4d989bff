"""What may happen to the bytes of an image."""

from __future__ import annotations


def truncated(data: bytes) -> bytes:
    return data[: len(data) // 2]


def emptied(data: bytes) -> bytes:
    return b""


def flipped(data: bytes) -> bytes:
    return data[:60] + bytes([data[60] ^ 1]) + data[61:]
