"""Worker processes as their claims name them, and whether one can still be running."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
from dataclasses import dataclass, replace
from pathlib import Path

from batchgen.slurm.environment import this_task


@dataclass(frozen=True, slots=True)
class Owner:
    """One worker process, as its claims name it."""

    token: str
    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    start_time: str
    """Of the process, in the kernel's ticks since boot: tells it from a later one with the same pid."""
    job_id: str = ""
    """Slurm's, with the array task; empty elsewhere."""
    restart_count: int = 0
    launcher_pid: int = 0
    """Of the process that started it as one of several; 0 for one that stands alone."""
    launcher_start_time: str = ""


def this_process() -> Owner:
    """The running process as an owner, with a fresh token."""
    task = this_task()
    return Owner(
        token=secrets.token_hex(8),
        host=socket.gethostname(),
        boot_id=_text("/proc/sys/kernel/random/boot_id"),
        pid_namespace=_link("/proc/self/ns/pid"),
        pid=os.getpid(),
        start_time=start_time(os.getpid()),
        job_id=task.name,
        restart_count=task.restart_count,
    )


def launched_process() -> Owner:
    """The running process as `this_process`, started by its parent as one of several workers."""
    launcher = os.getppid()
    return replace(this_process(), launcher_pid=launcher, launcher_start_time=start_time(launcher))


_ended: set[str] = set()
"""Tokens of this process's owners that will not go on: a run can fail and be started again without a new process."""


def end(owner: Owner) -> None:
    """Note that an owner of this process has stopped working, whatever it holds."""
    _ended.add(owner.token)


def has_ended(owner: Owner) -> bool:
    """Whether an owner of this process has stopped working."""
    return owner.token in _ended


def start_time(pid: int) -> str:
    """A process's start time, "" if there is no such process (or it has ended and only waits to be reaped)."""
    stat = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return "" if len(stat) < 20 or stat[0] in "ZX" else stat[19]


def _has_left(pid: int, started: str) -> bool:
    """Whether a process of this machine that began at a start time is gone."""
    return start_time(pid) != started and not _is_hidden(pid)


def _is_hidden(pid: int) -> bool:
    """Whether there is a process of which `/proc`, mounted with hidepid, tells nothing: it is another user's."""
    if _text(f"/proc/{pid}/stat"):
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        pass
    return False


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="latin-1").strip()
    except (FileNotFoundError, ProcessLookupError, NotADirectoryError, PermissionError):
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""


def mark(owner: Owner) -> str:
    """A process as a word of a file's name, by which `is_gone` knows when nobody needs the file any more."""
    machine = hashlib.sha256(f"{owner.boot_id} {owner.pid_namespace}".encode()).hexdigest()[:8]
    return f"{machine}-{owner.pid}-{owner.start_time}"


def is_gone(name: str, me: Owner) -> bool:
    """Whether a file's name bears the mark of a process of this machine that is gone."""
    machine = mark(me).partition("-")[0]
    marks = (word.split("-") for word in name.split(".") if word.startswith(f"{machine}-"))
    return any(len(one) == 3 and one[1].isdecimal() and _has_left(int(one[1]), one[2]) for one in marks)


def gone_because(owner: Owner, me: Owner) -> str | None:
    """Why an owner cannot be running any more, as far as this process can tell without a clock."""
    if (owner.boot_id, owner.pid_namespace) == (me.boot_id, me.pid_namespace):
        if _has_left(owner.pid, owner.start_time):
            return f"its process {owner.pid} on {owner.host} is gone"
        if owner.pid == me.pid and has_ended(owner):
            return "its run, in this process, has ended"
    elif owner.job_id and owner.job_id == me.job_id and owner.restart_count < me.restart_count:
        return f"Slurm has restarted its job {owner.job_id}"
    return None
