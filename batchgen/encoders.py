"""The encoder threads: a bounded pool that all parts of a worker share."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from batchgen.job import Output

_IN_FLIGHT_PER_THREAD = 2
"""One image being encoded and one waiting, so that no thread idles and memory stays flat."""
_MAX_THREADS = 8


def num_encoder_threads(output: Output) -> int:
    """As the job says, else one per core this process may use, at most 8."""
    return output.encoders or min(_MAX_THREADS, len(os.sched_getaffinity(0)))


class EncoderPool:
    """Threads that start work in the order in which it came, and a limit on the work in flight."""

    def __init__(self, num_threads: int) -> None:
        self.max_in_flight = num_threads * _IN_FLIGHT_PER_THREAD
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
