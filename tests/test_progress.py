"""What a person sees while a run works, and how it is asked to stop."""

from __future__ import annotations

import io
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from batchgen import progress
from batchgen.progress import Display
from batchgen.stopping import REPEAT_S, SIGNALS, Stop, StopNow, listening
from tests.terminals import on_a_terminal

ROOT = Path(__file__).parent.parent
LINE = re.compile(
    r"(\d+)/(\d+) images, as far as this worker knows; \d+\.\d\d images/s here, "
    r"time left (\S+) without others, failed (\d+)"
)


def eventually(is_so: Callable[[], bool], within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if is_so():
            return True
        time.sleep(0.01)
    return False


def test_lines_are_written_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert progress.LINE_EVERY_S == 30.0
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.02)
    stream = io.StringIO()
    with Display(10, done=2, failed=1, stream=stream) as display:
        assert eventually(lambda: "3/10 images" in stream.getvalue())
        display.count(3, 2)
        display.say("a word")
        assert eventually(lambda: "8/10 images" in stream.getvalue())
    lines = stream.getvalue().splitlines()
    assert "a word" in lines
    found = [LINE.fullmatch(line) for line in lines if line != "a word"]
    assert all(found)
    counts = [(int(one[1]), int(one[2]), one[3], int(one[4])) for one in found if one]
    assert counts[0] == (3, 10, "unknown", 1)
    assert counts[-1][:2] + counts[-1][3:] == (8, 10, 3)
    assert re.fullmatch(r"\d\d:\d\d", counts[-1][2])
    time.sleep(0.1)
    assert stream.getvalue().splitlines() == lines


BAR = """
import sys, time
from batchgen.progress import Display
with Display(10, 2, 1) as display:
    time.sleep(0.2)
    display.count(3, 2)
    display.say("a word")
"""


def test_a_bar_is_drawn_on_a_terminal() -> None:
    """A real one: the standard error of a process of its own."""
    text = on_a_terminal("-c", BAR)
    assert "3/10" in text
    assert "8/10" in text
    assert "failed=3" in text
    assert "img/s" in text
    assert "\na word" in text.replace("\r", "\n")
    assert not LINE.search(text)


def clocked(stop: Stop, *times: float) -> list[bool]:
    """Whether each of the signals at these times ends the run at once."""
    now: list[float] = []
    stop.clock = lambda: now[-1]
    results = []
    for at in times:
        now.append(at)
        try:
            stop.on_signal(signal.SIGTERM, None)
            results.append(False)
        except StopNow:
            results.append(True)
    return results


@pytest.mark.parametrize(
    ("times", "is_at_once"),
    [
        ([5.0], [False]),
        ([5.0, 5.0, 6.9, 7.0], [False, False, False, False]),
        ([5.0, 7.1], [False, True]),
        ([5.0, 6.0, 7.5], [False, False, True]),
        ([0.0, 1000.0], [False, True]),
    ],
)
def test_a_second_signal_after_two_seconds_ends_the_run_at_once(times: list[float], is_at_once: list[bool]) -> None:
    assert REPEAT_S == 2.0
    stop = Stop()
    assert not stop.is_asked
    assert stop.age_s() == 0.0
    assert clocked(stop, *times) == is_at_once
    assert stop.is_asked
    assert (stop.signal_name, stop.since) == ("SIGTERM", times[0])
    assert stop.age_s() == times[-1] - times[0]


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_real_signals_are_heard_within_the_block_only(number: signal.Signals) -> None:
    before = [signal.getsignal(one) for one in SIGNALS]
    with listening(Stop()) as stop, stop.working():
        os.kill(os.getpid(), number)
        assert stop.is_asked
        assert stop.signal_name == number.name
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal_name == number.name
        assert stop.since is not None
        stop.since -= REPEAT_S + 0.1
        with pytest.raises(StopNow):
            os.kill(os.getpid(), signal.SIGTERM)
    assert [signal.getsignal(one) for one in SIGNALS] == before


def test_handlers_are_given_back_after_an_error() -> None:
    before = [signal.getsignal(one) for one in SIGNALS]
    with pytest.raises(KeyError), listening(Stop()):
        raise KeyError
    assert [signal.getsignal(one) for one in SIGNALS] == before
