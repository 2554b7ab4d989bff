"""The program: `batchgen` where it is installed, `python -m batchgen` elsewhere."""

from __future__ import annotations

import signal
from typing import NoReturn

from batchgen.stopping import SIGNALS


def main() -> NoReturn:
    """As `cli.main`. Signals wait from the first moment on until the command says what they are to do: importing it
    takes seconds on a busy file system."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    from batchgen import cli

    cli.main()


if __name__ == "__main__":
    main()
