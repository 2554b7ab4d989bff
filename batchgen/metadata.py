"""The columns of a run's tables: what is written down of every row, made or failed.

A row table lies beside every part. It holds the part's rows, ok and failed, under one schema; `made_rows` and
`failed_rows` cut it into the rows of `metadata.parquet` and `failures.parquet`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from batchgen.columns import as_type
from batchgen.records import NOISE_BITS, Failure, Row, Written

CARRIED = "carried:"
"""Prefix of the manifest's own columns in plans and row tables; published tables name them without it."""

PARAMETERS = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),
        pa.field("image_number", pa.int32(), nullable=False),
        pa.field("prompt", pa.string(), nullable=False),
        pa.field("negative_prompt", pa.string()),
        pa.field("width", pa.int32(), nullable=False),
        pa.field("height", pa.int32(), nullable=False),
        pa.field("asked_width", pa.int32(), nullable=False),
        pa.field("asked_height", pa.int32(), nullable=False),
        pa.field("steps", pa.int32(), nullable=False),
        pa.field("guidance_scale", pa.float64(), nullable=False),
        pa.field("true_cfg_scale", pa.float64()),
        pa.field("strength", pa.float64()),
        pa.field("init_image", pa.string()),
        pa.field("init_sha256", pa.string()),
        pa.field("sampler", pa.string(), nullable=False),
        pa.field("lora", pa.string()),
        pa.field("seed", pa.uint64(), nullable=False),
        pa.field("noise_seed", pa.uint32(), nullable=False),
        pa.field("model", pa.string(), nullable=False),
    ]
)
"""What was asked for, the same for made and failed rows."""

FILE = pa.schema(
    [
        pa.field("file_name", pa.string()),
        pa.field("bytes", pa.int64()),
        pa.field("sha256", pa.string()),
        pa.field("pixel_sha256", pa.string()),
        pa.field("format", pa.string()),
        pa.field("batch_size", pa.int32()),
        pa.field("mode", pa.string()),
        pa.field("tokens", pa.int32()),
        pa.field("tokens_dropped", pa.int32()),
        pa.field("retries", pa.int32()),
        pa.field("is_flat", pa.bool_()),
        pa.field("seconds", pa.float64()),
    ]
)
"""What came of a made row; null in a failed one, but for `retries`."""

ERROR = pa.schema([pa.field("error", pa.string()), pa.field("message", pa.string())])
"""Why a failed row failed: the error's class and its sentence."""

_PLACE = pa.schema(
    [
        pa.field("position", pa.uint64(), nullable=False),
        pa.field("index", pa.int32(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
    ]
)

RESERVED = frozenset([*PARAMETERS.names, *FILE.names, *ERROR.names, "image", "nulls"])
"""Names that no column of the manifest's own may have."""


def carried_fields(schema: pa.Schema) -> list[pa.Field]:
    """The manifest's own columns in the schema of a plan or row table, under their own names."""
    return [field.with_name(field.name.removeprefix(CARRIED)) for field in schema if field.name.startswith(CARRIED)]


def metadata_schema(carried: Iterable[pa.Field]) -> pa.Schema:
    """Columns of `metadata.parquet`, one row per image."""
    return pa.schema([*PARAMETERS, *FILE, *carried])


def failures_schema(carried: Iterable[pa.Field]) -> pa.Schema:
    """Columns of `failures.parquet`, one row per image that could not be made."""
    return pa.schema([*PARAMETERS, FILE.field("retries"), *ERROR, *carried])


def row_table_schema(carried: Iterable[pa.Field]) -> pa.Schema:
    """Columns of the table beside a part, carried ones prefixed."""
    prefixed = [field.with_name(CARRIED + field.name) for field in carried]
    return pa.schema([*_PLACE, *PARAMETERS, *FILE, *ERROR, *prefixed])


def row_table(shard: pa.Table, model: str, made: Sequence[Written], failed: Sequence[Failure]) -> pa.Table:
    """The rows of a shard that a part settles: the made ones, then the failed ones, each in the order given.

    `shard` is the row group of the plan; rows that are neither made nor failed are left out of the table.
    """
    outcomes = [*map(_made, made), *map(_failed, failed)]
    own = pa.Table.from_pylist(outcomes, pa.schema([*_PLACE, *FILE, *ERROR]).remove(0))
    asked = shard.take(own["index"])
    columns = {name: asked[name] for name in asked.schema.names}
    columns["noise_seed"] = noise_seeds(asked["seed"])
    columns["model"] = pa.repeat(pa.scalar(model), len(own))
    columns |= {name: own[name] for name in own.schema.names}
    schema = row_table_schema(carried_fields(shard.schema))
    return pa.table([as_type(columns[field.name], field.type) for field in schema], schema=schema)


def made_rows(table: pa.Table) -> pa.Table:
    """The made rows of a row table under `metadata_schema`, in the table's order."""
    return _published(table, "ok", metadata_schema(carried_fields(table.schema)))


def failed_rows(table: pa.Table) -> pa.Table:
    """The failed rows of a row table under `failures_schema`, in the table's order."""
    return _published(table, "failed", failures_schema(carried_fields(table.schema)))


def noise_seeds(seeds: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """`Row.noise_seed` for a column of seeds."""
    return pc.bit_wise_and(seeds, pa.scalar(NOISE_BITS, pa.uint64())).cast(pa.uint32())


def parameters(row: Row, model: str) -> dict[str, Any]:
    """What made a row, as it travels inside its image: names of `PARAMETERS`, the seed as text.

    Text, because JSON readers other than Python's round integers above 2^53. What the model's family knows nothing of
    is left out, and so is a LoRA set where there is none.
    """
    of_family: dict[str, Any] = {} if row.true_cfg_scale is None else {"true_cfg_scale": row.true_cfg_scale}
    if row.init is not None:
        of_family |= {"strength": row.strength, "init_image": row.init.name, "init_sha256": row.init.sha256}
    of_job = {"lora": row.lora} if row.lora else {}
    return {
        "id": row.id,
        "image_number": row.image_number,
        "prompt": row.prompt,
        "negative_prompt": row.negative_prompt,
        "width": row.width,
        "height": row.height,
        "steps": row.steps,
        "guidance_scale": row.guidance_scale,
        **of_family,
        "sampler": row.sampler,
        **of_job,
        "seed": str(row.seed),
        "noise_seed": row.noise_seed,
        "model": model,
    }


def _made(image: Written) -> dict[str, Any]:
    return {"status": "ok", **asdict(image)}


def _failed(failure: Failure) -> dict[str, Any]:
    return {
        "index": failure.row.index,
        "status": "failed",
        "error": failure.error,
        "message": failure.message,
        "retries": failure.retries,
    }


def _published(table: pa.Table, status: str, schema: pa.Schema) -> pa.Table:
    rows = table.filter(pc.field("status") == status)
    prefixed = schema.names[: len(schema) - len(carried_fields(table.schema))]
    columns = [rows[name] for name in prefixed]
    columns += [rows[CARRIED + field.name] for field in carried_fields(table.schema)]
    return pa.table(columns, schema=schema)
