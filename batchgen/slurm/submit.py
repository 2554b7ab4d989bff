"""A run given to a cluster: planned here, its scripts written into the run directory, and sent."""

from __future__ import annotations

import json
import secrets
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchgen.balance import take_balance
from batchgen.disk import FILES
from batchgen.errors import UsageError
from batchgen.job import Job
from batchgen.ledger import Ledger
from batchgen.models.hashes import cache_dir
from batchgen.options import words_of
from batchgen.rundir import RunDirectory
from batchgen.slurm import programs
from batchgen.slurm.script import ARRAY, FINISH, FOLDER, Submission, Window, array_script, check, finish_script
from batchgen.wording import counted

REQUEST, JOBS = "request.json", "jobs.json"
USUAL_MAX_ARRAY_SIZE = 1001
"""Slurm's default."""


@dataclass(frozen=True, slots=True)
class Request:
    """What `submit` was asked: kept in the run directory, so that `--resume` needs no more than its name."""

    folder: str
    """Where it was asked."""
    manifest: tuple[str, ...]
    options: Mapping[str, Any]
    """The job options of the command line."""

    def keep(self, out: Path) -> None:
        FILES.make_folder(out / FOLDER)
        _put(out / FOLDER / REQUEST, json.dumps(asdict(self)))

    @classmethod
    def of(cls, out: Path) -> Request:
        """The latest request for a run directory. Raises UsageError if there is none."""
        path = out / FOLDER / REQUEST
        try:
            fields = json.loads(path.read_bytes())
            return cls(fields["folder"], tuple(fields["manifest"]), fields["options"])
        except FileNotFoundError:
            raise UsageError(
                f"{out} was never submitted from (it has no {FOLDER / REQUEST}); name its manifest"
            ) from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} cannot be read ({error!r}); submit by the manifest with -o {out}") from None


@dataclass(frozen=True, slots=True)
class Sent:
    """The jobs of a submission."""

    arrays: tuple[str, ...]
    finish: str


def _put(path: Path, text: str) -> None:
    """Write a file whole, or leave the one that is there."""
    temp = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        FILES.write(temp, text.encode())
        FILES.replace(temp, path)
    finally:
        FILES.remove(temp)


def submission(request: Request, out: Path, job: Job) -> Submission:
    """What the scripts say of a request. Raises UsageError for what they cannot say."""
    slurm = job.slurm
    program = slurm.program or ("batchgen" if slurm.container else f"{shlex.quote(sys.executable)} -m batchgen")
    names = [str(Path(request.folder, name)) for name in request.manifest]
    found = Submission(
        slurm=slurm,
        out=out,
        folder=Path(request.folder),
        words=(*names, "-o", str(out), *words_of(request.options)),
        program=program,
        device=job.engine.device,
        grace_s=job.run.grace_s,
        cache=Path(request.folder, slurm.cache) if slurm.cache else cache_dir().absolute(),
    )
    check(found)
    return found


@dataclass(frozen=True, slots=True)
class Left:
    """What a run has to do yet."""

    shards: int
    """That nobody alive works on."""
    rows: int
    """Outstanding, whoever works on them."""
    said: tuple[str, ...] = ()
    """How the run stands; nothing of a run that is not planned."""
    at_work: frozenset[str] = frozenset()
    """Tasks that hold shards, by their names."""


def left_of(run: RunDirectory, stale_after_s: float) -> Left:
    """What is left of a run that is planned. Raises UsageError for one that is not."""
    index = run.index()
    balance = take_balance(index, Ledger(run.root, run.files, plan=index.token))
    holders = [one for one in balance.holders if one.heartbeat_age_s <= stale_after_s]
    held = [
        f"{counted(one.rows, 'row')} of shard {one.shard} held by job {one.job_id or '-'} on {one.host}, heard "
        f"{one.heartbeat_age_s:.0f} s ago (thought dead after {stale_after_s:.0f} s)"
        for one in holders
    ]
    num_free = len(balance.shards) - balance.shards_settled - len(holders)
    return Left(
        num_free, balance.outstanding, (*held, balance.line()), frozenset(one.job_id for one in balance.holders)
    )


def sent_before(out: Path) -> tuple[str, ...]:
    """The arrays that were submitted for a run directory. Raises UsageError where their list cannot be read."""
    path = out / FOLDER / JOBS
    try:
        return tuple(map(str, json.loads(path.read_bytes())))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path}, the list of jobs sent before, cannot be read ({error!r}); remove it") from None


def waiting(out: Path, at_work: frozenset[str], say: Callable[[str], None]) -> tuple[str, ...]:
    """Tasks that were sent before and hold no shard yet. Where Slurm does not say, there are none, and that is said."""
    try:
        return tuple(one for one in programs.tasks(sent_before(out)) if one not in at_work)
    except programs.SlurmError as error:
        say(f"whether tasks that were sent before still wait is not known: {error}")
        return ()


def send(given: Submission, arrays: Sequence[Window], say: Callable[[str], None]) -> Sent:
    """Write the scripts into the run directory and submit them, and say so of each at once: whoever interrupts this
    must know what to take back. Raises programs.SlurmError."""
    folder = given.out / FOLDER
    _put(folder / ARRAY, array_script(given, arrays[0]))
    _put(folder / FINISH, finish_script(given))
    earlier, ids = sent_before(given.out), list[str]()
    try:
        for window in arrays:
            ids.append(programs.submit(folder / ARRAY, [f"--array={window.indices}"]))
            _put(folder / JOBS, json.dumps([*earlier, *ids]))
            say(_array_line(window, ids[-1]))
        finish = programs.submit(folder / FINISH, [f"--dependency=afterany:{':'.join(ids)}"])
        say(f"submitted job {finish}: checks and finishes the run when they have ended, however they end")
    except programs.SlurmError as error:
        before = f"; submitted before: {' '.join(ids)} (scancel takes them back)" if ids else ""
        raise programs.SlurmError(f"{error}{before}") from None
    return Sent(tuple(ids), finish)


def next_commands(sent: Sent, given: Submission) -> str:
    """What a person may type next."""
    out, slurm, ids = given.out, given.slurm, sent.arrays
    place = shlex.quote(str(out))
    again = f"sbatch --array=0 {shlex.quote(str(out / FOLDER / ARRAY))}"
    to_workers = "" if slurm.launcher == "srun" else "--batch "
    stop = f"scancel {to_workers}--signal=USR2 {' '.join(ids)}"
    commands = {
        f"batchgen status {place}": "where the run stands, from any host",
        f"squeue -j {','.join([*ids, sent.finish])}": "where its jobs stand",
        f"tail -F {place}/{FOLDER}/{ids[0]}_0.log": "what a worker says, once it runs",
        stop: "running workers commit what they have and end",
        f"scancel {' '.join(ids)}": "all tasks do, and none starts any more",
        again: "send a task again, any index",
        f"batchgen submit --resume {place}": "send as many tasks as there is work left for",
    }
    return "\n".join(["next:", *(f"  {command}  # {what}" for command, what in commands.items())])


def max_array_size(*, may_guess: bool) -> int:
    """The cluster's; where there is none and nothing is sent, Slurm's default. Raises programs.SlurmError where tasks
    cannot be sent from."""
    try:
        if not may_guess:
            programs.require("sbatch")
        return programs.max_array_size()
    except programs.SlurmError:
        if may_guess:
            return USUAL_MAX_ARRAY_SIZE
        raise


def _array_line(window: Window, job_id: str) -> str:
    limit = f", at most {window.throttle} at once" if window.throttle else ""
    return f"submitted job {job_id}: {counted(window.size, 'task')} from {window.first} on{limit}"
