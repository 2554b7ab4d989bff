"""Manifests that are large where their rows are few, lie among runs, or change while they are read."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen import drafts, manifest, plans, spill, survey
from batchgen.errors import UsageError
from batchgen.manifest import open_manifest
from batchgen.manifest_files import find_files
from batchgen.rundir import RunDirectory, open_run
from tests import runs
from tests.plans import frozen, pattern_job, planned


class TestRunsAmongManifests:
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A folder that is a manifest, with the runs of it that lie in it by default."""
        monkeypatch.chdir(tmp_path)
        runs.prompts(tmp_path / "m.parquet", 3)
        for out in ("m-out", "sub/n-out"):
            Path(out).parent.mkdir(exist_ok=True)
            assert runs.run("m.parquet", Path(out), "--format", "parquet").code == 0

    @pytest.mark.parametrize("name", [".", "*", "*.parquet", "**/*.parquet", "**", "s*/../m.parquet"])
    def test_are_passed_over(self, name: str) -> None:
        assert [file.resolve() for file in find_files([name])] == [Path("m.parquet").resolve()]
        again = runs.run(name, Path("m-out"), "--format", "parquet")
        assert (again.code, again.closing_line.split()[0]) == (0, "3"), again.err

    @pytest.mark.parametrize(
        ("name", "lies"),
        [
            ("m-out", "m-out is"),
            ("./m-out/", "m-out is"),
            ("m-out/data", "m-out/data names nothing but what lies in m-out,"),
            ("m-out/*.parquet", "m-out/*.parquet names nothing but what lies in m-out,"),
            ("m-ou*", "m-ou* names nothing but what lies in m-out,"),
        ],
    )
    def test_are_no_manifest_themselves(self, name: str, lies: str) -> None:
        said = runs.batchgen("plan", name, "--model", "pattern")
        assert (
            said.err == f"batchgen: {lies} a run directory; name the manifest that it was made of, and m-out with -o\n"
        )
        assert said.code == 2

    def test_a_table_in_one_is_taken_by_its_path(self) -> None:
        assert find_files(["m-out/metadata.parquet"]) == (Path("m-out/metadata.parquet"),)

    def test_a_folder_of_nothing_else_has_no_file(self) -> None:
        with pytest.raises(UsageError, match=r"folder sub holds no \*.parquet file; sub holds n-out"):
            find_files(["sub"])


def grown(path: Path) -> None:
    runs.prompts(path, 5)


def replaced(path: Path) -> None:
    """By a file of the same size and time."""
    before = path.stat()
    shutil.copyfile(path, path.with_suffix(".new"))
    os.utime(path.with_suffix(".new"), ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(path.with_suffix(".new"), path)


def cut_short(path: Path) -> None:
    with path.open("rb+") as file:
        file.truncate(100)


CHANGES = pytest.mark.parametrize("change", [grown, replaced, cut_short, Path.unlink])


class TestChangedWhileRead:
    @CHANGES
    def test_while_its_rows_are_checked(self, tmp_path: Path, change: Callable[[Path], None]) -> None:
        source, run = runs.prompts(tmp_path / "m.parquet", 3), RunDirectory(tmp_path / "out")
        with pytest.raises(UsageError, match=r"m.parquet changed while it was read \(it (is gone|has \d+ bytes now)\)"):
            open_run(run, [source], pattern_job(), on_progress=lambda rows, total: change(source))
        assert not run.path.exists()

    @pytest.mark.parametrize("change", [grown, replaced])
    def test_before_its_rows_are_checked(
        self, tmp_path: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its rows are counted already, and there are other ones now."""
        source, run, real = runs.prompts(tmp_path / "m.parquet", 3), RunDirectory(tmp_path / "out"), survey.survey

        def late(*arguments: Any) -> Any:
            change(source)
            return real(*arguments)

        monkeypatch.setattr("batchgen.planned.survey", late)
        with pytest.raises(UsageError, match=r"m.parquet changed while it was read"):
            open_run(run, [source], pattern_job())

    @CHANGES
    def test_while_its_plan_is_written(
        self, tmp_path: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source, run, real = runs.prompts(tmp_path / "m.parquet", 3), RunDirectory(tmp_path / "out"), plans._write_file

        def late(*arguments: Any) -> Any:
            change(source)
            return real(*arguments)

        monkeypatch.setattr(plans, "_write_file", late)
        with pytest.raises(UsageError, match=r"m.parquet changed while it was read"):
            open_run(run, [source], pattern_job())
        assert run.files.names(run.plans) == []

    def test_cut_short_in_the_middle_of_a_batch(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It would end the process if the file were mapped into memory."""
        monkeypatch.setattr(manifest, "READ_ROWS", 10)
        monkeypatch.setattr(manifest, "PROBED_ROWS", 10)
        monkeypatch.setattr(manifest, "BUFFER_BYTES", 1000)
        source = tmp_path / "m.parquet"
        pq.write_table(pa.table({"prompt": [os.urandom(500).hex() for _ in range(2000)]}), source, row_group_size=500)
        batches = open_manifest([source]).batches()
        next(batches)
        cut_short(source)
        with pytest.raises(UsageError, match=r"changed while it was read \(it has 100 bytes now\)"):
            list(batches)


KILOBYTES = {
    "long prompts": {"prompt": [f"{n:09d}" * 1111 for n in range(3000)]},
    "a long prompt, repeated": {"prompt": ["prompt, " * 1250] * 3000},
    "a carried column": {"prompt": ["a cat"] * 3000, "photo": [os.urandom(10_000) for _ in range(3000)]},
}
MEGABYTE = 2**20


class TestMemory:
    @pytest.mark.parametrize("name", KILOBYTES)
    def test_batches_are_bounded_in_bytes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        monkeypatch.setattr(manifest, "READ_BYTES", MEGABYTE)
        pq.write_table(pa.table(KILOBYTES[name]), tmp_path / "m.parquet")
        batches = list(open_manifest([tmp_path / "m.parquet"]).batches())
        assert max(batch.nbytes for batch in batches) < 1.5 * MEGABYTE
        assert len(batches) < 60
        read = pa.Table.from_batches(batches)
        assert read.equals(pa.table(KILOBYTES[name]).cast(read.schema))

    def test_so_are_the_parts_and_files_of_a_plan(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(spill, "PART_BYTES", MEGABYTE)
        monkeypatch.setattr(plans, "FILE_BYTES", MEGABYTE)
        sizes: list[int] = []
        real = plans.Reorder.parts
        monkeypatch.setattr(
            plans.Reorder, "parts", lambda self: (sizes.append(part.nbytes) or part for part in real(self))
        )
        done = frozen(tmp_path, KILOBYTES["long prompts"], overrides=["plan.shard_images=50"])
        assert sum(sizes) > 28 * MEGABYTE
        assert max(sizes) < 2 * MEGABYTE
        assert len(done.index.files) > 15
        assert sorted(row["prompt"] for row in done.rows) == KILOBYTES["long prompts"]["prompt"]

    def test_many_images_of_a_row_are_spelled_out_in_slices(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rows = {
            "prompt": [f"prompt {n}" for n in range(6)],
            "num_images": [1, 40, 3, 1, 1000, 2],
            "seed": [None, 7] * 3,
        }
        drafted = planned(tmp_path, rows).draft
        ((whole, ranks),) = drafts.plan_rows(drafted)
        monkeypatch.setattr(drafts, "SLICE_IMAGES", 100)
        monkeypatch.setattr(survey, "_SLICE", 100)
        sliced = list(drafts.plan_rows(planned(tmp_path, rows).draft))
        assert [table.num_rows for table, _ in sliced] == [100] * 10 + [47]
        assert pa.concat_tables(table for table, _ in sliced).equals(whole)
        assert [rank for _, some in sliced for rank in some.tolist()] == ranks.tolist()
