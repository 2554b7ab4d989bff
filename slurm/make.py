"""Writes the example scripts beside it, as `batchgen submit` renders them: `python slurm/make.py`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from batchgen.job import load_job
from batchgen.slurm.script import Submission, Window, array_script, finish_script
from batchgen.slurm.submit import Request, submission

HERE = Path(__file__).parent
OUT = Path("/scratch/me/out")


def example(job_file: str) -> Submission:
    """What `batchgen submit prompts.parquet --job jobs/JOB_FILE -o /scratch/me/out` says in /home/me."""
    names = ("model", "output_format", "on_bad_row", "size_policy", "on_truncate")
    options = {**dict.fromkeys(names), "job_file": f"/home/me/jobs/{job_file}", "overrides": ()}
    job = load_job(HERE.parent / "jobs" / job_file)
    return submission(Request("/home/me", ("prompts.parquet",), options), OUT, job)


def scripts() -> Mapping[str, str]:
    """The examples by their files' names."""
    usual, container = example("slurm.toml"), example("slurm_container.toml")
    return {
        "array.sbatch": array_script(usual, Window(0, usual.slurm.tasks, usual.slurm.throttle)),
        "finish.sbatch": finish_script(usual),
        "container-array.sbatch": array_script(container, Window(0, container.slurm.tasks, None)),
        "container-finish.sbatch": finish_script(container),
    }


if __name__ == "__main__":
    for name, text in scripts().items():
        (HERE / name).write_text(text, encoding="utf-8")
