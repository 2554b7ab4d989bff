"""`import` of Hugging Face data sets, by the real library, from local folders."""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image as Picture

from batchgen.errors import UsageError
from batchgen.importer import import_rows
from tests import runs

ROWS: dict[str, list[Any]] = {
    "caption": ["a red apple", 'a "cat"\nin two lines', "🐉龍é"],
    "width": [64, None, 128],
    "seed": [-1, None, 2**63 - 1],
    "guidance_scale": [7.5, 1.0, None],
    "tags": [["x"], [], ["y", "z"]],
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def take(folder: Path, out: Path, **options: Any) -> list[dict[str, Any]]:
    import_rows(str(folder), out, columns={"prompt": "caption"}, **options)
    table = pq.read_table(out)
    assert table.schema.metadata is None
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def expected() -> list[dict[str, Any]]:
    rows = [dict(zip(ROWS, values, strict=True)) for values in zip(*ROWS.values(), strict=True)]
    return [{"prompt": row.pop("caption"), **row, "seed": None if row["seed"] == -1 else row["seed"]} for row in rows]


def test_saved_data_set(tmp_path: Path) -> None:
    datasets.Dataset.from_dict(ROWS).save_to_disk(tmp_path / "saved")
    assert take(tmp_path / "saved", tmp_path / "o.parquet") == expected()
    assert pq.read_schema(tmp_path / "o.parquet").field("seed").type == pa.uint64()
    assert pq.read_schema(tmp_path / "o.parquet").field("width").type == pa.int32()


def test_folder_of_parquet_with_splits(tmp_path: Path) -> None:
    folder = tmp_path / "set" / "data"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        datasets.Dataset.from_dict({**ROWS, "from": [split] * 3}).to_parquet(folder / f"{split}-00000.parquet")
    with pytest.raises(UsageError, match="no split was named; add --split with one of: train, test"):
        take(tmp_path / "set", tmp_path / "o.parquet")
    with pytest.raises(UsageError, match="it has no split 'val'"):
        take(tmp_path / "set", tmp_path / "o.parquet", split="val")
    rows = take(tmp_path / "set", tmp_path / "o.parquet", split="test")
    assert rows == [{**row, "from": "test"} for row in expected()]


def test_pictures_are_not_carried(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(2):
        Picture.fromarray(np.full((8, 8, 3), number, np.uint8)).save(folder / f"{number}.png")
    (folder / "metadata.csv").write_text("file_name,caption\n0.png,none\n1.png,one\n")
    done = import_rows(str(folder), tmp_path / "o.parquet", columns={"prompt": "caption"})
    assert pq.read_table(tmp_path / "o.parquet").to_pylist() == [{"prompt": "none"}, {"prompt": "one"}]
    told = "pictures, sound and other media are not carried: image"
    assert done.notes == (f"{told}; --column image=image takes one in, for rows to begin from",)


@pytest.mark.parametrize("kind", ["folder", "saved"])
def test_pictures_that_rows_begin_from(tmp_path: Path, kind: str) -> None:
    """Those of an image folder by their paths, those of a saved set by their bytes; a run takes either."""
    source = tmp_path / "pictures"
    source.mkdir()
    for number in range(3):
        Picture.fromarray(np.full((64, 72, 3), 50 * number, np.uint8)).save(source / f"{number}.png")
    (source / "metadata.csv").write_text("file_name,caption\n0.png,none\n1.png,one\n2.png,two\n")
    if kind == "saved":
        read = datasets.load_dataset(str(source))["train"]
        content = [{"bytes": (source / f"{number}.png").read_bytes(), "path": None} for number in range(3)]
        read = read.remove_columns("image").add_column("photo", content).cast_column("photo", datasets.Image())
        source = tmp_path / "saved"
        read.save_to_disk(source)
    name = "photo" if kind == "saved" else "image"
    out = tmp_path / "o.parquet"
    done = import_rows(str(source), out, columns={"prompt": "caption", "image": name})
    assert done.notes == ()
    assert runs.run(out, tmp_path / "out").code == 0
    lines = runs.check_images(tmp_path / "out")
    assert [(line["prompt"], line["width"], line["height"]) for line in lines] == [
        (name, 72, 64) for name in ("none", "one", "two")
    ]
    wanted = [hashlib.sha256((tmp_path / "pictures" / f"{n}.png").read_bytes()).hexdigest() for n in range(3)]
    assert [line["init_sha256"] for line in lines] == wanted


@pytest.mark.parametrize(
    ("column", "values", "sentence"),
    [
        ("width", ["64", "12x"], "column width cannot be taken: a column of numbers is needed"),
        ("width", [64.5, 1.0], "column width cannot be taken"),
        ("seed", [-2, 1], "column seed cannot be taken"),
        ("seed", [1.0, 2.0], "column seed cannot be taken: a column of numbers is needed"),
        ("prompt", [1, 2], "column prompt cannot be taken: a text or null is needed"),
    ],
)
def test_wrong_type(column: str, values: list[Any], sentence: str, tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"prompt": ["a", "b"], column: values}).save_to_disk(tmp_path / "saved")
    with pytest.raises(UsageError, match=sentence):
        import_rows(str(tmp_path / "saved"), tmp_path / "o.parquet")


def test_many_batches_keep_order(tmp_path: Path) -> None:
    prompts = [f"prompt {n}" for n in range(70_000)]
    datasets.Dataset.from_dict({"prompt": prompts}).save_to_disk(tmp_path / "saved", num_shards=3)
    assert import_rows(str(tmp_path / "saved"), tmp_path / "o.parquet").rows == 70_000
    assert pq.read_table(tmp_path / "o.parquet").column("prompt").to_pylist() == prompts


def test_empty_folder_and_unknown_name(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"the folder .* cannot be loaded as a data set"):
        import_rows(str(tmp_path / "empty"), tmp_path / "o.parquet")
    with pytest.raises(UsageError, match="nobody/no-such-set is no file or folder here, and cannot be loaded"):
        import_rows("nobody/no-such-set", tmp_path / "o.parquet")


@pytest.mark.parametrize("answers", [True, False])
def test_without_a_network_it_fails_in_seconds(tmp_path: Path, answers: bool) -> None:
    """The hub is asked once: it refuses the connection, or takes it and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if answers:
            server.close()
        own = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
        words = [sys.executable, "-c", PROGRAM.format(0.5), "import", "nobody/no-such-set", "-o", "o.parquet"]
        environment = {**os.environ, **own, "NO_PROXY": "127.0.0.1", "PYTHONPATH": str(runs.ROOT)}
        ended = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        num_asked = 0 if answers else asked(server)
    assert ended.returncode == 2, ended.stderr
    said = "nobody/no-such-set is no file or folder here, and cannot be loaded as a data set: the hub gave: "
    assert ended.stderr.startswith(f"batchgen: {said}"), ended.stderr
    assert "the local cache does not have it. Check the name, the network" in ended.stderr
    assert num_asked <= 2


PROGRAM = "from batchgen.sources import hub; hub._HUB_TIMEOUT_S = {}; from batchgen.cli import main; main()"


def asked(server: socket.socket) -> int:
    """Connections that were made to a server that takes none."""
    server.setblocking(False)
    for number in itertools.count():
        try:
            server.accept()[0].close()
        except BlockingIOError:
            return number
    raise AssertionError
