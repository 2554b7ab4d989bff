"""LoRA sets at work: parity with diffusers' own pipeline, and swaps that leave nothing behind."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchgen.engine.whole import open_model
from batchgen.records import Image, Row
from tests import families, loras, tiny


def engine(kind: str, sets: dict[str, Any], *overrides: str) -> Any:
    told = ", ".join(f"{name} = [{', '.join(map(_file, files))}]" for name, files in sets.items())
    return open_model(tiny.job(families.folder(kind), f"model.loras={{{told}}}", *overrides), None)


def _file(file: tuple[Path, float]) -> str:
    return f"{{path = {json.dumps(str(file[0]))}, scale = {file[1]}}}"


def made(maker: Any, rows: list[Row], lora: str = "") -> list[np.ndarray]:
    """The rows' pixels, made with a set."""
    batch = tiny.batch([dataclasses.replace(row, lora=lora) for row in rows], maker.facts)
    batch = dataclasses.replace(batch, group=dataclasses.replace(batch.group, lora=lora))
    maker.prepare([batch], tiny.never)
    found = maker.submit(batch, tiny.never)()
    assert all(isinstance(one, Image) for one in found), found
    return [one.pixels for one in found]


def deviation(left: Any, right: Any) -> int:
    return int(np.abs(np.asarray(left, int) - np.asarray(right, int)).max())


KINDS = {"sd1": {}, "sdxl": {}, "sd3": {"sampler": "euler"}, "flux": {"sampler": "euler"}}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_what_diffusers_makes_with_the_set_and_no_set_leaves_anything_behind(kind: str) -> None:
    sets = {"one": [(loras.file(kind, 1), 1.0)], "net": [(loras.file(kind, 2, with_texts=False), 1.0)]}
    maker, plain = engine(kind, sets, "engine.mode=graph"), engine(kind, {}, "engine.mode=graph")
    rows = [tiny.row(i, steps=2 + i, guidance_scale=3.0, **KINDS[kind]) for i in range(2)]
    without = made(plain, rows)
    for lora, seed, with_texts in (("one", 1, True), ("net", 2, False)):
        found = made(maker, rows, lora)
        for row, pixels, bare in zip(rows, found, without, strict=True):
            wanted = reference(loras.pipeline(kind, seed, with_texts=with_texts), row, maker.facts)
            assert deviation(pixels, wanted) <= 1
            assert deviation(pixels, bare) > 8
        again = made(maker, rows)
        assert all(np.array_equal(one, other) for one, other in zip(again, without, strict=True))
    assert [one.mode for one in maker.steps.captures] == ["graph"]


def reference(pipe: Any, row: Row, facts: Any) -> Any:
    return tiny.reference(pipe, row, facts, "pil")[0]
