"""Check what the README's first command made: `check_quickstart.py MANIFEST RUN_DIRECTORY`. Exits 1 with the fault."""

from __future__ import annotations

import sys
from pathlib import Path

import datasets
import pyarrow.parquet as pq

GIVEN = ("prompt", "negative_prompt", "width", "height", "steps", "guidance_scale", "seed")
NEVER_NULL = ("id", "width", "height", "steps", "guidance_scale", "sampler", "seed", "noise_seed", "model",
              "file_name", "bytes", "sha256", "pixel_sha256", "format", "batch_size", "mode")  # fmt: skip


def main(manifest: Path, folder: Path) -> None:
    """Compare manifest, metadata and images of a finished run in the `files` format."""
    asked = {row["id"]: row for row in pq.read_table(manifest).to_pylist()}
    made = {row["id"]: row for row in pq.read_table(folder / "metadata.parquet").to_pylist()}
    expect((folder / "_SUCCESS").is_file(), "there is no _SUCCESS")
    expect(made.keys() == asked.keys(), f"metadata has {len(made)} rows, the manifest {len(asked)}")
    for name, row in made.items():
        check_row(asked[name], row, folder)
    images = list((folder / "data").rglob("*.png"))
    expect(len(images) == len(asked), f"there are {len(images)} images for {len(asked)} rows")
    check_loaded(made, str(folder))
    print(f"{len(images)} images of {len(asked)} rows: metadata, files and load_dataset agree")


def check_row(asked: dict[str, object], made: dict[str, object], folder: Path) -> None:
    """One row: what the manifest gave is what metadata says, and the file is there."""
    expect(all(made[column] is not None for column in NEVER_NULL), f"metadata of {made['id']} has nulls: {made}")
    for column in GIVEN:
        expect(asked[column] in (None, made[column]), f"{made['id']}: {column} is {made[column]}, not {asked[column]}")
    size = (folder / str(made["file_name"])).stat().st_size
    expect(size == made["bytes"], f"{made['file_name']} has {size} bytes, not {made['bytes']}")


def check_loaded(made: dict[str, dict[str, object]], folder: str) -> None:
    """`load_dataset` gives every image once, of the size that its own row says."""
    data = datasets.load_dataset(folder, split="train")
    expect(sorted(data["id"]) == sorted(made), "load_dataset gives other rows than metadata.parquet")
    for row in data:
        expect(row["prompt"] == made[row["id"]]["prompt"], f"{row['id']} has another prompt in the dataset")
        expect(row["image"].size == (row["width"], row["height"]), f"{row['id']} is {row['image'].size}")


def expect(is_so: bool, fault: str) -> None:
    """End the program with the fault unless it is so."""
    if not is_so:
        sys.exit(f"check_quickstart: {fault}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
