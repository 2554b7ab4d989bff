"""Every captured family on a CUDA device, against diffusers' own pipeline. Run by hand: pytest -m gpu."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from batchgen.engine.whole import open_model
from batchgen.records import Batch, Image, Pixels
from tests import families, tiny
from tests.test_families import CAPTURED, PADDED, mixed

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"


def pixels(engine: Any, asked: Sequence[Batch]) -> dict[int, Pixels]:
    """By the row's index."""
    outcomes = [one for batch in asked for one in engine.submit(batch, tiny.never)()]
    assert {type(one) for one in outcomes} == {Image}
    return {one.row.index: one.pixels for one in outcomes}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [*CAPTURED, PADDED])
@pytest.mark.usefixtures("whole_float32")
def test_a_captured_step_has_eagers_bits_and_makes_diffusers_picture(kind: str, dtype: str) -> None:
    is_padded, kind = kind == PADDED, "qwen" if kind == PADDED else kind
    options = [f"engine.device={DEVICE}", f"model.dtype={dtype}", "engine.attention=flash"]
    eager, captured = (
        open_model(tiny.job(families.folder(kind), *options, f"engine.mode={mode}"), None)
        for mode in ("eager", "graph")
    )
    rows = mixed(kind)
    asked = [families.padded(kind, rows)] if is_padded else families.batches(kind, rows)
    made, wanted = pixels(captured, asked), pixels(eager, asked)
    assert [one.mode for one in captured.steps.captures] == ["graph"] * len(asked)
    for row in rows:
        assert np.array_equal(made[row.index], wanted[row.index])
        if dtype == "float32":
            assert tiny.psnr(made[row.index], np.asarray(families.reference(kind, row))) >= 40
