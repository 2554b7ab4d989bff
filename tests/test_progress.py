"""What a person sees while a run works, and how it is asked to stop."""

from __future__ import annotations

import io
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from batchgen import progress
from batchgen.pace import Pace
from batchgen.progress import AtWork, Display, Now, Quiet
from batchgen.stopping import REPEAT_S, SIGNALS, Stop, StopNow, listening
from tests.terminals import on_a_terminal

ROOT = Path(__file__).parent.parent
LINE = re.compile(
    r"(\d+)/(\d+) images, as far as this worker knows; \d+\.\d\d images/s here, "
    r"time left (\S+) without others, failed (\d+), captures 0"
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


NOW = Now("512x512, batch 8, guided, x,e", captures=2)


def test_a_long_reading_says_how_far_it_is_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    read = progress.reading_bar()
    for second in (10.0, 31.0, 40.0, 62.0, 100.0):
        now[0] = second
        read(2_000, 10_000)
    assert capsys.readouterr().err == "checking: 4,000 of 10,000 rows\nchecking: 8,000 of 10,000 rows\n"


def test_lines_say_what_is_made_and_what_is_waited_for() -> None:
    stream = io.StringIO()
    with Display(10, 2, 1, stream) as display:
        assert display.line().endswith("failed 1, captures 0")
        display.show(replace(NOW, preparing="compiling it", captures=0))
        assert display.line().endswith("captures 0; compiling it, for 00:00")
        display.show(NOW)
        assert display.line().endswith("captures 2; making 512x512, batch 8, guided, x,e")
        display.show(replace(NOW, captures=1), "GPU 1")
        display.show(Now(), "")
        assert display.line().endswith("captures 1; GPU 1: making 512x512, batch 8, guided, x,e")
        display.show(Now(), "GPU 1")
        assert display.line().endswith("captures 0; GPU 1: idle")


def test_what_takes_long_is_said_before_it_begins() -> None:
    heard = Heard()
    at_work = AtWork(heard)
    at_work.begin("a bucket")
    with at_work.preparing("compiling a bucket", is_long=True):
        assert heard.said == ["compiling a bucket; no image of that shape is made before, and it can take minutes"]
        assert heard.shown[-1] == Now("a bucket", "compiling a bucket", 0)
    assert heard.shown[-1] == Now("a bucket", "", 1)
    with pytest.raises(KeyError), at_work.preparing("capturing it", is_long=False):
        raise KeyError
    assert (heard.shown[-1], len(heard.said)) == (Now("a bucket", "", 1), 1)


class Heard(Quiet):
    """What a progress was told."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.shown: list[Now] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def show(self, now: Now, who: str = "") -> None:
        self.shown.append(now)


def rates(events: Sequence[tuple[float, int | None]]) -> list[float | None]:
    """The rate after each event: images settled by then, or None where one only looks."""
    now = [0.0]
    pace = Pace(5, lambda: now[0])
    found = []
    for at, settled in events:
        now[0] = at
        if settled is not None:
            pace.count(settled)
        found.append(pace.rate())
    return found


def test_the_rate_is_that_of_late_and_falls_where_nothing_comes() -> None:
    assert rates([(0, None), (10, None)]) == [None, None]
    assert rates([(10, 15), (20, 25), (25, None), (30, None)]) == [1.0, 1.0, 1.0, 1.0]
    assert rates([(10, 15), (20, 25), (50, None)]) == [1.0, 1.0, 0.5]
    assert rates([(10, 15), (11, 5)])[-1] is None
    slow = [(100.0 * n, 5 + 10 * n) for n in range(1, 10)]
    assert rates(slow)[-1] == pytest.approx(0.1)
    faster = rates([*slow, *((900 + n, 95 + 10 * n) for n in range(1, 200))])
    assert faster[-1] == pytest.approx(10.0)


def test_getting_ready_is_no_part_of_the_rate() -> None:
    now = [0.0]
    pace = Pace(0, lambda: now[0])
    now[0] = 106.0
    pace.begin()
    now[0] = 108.0
    pace.count(8)
    assert pace.rate() == 4.0
    pace.begin()
    assert pace.rate() == 4.0


BAR = """
import sys, time
from batchgen.progress import Display, Now
with Display(10, 2, 1) as display:
    time.sleep(0.2)
    display.count(3, 2)
    display.say("a word")
    display.show(Now("a bucket of a name that is much too long for a line of a terminal" * 2, "compiling"), "GPU 0")
    time.sleep(3)
    display.show(Now("a bucket of a name that is much too long for a line of a terminal" * 2), "GPU 0")
    time.sleep(1.5)
"""


def test_a_bar_is_drawn_on_a_terminal() -> None:
    """A real one: the standard error of a process of its own."""
    text = on_a_terminal("-c", BAR)
    assert "3/10" in text
    assert "8/10" in text
    assert "3 failed" in text
    assert "/s, 00:0" in text
    assert re.search(r"8/10 images, in 00:\d\d, 3 failed, 0 captures", text)
    assert "\na word" in text.replace("\r", "\n")
    assert not LINE.search(text)
    assert re.search(r"GPU 0: compiling, for 00:0[1-9]", text)
    lines = re.split(r"[\r\n]|\x1b\[A", text)
    assert any(line.startswith("  GPU 0: making a bucket") and line.rstrip().endswith("…") for line in lines)
    assert max(map(len, lines)) <= 100


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
