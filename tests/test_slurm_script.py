"""What `submit` gives to sbatch: the committed examples, quoting, and arrays above the cluster's limit."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.cli import cli
from batchgen.errors import UsageError
from batchgen.job import Slurm
from batchgen.slurm.script import Submission, Window, array_script, check, finish_script, limit_s, windows
from tests.runs import ROOT

TRAPS = st.text(st.sampled_from("a'\" $`#%!*;&|()<>{}~é🐉=-@,:"), min_size=1)


def submission(out: str = "/scratch/out", words: tuple[str, ...] = (), **keys: object) -> Submission:
    return Submission(Slurm(**keys), Path(out), Path("/"), words, "batchgen", Path("/cache"))  # type: ignore[arg-type]


def lines(given: Submission) -> list[str]:
    return array_script(given, Window(0, 3, None)).splitlines()


@pytest.fixture(scope="module")
def make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_slurm", ROOT / "slurm" / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_committed_examples_are_what_the_code_renders(make: ModuleType) -> None:
    """After a change that is meant: `python slurm/make.py`."""
    committed = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "slurm").glob("*.sbatch")}
    assert committed == dict(make.scripts())


def test_the_shell_takes_them(make: ModuleType) -> None:
    for name in make.scripts():
        subprocess.run(["bash", "-n", ROOT / "slurm" / name], check=True)


def run_worker(script: str, folder: Path) -> list[str]:
    """The words that a script's worker gets, with a `srun` that only starts what follows."""
    for name, text in {"srun": 'exec "$@"', "batchgen": 'printf "%s\\0" "$@"'}.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, check=True)
    return done.stdout.decode().split("\0")[:-1]


@given(words=st.lists(TRAPS | st.just("two\nlines"), max_size=4))
def test_words_reach_the_worker_as_they_are(words: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("bin")
    script = array_script(submission(words=tuple(words)), Window(0, 1, None))
    assert run_worker(script, folder) == ["run", *words, "--no-wait"]


def sbatch_reads(line: str) -> str:
    """The option of a #SBATCH line, by sbatch's rules: quotes group, a backslash takes the next character as it is, a
    # outside of quotes ends the line."""
    found, quote, characters = "", "", iter(line.removeprefix("#SBATCH "))
    for char in characters:
        if char == "\\":
            found += next(characters)
        elif quote or char in "'\"":
            quote, found = ("", found) if char == quote else (quote or char, found + char if quote else found)
        elif char.isspace() or char == "#":
            break
        else:
            found += char
    return found


@given(name=TRAPS)
def test_a_path_full_of_traps_in_the_options(name: str) -> None:
    out = f"/scratch/{name}"
    options = [sbatch_reads(line) for line in lines(submission(out)) if line.startswith("#SBATCH")]
    assert f"--output={out.replace('%', '%%')}/.run/slurm/%A_%a.log" in options
    assert f"--job-name={Path(out).name}" in options


@pytest.mark.parametrize("name", ["two\nlines", "back\\slash", "a\x00b", "a\u2028b"])
@pytest.mark.parametrize("place", ["out", "folder", "cache"])
def test_paths_that_no_script_can_name(name: str, place: str) -> None:
    paths = {"out": "/scratch/out", "folder": "/", "cache": "/cache", place: f"/scratch/{name}"}
    given = Submission(Slurm(), Path(paths["out"]), Path(paths["folder"]), (), "batchgen", Path(paths["cache"]))
    with pytest.raises(UsageError, match="a batch script cannot name; rename the folder"):
        check(given)


def test_every_key_reaches_a_script() -> None:
    """Each but `tasks` and `throttle`, which make the windows, changes what is rendered, and nothing else does."""
    values = {
        "partition": "a", "account": "a", "time": "1", "gres": "gpu:1", "constraint": "a", "cpus": 2, "memory": "1G",
        "nodes": 2, "modules": ("a",), "setup": ("true",), "container": "a", "launcher": "shell",
        "warn_s": 1, "wait": True, "requeue": True, "options": ("--qos=a",), "finish_partition": "b",
        "finish_time": "2", "finish_options": ("--qos=b",),
    }  # fmt: skip
    plain = submission()
    assert values.keys() | {"tasks", "throttle", "program", "cache"} == Slurm.model_fields.keys()
    for name, value in values.items():
        changed = submission(**{name: value})
        is_changed = [
            array_script(changed, Window(0, 3, None)) != array_script(plain, Window(0, 3, None)),
            finish_script(changed) != finish_script(plain),
        ]
        of_all = {"partition", "account", "time", "modules", "setup", "container"}
        assert is_changed == [not name.startswith("finish"), name.startswith("finish") or name in of_all], name


def test_who_gets_the_warning() -> None:
    """Under srun the worker, in the batch shell the script, which has become the worker."""
    by_srun, by_shell = lines(submission(warn_s=90)), lines(submission(warn_s=90, launcher="shell"))
    assert "#SBATCH --signal=USR1@90" in by_srun
    assert "#SBATCH --signal=B:USR1@90" in by_shell
    assert (by_srun[-1], by_shell[-1]) == ("exec srun batchgen run --no-wait", "exec batchgen run --no-wait")


@pytest.mark.parametrize(
    ("gres", "is_several"),
    [
        *((gres, False) for gres in (None, "gpu", "gpu:1", "gpu:h100:1,shard:8", "lustre:4")),
        *((gres, True) for gres in ("gpu:4", "gpu:a100:2", "gpu:a100:1,gpu:v100:1", "gpu:a100:4(S:0-1)", "gres:gpu:2")),
    ],
)
def test_a_task_with_several_gpus_uses_all(gres: str | None, is_several: bool) -> None:
    assert ("--gpus all" in lines(submission(gres=gres))[-1]) is is_several


@pytest.mark.parametrize(
    ("option", "num"),
    [
        *((option, 1) for option in ("--gpus-per-node=1", "--gpus=a100", "-G 1", "--qos=gpu:8", "--gpu-bind=none")),
        *((option, 3) for option in ("--gpus-per-node=3", "--gpus=a100:3", "--gpus-per-task 3", "-G3", "--gres=gpu:3")),
    ],
)
def test_gpus_may_be_asked_for_by_any_option(option: str, num: int) -> None:
    """And each of their workers has as many CPUs as a worker is to have."""
    made = lines(submission(options=[option], cpus=8))
    assert ("--gpus all" in made[-1]) is (num > 1)
    assert f"#SBATCH --cpus-per-task={8 * num}" in made
    assert f"srun --cpus-per-task={8 * num} " in made[-1]


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("30", 1800), ("30:15", 1815), ("04:00:00", 14400), ("1-12", 129600), ("1-2:30", 95400), ("2-00:00:05", 172805)],
)
def test_time_limits_as_sbatch_reads_them(time: str, seconds: int) -> None:
    """sbatch's manual, --time."""
    assert limit_s(time) == seconds


def test_a_warning_that_comes_too_late_or_at_once() -> None:
    with pytest.raises(UsageError, match=r"slurm\.warn_s = 5 leaves no time.*run\.grace_s = 25 allows;"):
        check(submission(warn_s=5))
    with pytest.raises(UsageError, match=r"slurm\.time = '2' is over before a worker begins"):
        check(submission(time="2"))
    check(submission(time="2:01"))


def test_caches_that_tasks_share() -> None:
    shared = [line for line in lines(submission()) if line.startswith("export ")]
    names = ("BATCHGEN_CACHE=/cache", "TORCHINDUCTOR_CACHE_DIR=/cache/inductor", "TRITON_CACHE_DIR=/cache/triton")
    assert shared == [f"export {name}" for name in names]


def test_workers_that_must_not_share_a_task() -> None:
    with pytest.raises(UsageError, match=r"needs slurm\.launcher = 'srun'"):
        check(submission(nodes=2, launcher="shell"))
    with pytest.raises(UsageError, match=r"slurm\.requeue needs a task for each worker"):
        check(submission(nodes=2, requeue=True))


def test_case_20_and_21_nothing_depends_on_an_index_or_a_count() -> None:
    given = submission(words=("m.parquet",))
    first, second = (array_script(given, window) for window in (Window(0, 8, None), Window(1001, 2, 1)))
    assert re.sub("--array=.*", "", first) == re.sub("--array=.*", "", second)
    assert "SLURM_ARRAY" not in first


def test_case_21_2500_tasks() -> None:
    found = windows(2500, 1001, 100)
    assert [window.indices for window in found] == ["0-1000%34", "0-1000%33", "0-497%33"]
    assert [window.first for window in found] == [0, 1001, 2002]


@given(num=st.integers(1, 5000), size=st.integers(1, 1200), throttle=st.none() | st.integers(1, 6000))
def test_case_21_windows(num: int, size: int, throttle: int | None) -> None:
    if throttle is not None and throttle < -(-num // size):
        with pytest.raises(UsageError, match="is fewer than the"):
            windows(num, size, throttle)
        return
    found = windows(num, size, throttle)
    tasks = [task for window in found for task in range(window.first, window.first + window.size)]
    assert tasks == list(range(num))
    assert all(int(re.match(r"0-(\d+)", window.indices)[1]) < size for window in found)  # type: ignore[index]
    assert sum(window.throttle or 0 for window in found) == (throttle or 0)


def test_a_cluster_without_arrays() -> None:
    with pytest.raises(UsageError, match="takes no job arrays"):
        windows(3, 0, None)


def test_the_page_names_every_key_and_its_commands_are_taken() -> None:
    page = (ROOT / "slurm" / "README.md").read_text(encoding="utf-8")
    (keys,) = re.findall(r"(?ms)^\| key \| is \|\n(.+?)\n\n", page)
    assert set(re.findall(r"`(\w+)`(?=[^|]*\|[^|]*\|$)", keys, re.MULTILINE)) >= Slurm.model_fields.keys()
    commands = [shlex.split(line) for line in re.findall(r"(?m)^batchgen (.+)$", page)]
    assert len(commands) >= 6
    for name, *words in commands:
        with cli.commands[name].make_context(name, words):
            pass
    for path in re.findall(r"\bjobs/[\w.]+", page):
        assert (ROOT / path).exists()
