"""A real terminal for a process of its own."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

ROOT = Path(__file__).parent.parent


def on_a_terminal(*words: object) -> str:
    """What Python, called with these words, shows on a terminal of 100 columns as its standard error."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *map(str, words)]
    child = subprocess.Popen(command, stderr=theirs, stdout=subprocess.DEVNULL, env=environment)
    os.close(theirs)
    shown = b""
    try:
        while piece := os.read(ours, 4096):
            shown += piece
    except OSError:
        pass  # Linux ends a terminal whose other side is closed so.
    os.close(ours)
    assert child.wait() == 0
    return shown.decode()
