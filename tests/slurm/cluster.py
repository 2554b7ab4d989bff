"""A real Slurm of two nodes on this host: munged, slurmctld and a slurmd for each node, as root and without systemd,
every file in one folder.

Needs the programs of Debian's packages slurmctld, slurmd, slurm-client and munge; their own services need not run.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

NODES = ("n1", "n2")
MAX_ARRAY_SIZE = 12
WAIT_S = 400
"""Far more than anything takes here."""
_ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")

# A requeued job waits for cred_expire, where less than 5 s counts as 120. Nodes that were set down stay so. There are
# more CPUs than the host has.
_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
PlugStackConfig={folder}/plugstack.conf
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1,sched_min_interval=100000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=10
MinJobAge=3600
MaxArraySize={max_array_size}
ReturnToService=0
SlurmdTimeout=300
SlurmdParameters=config_overrides
PropagateResourceLimits=NONE
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=60 PriorityTier=1 GraceTime=10 LLN=YES
PartitionName=high Nodes=ALL MaxTime=INFINITE DefaultTime=60 PriorityTier=10 PreemptMode=OFF LLN=YES
"""


@dataclass(frozen=True, slots=True)
class State:
    """How a job, or a task of an array, stands."""

    name: str
    """"PENDING", "RUNNING", "COMPLETED", "FAILED", "CANCELLED", …"""
    code: int
    """Its exit code."""
    restarts: int
    node: str
    """Where its script runs or ran."""

    @property
    def has_ended(self) -> bool:
        return self.name in _ENDED


@dataclass(slots=True)
class Cluster:
    """A running cluster. `daemons` are the processes to be ended, the first started first."""

    folder: Path
    daemons: dict[str, int] = field(default_factory=dict)

    def ask(self, *words: object) -> str:
        """What a program of Slurm answers."""
        done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def states(self, job_id: str) -> dict[int, State]:
        """The tasks of an array by their index, any other job as its only task 0; those not started yet are left
        out."""
        found = {}
        for line in self.ask("scontrol", "-o", "show", "job", job_id).splitlines():
            facts = dict(re.findall(r"(\w+)=(\S*)", line))
            index = facts.get("ArrayTaskId", "0")
            if index.isdecimal():
                code, restarts = int(facts["ExitCode"].split(":")[0]), int(facts["Restarts"])
                found[int(index)] = State(facts["JobState"], code, restarts, facts.get("BatchHost", ""))
        return found

    def ended(self, job_id: str) -> dict[int, State]:
        """The tasks of a job once all of them have ended."""

        def has_ended() -> bool:
            return not self.ask("squeue", "-h", "-j", job_id, "-o", "%i", "-t", "PD,R,S,CG,CF,RQ")

        wait_for(has_ended, lambda: f"job {job_id} has not ended:\n{self.ask('squeue')}")
        return self.states(job_id)

    def start_node(self, name: str) -> None:
        self._start(f"slurmd-{name}", "slurmd", "-N", name, "-f", str(self.folder / "slurm.conf"))

    def kill(self, daemon: str) -> None:
        """End a daemon by SIGKILL."""
        os.kill(self.daemons[daemon], signal.SIGKILL)
        wait_for(lambda: not is_running(self.daemons[daemon]), lambda: f"{daemon} has survived")
        (self.folder / f"{daemon}.pid").unlink()

    def start(self) -> None:
        for name in ("state", *(f"spool-{node}" for node in NODES)):
            (self.folder / name).mkdir()
        ports = _free_ports(1 + len(NODES))
        host = socket.gethostname().split(".")[0]
        memory = int(re.findall(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())[0]) // 1024
        nodes = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=12 RealMemory={memory} Gres=gpu:2"
            for name, port in zip(NODES, ports[1:], strict=True)
        ]
        conf = _CONF.format(
            host=host, port=ports[0], folder=self.folder, max_array_size=MAX_ARRAY_SIZE, nodes="\n".join(nodes)
        )
        # A device's name ends in its index, and it must be a device.
        for gpu in range(2):
            (self.folder / f"nvidia{gpu}").symlink_to("/dev/null")
        gres = f"AutoDetect=off\nNodeName=n[1-2] Name=gpu File={self.folder}/nvidia[0-1]\n"
        files = {"slurm.conf": conf, "gres.conf": gres, "cgroup.conf": "", "plugstack.conf": ""}
        for name, text in files.items():
            (self.folder / name).write_text(text)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        self._start(
            *("munged", "munged", "--force", f"--key-file={key}", f"--socket={self.folder}/munge.socket"),
            *(f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/munged.log"),
            f"--seed-file={self.folder}/munged.seed",
        )
        self._start("slurmctld", "slurmctld", "-c", "-f", str(self.folder / "slurm.conf"))
        for node in NODES:
            self.start_node(node)
        wait_for(
            lambda: self.ask("sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N").split() == [*NODES], self.logs
        )

    def stop(self) -> None:
        """Cancel the jobs, then end the daemons, the last started first."""
        try:
            self.ask("scancel", "--partition=main")
            self.ask("scancel", "--partition=high")
            wait_for(lambda: not self.ask("squeue", "-h"), lambda: self.ask("squeue"))
        finally:
            for pid in reversed(self.daemons.values()):
                _end(pid)

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))

    def _start(self, name: str, *words: str) -> None:
        """Start a daemon and note its process."""
        program = shutil.which(words[0], path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        assert program, f"{words[0]} is not installed; apt-get install slurmctld slurmd slurm-client munge"
        pid_file = self.folder / f"{name}.pid"
        with (self.folder / f"{name}.out").open("ab") as out:
            subprocess.run(
                [program, *words[1:]], stdin=subprocess.DEVNULL, stdout=out, stderr=out, timeout=60, check=True
            )
        wait_for(lambda: pid_file.exists() and pid_file.read_text().strip().isdecimal(), self.logs)
        self.daemons[name] = int(pid_file.read_text())


def wait_for(is_so: Callable[[], object], what: Callable[[], str]) -> None:
    """Look again and again until something is so; `what` says how it stands instead."""
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, what()
        time.sleep(0.2)


@contextmanager
def cluster() -> Iterator[Cluster]:
    """A cluster for the time of the block, which this process's environment names (SLURM_CONF)."""
    # Paths of Unix sockets are short.
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    folder.chmod(0o755)
    started = Cluster(folder)
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    try:
        started.start()
        yield started
    finally:
        started.stop()
        del os.environ["SLURM_CONF"]
    shutil.rmtree(folder)


def _free_ports(num: int) -> list[int]:
    with_sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(num)]
    ports = [one.getsockname()[1] for one in with_sockets]
    for one in with_sockets:
        one.close()
    return ports


def _end(pid: int) -> None:
    if is_running(pid):
        os.kill(pid, signal.SIGTERM)
        wait_for(lambda: not is_running(pid), lambda: f"process {pid} goes on")


def is_running(pid: int) -> bool:
    """Whether a process is there and not only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
