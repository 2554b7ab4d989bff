"""What `plan` and `run` say of a manifest before a night is spent on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen.planned import plan_manifest
from tests import loras, runs, tiny
from tests.plans import planned
from tests.test_init_images import encoded

STRENGTH = "sampling.strength has no effect: no row begins from an image"
NEGATIVE = "sampling.negative_prompt has no effect: no row has a guidance_scale by which it is guided"


@pytest.mark.parametrize(
    ("override", "columns", "note"),
    [
        ("sampling.strength=0.5", {}, STRENGTH),
        ("sampling.strength=0.5", {"image": [None, encoded(64, 64)]}, ""),
        ("sampling.negative_prompt='x'", {"guidance_scale": [1.0, 0.5]}, NEGATIVE),
        ("sampling.negative_prompt='x'", {"guidance_scale": [1.0, 1.5]}, ""),
    ],
)
def test_a_default_that_no_row_is_made_by(
    tmp_path: Path, override: str, columns: dict[str, list[object]], note: str
) -> None:
    """It is no mistake: a job file serves many manifests."""
    notes = planned(tmp_path, {"prompt": ["a", "b"], **columns}, overrides=[override]).notes
    assert [one for one in notes if "has no effect" in one] == [note] * bool(note)


def test_lora_sets_that_no_row_has(tmp_path: Path) -> None:
    """A column that was forgotten is seen before the run, not in its pictures."""
    file = f"[{{path = '{loras.file('demo', 1)}'}}]"
    told = f"model.loras={{here = {file}, there = {file}, idle = {file}}}"
    source = runs.manifest(tmp_path / "m.parquet", {"prompt": ["a", "b"], "lora": ["here", None]})
    job = tiny.job("demo", told, "sampling.lora='there'")
    idle = [one for one in plan_manifest([source], job).notes if "LoRA" in one]
    assert idle == [
        "LoRA sets of model.loras that no row has: 'idle'; rows take one by the column lora or by sampling.lora"
    ]
