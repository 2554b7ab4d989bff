"""What the README promises that can be held here; `.ci/run` runs its two commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from batchgen.job import load_job

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["run", "test"])
def test_command_is_one_line(name: str) -> None:
    found = re.findall(rf"<!-- command: {name} -->\n```bash\n(.+)\n```\n<!-- end -->", README)
    assert len(found) == 1


def test_job_file_loads(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.+?)```", README, re.DOTALL)
    (tmp_path / "job.toml").write_text(text, encoding="utf-8")
    job = load_job(tmp_path / "job.toml")
    assert (job.output.format, job.columns["prompt"]) == ("webdataset", "caption")


def test_every_path_that_is_named_exists() -> None:
    root = Path(__file__).parent.parent
    named = set(re.findall(r"\b(?:manifests|jobs|batchgen)/[\w./]*\w", README))
    assert len(named) >= 3
    assert [path for path in named if not (root / path).exists()] == []
