"""What makes the run directory a dataset that `datasets` opens: its card, and the image folder's table."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from batchgen.carried import as_text, is_folder_readable

_DATA_FILES = {"files": "data/**", "webdataset": "data/*.tar", "parquet": "data/*.parquet"}
"""By `[output] format`. Always with a named split: left to itself, `datasets` makes splits of file names that
hold "test" or "train", and takes a folder of one image for a Parquet data set."""

_TEMPLATE = """\
---
task_categories:
- text-to-image
tags:
- synthetic
configs:
- config_name: default
  description: "the images of metadata.parquet {digest}"
  data_files:
  - split: train
    path: "{data_files}"
---
# {name}

{num_images:,} images made by batchgen {version} with the model `{model}`{failures}

```python
from datasets import load_dataset

images = load_dataset("path/to/this/folder", split="train")
```

`metadata.parquet` has one line per image: prompt and every parameter, the file's name, its sha256 and that
of its pixels.{format_note}
"""

_FORMAT_NOTES = {
    "files": """ `data/metadata.parquet` is the same table for the image folder reader: there seeds, and
columns of your own that the reader cannot hold, are text.""",
    "webdataset": """ In the tars each image has a JSON file of its parameters, seeds and columns of your own
as text; what is null there is "" or 0 and its name stands in `nulls`.""",
    "parquet": " The parts in `data/` hold the images and the same columns.",
}


def card(
    *, name: str, output_format: str, model: str, version: str, digest: str, num_images: int, num_failed: int = 0
) -> str:
    """The text of the run directory's README.md.

    `digest` is that of the metadata: `datasets` keeps what it has read under the folder's name and the card's words,
    and would take another run in a folder of the same name for this one.
    """
    return _TEMPLATE.format(
        name=_one_line(name),
        data_files=_DATA_FILES[output_format],
        num_images=num_images,
        version=version,
        digest=digest[:16],
        model=_one_line(model).replace("`", "'"),
        failures=f"; {num_failed:,} rows failed, see `failures.parquet`." if num_failed else ".",
        format_note=_FORMAT_NOTES[output_format],
    )


def image_folder_table(table: pa.Table) -> pa.Table:
    """Rows of `metadata.parquet` as `data/metadata.parquet` has them, for the format `files`.

    File names are relative to `data/` and stand first. Seeds are text, and so are carried columns that the
    reader cannot hold; a carried column whose name ends in "file_name" or "file_names" would be opened as
    images and gets "_" behind its name. Chunks of one table give chunks of one schema.
    """
    columns = {"file_name": pc.utf8_slice_codeunits(table["file_name"], len("data/"))}
    for field in table.schema:
        if not is_folder_readable(field.type):
            columns[_free_name(field.name, table.schema.names)] = as_text(table[field.name])
        elif field.name != "file_name":
            columns[_free_name(field.name, table.schema.names)] = table[field.name]
    return pa.table(columns)


def _free_name(name: str, taken: list[str]) -> str:
    if not name.endswith(("file_name", "file_names")):
        return name
    free = name + "_"
    while free in taken:
        free += "_"
    return free


def _one_line(text: str) -> str:
    return " ".join(text.split())
