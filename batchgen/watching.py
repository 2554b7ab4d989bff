"""Where a run stands, once or again and again, seen from its directory alone."""

from __future__ import annotations

import json
import math
import sys
import time

import click
from tqdm import tqdm

from batchgen.balance import Balance, take_balance
from batchgen.errors import UsageError
from batchgen.ledger import Ledger
from batchgen.marker import is_finished
from batchgen.pace import Pace
from batchgen.report import status_facts, status_text
from batchgen.rundir import RunDirectory
from batchgen.streams import is_gone


def look(run: RunDirectory, *, as_json: bool, is_short: bool = False) -> tuple[str, Balance]:
    """How a run stands, as text or in one JSON object, on one line if `is_short`. Raises UsageError for a folder that
    is no run directory."""
    index = run.index()
    balance = take_balance(index, Ledger(run.root, run.files, plan=index.token))
    is_finalized = is_finished(run, balance)
    if as_json:
        facts = status_facts(index, balance, is_finalized=is_finalized)
        return json.dumps(facts, indent=None if is_short else 2), balance
    return status_text(index, balance, is_finalized=is_finalized), balance


def watch(run: RunDirectory, every_s: float, *, as_json: bool) -> Balance:
    """Show it every so many seconds until all rows are settled: on a terminal in the place of what was shown before,
    with the rate of all workers together, as their commits tell it, or until nobody reads it any more. The balance at
    the end."""
    if math.isnan(every_s):
        raise UsageError("--watch nan is not usable: it takes a number of seconds from 0.1 on")
    pace: Pace | None = None
    while True:
        shown, balance = look(run, as_json=as_json, is_short=True)
        settled = balance.done + balance.failed
        if pace is None:
            pace, before = Pace(settled), settled
        if settled != before:
            pace.count(settled)
            before = settled
        if not as_json:
            shown = f"{shown}\n\n{_when(pace.rate(), balance)}"
            if sys.stdout.isatty():
                click.clear()
        click.echo(shown)
        if not balance.outstanding or is_gone(sys.stdout):
            return balance
        time.sleep(every_s)


def _when(rate: float | None, balance: Balance) -> str:
    clock = time.strftime("%H:%M:%S")
    if not balance.outstanding:
        return f"at {clock}: all rows are settled"
    if rate is None:
        return f"at {clock}: no rate yet, for workers commit at intervals; Ctrl-C ends the watch, not the run"
    left = tqdm.format_interval(balance.outstanding / rate)
    return f"at {clock}: {rate:.2f} rows/s committed, about {left} left; Ctrl-C ends the watch, not the run"
