"""Whole runs for tests: manifests, the command line in this process or in one of its own, every image checked."""

from __future__ import annotations

import contextlib
import importlib
import io
import multiprocessing
import os
import signal
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen import cli as program
from batchgen import codec
from batchgen.__main__ import main
from batchgen.children import Child
from batchgen.metadata import parameters
from batchgen.models.pattern import expected, read_pattern
from batchgen.records import InitImage, Row
from batchgen.writer import pixel_sha256

ROOT = Path(__file__).parent.parent
FORMATS = ("files", "webdataset", "parquet")

_processes = multiprocessing.get_context("forkserver")
# Real processes with the imports done: an interpreter of its own costs a second of a core.
_processes.set_forkserver_preload(["batchgen.cli", "batchgen.runner", "batchgen.report", "batchgen.models.pattern"])


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def closing_line(self) -> str:
        return self.out.splitlines()[-1] if self.out else ""


def manifest(path: Path, rows: Sequence[Mapping[str, Any]] | Mapping[str, Any], schema: pa.Schema = None) -> Path:
    """A Parquet manifest of rows, or of whole columns."""
    table = pa.table(dict(rows)) if isinstance(rows, Mapping) else pa.Table.from_pylist(list(rows), schema)
    pq.write_table(table, path)
    return path


def prompts(path: Path, num: int, **columns: Any) -> Path:
    """A manifest of `num` rows "row-0", "row-1", … of one prompt each; other columns get their values for all."""
    own = {"id": [f"row-{n}" for n in range(num)], "prompt": [f"prompt number {n}" for n in range(num)]}
    return manifest(path, own | {name: [value] * num for name, value in columns.items()})


def slow(path: Path, num: int, seconds: float = 0.1) -> Path:
    """Rows that the pattern model takes so long over."""
    return manifest(path, [{"id": f"row-{n}", "prompt": f"fault: slow {seconds}"} for n in range(num)])


def batchgen(*args: object) -> Ended:
    """The command line in this process: `batchgen ARGS`."""
    out, err = io.StringIO(), io.StringIO()
    before = sys.argv
    sys.argv = ["batchgen", *map(str, args)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            program.main()
    except SystemExit as ending:
        return Ended(int(str(ending.code)), out.getvalue(), err.getvalue())
    finally:
        sys.argv = before


def run(source: Path | str, out: Path, *args: object, model: object = "pattern") -> Ended:
    """`batchgen run` in this process."""
    return batchgen("run", source, "-o", out, "--model", model, *args)


class Process:
    """`batchgen ARGS` in a process of its own, its output in files."""

    def __init__(
        self,
        *args: object,
        limit_file_bytes: int | None = None,
        own_group: bool = False,
        puts: Mapping[str, Callable[..., object]] | None = None,
        ignores: signal.Signals | None = None,
    ) -> None:
        """`puts` are functions to put in the place of others, by MODULE:NAME; `ignores` is a signal, as under nohup."""
        self._folder = Path(tempfile.mkdtemp(prefix="process-"))
        words = [str(arg) for arg in args]
        self._process: ForkServerProcess = _processes.Process(
            target=_main,
            args=(words, str(self._folder), limit_file_bytes, own_group, dict(os.environ), puts, ignores),
        )
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.is_alive()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def errors(self) -> str:
        """Standard error so far."""
        path = self._folder / "err"
        return path.read_text() if path.exists() else ""

    def wait(self, timeout_s: float = 60) -> Ended:
        """How it ended; a signal is its negative number."""
        self._process.join(timeout_s)
        code = self._process.exitcode
        if code is None:
            self._process.kill()
            raise AssertionError(f"still running after {timeout_s} s:\n{self.errors()}")
        out = self._folder / "out"
        return Ended(code, out.read_text() if out.exists() else "", self.errors())


PATIENCE_S = 200.0


def until(is_so: Callable[[], object], process: Process | None = None) -> None:
    """Wait for a state while the process runs; minutes, where the machine is busy."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, process and process.errors()
        assert process is None or process.is_running, process.errors()
        time.sleep(0.01)


def _main(
    args: list[str],
    folder: str,
    limit_file_bytes: int | None,
    own_group: bool,
    environment: Mapping[str, str],
    puts: Mapping[str, Callable[..., object]] | None,
    ignores: signal.Signals | None,
) -> None:
    import resource

    # The fork server keeps the one that it was started in.
    os.environ.clear()
    os.environ.update(environment)

    for number, name in ((1, "out"), (2, "err")):
        file = os.open(Path(folder) / name, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    if own_group:
        os.setpgrp()
    if limit_file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_file_bytes, limit_file_bytes))
    for place, function in (puts or {}).items():
        module, name = place.split(":")
        setattr(importlib.import_module(module), name, function)
    if ignores:
        signal.signal(ignores, signal.SIG_IGN)
    sys.argv = ["batchgen", *args]
    main()


def sleep(*arguments: object, **options: object) -> None:
    """For an hour, which it says."""
    print("asleep", file=sys.stderr, flush=True)
    time.sleep(3600)


class Unkillable(Child):
    """A process that the kernel keeps, because it waits for a disk that does not answer: as far as can be had, one that
    gets no signal."""

    def signal(self, number: int) -> None:
        pass


def start(source: Path | str, out: Path, *args: object, model: str = "pattern", **options: Any) -> Process:
    """`batchgen run` in a process of its own."""
    return Process("run", source, "-o", out, "--model", model, *args, **options)


def metadata(out: Path) -> list[dict[str, Any]]:
    """The lines of a run's metadata.parquet."""
    lines: list[dict[str, Any]] = pq.read_table(out / "metadata.parquet").to_pylist()
    return lines


def by_id(out: Path) -> dict[str, dict[str, Any]]:
    lines = metadata(out)
    found = {line["id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def pixels(out: Path) -> dict[tuple[str, int], str]:
    """pixel_sha256 by id and image number."""
    return {(line["id"], line["image_number"]): line["pixel_sha256"] for line in metadata(out)}


def images(out: Path) -> dict[str, bytes]:
    """Every image file that lies in `data/`, under the name that the metadata has for it."""
    found: dict[str, bytes] = {}
    for part in (out / "data").iterdir():
        for name, data in _members(part):
            assert f"data/{part.name}/{name}" not in found
            found[f"data/{part.name}/{name}"] = data
    return found


def _members(part: Path) -> Iterator[tuple[str, bytes]]:
    if part.suffix == ".tar":
        with tarfile.open(part) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                if not member.name.endswith(".json"):
                    yield member.name, file.read()
    elif part.is_dir():
        for file in part.iterdir():
            yield file.name, file.read_bytes()
    elif part.name != "metadata.parquet":
        for image in pq.read_table(part, columns=["image"])["image"].to_pylist():
            yield image["path"], image["bytes"]


def as_row(line: Mapping[str, Any]) -> Row:
    """The row that a line of metadata speaks of."""
    own = {name: line[name] for name in Row.__dataclass_fields__ if name not in ("index", "init")}
    init = InitImage(line["init_sha256"], "", line["init_image"]) if line["init_sha256"] else None
    return Row(index=0, init=init, **own)


def check_images(out: Path, *, is_pattern: bool = True) -> list[dict[str, Any]]:
    """Every image has its line and every line its image; pixels, embedded parameters and line name one row."""
    lines, files = metadata(out), images(out)
    assert sorted(line["file_name"] for line in lines) == sorted(files)
    for line in lines:
        data, row = files[line["file_name"]], as_row(line)
        picture = codec.decode(data)
        assert picture.shape == (row.height, row.width, 3)
        assert codec.read_parameters(data) == parameters(row, line["model"])
        if is_pattern:
            assert read_pattern(picture) == expected(row)
        if line["format"] == "png":
            assert pixel_sha256(picture) == line["pixel_sha256"]
        assert line["noise_seed"] == row.noise_seed
    return lines
