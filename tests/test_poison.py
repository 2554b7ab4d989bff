"""Poisoned input: whatever lies in a manifest, a job file or the run directory, there is an error that names the file
or a right result; never a traceback, never a wrong "done", and nothing written outside the run directory."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.errors import UsageError
from batchgen.job import load_job
from batchgen.rundir import RunDirectory
from batchgen.runner import run_job
from batchgen.slots import sealed, unsealed
from batchgen.verify import verify
from tests import runs, tiny
from tests.arrow import any_column, through_parquet
from tests.plans import folder, pattern_job, write

NAMES = ("../x", "/tmp/x", "a\x00b", "CON", ".", "..", "~", "n" * 3000, "id/../..", "\u2024\u2024\u2215x", "е",
         "e\u0301", "data/metadata", "file_name", "image_file_name", "\n", "", " ", "x.parquet", "<script>", "json",
         "__key__")  # fmt: skip
"""Column names and ids that would like to be paths, or look like others."""


@pytest.fixture
def memory() -> Iterator[Path]:
    with folder() as path:
        yield path


def said(ended: runs.Ended, *codes: int) -> str:
    assert ended.code in codes, ended
    assert "Traceback" not in ended.err + ended.out, ended.err
    return ended.err + ended.out


def others(path: Path) -> dict[Path, bytes | None]:
    """All that lies beside the run directory."""
    return {
        one: one.read_bytes() if one.is_file() else None
        for one in path.rglob("*")
        if path / "out" not in (one, *one.parents)
    }


# Manifests


@st.composite
def manifests(draw: st.DrawFn) -> pa.Table:
    """Any schema: columns of any type under any name, ours among them."""
    size = draw(st.integers(0, 4))
    names = st.sampled_from([*NAMES, "id", "prompt", "width", "seed", "steps", "num_images", "sampler"]) | st.text(
        max_size=8
    )
    columns = draw(st.dictionaries(names, any_column(size), max_size=4))
    if draw(st.booleans()):
        columns["prompt"] = pa.array([f"prompt {n}" for n in range(size)])
    return pa.table(list(columns.values()), names=list(columns))


@given(manifests(), st.sampled_from(runs.FORMATS))
@settings(max_examples=25)
def test_any_manifest_is_made_or_refused_in_a_sentence(table: pa.Table, output: str) -> None:
    content = through_parquet(table)
    if content is None:
        return
    with folder() as path:
        source, out = path / "m.parquet", path / "out"
        source.write_bytes(content)
        before = others(path)
        ended = runs.run(source, out, "--format", output, "--on-bad-row", "skip", "--set", "sampling.steps=1")
        text = said(ended, 0, 2, 3)
        if ended.code == 2:
            assert "manifest" in text or source.name in text
            assert not out.exists()
        else:
            assert " + 0 outstanding" in ended.closing_line
            runs.check_images(out)
            assert runs.batchgen("verify", out).code == 0
        assert others(path) == before


@pytest.mark.parametrize("output", runs.FORMATS)
def test_ids_and_column_names_stay_in_the_run_directory(memory: Path, output: str) -> None:
    ids = [name or "empty" for name in NAMES]
    reserved = {"file_name", "a\x00b"}
    columns = {name: list(range(len(ids))) for name in NAMES if name not in reserved}
    table = pa.table({"id": ids, "prompt": ["a fox"] * len(ids), **columns})
    source, out = memory / "m.parquet", memory / "out"
    content = through_parquet(table)
    assert content is not None
    source.write_bytes(content)
    before = others(memory)
    ended = runs.run(source, out, "--format", output)
    assert ended.code == 0, ended.err
    lines = runs.check_images(out)
    assert [line["id"] for line in lines] == ids
    assert all(line[name] == place for place, line in enumerate(lines) for name in columns)
    assert others(memory) == before
    places = [path.relative_to(out) for path in out.rglob("*")]
    assert all(str(place).isascii() and len(place.name) < 200 for place in places)


# Job files

VALUES = st.recursive(
    st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
KEYS = st.sampled_from(["path", "steps", "width", "batch_sizes", "max_batch", "format", "grace_s", "seed"]) | st.text(
    "abc", min_size=1
)
TABLES = st.sampled_from(["model", "sampling", "columns", "plan", "engine", "output", "run", "slurm", "x"])


def toml(tables: dict[str, dict[str, Any]]) -> bytes:
    lines = []
    for table, values in tables.items():
        lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
    return "\n".join(lines).encode()


@given(
    st.binary(max_size=60) | st.dictionaries(TABLES, st.dictionaries(KEYS, VALUES, max_size=3), max_size=3).map(toml)
)
@settings(max_examples=150)
def test_any_job_file_is_taken_or_refused_by_name(content: bytes) -> None:
    with folder() as path:
        file = path / "job.toml"
        file.write_bytes(content)
        try:
            load_job(file)
        except UsageError as error:
            assert str(file) in str(error)  # noqa: PT017 - a file that is taken is right too


@pytest.mark.parametrize(
    "content", [b"[" * 100_000, b"a = " + b"9" * 10_000, b"\x00", b"x" * 2**20, b"a = [" + b"[" * 5000]
)
def test_a_job_file_that_would_choke_a_parser(memory: Path, content: bytes) -> None:
    source = runs.prompts(memory / "m.parquet", 1)
    (memory / "job.toml").write_bytes(content)
    assert "job.toml" in said(runs.batchgen("run", source, "-o", memory / "out", "--job", memory / "job.toml"), 2)


def test_a_model_of_pickles_is_refused_and_not_opened(memory: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(memory / "opened"),)

    model = shutil.copytree(tiny.folder("sd1"), memory / "model")
    for file in list(model.rglob("*.safetensors")):
        file.with_suffix(".bin").write_bytes(pickle.dumps(Evil()))
        file.unlink()
    ended = runs.run(runs.prompts(memory / "m.parquet", 1), memory / "out", model=model)
    assert "pickles, which can run code" in said(ended, 2)
    assert not (memory / "opened").exists()
    assert not (memory / "out").exists()


# The run directory

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
COLUMNS = {"id": [f"row-{n}" for n in range(6)], "prompt": [f"prompt {n}" for n in range(6)]}
OVERRIDES = ("plan.shard_images=3", "plan.batch_sizes=[1]", "output.encoders=1", "run.stale_after_s=0.2")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("finished")
    run_job(write(path / "manifest", COLUMNS), path / "out", pattern_job(*OVERRIDES))
    return path


def fields_of(content: bytes) -> dict[str, Any]:
    return unsealed(content)


@st.composite
def damages(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """What can become of a slot: torn, empty, noise, another type, a bomb; sealed again, as only malice would."""
    kind = draw(st.sampled_from(["torn", "noise", "json", "flipped", "forged", "bomb"]))
    if kind == "torn":
        part = draw(st.floats(0, 1))
        return lambda whole: whole[: int(part * (len(whole) - 1))]
    if kind == "noise":
        noise = draw(st.binary(max_size=50))
        return lambda whole: noise
    if kind == "json":
        value = draw(JSON)
        return lambda whole: json.dumps(value).encode()
    if kind == "flipped":
        place, bit = draw(st.floats(0, 0.999)), draw(st.integers(0, 7))

        def flip(whole: bytes) -> bytes:
            at = int(place * len(whole))
            return whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]

        return flip
    if kind == "bomb":
        bomb = draw(st.sampled_from([b"[" * 10**6, b"9" * 10**5, b'{"a":' * 10**5, b"\x00" * 2**20]))
        return lambda whole: bomb
    value, which = draw(JSON | st.just([[0, 2**60]]) | st.just("../../x")), draw(st.integers(0, 30))

    def forge(whole: bytes) -> bytes:
        fields = unsealed(whole)
        name = sorted(fields)[which % len(fields)]
        return sealed("token", fields | {name: value})

    return forge


SLOTS = ["receipts/00000-0", "claims/00000-0", "receipts/00001-0", "plan/0.json", "../_SUCCESS"]


@given(st.data(), st.sampled_from(SLOTS), damages())
@settings(max_examples=40)
def test_a_damaged_slot_is_named_or_counts_for_nothing(
    finished: Path, data: st.DataObject, slot: str, damage: Callable[[bytes], bytes]
) -> None:
    with folder() as path:
        shutil.copytree(finished, path, dirs_exist_ok=True)
        out = path / "out"
        file = out / ".run" / slot
        whole = file.read_bytes()
        content = damage(whole)
        file.write_bytes(content)
        before = others(path)
        said(runs.batchgen("status", out), 0, 2)
        verified = runs.batchgen("verify", out)
        text = said(verified, 0, 2, 3)
        if slot == "plan/0.json" and verified.code == 2:
            assert "0.json" in text
            assert "0.json" in said(runs.run(path / "manifest", out, *options()), 2)
        else:
            said(runs.batchgen("finalize", out), 0, 1, 2)
            ended = runs.run(path / "manifest", out, *options())
            text = said(ended, 0, 1, 2)
            if ended.code == 0:
                assert ended.closing_line.startswith("6 rows = 6 done + 0 failed")
                assert len(runs.check_images(out)) == 6
                assert verify(RunDirectory(out)).faults == ()
        assert others(path) == before


def options() -> list[str]:
    return [word for one in OVERRIDES for word in ("--set", one)]


# Symbolic links


def links(path: Path) -> tuple[Path, Path]:
    """A folder and a file outside, with something of their owner's in them."""
    (path / "outside").mkdir()
    (path / "outside" / "mine.png").write_bytes(b"mine")
    (path / "mine").write_bytes(b"mine")
    return path / "outside", path / "mine"


@pytest.mark.parametrize(
    "name", ["data", ".run", ".run/plan", ".run/claims", ".run/work", ".run/receipts", ".run/modes"]
)
@pytest.mark.parametrize("is_begun", [True, False])
def test_a_folder_that_leads_out_is_refused(memory: Path, finished: Path, name: str, *, is_begun: bool) -> None:
    outside, _ = links(memory)
    out = memory / "out"
    if is_begun:
        shutil.copytree(finished / "out", out)
        shutil.rmtree(out / name)
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).symlink_to(outside)
    (out / ".run").mkdir(exist_ok=True)
    before = others(memory)
    ended = runs.run(finished / "manifest", out, *options())
    assert f"{out / name} is a symbolic link" in said(ended, 2)
    for command in ("verify", "finalize", "retry", "status"):
        said(runs.batchgen(command, out), 2)
    assert others(memory) == before


TARGETS = ["folder", "file", "nothing"]
SLOTS_LINKED = (".run/claims/00000-0", ".run/receipts/00000-0", ".run/plan/0.json")
NOT_FOLLOWED = [
    *(
        "metadata.parquet",
        "failures.parquet",
        "README.md",
        "_SUCCESS",
        "data/metadata.parquet",
        "metadata.partial.parquet",
    ),
    *(
        ".run/work/00000-0",
        ".run/work/00000-0.rows.parquet",
        ".run/work/00000-0.tar",
        "data/00000-0",
        "data/00000-0.tar",
    ),
    *(".run/claims/00000-0", ".run/receipts/00000-0", ".run/plan/0.json", ".run/modes/dtype", "data/x"),
]


LINKS = [(name, target) for name in NOT_FOLLOWED if name in SLOTS_LINKED for target in TARGETS]
LINKS += [(name, TARGETS[place % 3]) for place, name in enumerate(NOT_FOLLOWED) if name not in SLOTS_LINKED]


@pytest.mark.parametrize(("name", "target"), LINKS)
def test_a_link_among_the_files_is_not_followed(memory: Path, finished: Path, name: str, target: str) -> None:
    outside, mine = links(memory)
    out = memory / "out"
    for folder_name in ("data", ".run/plan", ".run/work", ".run/claims", ".run/receipts", ".run/modes"):
        (out / folder_name).mkdir(parents=True, exist_ok=True)
    (out / name).symlink_to({"folder": outside, "file": mine, "nothing": memory / "nothing"}[target])
    before = others(memory)
    output = "webdataset" if name.endswith(".tar") else "files"
    ended = runs.run(finished / "manifest", out, *options(), "--format", output)
    said(ended, 0, 1, 2)
    assert others(memory) == before
    if ended.code == 0:
        assert ended.closing_line.startswith("6 rows = 6 done")
        assert len(runs.metadata(out)) == 6
        faults = verify(RunDirectory(out)).faults
        assert [fault.place for fault in faults] == (["data/x"] if name == "data/x" else [])
    for command in ("verify", "finalize", "status"):
        said(runs.batchgen(command, out), 0, 1, 2, 3)
    said(runs.batchgen("verify", out, "--repair"), 0, 1, 2, 3)
    assert others(memory) == before
