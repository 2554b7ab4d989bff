"""What a process may really use, of the machine's cores and of its GPUs."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchgen.cores import thread_settings, usable_cores
from batchgen.encoders import num_encoder_threads
from batchgen.errors import UsageError
from batchgen.gpus import choose_gpus, visible_gpus
from batchgen.job import Output
from tests import runs


@pytest.fixture(autouse=True)
def _many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))


def machine(folder: Path, cgroup: str, mounts: str, **files: str) -> Path:
    """A `/proc/self` whose control groups are mounted below `folder`; `files` by their path with "__" for "/"."""
    proc = folder / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(cgroup)
    (proc / "mountinfo").write_text(mounts.replace("AT", str(folder)))
    for name, content in files.items():
        file = folder / name.replace("__", "/").replace("_DOT_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return proc


V2 = "31 23 0:28 / AT/cg rw,relatime shared:9 - cgroup2 cgroup2 rw\n"
V1 = "32 31 0:29 / AT/cg/cpu rw - cgroup cgroup rw,cpu,cpuacct\n33 31 0:31 / AT/cg/set rw - cgroup cgroup rw,cpuset\n"
CASES: dict[str, tuple[str, str, dict[str, str], int]] = {
    "no control group": ("", "", {}, 64),
    "no quota": ("0::/a/b\n", V2, {"cg__a__b__cpu_DOT_max": "max 100000\n"}, 64),
    "version 2": ("0::/a/b\n", V2, {"cg__a__b__cpu_DOT_max": "350000 100000\n"}, 3),
    "version 2, above": (
        "0::/a/b\n",
        V2,
        {"cg__a__b__cpu_DOT_max": "max 100000\n", "cg__a__cpu_DOT_max": "200000 100000\n"},
        2,
    ),
    "less than a core": ("0::/\n", V2, {"cg__cpu_DOT_max": "50000 100000\n"}, 1),
    "a container with the host's names": ("0::/docker/1\n", V2, {"cg__cpu_DOT_max": "400000 100000\n"}, 4),
    "a container's own mount": (
        "0::/docker/1/x\n",
        V2.replace("/ AT", "/docker/1 AT"),
        {"cg__x__cpu_DOT_max": "500000 100000\n"},
        5,
    ),
    "version 1": (
        "4:cpuset:/s\n3:cpu,cpuacct:/slurm/job\n0::/\n",
        V1,
        {"cg__cpu__slurm__job__cpu_DOT_cfs_quota_us": "600000", "cg__cpu__slurm__job__cpu_DOT_cfs_period_us": "100000"},
        6,
    ),
    "version 1, no quota": (
        "3:cpu,cpuacct:/\n",
        V1,
        {"cg__cpu__cpu_DOT_cfs_quota_us": "-1", "cg__cpu__cpu_DOT_cfs_period_us": "100000"},
        64,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_cores_of_a_control_group(tmp_path: Path, case: str) -> None:
    cgroup, mounts, files, cores = CASES[case]
    proc = machine(tmp_path, cgroup, mounts, **files)
    assert usable_cores(proc, {}) == cores
    assert usable_cores(proc, {"SLURM_CPUS_PER_TASK": "2"}) == min(cores, 2)
    assert usable_cores(proc, {"SLURM_CPUS_PER_TASK": ""}) == cores


def test_the_affinity_of_this_process_is_seen() -> None:
    code = "import os; os.sched_setaffinity(0, {0}); from batchgen.cores import usable_cores; print(usable_cores())"
    environment = {"PYTHONPATH": str(runs.ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True).stdout == b"1\n"


def test_encoders_have_a_thread_for_each_core_but_8_at_most() -> None:
    assert [num_encoder_threads(Output(), cores) for cores in (1, 3, 20)] == [1, 3, 8]
    assert num_encoder_threads(Output(encoders=5), 2) == 5
    assert num_encoder_threads(Output()) == min(8, usable_cores())


def test_threads_that_are_set_already_stay() -> None:
    """One of torch's two decides; torch takes the other, if it is set, before it."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        assert thread_settings(3, {name: "7"}) == {"TORCHINDUCTOR_COMPILE_THREADS": "3"}
    compiling = thread_settings(3, {"TORCHINDUCTOR_COMPILE_THREADS": "7"})
    assert compiling == {"OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3"}


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_torch_takes_the_number_that_is_set(name: str) -> None:
    outside = {key: value for key, value in os.environ.items() if not key.endswith("_NUM_THREADS")}
    chosen = outside | {name: "1"}
    command = [sys.executable, "-c", "import torch; print(torch.get_num_threads())"]
    made = subprocess.run(command, env=chosen | thread_settings(2, chosen), capture_output=True, text=True, check=True)
    assert made.stdout == "1\n"


class Driver:
    """As libcuda answers, with some devices or an error."""

    def __init__(self, count: int, failed: int = 0) -> None:
        self._devices, self._failed = count, failed

    def cuInit(self, flags: int) -> int:
        assert flags == 0
        return self._failed

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self._devices
        return 0

    def cuGetErrorString(self, code: int, text: Any) -> int:
        assert isinstance(text._obj, ctypes.c_char_p)
        text._obj.value = b"system not yet initialized"
        return 0


def seen(driver: Driver, visible: str | None = None) -> tuple[str, ...]:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return visible_gpus(environment, lambda name: driver)


@pytest.mark.parametrize(
    ("count", "visible", "names"),
    [
        (3, None, ("0", "1", "2")),
        (2, "3,5", ("3", "5")),
        (2, " 1 , 0", ("1", "0")),
        (1, "1,-1,0", ("1",)),
        (2, "GPU-1f2e,GPU-77aa", ("GPU-1f2e", "GPU-77aa")),
        (1, "MIG-a1,MIG-b2,MIG-c3", ("MIG-a1", "MIG-b2", "MIG-c3")),
        (1, "MIG-GPU-a1/7/0", ("MIG-GPU-a1/7/0",)),
    ],
)
def test_gpus_that_a_process_would_see(count: int, visible: str | None, names: tuple[str, ...]) -> None:
    assert seen(Driver(count), visible) == names


@pytest.mark.parametrize(
    ("driver", "visible", "message"),
    [
        (Driver(0, failed=100), None, "the NVIDIA driver finds no GPU here"),
        (Driver(0), None, "the NVIDIA driver finds no GPU here"),
        (Driver(0, failed=100), "5", "the NVIDIA driver finds no GPU among CUDA_VISIBLE_DEVICES = '5'"),
        (Driver(0, failed=802), None, r"system not yet initialized \(CUDA error 802\)"),
        (Driver(2), "", "CUDA_VISIBLE_DEVICES is '', which hides all GPUs"),
        (Driver(2), "-1", "CUDA_VISIBLE_DEVICES is '-1', which hides all GPUs"),
        (Driver(1), "0,9", "CUDA_VISIBLE_DEVICES is '0,9', and of these 1 GPU can be used"),
    ],
)
def test_no_gpu_is_said_in_a_sentence(driver: Driver, visible: str | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        seen(driver, visible)


def test_this_machine_is_asked_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a driver, the command says so and makes nothing."""
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        ended = runs.run(runs.prompts(tmp_path / "m.parquet", 2), tmp_path / "out", "--gpus", "all")
        assert ended.code == 2
        assert "this machine has no NVIDIA driver that can be used" in ended.err
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("wanted", "chosen"), [("all", "abc"), ("1", "a"), ("3", "abc"), ("0,2", "ac"), ("2,0", "ca"), ("1,", "b")]
)
def test_gpus_that_are_asked_for(wanted: str, chosen: str) -> None:
    assert choose_gpus(wanted, ("a", "b", "c")) == tuple(chosen)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("0", "names no GPU"),
        ("0,0", "names a GPU twice"),
        ("4", r"asks for more than is there: 3 GPUs can be seen, numbered from 0 \(a, b, c\)"),
        ("0,3", "asks for more than is there"),
        ("", "takes .all., a count like 2, or numbers like 0,2"),
        ("every", "takes .all., a count like 2, or numbers like 0,2"),
        ("-1", "takes .all., a count like 2, or numbers like 0,2"),
    ],
)
def test_gpus_that_cannot_be_had(wanted: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        choose_gpus(wanted, ("a", "b", "c"))
