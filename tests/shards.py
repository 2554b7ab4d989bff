"""Rows and plan shards for tests that need no planner, and the way from rows to a finished part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from batchgen import job
from batchgen.card import card, image_folder_table
from batchgen.encoders import EncoderPool
from batchgen.metadata import made_rows, row_table
from batchgen.models.pattern import paint
from batchgen.records import Image, Part, Row
from batchgen.writer import PartWriter

MODEL = "pattern"
FORMATS = ["files", "webdataset", "parquet"]
SEEDS = [0, 2**32, 2**53 + 1, 2**63 - 1, 2**64 - 1]
"""Where 32 bits, a double, a signed and an unsigned 64-bit integer end."""
AWKWARD_TEXTS = [
    "a\x00b",
    "a\nb\r\n\tc",
    "🐉龍é",
    "🐉龍e\u0301",
    "\u0301 a lone combining mark",
    "\u2028\u202e right to left",
    "",
    "   ",
    '{"json": "\\u0000"}',
    "../../x",
    "--ar 4:5",
    "<script>alert(1)</script>",
    "l" * 2000,
]


def make_row(index: int = 0, prompt: str = "a red apple", **changes: object) -> Row:
    values: dict[str, object] = {
        "index": index,
        "id": f"row-{index}",
        "image_number": 0,
        "prompt": prompt,
        "negative_prompt": None,
        "width": 64,
        "height": 64,
        "steps": 20,
        "guidance_scale": 7.5,
        "sampler": "ddim",
        "seed": 1000 + index,
    }
    return Row(**(values | changes))  # type: ignore[arg-type]


def make_shard(rows: Sequence[Row], carried: Mapping[str, pa.Array] | None = None) -> pa.Table:
    """The plan's row group of the rows; manifest order is the reverse, so that the two cannot be confused."""
    count = len(rows)
    int32 = pa.int32()
    columns = {
        "position": pa.array(range(count - 1, -1, -1), pa.uint64()),
        "id": pa.array([row.id for row in rows], pa.large_string()),
        "image_number": pa.array([row.image_number for row in rows], int32),
        "prompt": pa.array([row.prompt for row in rows], pa.large_string()),
        "negative_prompt": pa.array([row.negative_prompt for row in rows], pa.large_string()),
        "width": pa.array([row.width for row in rows], int32),
        "height": pa.array([row.height for row in rows], int32),
        "steps": pa.array([row.steps for row in rows], int32),
        "guidance_scale": pa.array([row.guidance_scale for row in rows], pa.float64()),
        "true_cfg_scale": pa.array([row.true_cfg_scale for row in rows], pa.float64()),
        "strength": pa.array([row.strength for row in rows], pa.float64()),
        "init_image": pa.array([row.init and row.init.name for row in rows], pa.large_string()),
        "init_sha256": pa.array([row.init and row.init.sha256 for row in rows], pa.string()),
        "init_file": pa.array([row.init and row.init.file for row in rows], pa.large_string()),
        "init_offset": pa.array([row.init and row.init.offset for row in rows], pa.int64()),
        "init_bytes": pa.array([row.init and row.init.num_bytes for row in rows], pa.int64()),
        "sampler": pa.array([row.sampler for row in rows], pa.dictionary(int32, pa.string())),
        "lora": pa.array([row.lora or None for row in rows], pa.dictionary(int32, pa.string())),
        "seed": pa.array([row.seed for row in rows], pa.uint64()),
        "asked_width": pa.array([row.width - 1 for row in rows], int32),
        "asked_height": pa.array([row.height - 1 for row in rows], int32),
        "group": pa.array([0] * count, int32),
        "batch": pa.array(range(count), int32),
        "batch_size": pa.array([1] * count, int32),
    }
    columns |= {f"carried:{name}": column for name, column in (carried or {}).items()}
    return pa.table(columns)


def output_of(**changes: object) -> job.Output:
    return job.Output.model_validate(changes)


def seven() -> list[Row]:
    """Seven prompts, and an order in which batches might bring them."""
    rows = [make_row(index, f"prompt number {index}", seed=10**index) for index in range(7)]
    return [rows[index] for index in (2, 0, 1, 6, 5, 3, 4)]


def shard_of_seven() -> pa.Table:
    return make_shard(sorted(seven(), key=lambda row: row.index), {"caption": pa.array([f"own {n}" for n in range(7)])})


def make_image(row: Row) -> Image:
    return Image(row, paint(row), 4, "pattern", None, None, 0.25)


def write_part(
    folder: Path,
    output: job.Output,
    rows: Sequence[Row],
    shard: pa.Table,
    stem: str = "00000-0",
    num_threads: int = 2,
    images: Iterable[Image] | None = None,
) -> Part:
    folder.mkdir(parents=True, exist_ok=True)
    with EncoderPool(num_threads) as pool:
        writer = PartWriter(folder, stem, output, shard, MODEL, pool)
        for image in images if images is not None else map(make_image, rows):
            writer.add(image)
        return writer.finish()


@dataclass(frozen=True)
class RunFolder:
    """A run directory as it looks when finished, as far as readers see it."""

    path: Path
    metadata: pa.Table


def make_run(folder: Path, output: job.Output, rows: Sequence[Row], shard: pa.Table) -> RunFolder:
    part = write_part(folder / "data", output, rows, shard)
    metadata = made_rows(row_table(shard, MODEL, part.images, part.failures))
    pq.write_table(metadata, folder / "metadata.parquet")
    if output.format == "files":
        pq.write_table(image_folder_table(metadata), folder / "data" / "metadata.parquet")
    text = card(
        name="a run", output_format=output.format, model=MODEL, version="1", digest="0", num_images=metadata.num_rows
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
    (folder / ".run").mkdir()
    pq.write_table(shard, folder / ".run" / "0000.parquet")
    return RunFolder(folder, metadata)
