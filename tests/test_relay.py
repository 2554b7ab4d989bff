"""More rows than lanes: each row is what it is alone in as many lanes, whoever had its lane before."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from batchgen.engine.engine import Engine
from batchgen.engine.relay import Relay
from batchgen.generator import Dropped
from batchgen.records import Image, Row
from batchgen.schedule import makespan
from tests import tiny

SAMPLERS = ["ddim", "euler_ancestral", "dpmpp_2m", "pndm", "heun"]
STEPS = (2, 7, 3, 4, 2, 5)
LANES = 2


def mixed(sampler: str, is_guided: bool = True, steps: Sequence[int] = STEPS) -> list[Row]:
    """Rows that differ in all that a batch may mix."""
    negatives = [None, "", "blurry"]
    return [
        tiny.row(
            i,
            sampler=sampler,
            steps=num,
            seed=40 + i,
            prompt=f"picture {i}",
            negative_prompt=negatives[i % 3],
            guidance_scale=2.0 + i if is_guided else 1.0,
        )
        for i, num in enumerate(steps)
    ]


@pytest.fixture(scope="module")
def captured() -> dict[str, Engine]:
    return {kind: Engine(tiny.job(tiny.folder(kind), "engine.mode=graph")) for kind in ("sd1", "sdxl")}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(("kind", "is_guided"), [("sd1", True), ("sd1", False), ("sdxl", True)])
def test_a_row_is_what_it_is_alone(captured: dict[str, Engine], kind: str, is_guided: bool, sampler: str) -> None:
    """Case 36, bit for bit, launched one by one and as replays of one capture."""
    eager, rows = tiny.engine(kind), mixed(sampler, is_guided)
    alone = torch.cat([tiny.denoise(eager, [row], LANES) for row in rows])
    for engine in (eager, captured[kind]):
        assert torch.equal(tiny.denoise(engine, rows, LANES), alone)


@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
def test_pixels_are_those_of_diffusers(kind: str) -> None:
    """Rows of 5, 10 and 20 steps in two lanes, each against a call for that row alone."""
    engine, rows = tiny.engine(kind), mixed("euler", steps=(5, 20, 10, 5, 10))
    outcomes = engine.submit(tiny.batch(rows, engine.facts, LANES), tiny.never)()
    for row, made in zip(rows, outcomes, strict=True):
        assert isinstance(made, Image)
        assert (made.row, made.batch_size) == (row, LANES)
        wanted = np.asarray(tiny.reference(tiny.pipeline(kind), row, engine.facts, "pil")[0])
        assert np.abs(made.pixels.astype(int) - wanted.astype(int)).max() <= 1


@pytest.mark.parametrize("changes", [{"seed": 9}, {"prompt": tiny.LONG}, {"guidance_scale": 9.0}, {"steps": 9}])
def test_another_neighbour_changes_nothing(captured: dict[str, Engine], changes: dict[str, object]) -> None:
    """More steps also change lanes and turns of the others."""
    rows = mixed("euler_ancestral")
    for engine in (tiny.engine("sd1"), captured["sd1"]):
        before = tiny.denoise(engine, rows, LANES)
        after = tiny.denoise(engine, [rows[0], dataclasses.replace(rows[1], **changes), *rows[2:]], LANES)
        assert not torch.equal(after[1], before[1])
        assert torch.equal(after[[0, 2, 3, 4, 5]], before[[0, 2, 3, 4, 5]])


def test_nan_leaves_with_its_row() -> None:
    """Whatever a row has left in its lane, the next one does not see it: 0 × NaN is NaN."""
    engine, rows = tiny.engine("sd1"), mixed("pndm", steps=(6, 6, 3, 3))
    good = tiny.denoise(engine, rows, LANES)
    poisoned = tiny.denoise(engine, [dataclasses.replace(rows[0], guidance_scale=1e38), *rows[1:]], LANES)
    assert not poisoned[0].isfinite().all()
    assert torch.equal(poisoned[1:], good[1:])


def test_a_batch_can_be_dropped_between_turns(captured: dict[str, Engine]) -> None:
    """As early as in a batch without turns, and nothing of it is left in the next."""
    rows = mixed("pndm")
    for engine in (tiny.engine("sd1"), captured["sd1"]):
        wanted, asked = tiny.denoise(engine, rows, LANES), 0

        def after_eight() -> bool:
            nonlocal asked
            asked += 1
            return asked > 8

        with pytest.raises(Dropped):
            engine.submit(tiny.batch(rows, engine.facts, LANES), after_eight)()
        assert asked == 9
        assert torch.equal(tiny.denoise(engine, rows, LANES), wanted)


def test_a_batch_takes_as_many_evaluations_as_its_busiest_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, rows, num = tiny.engine("sd1"), mixed("ddim"), 0
    predict = engine.model.predict

    def counted(*arguments: object) -> torch.Tensor:
        nonlocal num
        num += 1
        return predict(*arguments)

    monkeypatch.setattr(engine.model, "predict", counted)
    tiny.denoise(engine, rows, LANES)
    assert num == makespan(STEPS, LANES) == 12


def test_step_noise_is_held_for_no_more_rows_than_lanes() -> None:
    engine, rows = tiny.engine("sd1"), mixed("euler_ancestral")
    batch = tiny.batch(rows, engine.facts, LANES)
    tables = [engine.samplers.table(row.sampler, row.steps) for row in rows]
    lanes, told = Relay(engine.model, rows, tables, engine.conditioning(batch), LANES).first(0)
    assert lanes.noise.shape[:2] == (LANES, max(STEPS))
    assert len(told.guidance) == LANES


def test_a_captured_bucket_serves_any_number_of_rows(captured: dict[str, Engine]) -> None:
    engine = captured["sd1"]
    tiny.denoise(engine, mixed("ddim"), LANES)
    num = len(engine.steps.captures)
    for rows in (mixed("ddim")[:1], mixed("ddim")[:2], mixed("ddim")):
        tiny.denoise(engine, rows, LANES)
    assert len(engine.steps.captures) == num
