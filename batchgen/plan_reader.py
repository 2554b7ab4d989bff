"""A frozen plan read: a shard's rows, and its batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batchgen.columns import as_type, is_text
from batchgen.errors import Interrupted, UsageError
from batchgen.filesystem import readable
from batchgen.metadata import CARRIED
from batchgen.plan_index import PlanIndex
from batchgen.plans import footer_digest
from batchgen.records import Batch, Group, InitImage, Row


class PlanReader:
    """Opens shards of a frozen plan, one row group each."""

    def __init__(self, root: Path, index: PlanIndex) -> None:
        self.index = index
        self.root = root
        """The plans' folder."""

    def shard(self, number: int, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of a shard, in order, with all columns or some. Raises UsageError if the plan's file is missing or
        damaged."""
        file = next(one for one in self.index.files if one.first_shard <= number < one.first_shard + one.num_shards)
        path = self.root / file.name
        try:
            # Opened by Arrow itself: if a thread of its own still has hold of a Python file when the interpreter ends,
            # the process is aborted.
            with readable(path), pa.OSFile(str(path)) as source:
                if footer_digest(source) != file.footer_sha256:
                    raise ValueError("its footer is another one")
                with pq.ParquetFile(source, page_checksum_verification=True) as opened:
                    table = opened.read_row_group(number - file.first_shard, columns)
        except (OSError, ValueError, pa.ArrowException) as error:
            self._require_same_run()
            raise UsageError(f"{path}: the plan cannot be read ({error}); start a new run directory") from None
        schema = pa.schema([_short(field) for field in table.schema])
        return pa.table(list(map(as_type, table.columns, schema.types)), schema=schema)

    def _require_same_run(self) -> None:
        """Raises Interrupted where another run has taken this one's place."""
        slot = self.root / "0.json"
        if slot.exists() and self.index.token not in slot.read_text(encoding="utf-8", errors="replace"):
            raise Interrupted(
                f"{self.root.parent.parent} is another run's directory by now: that of this run was moved or removed "
                "while it was in use. Nothing more is written here"
            )


def _short(field: pa.Field) -> pa.Field:
    """A row group's texts fit plain strings; only whole manifests need large ones."""
    is_own = not field.name.startswith(CARRIED)
    return pa.field(field.name, pa.string()) if is_own and is_text(field.type) else field


def batches(
    shard: pa.Table, groups: tuple[Group, ...], skip: frozenset[int] = frozenset(), root: Path = Path()
) -> Iterator[Batch]:
    """The batches of a shard's table, without the rows of `skip` (by index); batches left empty are not there. `root`
    is the plans' folder, under which init images may lie."""
    number = shard["batch"].to_numpy()
    edges = np.append(np.flatnonzero(np.append(True, number[1:] != number[:-1])), len(number)).tolist()
    # Python cannot hold the values of every carried column: dates of the year 12000, say.
    own = shard.select([name for name in shard.schema.names if not name.startswith(CARRIED)])
    for start, end in pairwise(edges):
        lines = own.slice(start, end - start).to_pylist()
        rows = tuple(_row(start + place, one, root) for place, one in enumerate(lines) if start + place not in skip)
        if rows:
            yield Batch(lines[0]["batch"], lines[0]["batch_size"], groups[lines[0]["group"]], rows)


def rows_of(shard: pa.Table) -> list[Row]:
    """The rows of a shard's table, in order."""
    own = shard.select([name for name in shard.schema.names if not name.startswith(CARRIED)])
    return [_row(index, line, Path()) for index, line in enumerate(own.to_pylist())]


def _row(index: int, line: Mapping[str, Any], root: Path) -> Row:
    return Row(
        index=index,
        id=line["id"],
        image_number=line["image_number"],
        prompt=line["prompt"],
        negative_prompt=line["negative_prompt"],
        width=line["width"],
        height=line["height"],
        steps=line["steps"],
        guidance_scale=line["guidance_scale"],
        true_cfg_scale=line["true_cfg_scale"],
        init=_init_image(line, root),
        strength=line["strength"],
        sampler=line["sampler"],
        seed=line["seed"],
        lora=line["lora"] or "",
    )


def _init_image(line: Mapping[str, Any], root: Path) -> InitImage | None:
    if line["init_sha256"] is None:
        return None
    file = str(root.absolute() / line["init_file"])  # A path that is whole stays as it is.
    return InitImage(line["init_sha256"], file, line["init_image"], line["init_offset"] or 0, line["init_bytes"])
