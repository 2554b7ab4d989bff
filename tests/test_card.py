import datetime
import io
import json
from collections.abc import Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
from PIL import Image as PILImage

from batchgen import job
from batchgen.card import card, image_folder_table
from batchgen.models.pattern import expected, read_pattern
from batchgen.records import Row
from tests.shards import AWKWARD_TEXTS, FORMATS, SEEDS, RunFolder, make_row, make_run, make_shard

SPLIT_WORDS = ["test-1", "train", "validation-2", "a_test_b", "dev"]
"""Ids that `datasets` would take for names of splits."""
ROWS = [
    make_row(
        index,
        text,
        id=row_id,
        seed=SEEDS[index % len(SEEDS)],
        negative_prompt=(None, "", "blurry")[index % 3],
        width=64 + 8 * (index % 3),
    )
    for index, (text, row_id) in enumerate(
        [(text, text) for text in AWKWARD_TEXTS] + [(f"prompt {word}", word) for word in SPLIT_WORDS]
    )
]
COUNT = len(ROWS)
PLAIN = {
    "caption": pa.array([f"caption {n}" if n % 2 else None for n in range(COUNT)]),
    "when": pa.array([datetime.date(2024, 2, 29)] * COUNT),
    "kind": pa.array(["a", "b", None] * (COUNT // 3)).dictionary_encode(),
    "scores": pa.array([[1.5, None]] * COUNT),
    "price": pa.array([Decimal("1.50")] * COUNT),
}
AWKWARD = {
    "huge": pa.array([2**64 - 1] * COUNT, pa.uint64()),
    "moment": pa.array([1] * COUNT, pa.timestamp("ns")),
    "nested": pa.array([{"file_name": "../x", "n": [1]}] * COUNT),
    "pairs": pa.array([[("a", 1)]] * COUNT, pa.map_(pa.string(), pa.int64())),
    "uuid": pa.array([bytes(range(16))] * COUNT, pa.uuid()),
    "bytes_of": pa.array([b"\xff\x00"] * COUNT),
    "nothing": pa.array([None] * COUNT),
    "photo_file_name": pa.array(["photo.jpg"] * COUNT),
    "photo_file_name_": pa.array(["taken"] * COUNT),
    "file_names": pa.array([["a.jpg"]] * COUNT),
}


def run_of(
    tmp_path: Path, format_name: str, carried: Mapping[str, pa.Array] | None = None, **output: object
) -> RunFolder:
    settings = job.Output.model_validate({"format": format_name, **output})
    return make_run(tmp_path / "run", settings, ROWS, make_shard(ROWS, carried))


def loaded(run: RunFolder, is_streaming: bool) -> list[dict[str, Any]]:
    cache = str(run.path.parent / "cache")
    splits = datasets.load_dataset(str(run.path), streaming=is_streaming, cache_dir=cache)
    assert list(splits) == ["train"]
    return list(splits["train"])


def flat(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample of any format as one dict with the picture under "image"."""
    if "json" in sample:
        picture = next(sample[name] for name in ("png", "jpg", "webp") if name in sample)
        return {"image": picture, **sample["json"]}
    return sample


def check(samples: Iterable[dict[str, Any]], rows: list[Row]) -> None:
    """Every row once, its picture under its own prompt and seed."""
    by_id = {sample["id"]: sample for sample in samples}
    assert by_id.keys() == {row.id for row in rows}
    for row in rows:
        sample = by_id[row.id]
        assert read_pattern(np.asarray(sample["image"].convert("RGB"))) == expected(row)
        assert sample["prompt"] == row.prompt
        assert int(sample["seed"]) == row.seed
        assert (sample["width"], sample["height"]) == (row.width, row.height)
        assert (sample["negative_prompt"] or "") == (row.negative_prompt or "")


@pytest.mark.parametrize("is_streaming", [False, True], ids=["loaded", "streaming"])
@pytest.mark.parametrize("format_name", FORMATS)
def test_datasets_opens_the_run_and_every_image_matches_its_row(
    tmp_path: Path, format_name: str, is_streaming: bool
) -> None:
    samples = [flat(sample) for sample in loaded(run_of(tmp_path, format_name, PLAIN), is_streaming)]
    assert len(samples) == COUNT
    check(samples, ROWS)
    captions = {sample["id"]: sample["caption"] for sample in samples}
    assert [captions[row.id] or None for row in ROWS] == PLAIN["caption"].to_pylist()


@pytest.mark.parametrize("image", ["jpeg", "webp"])
@pytest.mark.parametrize("format_name", FORMATS)
def test_datasets_opens_the_other_image_formats(tmp_path: Path, format_name: str, image: str) -> None:
    check(map(flat, loaded(run_of(tmp_path, format_name, image=image, quality=90), False)), ROWS)


@pytest.mark.parametrize("is_streaming", [False, True], ids=["loaded", "streaming"])
@pytest.mark.parametrize("format_name", FORMATS)
def test_columns_that_datasets_cannot_hold_do_not_break_it(
    tmp_path: Path, format_name: str, is_streaming: bool
) -> None:
    samples = [flat(sample) for sample in loaded(run_of(tmp_path, format_name, AWKWARD), is_streaming)]
    check(samples, ROWS)
    sample = samples[0]
    assert int(sample["huge"]) == 2**64 - 1
    assert sample["uuid"] == "00010203-0405-0607-0809-0a0b0c0d0e0f"
    assert json.loads(sample["pairs"]) == [["a", 1]]
    names = {"photo_file_name", "photo_file_name_"}
    if format_name == "files":
        names = {"photo_file_name_", "photo_file_name__"}
        assert sample["moment"].endswith("000000001")
    assert names <= sample.keys()
    assert {sample[name] for name in names} == {"photo.jpg", "taken"}
    nested = sample["nested"]
    assert (json.loads(nested) if isinstance(nested, str) else nested) == {"file_name": "../x", "n": [1]}


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_run_of_one_image_opens(tmp_path: Path, format_name: str) -> None:
    settings = job.Output.model_validate({"format": format_name})
    run = make_run(tmp_path / "run", settings, ROWS[:1], make_shard(ROWS[:1]))
    for is_streaming in (False, True):
        check(map(flat, loaded(run, is_streaming)), ROWS[:1])


@pytest.mark.parametrize("format_name", FORMATS)
def test_metadata_keeps_types_and_values(tmp_path: Path, format_name: str) -> None:
    run = run_of(tmp_path, format_name, PLAIN | AWKWARD)
    table = pq.read_table(run.path / "metadata.parquet")
    assert table["seed"].to_pylist() == [row.seed for row in ROWS]
    assert table["seed"].type == pa.uint64()
    for name, column in (PLAIN | AWKWARD).items():
        assert table[name].to_pylist() == column.to_pylist()


def test_the_webdataset_library_reads_the_tars(tmp_path: Path) -> None:
    run = run_of(tmp_path, "webdataset", PLAIN)
    urls = [str(path) for path in sorted((run.path / "data").glob("*.tar"))]
    samples = list(webdataset.WebDataset(urls, shardshuffle=False).decode("pil"))
    assert len({sample["__key__"] for sample in samples}) == COUNT
    check(({"image": sample["png"], **sample["json"]} for sample in samples), ROWS)


def test_ids_that_differ_only_after_a_dot_are_two_samples_in_every_reader(tmp_path: Path) -> None:
    rows = [make_row(index, row_id, id=row_id) for index, row_id in enumerate(["v1.0", "v1.5", "v1"])]
    run = make_run(tmp_path / "run", job.Output(format="webdataset"), rows, make_shard(rows))
    (path,) = (run.path / "data").glob("*.tar")
    samples = list(webdataset.WebDataset(str(path), shardshuffle=False).decode("pil"))
    check(({"image": sample["png"], **sample["json"]} for sample in samples), rows)
    for is_streaming in (False, True):
        check(map(flat, loaded(run, is_streaming)), rows)


def test_a_parquet_part_is_read_without_our_code_or_datasets(tmp_path: Path) -> None:
    run = run_of(tmp_path, "parquet", PLAIN)
    (path,) = (run.path / "data").glob("*.parquet")
    lines = pq.read_table(path).to_pylist()
    check(({**line, "image": PILImage.open(io.BytesIO(line["image"]["bytes"]))} for line in lines), ROWS)
    assert lines[0]["image"]["path"] == Path(lines[0]["file_name"]).name


def test_image_folder_table_has_one_schema_for_every_chunk(tmp_path: Path) -> None:
    metadata = run_of(tmp_path, "files", PLAIN | AWKWARD).metadata
    whole = image_folder_table(metadata)
    assert whole.schema.names[0] == "file_name"
    assert image_folder_table(metadata.slice(3, 2)).schema == whole.schema
    assert image_folder_table(metadata.slice(0, 0)).schema == whole.schema
    for name in whole["file_name"].to_pylist():
        assert (tmp_path / "run" / "data" / name).is_file()


def test_uint64_seeds_still_overflow_in_the_image_folder_reader(tmp_path: Path) -> None:
    """Why seeds are text in `data/metadata.parquet`."""
    run = run_of(tmp_path, "files")
    with_numbers = image_folder_table(run.metadata).drop_columns("seed").append_column("seed", run.metadata["seed"])
    pq.write_table(with_numbers, run.path / "data" / "metadata.parquet")
    with pytest.raises(datasets.exceptions.DatasetGenerationError):
        loaded(run, False)


def test_names_cannot_break_the_card() -> None:
    text = card(
        name="a\n---\nlicense: x",
        output_format="files",
        model="a`b\n# c",
        version="1",
        digest="0",
        num_images=1234,
        num_failed=2,
    )
    front, body = text.removeprefix("---\n").split("---\n", 1)
    assert "license" not in front
    assert "\n# c" not in body
    assert "1,234 images" in body
    assert "2 rows failed" in body
