"""Images of one part: encoded on the pool's threads, written in the order in which they were added."""

from __future__ import annotations

import hashlib
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pyarrow as pa

from batchgen import codec, disk
from batchgen.encoders import EncoderPool
from batchgen.errors import BatchgenError, RowError
from batchgen.filesystem import resumable
from batchgen.formats import CONTAINERS, Container, Member
from batchgen.job import Output
from batchgen.metadata import parameters
from batchgen.names import EXTENSIONS, file_stem, published_name
from batchgen.records import Failure, Image, Part, Pixels, Written

_FLAT_SPAN = 2
_FLAT_STRIDE = 64


class PartWriter:
    """A part being written in `work_dir`.

    `shard` is the row group of the plan that its rows come from, `model` the name recorded with every row.
    One thread calls the methods. Whatever goes wrong on an encoder thread is raised by the next `add` or
    `finish`: Interrupted where the disk refuses, a bug as it is. A RowError costs its row alone.
    """

    def __init__(
        self, work_dir: Path, stem: str, output: Output, shard: pa.Table, model: str, pool: EncoderPool
    ) -> None:
        self._stem = stem
        self._output = output
        self._shard = shard
        self._model = model
        self._pool = pool
        container = CONTAINERS[output.format]
        self._path = work_dir / f"{stem}{container.suffix}"
        disk.FILES.remove_any(self._path)
        with resumable(self._path):
            self._container: Container = container(self._path, shard, model)
        self._num_added = 0
        self._num_settled = 0
        self._write_s = 0.0
        self._ready: dict[int, Member | Failure | None] = {}
        self._images: list[Written] = []
        self._failures: list[Failure] = []
        self._error: BaseException | None = None
        self._progress = threading.Condition()

    def add(self, image: Image) -> None:
        """Hand over an image. Waits while the pool holds as many images as it may."""
        assert self._shard["id"][image.row.index].as_py() == image.row.id
        self._raise_error()
        # Counted before it is handed over: an interruption between the two must leave nothing that is waited for.
        place, self._num_added = self._num_added, self._num_added + 1
        try:
            self._pool.submit(partial(self._encode, place, image))
        except BaseException:
            self._num_added = place
            raise

    def finish(self) -> Part:
        """Wait for the encoders and make the part durable, names included."""
        self._wait()
        self._raise_error()
        if not self._images:
            self.discard()
            return self._part(None, 0, hashlib.sha256().hexdigest())
        with resumable(self._path):
            num_bytes, sha256 = self._container.close()
            disk.FILES.sync_folder(self._path.parent)
        return self._part(self._path, num_bytes, sha256)

    def discard(self) -> None:
        """Remove what there is of the part, finished or not."""
        self._error = self._error or BatchgenError(f"part {self._stem} was discarded")
        self._wait()
        with suppress(OSError):  # Closing writes what is still buffered; a full disk refuses that too.
            self._container.abort()
        disk.FILES.remove_any(self._path)

    def _encode(self, place: int, image: Image) -> None:
        outcome: Member | Failure | None = None
        started = time.monotonic()
        try:
            if self._error is None:
                outcome = self._member(image)
        except RowError as error:
            outcome = Failure(image.row, type(error).__name__, str(error), image.retries)
        except BaseException as error:
            self._error = error
        self._settle(place, outcome, time.monotonic() - started)

    def _member(self, image: Image) -> Member:
        row = image.row
        file = f"{file_stem(row.id, row.image_number)}.{EXTENSIONS[self._output.image]}"
        data = codec.encode(image.pixels, parameters(row, self._model), self._output)
        file_name = published_name(self._stem, self._container.suffix, file)
        member = Member(row, file, data, describe(image, data, file_name, self._output.image))
        with resumable(self._path):
            self._container.stage(member)
        return member

    def _settle(self, place: int, outcome: Member | Failure | None, seconds: float) -> None:
        with self._progress:
            self._write_s += seconds
            self._ready[place] = outcome
            while self._num_settled in self._ready:
                self._append(self._ready.pop(self._num_settled))
                self._num_settled += 1
                self._pool.release()
            self._progress.notify_all()

    def _append(self, outcome: Member | Failure | None) -> None:
        if isinstance(outcome, Failure):
            self._failures.append(outcome)
        elif outcome is not None and self._error is None:
            try:
                with resumable(self._path):
                    self._container.append(outcome)
                self._images.append(outcome.written)
            except BaseException as error:
                self._error = error

    def _wait(self) -> None:
        with self._progress:
            self._progress.wait_for(lambda: self._num_settled >= self._num_added)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _part(self, path: Path | None, num_bytes: int, sha256: str) -> Part:
        return Part(path, num_bytes, sha256, tuple(self._images), tuple(self._failures), self._write_s)


def describe(image: Image, data: bytes, file_name: str, image_format: str) -> Written:
    """What is recorded of an image whose file holds `data`."""
    return Written(
        index=image.row.index,
        file_name=file_name,
        bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        pixel_sha256=pixel_sha256(image.pixels),
        format=image_format,
        is_flat=is_flat(image.pixels),
        batch_size=image.batch_size,
        mode=image.mode,
        tokens=image.tokens,
        tokens_dropped=image.tokens_dropped,
        retries=image.retries,
        seconds=image.seconds,
    )


def pixel_sha256(pixels: Pixels) -> str:
    """sha256 of the RGB bytes, row by row."""
    return hashlib.sha256(pixels.tobytes()).hexdigest()


def is_flat(pixels: Pixels) -> bool:
    """Whether no channel spans more than 2 of 255."""
    # Some rows of pixels tell most pictures at once.
    return all(_spans_little(some) for some in (pixels[::_FLAT_STRIDE], pixels))


def _spans_little(pixels: Pixels) -> bool:
    span = pixels.max(axis=(0, 1)).astype(int) - pixels.min(axis=(0, 1))
    return bool((span <= _FLAT_SPAN).all())
