"""Standard streams that do not take what they are told."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from io import TextIOWrapper
from typing import TextIO

import pytest

from batchgen import streams


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    """A pipe that does not block: its reading end, and its writing end as standard output."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    stream = TextIOWrapper(open(writer, "wb", buffering=0), encoding="utf-8")  # noqa: SIM115
    lasting = streams._lasting(stream)
    yield reader, lasting
    os.close(reader)
    lasting.close()
    stream.close()


def test_a_reader_that_takes_nothing_is_not_waited_for(
    pipe: tuple[int, TextIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "PATIENCE_S", 0.01)
    ended = threading.Event()

    def write() -> None:
        for _ in range(5):
            print("x" * 100_000, file=pipe[1])
        ended.set()

    before = time.process_time()
    threading.Thread(target=write, daemon=True).start()
    assert ended.wait(60)
    assert time.process_time() - before < 5


def test_a_late_reader_gets_all(pipe: tuple[int, TextIO], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PATIENCE_S", 60.0)
    lines = [f"{number:09d}" for number in range(20_000)]
    taken: list[bytes] = []

    def read() -> None:
        while sum(map(len, taken)) < 10 * len(lines):
            taken.append(os.read(pipe[0], 1000))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    for line in lines:
        print(line, file=pipe[1])
    thread.join(60)
    assert b"".join(taken).decode().splitlines() == lines
