"""`batchgen submit` on a login node, with programs of Slurm that only note their calls."""

from __future__ import annotations

import errno
import os
import shlex
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from batchgen.filesystem import FileSystem
from batchgen.job import load_job
from batchgen.ledger import Ledger
from batchgen.owners import this_process
from batchgen.progress import Quiet
from batchgen.rundir import RunDirectory
from batchgen.runner import Terms, run_job
from batchgen.slurm import programs
from batchgen.stopping import Stop
from tests import runs
from tests.slurm.fakes import Fakes

ONE_BY_ONE = ("--set", "plan.batch_sizes=[1]", "--set", "plan.shard_images=1")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fakes:
    monkeypatch.chdir(tmp_path)
    return Fakes(tmp_path / "bin", monkeypatch)


def submit(*words: object) -> runs.Ended:
    return runs.batchgen("submit", *words, "--model", "pattern", *ONE_BY_ONE)


def prompts(num: int) -> Path:
    """A manifest in the current folder, by a relative path."""
    return runs.prompts(Path("m.parquet"), num)


def test_plans_writes_sends_and_tells(slurm: Fakes, tmp_path: Path) -> None:
    Path("job.toml").write_text('[slurm]\npartition = "gpu"\ntasks = 3\n')
    ended = submit(prompts(10), "--job", "job.toml", "-o", "out")
    assert ended.code == 0, ended.err
    folder = tmp_path / "out" / ".run" / "slurm"
    array, finish = folder / "array.sbatch", folder / "finish.sbatch"
    assert slurm.calls("sbatch") == [
        f"--parsable --array=0-2 {array}",
        f"--parsable --dependency=afterany:101 {finish}",
    ]
    words = shlex.split(array.read_text().splitlines()[-1])
    assert words[words.index("run") + 1] == str(tmp_path / "m.parquet")
    assert words[words.index("--job") + 1] == str(tmp_path / "job.toml")
    assert "#SBATCH --partition=gpu" in array.read_text()
    assert "10 images, 10 batches, 10 shards" in ended.err
    for told in (
        "submitted job 101: 3 tasks from 0 on",
        "submitted job 102: ",
        f"batchgen status {tmp_path}/out",
        "squeue -j 101,102",
        "scancel --signal=USR2 101",
        f"sbatch --array=0 {array}",
        f"batchgen submit --resume {tmp_path}/out",
    ):
        assert told in ended.out


def test_the_words_in_the_script_run(slurm: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any folder, as often as one likes, and `--check` says when all is made."""
    submit(prompts(4), "--set", "run.grace_s=7", "-o", "out")
    assert runs.batchgen("status", "out", "--check").code == 75
    words = shlex.split((tmp_path / "out/.run/slurm/array.sbatch").read_text().splitlines()[-1])
    for _ in range(2):
        assert runs.batchgen(*words[words.index("batchgen") + 1 :]).code == 0
    assert runs.batchgen("status", "out", "--check").code == 0
    assert len(runs.check_images(tmp_path / "out")) == 4


def test_dry_run_shows_and_does_nothing(slurm: Fakes, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    ended = submit(prompts(10), "--dry-run", "--set", "slurm.tasks=3")
    assert ended.code == 0, ended.err
    assert "#SBATCH --array=0-2" in ended.out
    assert "status" in ended.out.split("==> finish.sbatch <==")[1]
    assert slurm.calls("sbatch") == []
    after = {path for path in tmp_path.rglob("*") if path.is_file()} - before.keys()
    assert {path.name for path in after} == {"m.parquet", "scontrol.calls"}


def test_dry_run_where_there_is_no_slurm(slurm: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm.lack("scontrol", monkeypatch)
    assert "#SBATCH --array=0-9" in submit(prompts(10), "--dry-run", "--set", "slurm.tasks=100").out
    ended = submit("m.parquet")
    assert (ended.code, slurm.calls("sbatch")) == (1, [])
    assert "there is no scontrol here; is this a machine of the cluster?" in ended.err


@pytest.mark.parametrize("program", ["sbatch", "scontrol"])
def test_without_slurm_nothing_is_planned(
    slurm: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    slurm.lack(program, monkeypatch)
    ended = submit(prompts(3), "-o", "out")
    assert ended.code == 1
    assert f"there is no {program} here; is this a machine of the cluster?" in ended.err
    assert not (tmp_path / "out").exists()


def test_what_could_not_be_sent_is_resumed(slurm: Fakes) -> None:
    slurm.refuse("sbatch", "sbatch: error: no")
    assert submit(prompts(3), "-o", "out").code == 1
    slurm.answer("sbatch", "echo 7")
    assert runs.batchgen("submit", "--resume", "out").code == 0


def test_case_21_windows_above_the_limit(slurm: Fakes, tmp_path: Path) -> None:
    slurm.answer("scontrol", 'echo "MaxArraySize            = 4"')
    keys = ("--set", "slurm.tasks=100", "--set", "slurm.throttle=5")
    dry = submit(prompts(10), "--dry-run", *keys)
    assert "array.sbatch again for the tasks from 8 on, with --array=0-1%1" in dry.out
    ended = submit("m.parquet", *keys)
    assert [call.split()[1] for call in slurm.calls("sbatch")] == [
        *("--array=0-3%2", "--array=0-3%2", "--array=0-1%1", "--dependency=afterany:101:102:103"),
    ]
    assert "submitted job 103: 2 tasks from 8 on, at most 1 at once" in ended.out


def test_a_refusal_says_what_was_sent_before(slurm: Fakes) -> None:
    slurm.answer("scontrol", 'echo "MaxArraySize            = 4"')
    slurm.answer(
        "sbatch", '[ $(wc -l < "$FAKES/sbatch.calls") = 1 ] || { echo "sbatch: error: no" >&2; exit 1; }; echo 7'
    )
    ended = submit(prompts(10))
    assert ended.code == 1
    assert "batchgen: sbatch refuses: sbatch: error: no; submitted before: 7 (scancel takes them back)" in ended.err


def test_what_was_sent_before_an_interrupt_is_said(slurm: Fakes, tmp_path: Path) -> None:
    """Ctrl-C while a slow sbatch takes the second of several jobs."""
    slurm.answer("sbatch", '[ $(wc -l < "$FAKES/sbatch.calls") = 1 ] || { sleep 30; }; echo 7')
    process = runs.Process("submit", prompts(3).absolute(), "-o", tmp_path / "out")
    runs.until(lambda: len(slurm.calls("sbatch")) == 2, process)
    process.signal(signal.SIGINT)
    ended = process.wait(30)
    assert ended.code == 130
    assert "submitted job 7: " in ended.out


def test_resume_sends_tasks_for_what_is_left(slurm: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From another folder; what is given now is laid over what was given then."""
    submit(prompts(10), "--set", "slurm.tasks=100", "-o", "out")
    done = make(tmp_path / "out", 7)
    assert 7 <= done < 10
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    ended = runs.batchgen("submit", "--resume", tmp_path / "out", "--requeue", "--set", "slurm.time=30")
    assert ended.code == 0, ended.err
    assert f"10 rows = {done} done + 0 failed + 0 rejected + {10 - done} outstanding" in ended.err
    assert slurm.calls("sbatch")[-2].split()[1] == f"--array=0-{9 - done}"
    script = (tmp_path / "out/.run/slurm/array.sbatch").read_text()
    assert "#SBATCH --time=30\n" in script
    assert script.endswith("--no-wait --requeue\n")
    assert make(tmp_path / "out", 10) == 10
    ended = runs.batchgen("submit", "--resume", tmp_path / "out")
    assert (ended.code, len(slurm.calls("sbatch"))) == (0, 4)
    assert "nothing is submitted: all rows are settled" in ended.err


def make(out: Path, num: int) -> int:
    """Have some rows made, as a worker does that is told to stop after `num`; how many are done then."""
    stop = Stop()

    class Counting(Quiet):
        made = 0

        def count(self, made: int, failed: int) -> None:
            self.made += made
            if self.made >= num:
                stop.ask("the test")

    job = load_job(None, ["model.path=pattern", "plan.batch_sizes=[1]", "plan.shard_images=1"])
    source = out.parent / "m.parquet"
    terms = Terms(stop=stop, progress=lambda balance: nullcontext(Counting()))
    return run_job([source], out, job, terms).balance.done


def test_held_shards_are_not_sent_for_again(slurm: Fakes, tmp_path: Path) -> None:
    """Unless who holds them has been silent for too long."""
    submit(prompts(3), "-o", "out")
    run = RunDirectory(tmp_path / "out")
    claims = run.root / "claims"
    owner = replace(this_process(), host="n7", boot_id="another", job_id="7_3")
    ledger = Ledger(run.root, run.files, owner)
    ledger.make_folders()
    assert all(ledger.claim(shard, 0) for shard in range(3))
    ended = runs.batchgen("submit", "--resume", "out")
    assert (ended.code, len(slurm.calls("sbatch"))) == (0, 2)
    assert "1 row of shard 00000-0 held by job 7_3 on n7, heard 0 s ago (thought dead after 600 s)" in ended.err
    os.utime(claims / "00001-0", (0, 0))
    runs.batchgen("submit", "--resume", "out")
    assert slurm.calls("sbatch")[2].split()[1] == "--array=0-0"


def queued(slurm: Fakes, **tasks: str) -> None:
    """What squeue knows of arrays: tasks and their states."""
    lines = "\n".join(f"{name[1:]} {state}" for name, state in tasks.items())
    slurm.answer("squeue", f"echo {shlex.quote(lines)}")


@pytest.mark.parametrize("words", [("--resume", "out"), ("m.parquet", "-o", "out")])
def test_tasks_that_wait_are_not_sent_again(slurm: Fakes, words: tuple[str, ...]) -> None:
    """Not by the same command given twice; of what was allowed, what is missing is sent."""
    again = runs.batchgen if "--resume" in words else submit
    more = () if "--resume" not in words else ("submit",)
    submit(prompts(10), "-o", "out", "--set", "slurm.tasks=3")
    queued(slurm, _101_0="PENDING", _101_1="CONFIGURING", _101_2="RUNNING")
    ended = again(*more, *words, "--set", "slurm.tasks=3")
    assert (ended.code, len(slurm.calls("sbatch"))) == (0, 2), ended.err
    assert slurm.calls("squeue")[-1] == "-h -r -j 101 -o %i %T"
    assert "3 tasks sent before, in the queue or just begun: 101_0, 101_1, 101_2 (scancel 101 takes all" in ended.err
    assert "nothing is submitted: that is as many as slurm.tasks allows" in ended.err
    queued(slurm, _101_0="COMPLETING", _101_1="PENDING")
    again(*more, *words, "--set", "slurm.tasks=3")
    assert slurm.calls("sbatch")[2].split()[1] == "--array=0-1"
    slurm.refuse("squeue", "slurm_load_jobs error: Invalid job id specified")
    ended = again(*more, *words, "--set", "slurm.tasks=100")
    assert slurm.calls("squeue")[-1] == "-h -r -j 101,103 -o %i %T"
    assert "sent before" not in ended.err
    assert slurm.calls("sbatch")[4].split()[1] == "--array=0-9"


def test_tasks_at_work_are_not_counted_as_waiting(slurm: Fakes, tmp_path: Path) -> None:
    submit(prompts(3), "-o", "out")
    run = RunDirectory(tmp_path / "out")
    ledger = Ledger(run.root, run.files, replace(this_process(), host="n7", boot_id="another", job_id="101_0"))
    ledger.make_folders()
    assert ledger.claim(0, 0)
    queued(slurm, _101_0="RUNNING", _101_1="PENDING")
    ended = runs.batchgen("submit", "--resume", "out")
    assert "1 task sent before, in the queue or just begun: 101_1 (" in ended.err
    assert slurm.calls("sbatch")[2].split()[1] == "--array=0-0"
    queued(slurm, _101_0="RUNNING", _101_1="PENDING", _101_2="PENDING")
    ended = runs.batchgen("submit", "--resume", "out")
    assert "nothing is submitted: that is as many as there are shards that nobody works on" in ended.err


def test_a_queue_that_does_not_answer_holds_nothing_up(slurm: Fakes) -> None:
    submit(prompts(3), "-o", "out")
    slurm.refuse("squeue", "slurm_load_jobs error: Unable to contact slurm controller")
    ended = runs.batchgen("submit", "--resume", "out")
    assert (ended.code, len(slurm.calls("sbatch"))) == (0, 4)
    assert "whether tasks that were sent before still wait is not known: squeue refuses: slurm_load_jobs" in ended.err


def test_wrong_usage(slurm: Fakes, tmp_path: Path) -> None:
    for words in ([], ["m.parquet", "--resume", "out"], ["--resume", "out", "-o", "other"]):
        ended = runs.batchgen("submit", *words)
        assert (ended.code, "submit takes a MANIFEST" in ended.err) == (2, True)
    assert "was never submitted" in runs.batchgen("submit", "--resume", tmp_path).err
    Path("two\nlines").mkdir()
    ended = submit(prompts(1), "-o", "two\nlines/out")
    assert (ended.code, "rename the folder" in ended.err) == (2, True)
    assert not Path("two\nlines/out").exists()
    assert slurm.calls("sbatch") == []


def test_another_job_in_the_directory_is_refused(slurm: Fakes) -> None:
    submit(prompts(3), "-o", "out")
    ended = submit("m.parquet", "-o", "out", "--set", "sampling.seed=5")
    assert (ended.code, len(slurm.calls("sbatch"))) == (2, 2)
    assert "sampling.seed: 0 there, 5 now" in ended.err


def test_a_dry_run_refuses_what_the_real_one_would(slurm: Fakes, tmp_path: Path) -> None:
    """Of a run that is planned: other keys of the plan."""
    assert submit(prompts(3), "-o", "out").code == 0
    before = sorted((tmp_path / "out").rglob("*"))
    ended = submit("m.parquet", "-o", "out", "--dry-run", "--set", "output.image=jpeg")
    assert ended.code == 2
    assert "is the run directory of another job" in ended.err
    assert submit("m.parquet", "-o", "out", "--dry-run").code == 0
    assert sorted((tmp_path / "out").rglob("*")) == before


def test_a_cluster_may_change_between_submissions(slurm: Fakes) -> None:
    """Nothing of [slurm] is part of the run's fingerprint."""
    submit(prompts(3), "-o", "out", "--set", "slurm.partition=a")
    assert submit("m.parquet", "-o", "out", "--set", "slurm.partition=b", "--set", "slurm.warn_s=99").code == 0


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1-02:03:04", 93784.0), ("2:03:04", 7384.0), ("3:04", 184.0), ("0:00", 0.0), ("59:59", 3599.0)],
)
def test_times_as_squeue_writes_them(slurm: Fakes, text: str, seconds: float) -> None:
    slurm.answer("squeue", f"echo {text}")
    assert programs.time_left_s("7_3") == seconds
    assert slurm.calls("squeue") == ["-h -j 7_3 -o %L"]


def test_answers_that_are_none(slurm: Fakes) -> None:
    slurm.answer("squeue", "echo UNLIMITED")
    assert programs.time_left_s("7") is None
    slurm.answer("squeue", "echo INVALID")
    with pytest.raises(programs.SlurmError, match="squeue says 'INVALID' where the time left was expected"):
        programs.time_left_s("7")
    slurm.answer("scontrol", "echo nothing")
    with pytest.raises(programs.SlurmError, match="names no MaxArraySize"):
        programs.max_array_size()
    slurm.answer("sbatch", "echo Submitted batch job 7")
    with pytest.raises(programs.SlurmError, match="where a job's id was expected"):
        programs.submit(Path("x"))


def test_no_program_may_take_its_time(slurm: Fakes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "ASKING_S", 0.2)
    slurm.answer("squeue", "exec sleep 60")
    with pytest.raises(programs.SlurmError, match="squeue has not answered for 0 s"):
        programs.time_left_s("7")
    slurm.answer("squeue", "exit 3")
    with pytest.raises(programs.SlurmError, match="squeue refuses: it ended with code 3"):
        programs.time_left_s("7")


@pytest.mark.parametrize("name", ["request.json", "array.sbatch", "finish.sbatch"])
def test_what_submit_leaves_is_whole_or_as_it_was(
    slurm: Fakes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A disk that fills up, or a kill, in the middle of writing."""
    assert submit(prompts(3), "-o", "out").code == 0
    folder = tmp_path / "out/.run/slurm"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    rename = FileSystem.rename

    def refuses(self: FileSystem, source: Path, target: Path) -> None:
        if target.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        rename(self, source, target)

    monkeypatch.setattr(FileSystem, "rename", refuses)
    assert submit("m.parquet", "-o", "out", "--set", "slurm.tasks=2", "--set", "slurm.time=3").code == 75
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert after[name] == before[name]
    assert after.keys() == before.keys()


def test_a_device_and_several_gpus_a_task_are_refused(slurm: Fakes, tmp_path: Path) -> None:
    """Before anything is planned: each task would end as soon as it started."""
    device = ("--set", "engine.device=cuda:0")
    ended = submit(prompts(3), "-o", "out", "--set", "slurm.gres=gpu:a100:4", *device)
    assert ended.code == 2
    assert "[slurm] gives each task 4 GPUs" in ended.err
    assert "engine.device = 'cuda:0' names one device for all; leave engine.device out" in ended.err
    assert not (tmp_path / "out").exists()
    assert submit("m.parquet", "-o", "out", "--set", "slurm.gres=gpu:1", *device).code == 0
