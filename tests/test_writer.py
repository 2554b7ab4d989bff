import hashlib
import json
import os
import tarfile
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen import codec, job, writer
from batchgen.encoders import EncoderPool, num_encoder_threads, num_in_flight
from batchgen.errors import BatchgenError
from batchgen.formats import CONTAINERS
from batchgen.metadata import failed_rows, made_rows, row_table
from batchgen.models.pattern import expected, read_pattern
from batchgen.parts import part_digest, part_reader
from batchgen.records import Part
from batchgen.writer import PartWriter
from tests.shards import (
    AWKWARD_TEXTS,
    FORMATS,
    MODEL,
    SEEDS,
    make_image,
    make_row,
    make_shard,
    output_of,
    seven,
    shard_of_seven,
    write_part,
)

IMAGES = ["png", "jpeg", "webp"]


def slow_down_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encode some images slowly, so that later ones overtake them."""
    encode = codec.encode

    def uneven(pixels: Any, parameters: Any, output: job.Output) -> bytes:
        time.sleep(0.02 * (int(parameters["id"].removeprefix("row-")) * 5 % 7))
        return encode(pixels, parameters, output)

    monkeypatch.setattr(codec, "encode", uneven)


@pytest.mark.parametrize("image", IMAGES)
@pytest.mark.parametrize("format_name", FORMATS)
def test_pixels_embedded_parameters_and_table_name_the_same_row(
    tmp_path: Path, format_name: str, image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down_some(monkeypatch)
    output = output_of(format=format_name, image=image, quality=90)
    rows = {row.id: row for row in seven()}
    part = write_part(tmp_path, output, seven(), shard_of_seven(), num_threads=4)
    table = made_rows(row_table(shard_of_seven(), MODEL, part.images, part.failures))
    lines = {Path(line["file_name"]).name: line for line in table.to_pylist()}
    assert part.path is not None
    found = dict(part_reader(part.path))
    assert found.keys() == lines.keys()
    for file, data in found.items():
        line = lines[file]
        row = rows[line["id"]]
        assert read_pattern(codec.decode(data)) == expected(row)
        embedded = codec.read_parameters(data)
        assert (embedded["id"], embedded["prompt"], embedded["seed"]) == (row.id, row.prompt, str(row.seed))
        assert (line["prompt"], line["seed"]) == (row.prompt, row.seed)
        assert line["caption"] == f"own {row.index}"
        assert (line["bytes"], line["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
        assert line["pixel_sha256"] == hashlib.sha256(make_image(row).pixels.tobytes()).hexdigest()
        assert line["format"] == image


@pytest.mark.parametrize("format_name", FORMATS)
def test_images_keep_the_order_in_which_they_were_added(
    tmp_path: Path, format_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_down_some(monkeypatch)
    part = write_part(tmp_path, output_of(format=format_name), seven(), shard_of_seven(), num_threads=4)
    assert [image.index for image in part.images] == [2, 0, 1, 6, 5, 3, 4]
    assert part.path is not None
    if format_name != "files":
        names = [name for name, _ in part_reader(part.path)]
        assert names == [f"row-{index}.png" for index in (2, 0, 1, 6, 5, 3, 4)]


@pytest.mark.parametrize("format_name", FORMATS)
def test_the_part_is_what_lies_on_the_disk(tmp_path: Path, format_name: str) -> None:
    part = write_part(tmp_path, output_of(format=format_name), seven(), shard_of_seven())
    assert part.path == tmp_path / f"00000-0{CONTAINERS[format_name].suffix}"
    assert part.path.is_dir() == (format_name == "files")
    assert part_digest(part.path) == (part.bytes, part.sha256)
    assert part.images[0].file_name == {
        "files": "data/00000-0/row-2.png",
        "webdataset": "data/00000-0.tar/row-2.png",
        "parquet": "data/00000-0.parquet/row-2.png",
    }.get(format_name)


@pytest.mark.parametrize("format_name", FORMATS)
def test_parts_are_the_same_bytes_again(tmp_path: Path, format_name: str) -> None:
    parts = [
        write_part(tmp_path / str(threads), output_of(format=format_name), seven(), shard_of_seven(), "1-0", threads)
        for threads in (1, 4)
    ]
    assert parts[0].sha256 == parts[1].sha256


@pytest.mark.parametrize("format_name", FORMATS)
def test_every_seed_and_text_is_exact_in_the_part(tmp_path: Path, format_name: str) -> None:
    texts = AWKWARD_TEXTS + ["x"] * len(SEEDS)
    rows = [
        make_row(index, text, id=f"{text}{index}", negative_prompt=text, seed=SEEDS[index % 5])
        for index, text in enumerate(texts)
    ]
    part = write_part(tmp_path, output_of(format=format_name), rows, make_shard(rows))
    assert part.path is not None
    found = {data_row["id"]: data_row for data_row in map(codec.read_parameters, dict(part_reader(part.path)).values())}
    for row in rows:
        assert found[row.id]["prompt"] == found[row.id]["negative_prompt"] == row.prompt
        assert int(found[row.id]["seed"]) == row.seed
    if format_name == "parquet":
        lines = pq.read_table(part.path).to_pylist()
        assert [(line["prompt"], line["seed"]) for line in lines] == [(row.prompt, row.seed) for row in rows]
    if format_name == "webdataset":
        samples = tar_samples(part)
        assert [(line["prompt"], int(line["seed"])) for line in samples] == [(row.prompt, row.seed) for row in rows]


def tar_samples(part: Part) -> list[dict[str, Any]]:
    with tarfile.open(part.path) as tar:
        return [json.load(tar.extractfile(entry)) for entry in tar if entry.name.endswith(".json")]  # type: ignore[arg-type]


def test_tar_members_carry_no_time_and_no_user(tmp_path: Path) -> None:
    part = write_part(tmp_path, output_of(format="webdataset"), seven(), shard_of_seven())
    with tarfile.open(part.path) as tar:
        members = tar.getmembers()
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in members} == {(0, 0, 0, "", "", 0o644)}
    assert [m.name for m in members][:2] == ["row-2.png", "row-2.json"]


def test_tar_samples_share_one_schema_without_nulls(tmp_path: Path) -> None:
    rows = [
        make_row(0, negative_prompt=None),
        make_row(1, negative_prompt=""),
        make_row(2, negative_prompt="n"),
    ]
    carried = {
        "number": pa.array([2**64 - 1, None, 0], pa.uint64()),
        "nested": pa.array([{"a": [1]}, None, {"a": []}]),
        "label": pa.array(["x", None, ""]).dictionary_encode(),
    }
    part = write_part(tmp_path, output_of(format="webdataset"), rows, make_shard(rows, carried))
    samples = tar_samples(part)
    assert len({tuple((name, type(value)) for name, value in sample.items()) for sample in samples}) == 1
    assert [sample["number"] for sample in samples] == [str(2**64 - 1), "", "0"]
    assert [sample["nested"] for sample in samples] == ['{"a": [1]}', "", '{"a": []}']
    assert [sample["label"] for sample in samples] == ["x", "", ""]
    assert json.loads(samples[0]["nulls"]) == ["negative_prompt", "tokens", "tokens_dropped"]
    assert json.loads(samples[1]["nulls"]) == ["tokens", "tokens_dropped", "number", "nested", "label"]
    assert json.loads(samples[2]["nulls"]) == ["tokens", "tokens_dropped"]
    assert [sample["asked_width"] for sample in samples] == [63] * 3


def test_parquet_row_groups_hold_at_most_100_rows_and_no_more_bytes_than_memory_is_meant_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [make_row(index) for index in range(230)]
    part = write_part(tmp_path, output_of(format="parquet"), rows, make_shard(rows))
    metadata = pq.read_metadata(part.path)
    assert [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)] == [100, 100, 30]
    monkeypatch.setattr("batchgen.formats._MAX_GROUP_BYTES", part.images[0].bytes * 9)
    part = write_part(tmp_path / "small", output_of(format="parquet"), rows, make_shard(rows))
    assert pq.read_metadata(part.path).num_row_groups > 20


def test_nothing_is_embedded_when_not_wanted(tmp_path: Path) -> None:
    part = write_part(tmp_path, output_of(embed=False), seven(), shard_of_seven())
    assert part.path is not None
    for _, data in part_reader(part.path):
        with pytest.raises(BatchgenError, match="no parameters"):
            codec.read_parameters(data)


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_row_that_cannot_be_encoded_fails_alone(tmp_path: Path, format_name: str) -> None:
    rows = [make_row(index, "x" * (80_000 if index == 2 else 10)) for index in range(5)]
    shard = make_shard(rows)
    part = write_part(tmp_path, output_of(format=format_name, image="jpeg"), rows, shard)
    assert [image.index for image in part.images] == [0, 1, 3, 4]
    (failure,) = part.failures
    assert (failure.row, failure.error) == (rows[2], "RowError")
    table = row_table(shard, MODEL, part.images, part.failures)
    assert made_rows(table)["id"].to_pylist() == ["row-0", "row-1", "row-3", "row-4"]
    (line,) = failed_rows(table).to_pylist()
    assert (line["id"], line["error"]) == ("row-2", "RowError")
    assert "shorten the prompt" in line["message"]


@pytest.mark.parametrize("format_name", FORMATS)
def test_a_part_without_an_image_leaves_no_file(tmp_path: Path, format_name: str) -> None:
    rows = [make_row(0, "x" * 80_000)]
    part = write_part(tmp_path, output_of(format=format_name, image="jpeg"), rows, make_shard(rows))
    assert (part.path, part.bytes, part.images, len(part.failures)) == (None, 0, (), 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("is_finished", [False, True])
def test_discard_leaves_nothing_behind(tmp_path: Path, format_name: str, is_finished: bool) -> None:
    with EncoderPool(2) as pool:
        part_writer = PartWriter(tmp_path, "1-0", output_of(format=format_name), shard_of_seven(), MODEL, pool)
        for row in seven():
            part_writer.add(make_image(row))
        if is_finished:
            part_writer.finish()
        part_writer.discard()
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("format_name", FORMATS)
def test_leftovers_of_a_killed_process_are_replaced(tmp_path: Path, format_name: str) -> None:
    left = tmp_path / f"00000-0{CONTAINERS[format_name].suffix}"
    if format_name == "files":
        left.mkdir()
        (left / "torn.png").write_bytes(b"torn")
    else:
        left.write_bytes(b"torn" * 100_000)
    part = write_part(tmp_path, output_of(format=format_name), seven(), shard_of_seven())
    assert part.path is not None
    assert len(dict(part_reader(part.path))) == 7


def test_two_parts_share_a_pool(tmp_path: Path) -> None:
    with EncoderPool(1) as pool:
        writers = [
            PartWriter(tmp_path, f"{n}-0", output_of(format="webdataset"), shard_of_seven(), MODEL, pool)
            for n in range(2)
        ]
        for row in seven():
            for part_writer in writers:
                part_writer.add(make_image(row))
        first, second = (part_writer.finish() for part_writer in writers)
    assert first.sha256 == second.sha256


class Gauge:
    """How many images are between `add` and their container."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0
        self._lock = threading.Lock()

    def change(self, by: int) -> None:
        with self._lock:
            self.now += by
            self.most = max(self.most, self.now)


@pytest.mark.parametrize("format_name", FORMATS)
def test_slow_encoders_hold_up_add(tmp_path: Path, format_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, gauge = codec.encode, Gauge()

    def slow(pixels: Any, parameters: Any, output: job.Output) -> bytes:
        time.sleep(0.2 if parameters["id"] == "row-0" else 0.005)
        return encode(pixels, parameters, output)

    release = EncoderPool.release

    def counted_release(pool: EncoderPool) -> None:
        gauge.change(-1)
        release(pool)

    monkeypatch.setattr(codec, "encode", slow)
    monkeypatch.setattr(EncoderPool, "release", counted_release)
    rows = [make_row(index) for index in range(30)]
    with EncoderPool(3) as pool:
        part_writer = PartWriter(tmp_path, "0-0", output_of(format=format_name), make_shard(rows), MODEL, pool)
        for row in rows:
            part_writer.add(make_image(row))
            gauge.change(1)
        assert len(part_writer.finish().images) == 30
    assert pool.max_in_flight == 6
    assert 3 < gauge.most <= pool.max_in_flight
    assert gauge.now == 0


def test_a_bug_in_an_encoder_is_raised_and_names_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(pixels: Any, parameters: Any, output: job.Output) -> bytes:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(codec, "encode", broken)
    with EncoderPool(2) as pool:
        part_writer = PartWriter(tmp_path, "0-0", output_of(), shard_of_seven(), MODEL, pool)
        part_writer.add(make_image(make_row(0)))
        with pytest.raises(ZeroDivisionError):
            part_writer.finish()
        with pytest.raises(ZeroDivisionError):
            part_writer.add(make_image(make_row(1)))
        part_writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_flat_is_a_span_of_at_most_2_in_every_channel() -> None:
    pixels = make_image(make_row()).pixels.copy()
    pixels[:] = (10, 100, 200)
    pixels[3, 4] += 2
    assert writer.is_flat(pixels)
    pixels[3, 4, 1] += 1
    assert not writer.is_flat(pixels)


def test_as_many_threads_as_cores_but_8_at_most() -> None:
    assert num_encoder_threads(output_of(encoders=3)) == 3
    assert num_encoder_threads(output_of()) == min(8, len(os.sched_getaffinity(0)))


@pytest.mark.parametrize(
    ("threads", "batch", "side", "number"), [(8, 32, 512, 64), (8, 1, 512, 16), (2, 32, 4096, 10), (8, 32, 8192, 16)]
)
def test_two_batches_may_wait_if_memory_holds_them(threads: int, batch: int, side: int, number: int) -> None:
    assert num_in_flight(threads, batch, side * side) == number
