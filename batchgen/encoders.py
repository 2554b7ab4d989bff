"""The encoder threads: a bounded pool that all parts of a worker share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from batchgen.cores import usable_cores
from batchgen.job import Output

_IN_FLIGHT_PER_THREAD = 2
"""One image being encoded and one waiting, so that no thread idles."""
_IN_FLIGHT_BYTES = 2**29
_MAX_THREADS = 8


def num_encoder_threads(output: Output, cores: int | None = None) -> int:
    """As the job says, else one per core (of those that this process may use), at most 8."""
    return output.encoders or min(_MAX_THREADS, cores or usable_cores())


def num_in_flight(num_threads: int, batch_size: int, num_pixels: int) -> int:
    """How many images may wait for the encoders or be with them: two of the largest batches, so that whoever hands one
    over need not wait for the one before, but no more than half a gigabyte of the largest images or two a thread."""
    return max(_IN_FLIGHT_PER_THREAD * num_threads, min(2 * batch_size, _IN_FLIGHT_BYTES // (3 * num_pixels)))


class EncoderPool:
    """Threads that start work in the order in which it came, and a limit on the work in flight."""

    def __init__(self, num_threads: int, max_in_flight: int | None = None) -> None:
        self.max_in_flight = max_in_flight or num_threads * _IN_FLIGHT_PER_THREAD
        self._slots = threading.Semaphore(self.max_in_flight)
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="encoder")

    def submit(self, work: Callable[[], None]) -> None:
        """Take a slot, waiting for one if need be, and run `work` on a thread. Whoever is done with what the
        work made gives the slot back by `release`."""
        self._slots.acquire()
        self._threads.submit(work)

    def release(self) -> None:
        self._slots.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        """Let the threads finish what they have; drop it where a second signal ends the process."""
        is_orderly = kind is None or issubclass(kind, Exception)
        self._threads.shutdown(wait=is_orderly, cancel_futures=not is_orderly)
