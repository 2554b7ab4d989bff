"""Worker processes as their launcher holds them: started with signals blocked, read without waiting."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing import connection
from typing import IO

from batchgen import owners
from batchgen.launched import Order
from batchgen.ledger import Receipt
from batchgen.stopping import SIGNALS

# The same modules as here: `-m` would search the current folder first.
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from batchgen.launched import main; main()"


class Child:
    """One worker process. What it made is what it says; what it committed is what the receipts say."""

    def __init__(self, name: str, order: Order, environment: Mapping[str, str]) -> None:
        self.made = self.failed = 0
        with _signals_blocked():
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOT, json.dumps(sys.path), name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **environment},
            )
        self._start_time = owners.start_time(self.process.pid)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.counts, self.words = Lines(self.process.stdout), Lines(self.process.stderr)
        with suppress(BrokenPipeError):  # It has ended already.
            pickle.dump(order, self.process.stdin)
            self.process.stdin.flush()

    def wrote(self, receipt: Receipt, me: owners.Owner) -> bool:
        """Whether a receipt is this process's; `me` is any process of this machine."""
        by, own = receipt.by, (me.boot_id, me.pid_namespace, self.process.pid, self._start_time)
        return (by.boot_id, by.pid_namespace, by.pid, by.start_time) == own

    def signal(self, number: int) -> None:
        """Send a signal; to a process that has ended, none."""
        self.process.send_signal(number)

    def close(self) -> None:
        """Let go of the pipes of a process that has ended."""
        for stream in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()


class Lines:
    """The lines that a process writes into a pipe, as they come."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.handle = stream.fileno()
        os.set_blocking(self.handle, False)
        self._rest = b""
        self.is_open = True

    def take(self) -> list[str]:
        """Those that are whole since the last call, and at the end of the pipe the rest."""
        data = self._rest + b"".join(self._pieces())
        *lines, self._rest = data.split(b"\n")
        if not self.is_open and self._rest:
            lines.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace") for line in lines]

    def _pieces(self) -> Iterator[bytes]:
        with suppress(BlockingIOError):
            while piece := os.read(self.handle, 2**16):
                yield piece
            self.is_open = False


def wait_for_lines(children: list[Child], timeout_s: float) -> None:
    """Until one of the processes has written or ended its output, at most so long."""
    pipes = (pipe for child in children for pipe in (child.counts, child.words))
    connection.wait([pipe.handle for pipe in pipes if pipe.is_open], timeout_s)


class _signals_blocked:
    """A process that is started in the block has the signals blocked, and finds them waiting once it listens."""

    def __enter__(self) -> None:
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def __exit__(self, *error: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)
