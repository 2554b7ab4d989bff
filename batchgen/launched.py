"""The worker process that a launcher starts: it is told what to do on standard input, reports on standard output,
in lines of JSON, and says on standard error what a person should read."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn, TextIO

from batchgen.errors import BatchgenError, Interrupted
from batchgen.job import Job
from batchgen.ledger import Ledger
from batchgen.owners import launched_process
from batchgen.presence import present
from batchgen.progress import Now
from batchgen.rundir import RunDirectory, check_job
from batchgen.runner import Task, work
from batchgen.stopping import Stop, StopNow, Stopped, hear, listening
from batchgen.timeleft import OUT_OF_TIME, TimeLeft

OUT_OF_TIME_CODE = 76
"""Exit code by which the launcher knows that no shard fitted into the time that is left."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a worker process is told, pickled. The plan lies in the run directory."""

    out: Path
    job: Job
    left: float
    num_others: int
    """As in a Task, its fellows included."""
    may_wait: bool
    time_left: TimeLeft


class Reporter:
    """A Progress that is read by the launcher. Where that is gone nobody is told, and the worker ends by itself."""

    def __init__(self, counts: TextIO) -> None:
        self._counts = counts

    def count(self, made: int, failed: int) -> None:
        with suppress(BrokenPipeError):
            print(json.dumps({"made": made, "failed": failed}), file=self._counts, flush=True)

    def show(self, now: Now, who: str = "") -> None:
        with suppress(BrokenPipeError):
            print(json.dumps({"now": asdict(now)}), file=self._counts, flush=True)

    def say(self, text: str) -> None:
        with suppress(BrokenPipeError):
            print(text, file=sys.stderr, flush=True)


def main() -> NoReturn:
    """Work until nothing is left; exits as `batchgen run` would. Signals are blocked when it is called."""
    with listening(Stop()) as stop:
        try:
            hear()
            reporter = Reporter(_own_output())
            order = pickle.load(sys.stdin.buffer)
            threading.Thread(target=_end_with_launcher, daemon=True).start()
            code = _work(order, stop, reporter)
        except (Stopped, StopNow):
            os._exit(Interrupted.exit_code)
        sys.exit(code)


def _work(order: Order, stop: Stop, reporter: Reporter) -> int:
    run = RunDirectory(order.out)
    try:
        with present(run):
            index, left, others = run.index(), order.left, order.num_others
            check_job(run, index, order.job)  # It may start in another's place, hours after the run began.
            ledger = Ledger(run.root, run.files, launched_process(), index.token)
            work(Task(run, index, order.job, ledger, left, others, order.may_wait, order.time_left), stop, reporter)
    except Exception as error:
        if stop.was_raised:
            raise Stopped from None
        if isinstance(error, BatchgenError):
            reporter.say(str(error))
            return error.exit_code
        reporter.say(traceback.format_exc())
        return BatchgenError.exit_code
    if stop.signal_name == OUT_OF_TIME:
        return OUT_OF_TIME_CODE
    return Interrupted.exit_code if stop.is_asked else 0


def _own_output() -> TextIO:
    """The reports' pipe; whatever else is printed on standard output goes to standard error."""
    counts = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return counts


def _end_with_launcher() -> None:
    """Stop as by a signal once the launcher is gone, however it ended: standard input's other end is its own."""
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)
