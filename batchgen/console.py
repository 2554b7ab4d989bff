"""What the commands that work say, and how they end."""

from __future__ import annotations

import os
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from batchgen.errors import BatchgenError, Interrupted, UsageError
from batchgen.saying import say
from batchgen.stopping import REPEAT_S
from batchgen.wording import counted

if TYPE_CHECKING:
    from batchgen.balance import Balance
    from batchgen.plan_index import PlanIndex
    from batchgen.runner import Ending, Terms


def work(
    directory: Path,
    begin: Callable[[Terms], Ending],
    on_ended: Callable[[Ending], None] = lambda ending: None,
) -> NoReturn:
    """Let workers run, with signals heard and progress shown, and end as the run ends."""
    from batchgen.cores import limit_threads
    from batchgen.progress import showing
    from batchgen.rundir import RunDirectory
    from batchgen.runner import Terms
    from batchgen.starts import Starts
    from batchgen.stopping import Stop, StopNow, Stopped, hear, listening

    limit_threads()
    starts = Starts(RunDirectory(directory))

    def open_balance(index: PlanIndex, balance: Balance) -> None:
        say(f"run directory {directory}: {balance.line()}")
        if balance.outstanding:
            starts.begin(balance)

    with listening(Stop(on_asked=_say_stopping)) as stop:
        try:
            hear()
            with starts.noting():
                ending = begin(Terms(stop=stop, on_opened=open_balance, progress=showing))
                starts.end(is_early=ending.is_early)
        except Stopped:
            end_idle(directory, stop.signal_name, on_ended)
        except StopNow:
            end_now(directory, stop.signal_name)
        except Exception as error:
            if stop.was_raised:
                end_idle(directory, stop.signal_name, on_ended)
            if isinstance(error, UsageError):
                raise
            say(f"batchgen: {error}" if isinstance(error, BatchgenError) else traceback.format_exc())
            say_balance(directory)
            sys.exit(error.exit_code if isinstance(error, BatchgenError) else BatchgenError.exit_code)
    for holder in ending.balance.holders:
        say(
            f"{counted(holder.rows, 'row')} of shard {holder.shard} held by process {holder.pid} on {holder.host}, "
            f"heard {holder.heartbeat_age_s:.0f} s ago"
        )
    if ending.balance.cut:
        say(ending.balance.cut_note())
    if ending.exit_code == 3:
        for line in not_made(directory, ending.balance):
            say(line)
    if ending.stopped_by and ending.balance.outstanding:
        say(f"stopped by {ending.stopped_by}; the same command goes on")
    click.echo(ending.balance.line())
    on_ended(ending)
    sys.exit(ending.exit_code)


def _say_stopping(signal_name: str) -> None:
    """At once, and by no buffer: a signal may come while one is written."""
    line = (
        f"{signal_name}: the batch at work is finished if the grace allows, and what is done is committed; a second "
        f"signal, more than {REPEAT_S:.0f} s later, leaves that batch unmade\n"
    )
    with suppress(OSError):
        os.write(sys.stderr.fileno(), line.encode())


def not_made(directory: Path, balance: Balance) -> Iterator[str]:
    """Where it says why rows of a settled run were not made, and what to do."""
    if balance.failed:
        again = shlex.join(["batchgen", "retry", str(directory)])
        why = directory / "failures.parquet"
        yield f"{counted(balance.failed, 'row')} failed; {why} says why, and {again} makes another try"
    if balance.rejected:
        yield f"{counted(balance.rejected, 'row')} rejected; {directory / 'rejected.parquet'} says why"


def end_planned(directory: Path) -> NoReturn:
    """End where a plan was appended and is not to be worked off yet."""
    balance = say_balance(directory)
    if balance is not None and balance.outstanding:
        say("the command that began the run makes what is outstanding, as do tasks of `batchgen submit --resume`")
    sys.exit(0)


def say_balance(directory: Path) -> Balance | None:
    """The closing line where the run itself could not reach it; what cannot be read any more is said."""
    from batchgen.balance import take_balance
    from batchgen.ledger import Ledger
    from batchgen.rundir import RunDirectory

    run = RunDirectory(directory)
    try:
        index = run.index()
        balance = take_balance(index, Ledger(run.root, run.files, plan=index.token))
    except (BatchgenError, OSError) as error:
        say(f"the run directory cannot be read now ({error}); the balance is not known")
        return None
    click.echo(balance.line())
    return balance


def end_idle(directory: Path, signal_name: str, on_ended: Callable[[Ending], None]) -> NoReturn:
    """End at a first signal that finds nothing to finish, without waiting for any thread."""
    from batchgen.rundir import RunDirectory
    from batchgen.runner import Ending

    say(f"stopped by {signal_name}, while no row was being made; the same command goes on")
    if not (RunDirectory(directory).plans / "0.json").exists():
        say("nothing is planned yet")
    elif balance := say_balance(directory):
        on_ended(Ending(balance, signal_name, may_wait=True))
    _exit_now()


def end_now(directory: Path, signal_name: str) -> NoReturn:
    """End without waiting for any thread: what is not committed is dropped."""
    say(f"stopped at once by a second signal (the first was {signal_name}); the same command goes on")
    say_balance(directory)
    _exit_now()


def _exit_now() -> NoReturn:
    sys.stdout.flush()
    os._exit(Interrupted.exit_code)
