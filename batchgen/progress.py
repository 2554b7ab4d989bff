"""What a run shows while it works: a tqdm bar on a terminal, a line every 30 s elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn, Protocol, Self, TextIO

from tqdm import tqdm

LINE_EVERY_S = 30.0


class Progress(Protocol):
    """Where workers report to."""

    def count(self, made: int, failed: int) -> None:
        """Rows that were made and that failed since the last call; less than 0 for what was lost again."""

    def say(self, text: str) -> None:
        """One line that a person should read."""


class Quiet:
    """Reports nothing."""

    def count(self, made: int, failed: int) -> None:
        pass

    def say(self, text: str) -> None:
        pass


class Display:
    """A bar or lines on standard error: images made, images/s, time left, failed."""

    def __init__(self, total: int, done: int, failed: int, stream: TextIO | None = None, num_workers: int = 1) -> None:
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._failed = failed
        self._who = "this worker knows" if num_workers == 1 else f"these {num_workers} workers know"
        self._started_s, self._started_at = time.monotonic(), done + failed
        self._bar = tqdm(
            total=total,
            initial=done + failed,
            unit="img",
            dynamic_ncols=True,
            file=self._stream,
            disable=not self._is_terminal,
            postfix={"failed": failed},
        )
        self._settled, self._total = done + failed, total
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write_lines, daemon=True)

    def __enter__(self) -> Self:
        if not self._is_terminal:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._bar.close()

    def count(self, made: int, failed: int) -> None:
        self._settled += made + failed
        self._failed += failed
        self._bar.set_postfix({"failed": self._failed}, refresh=False)
        self._bar.update(made + failed)

    def say(self, text: str) -> None:
        with self._bar.external_write_mode(self._stream):
            print(text, file=self._stream, flush=True)

    def line(self) -> str:
        """The state in one line."""
        elapsed_s = time.monotonic() - self._started_s
        rate = (self._settled - self._started_at) / elapsed_s if elapsed_s > 0 else 0.0
        left = tqdm.format_interval((self._total - self._settled) / rate) if rate else "unknown"
        known = f"{self._settled}/{self._total} images, as far as {self._who}"
        return f"{known}; {rate:.2f} images/s here, time left {left} without others, failed {self._failed}"

    def _write_lines(self) -> None:
        while not self._ended.wait(LINE_EVERY_S):
            self.say(self.line())


def reading_bar() -> Callable[[int, int], None]:
    """What shows the reading of a large manifest on a terminal: called with the rows just read, and all."""
    bars: list[tqdm[NoReturn]] = []

    def read(rows: int, total: int) -> None:
        if not bars:
            is_hidden = not sys.stderr.isatty()
            bars.append(tqdm(total=total, unit="row", desc="checking", delay=1, leave=False, disable=is_hidden))
        bars[0].update(rows)
        if bars[0].n >= total:
            bars[0].close()

    return read
