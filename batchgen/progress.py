"""What a run shows while it works: bars on a terminal, a line every 30 s elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, Self, TextIO

from tqdm.auto import tqdm

from batchgen.pace import Pace
from batchgen.wording import counted, shorten

if TYPE_CHECKING:
    from batchgen.balance import Balance

    _Tqdm = tqdm[NoReturn]
else:
    _Tqdm = tqdm
IS_NOTEBOOK = "tqdm.notebook" in {one.__module__ for one in tqdm.__mro__}
"""Whether tqdm shows its bars as widgets."""
LINE_EVERY_S = 30.0
REFRESH_EVERY_S = 1.0
"""Of a terminal: clocks go on while no image is made."""
MIN_REFRESH_S = 0.1


@dataclass(frozen=True, slots=True)
class Now:
    """What a worker is at."""

    bucket: str = ""
    """Size, batch size and form of the batch at work; "" while there is none."""
    preparing: str = ""
    """What has to be done before that batch can be made, such as compiling; "" while rows are made."""
    captures: int = 0
    """Buckets made ready by this process so far: compiled, captured, or both."""


class Progress(Protocol):
    """Where workers report to."""

    def count(self, made: int, failed: int) -> None:
        """Rows that were made and that failed since the last call; less than 0 for what was lost again."""

    def say(self, text: str) -> None:
        """One line that a person should read."""

    def show(self, now: Now, who: str = "") -> None:
        """What a worker is at from now on; `who` tells several apart."""


class Quiet:
    """Reports nothing."""

    def count(self, made: int, failed: int) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def show(self, now: Now, who: str = "") -> None:
        pass


class AtWork:
    """Tells a progress what this process's worker is at, whenever that changes."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._now = Now()

    def begin(self, bucket: str) -> None:
        """A batch of this bucket is next."""
        self._set(bucket=bucket)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Nothing can be made within the block."""
        self._set(preparing=what)
        try:
            yield
        finally:
            self._set(preparing="")

    @contextmanager
    def preparing(self, what: str, *, is_long: bool) -> Iterator[None]:
        """A bucket is made ready within the block; what takes minutes is said before it begins."""
        if is_long:
            self._progress.say(f"{what}; no image of that shape is made before, and it can take minutes")
        with self.waiting(what):
            yield
        self._set(captures=self._now.captures + 1)

    def _set(self, **changes: Any) -> None:
        self._now = replace(self._now, **changes)
        self._progress.show(self._now)


class _Bar(_Tqdm):
    """A bar that ends with our own words."""

    said = ""

    @property
    def format_dict(self) -> MutableMapping[str, Any]:
        return {**super().format_dict, "said": self.said}

    @property
    def columns(self) -> int:
        """Of the terminal; a notebook has as many as there are words."""
        return 1000 if IS_NOTEBOOK else int(super().format_dict["ncols"] or 80)


class Display:
    """Bars on a terminal's standard error or in a notebook, else lines: of all images one, with images/s, time left,
    failed rows and captures; below it a line for each worker, with what it is at."""

    def __init__(self, total: int, done: int, failed: int, stream: TextIO | None = None) -> None:
        self._stream = stream or (sys.stdout if IS_NOTEBOOK else sys.stderr)
        self._has_bars = IS_NOTEBOOK or self._stream.isatty()
        self._failed = failed
        self._settled, self._total = done + failed, total
        self._pace = Pace(self._settled)
        self._started_s, self._refreshed_s = time.monotonic(), 0.0
        self._now: dict[str, tuple[Now, float]] = {}
        """By worker: what it is at, and since when."""
        self._lock = threading.RLock()
        self._bars: dict[str, _Bar] = {}
        self._bar = self._new_bar("{percentage:3.0f}%|{bar}| {said}", total=total, initial=self._settled)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True)

    def __enter__(self) -> Self:
        self._refresh()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        for bar in self._bars.values():
            bar.close()
        self._bar.said = self._totals(f"in {tqdm.format_interval(time.monotonic() - self._started_s)}")
        self._bar.close()

    def count(self, made: int, failed: int) -> None:
        with self._lock:
            self._settled += made + failed
            self._failed += failed
            self._pace.count(self._settled)
            self._bar.n = self._settled
            self._refresh()

    def say(self, text: str) -> None:
        with self._bar.external_write_mode(self._stream):
            print(text, file=self._stream, flush=True)

    def show(self, now: Now, who: str = "") -> None:
        with self._lock:
            before, since = self._now.get(who, (Now(), 0.0))
            if now.preparing != before.preparing or not since:
                since = time.monotonic()
            self._now[who] = now, since
            if before.preparing and not now.preparing:
                self._pace.begin()
            if who not in self._bars and self._has_bars:
                self._bars[who] = self._new_bar("{said}", total=None, position=len(self._bars) + 1, leave=False)
            self._refresh()

    def line(self) -> str:
        """The state in one line."""
        with self._lock:
            who = f"these {len(self._now)} workers know" if len(self._now) > 1 else "this worker knows"
            known = f"{self._settled}/{self._total} images, as far as {who}"
            rate = self._pace.rate()
            pace = f"{rate or 0.0:.2f} images/s here, time left {self._left(rate)} without others"
            at = "; ".join(filter(None, map(self._worker, self._now)))
            return f"{known}; {pace}, failed {self._failed}, captures {self._captures}{f'; {at}' if at else ''}"

    def _new_bar(self, bar_format: str, **options: Any) -> _Bar:
        return _Bar(
            bar_format=bar_format,
            dynamic_ncols=not IS_NOTEBOOK,
            file=self._stream,
            disable=not self._has_bars,
            **options,
        )

    @property
    def _captures(self) -> int:
        return sum(now.captures for now, _ in self._now.values())

    def _totals(self, when: str = "") -> str:
        rate = self._pace.rate()
        pace = when or ("no rate yet" if rate is None else f"{rate:.2f}/s, {self._left(rate)} left")
        failed, captures = f"{self._failed:,} failed", counted(self._captures, "capture")
        return f"{self._settled:,}/{self._total:,} images, {pace}, {failed}, {captures}"

    def _left(self, rate: float | None) -> str:
        return str(tqdm.format_interval((self._total - self._settled) / rate)) if rate else "unknown"

    def _worker(self, who: str) -> str:
        """What a worker is at; "" for one alone that is at nothing."""
        now, since = self._now[who]
        what = f"making {now.bucket}" if now.bucket else "idle" if who else ""
        if now.preparing:
            what = f"{now.preparing}, for {tqdm.format_interval(time.monotonic() - since)}"
        return f"{who}: {what}" if who else what

    def _refresh(self) -> None:
        if not self._has_bars or time.monotonic() - self._refreshed_s < MIN_REFRESH_S:
            return
        with self._lock:
            self._refreshed_s = time.monotonic()
            self._bar.said = self._totals()
            for who, bar in self._bars.items():
                bar.said = shorten(f"  {self._worker(who)}", bar.columns - 1)
            for bar in (self._bar, *self._bars.values()):
                bar.refresh()

    def _go_on(self) -> None:
        while not self._ended.wait(REFRESH_EVERY_S if self._has_bars else LINE_EVERY_S):
            if self._has_bars:
                self._refresh()
            else:
                self.say(self.line())


@contextmanager
def showing(balance: Balance) -> Iterator[Display]:
    """The display of a run that stands so."""
    total = balance.done + balance.failed + balance.outstanding
    with Display(total, balance.done, balance.failed) as display:
        yield display


def reading_bar() -> Callable[[int, int], None]:
    """What shows the reading of a large manifest, as a bar on a terminal and elsewhere as lines: called with the rows
    just read, and all."""
    bars: list[tqdm[NoReturn]] = []
    has_bar, seen, said_s = IS_NOTEBOOK or sys.stderr.isatty(), 0, time.monotonic()

    def read(rows: int, total: int) -> None:
        nonlocal seen, said_s
        seen += rows
        if not bars:
            bars.append(tqdm(total=total, unit="row", desc="checking", delay=1, leave=False, disable=not has_bar))
        bars[0].update(rows)
        if seen >= total:
            bars[0].close()
        elif not has_bar and time.monotonic() - said_s >= LINE_EVERY_S:
            said_s = time.monotonic()
            print(f"checking: {seen:,} of {total:,} rows", file=sys.stderr, flush=True)

    return read
