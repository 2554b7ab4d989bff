"""The engine on a CUDA device, against diffusers on the same device. Run by hand: pytest -m gpu."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from batchgen.engine.denoise import load_lanes
from batchgen.engine.engine import Engine
from batchgen.engine.relay import Relay
from batchgen.generator import Context, OutOfMemory
from batchgen.records import UNSAFE, Bucket, Failure, Image, Row, Work
from tests import checkers, tiny

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"


def engine_in(mode: str, kind: str = "sd1", dtype: str = "float16") -> Engine:
    """With one kind of attention kernels: timing would choose among them by chance for networks as small as these."""
    options = [f"engine.device={DEVICE}", f"model.dtype={dtype}", f"engine.mode={mode}", "engine.attention=flash"]
    return Engine(tiny.job(tiny.folder(kind), *options))


@functools.cache
def engine(kind: str, dtype: str) -> Engine:
    return engine_in("eager", kind, dtype)


@functools.cache
def pipeline(kind: str, dtype: str) -> Any:
    return tiny.reference_pipeline(tiny.folder(kind), DEVICE, torch_dtype=getattr(torch, dtype))


def rows(sampler: str, steps: tuple[int, ...] = (4, 9, 6)) -> list[Row]:
    prompts = ("a red cube", tiny.LONG, "")
    return [
        tiny.row(i, sampler=sampler, prompt=prompts[i], steps=steps[i], guidance_scale=2.0 + 2.3 * i, seed=7 + i)
        for i in range(3)
    ]


SAMPLERS = ["ddim", "pndm", "euler", "euler_ancestral", "heun", "deis", "dpmpp_2m", "dpmpp_2m_karras", "DDPMScheduler"]
OWN = ["UniPCMultistepScheduler"]


def batch_of(sampler: str) -> list[Row]:
    return rows(sampler, (5, 5, 5)) if sampler in OWN else rows(sampler)


@pytest.mark.parametrize("sampler", [*SAMPLERS, *OWN])
@pytest.mark.parametrize("kind", ["sd1", "sd2", "sdxl"])
@pytest.mark.usefixtures("whole_float32")
def test_float32_latents(kind: str, sampler: str) -> None:
    made = engine(kind, "float32")
    latents = tiny.denoise(made, batch_of(sampler))
    assert latents.device == torch.device(DEVICE)
    for i, row in enumerate(batch_of(sampler)):
        wanted = tiny.reference(pipeline(kind, "float32"), row, made.facts)[0]
        assert tiny.difference(latents[i], wanted) < 1e-4


@pytest.mark.parametrize("sampler", [*SAMPLERS, *OWN])
@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
def test_float16_pixels(kind: str, sampler: str) -> None:
    made = engine(kind, "float16")
    outcomes = made.submit(tiny.batch(batch_of(sampler), made.facts), tiny.never)()
    for row, outcome in zip(batch_of(sampler), outcomes, strict=True):
        assert isinstance(outcome, Image)
        wanted = np.asarray(tiny.reference(pipeline(kind, "float16"), row, made.facts, "pil")[0])
        assert tiny.psnr(outcome.pixels, wanted) >= 40


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("sampler", ["euler_ancestral", "pndm", "UniPCMultistepScheduler"])
def test_twice_the_same_bits(dtype: str, sampler: str) -> None:
    made = engine("sd1", dtype)
    first, second = (made.submit(tiny.batch(batch_of(sampler), made.facts), tiny.never)() for _ in range(2))
    for one, two in zip(first, second, strict=True):
        assert isinstance(one, Image)
        assert isinstance(two, Image)
        assert np.array_equal(one.pixels, two.pixels)


def test_noise_is_that_of_the_cpu() -> None:
    row = tiny.row(seed=2**63 + 5)
    drawn = [
        made.model.noise(row, torch.Generator("cpu").manual_seed(row.seed))
        for made in (engine("sd1", "float32"), tiny.engine("sd1"))
    ]
    assert torch.equal(*drawn)


def test_defaults_are_the_first_gpu_and_half_precision() -> None:
    made = Engine(tiny.load_job(overrides=["model.path=demo"]))
    assert made.device == torch.device("cuda:0")
    assert made.model.dtype == torch.float16
    assert made.versions["device"] == torch.cuda.get_device_name(0)


# The safety checker

JUDGED = [checkers.ROWS[i] for i in (0, 1, 2, 3, 5)]
"""Without the row that is flagged by five thousandths."""


def judging(dtype: str) -> Path:
    """The folder whose checker tells the pictures apart that this GPU makes."""
    return checkers.folder(f"engine.device={DEVICE}", f"model.dtype={dtype}", "engine.attention=flash")


@functools.cache
def checked(dtype: str = "float16") -> Engine:
    options = [f"engine.device={DEVICE}", f"model.dtype={dtype}", "engine.mode=graph", "engine.attention=flash"]
    return Engine(tiny.job(judging(dtype), "engine.safety_checker=true", *options))


def unsafe(made: Engine, rows: list[Row], size: int | None = None) -> list[bool]:
    outcomes = made.submit(tiny.batch(rows, made.facts, size), tiny.never)()
    return [isinstance(one, Failure) and one.error == UNSAFE for one in outcomes]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_is_flagged_is_what_diffusers_flags(dtype: str) -> None:
    pipe = tiny.reference_pipeline(judging(dtype), DEVICE, checks_safety=True, torch_dtype=getattr(torch, dtype))
    pipe.scheduler = diffusers.DDIMScheduler.from_config(pipe.own_scheduler.config, clip_sample=False)
    for rows in (JUDGED, JUDGED[::-1], *([row] for row in JUDGED)):
        wanted = pipe(
            prompt=[row.prompt for row in rows],
            width=64,
            height=64,
            num_inference_steps=rows[0].steps,
            guidance_scale=rows[0].guidance_scale,
            generator=[torch.Generator("cpu").manual_seed(row.seed) for row in rows],
            output_type="np",
        ).nsfw_content_detected
        assert unsafe(checked(dtype), rows) == wanted == [row in (JUDGED[1], JUDGED[4]) for row in rows]
    assert unsafe(checked(dtype), JUDGED, 8) == [False, True, False, False, True]


def test_a_finding_is_the_same_bits_whatever_shares_its_chunk() -> None:
    safety = checked()._safety
    assert safety is not None
    pictures = checkers.noise(7, 96, 72)
    with torch.inference_mode():
        together = safety._cosines(pictures)
        for i, picture in enumerate(pictures):
            assert np.array_equal(safety._cosines([picture])[0], together[i])


def test_a_batch_is_judged_while_the_next_one_is_at_work() -> None:
    """The device is kept busy for some seconds after the first batch, whose findings are there before that ends."""
    made = checked()
    unsafe(made, JUDGED)
    first = made.submit(tiny.batch(JUDGED, made.facts), tiny.never)
    torch.cuda._sleep(5_000_000_000)
    second = made.submit(tiny.batch(JUDGED, made.facts), tiny.never)
    end = torch.cuda.Event()
    end.record()
    outcomes = first()
    assert not end.query()
    assert [isinstance(one, Failure) for one in outcomes] == [False, True, False, False, True]
    assert len(second()) == len(JUDGED)


# Captured and compiled steps


def latents(mode: str, sampler: str, dtype: str) -> tuple[torch.Tensor, Engine]:
    made = engine_in(mode, dtype=dtype)
    return tiny.denoise(made, rows(sampler)), made


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("sampler", ["euler", "pndm", "euler_ancestral", "dpmpp_2m"])
def test_a_graph_gives_eagers_bits(sampler: str, dtype: str) -> None:
    wanted, _ = latents("eager", sampler, dtype)
    made, captured = latents("graph", sampler, dtype)
    assert [one.mode for one in captured.steps.captures] == ["graph"]
    assert torch.equal(made, wanted)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("sampler", ["euler", "pndm", "euler_ancestral", "dpmpp_2m"])
def test_lanes_are_refilled_without_waiting_and_with_the_bits_of_each_row_alone(
    sampler: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refill = Relay.refill

    def unwaiting(*arguments: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            refill(*arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(Relay, "refill", unwaiting)
    many = [dataclasses.replace(rows(sampler)[i % 3], seed=i, steps=3 + 2 * (i % 4)) for i in range(8)]
    eager, captured = engine_in("eager", dtype=dtype), engine_in("graph", dtype=dtype)
    alone = torch.cat([tiny.denoise(eager, [row], 3) for row in many])
    for made in (eager, captured):
        assert torch.equal(tiny.denoise(made, many, 3), alone)
    assert [one.mode for one in captured.steps.captures] == ["graph"]


@pytest.mark.parametrize("sampler", ["ddim", "euler_ancestral"])
def test_batch_size_does_not_matter(sampler: str) -> None:
    """Cases 1 and 8: seeds 1 to 5 alone, and in fours with a tail of one."""
    made = engine_in("graph", dtype="float32")
    five = [tiny.row(i, seed=1 + i, prompt="a boat", sampler=sampler) for i in range(5)]
    alone = [tiny.denoise(made, [row]) for row in five]
    fours = torch.cat([tiny.denoise(made, five[:4]), tiny.denoise(made, five[4:], 4)])
    assert max(map(tiny.difference, alone, fours.split(1))) < 5e-3
    assert tiny.difference(fours[0], fours[1]) > 0.1
    tables = made.tables(five)
    together = load_lanes(made.model, five, tables)
    for i in range(5):
        own = load_lanes(made.model, five[i : i + 1], tables[i : i + 1])
        assert torch.equal(own.latents[0], together.latents[i])
        assert torch.equal(own.noise[0], together.noise[i])


@pytest.mark.parametrize("sampler", ["ddim", "pndm"])
def test_nan_stays_in_its_row_and_its_replays(sampler: str) -> None:
    """Case 32: a row that overflows, then another batch through the same graph."""
    made = engine_in("graph")
    good = [tiny.row(i, sampler=sampler) for i in range(3)]
    before = made.submit(tiny.batch(good, made.facts), tiny.never)()
    poisoned = [good[0], dataclasses.replace(good[1], guidance_scale=1e38), good[2]]
    among = made.submit(tiny.batch(poisoned, made.facts), tiny.never)()
    after = made.submit(tiny.batch(good, made.facts), tiny.never)()
    assert isinstance(among[1], Failure)
    assert among[1].error == "NotFinite"
    for i, outcomes in ((0, among), (2, among), (0, after), (1, after), (2, after)):
        one, wanted = outcomes[i], before[i]
        assert isinstance(one, Image)
        assert isinstance(wanted, Image)
        assert np.array_equal(one.pixels, wanted.pixels)
    assert [one.mode for one in made.steps.captures] == ["graph"]


@pytest.mark.parametrize("changed", ["prompt", "negative_prompt", "seed", "steps", "guidance_scale"])
def test_what_changes_after_the_capture_is_followed(changed: str) -> None:
    """Case 35."""
    made, batch = engine_in("graph"), rows("ddim")
    before = tiny.denoise(made, batch).clone()
    value: Any = {"prompt": "another", "negative_prompt": "else", "seed": 99, "steps": 5, "guidance_scale": 9.0}[
        changed
    ]
    after = tiny.denoise(made, [dataclasses.replace(batch[0], **{changed: value}), *batch[1:]])
    assert not torch.equal(after[0], before[0])
    assert torch.equal(after[1:], before[1:])
    assert len(made.steps.captures) == 1


def test_compiled_steps_are_near_eager() -> None:
    wanted, _ = latents("eager", "euler", "float16")
    for mode in ("compiled", "compiled+graph"):
        made, compiled = latents(mode, "euler", "float16")
        assert [one.mode for one in compiled.steps.captures] == [mode]
        assert tiny.difference(made, wanted) <= 5e-3


def test_captures_of_many_groups_keep_the_memory_of_one() -> None:
    """Forty sizes, each captured at two batch sizes, hold no more at the end than the largest did."""
    made = engine_in("graph")
    held = []
    for side in range(40):
        for size in (4, 1):
            batch = [tiny.row(i, width=512 - 8 * side, height=512, steps=2) for i in range(size)]
            tiny.denoise(made, batch)
        held.append(torch.cuda.memory_reserved())
    assert len(made.steps.captures) == 80
    assert held[-1] <= max(held[:2]) + 64 * 2**20


def test_the_queue_runs_ahead_of_the_host() -> None:
    """Two batches are submitted before the first one's pixels are asked for, through one graph: case 34."""
    made = engine_in("graph")
    eager = engine("sd1", "float16")
    batches = [[tiny.row(i, seed=10 * k + i, steps=5) for i in range(3)] for k in range(4)]
    pending = [made.submit(tiny.batch(batch, made.facts), tiny.never) for batch in batches]
    for batch, outcomes in zip(batches, [one() for one in pending], strict=True):
        for outcome, wanted in zip(outcomes, eager.submit(tiny.batch(batch, eager.facts), tiny.never)(), strict=True):
            assert isinstance(outcome, Image)
            assert isinstance(wanted, Image)
            assert np.array_equal(outcome.pixels, wanted.pixels)


def test_memory_that_runs_out_is_named_as_such_and_leaves_a_working_engine() -> None:
    """Case 33, with a real lack of memory."""
    made = engine_in("graph")
    batch = [tiny.row(i, steps=2) for i in range(2)]
    before = made.submit(tiny.batch(batch, made.facts), tiny.never)()
    large = [tiny.row(0, width=1024, height=1024, steps=1)]
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**25) / total)
    try:
        with pytest.raises(OutOfMemory):
            made.submit(tiny.batch(large, made.facts, 16), tiny.never)()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    after = made.submit(tiny.batch(batch, made.facts), tiny.never)()
    for one, two in zip(before, after, strict=True):
        assert isinstance(one, Image)
        assert isinstance(two, Image)
        assert np.array_equal(one.pixels, two.pixels)


def test_auto_times_the_kernels_and_settles_a_choice() -> None:
    settled: dict[str, str] = {}
    said: list[str] = []
    group = tiny.batch(rows("euler"), engine("sd1", "float16").facts).group
    context = Context(
        said.append, lambda name, value: settled.setdefault(name, value), {Bucket(group, 3): Work(50, 5000)}
    )
    made = Engine(tiny.job(tiny.folder("sd1"), f"engine.device={DEVICE}"), context)
    outcomes = made.submit(tiny.batch(rows("euler"), made.facts), tiny.never)()
    assert [type(one) for one in outcomes] == [Image] * 3
    (name,) = settled
    choice = json.loads(settled[name])
    assert choice["attention"] in ("flash", "cudnn")
    assert choice["modes"][str(Bucket(group, 3))] != "eager"
    assert any("attention kernels" in line for line in said)


@pytest.mark.parametrize("mode", ["eager", "graph", "regional+graph"])
@pytest.mark.parametrize("kind", ["sd1", "sdxl"])
@pytest.mark.usefixtures("whole_float32")
def test_rows_from_an_image_take_turns(kind: str, mode: str) -> None:
    """Three rows in two lanes, two of which begin from a picture; in float32, against diffusers on the device."""
    made, asked = engine_in(mode, kind, "float32"), rows("euler_ancestral")
    begun = [dataclasses.replace(row, init=tiny.init_image(i), strength=0.6) for i, row in enumerate(asked[:2])]
    latents = tiny.denoise(made, [*begun, asked[2]], 2)
    for row, found in zip([*begun, asked[2]], latents, strict=True):
        wanted = tiny.reference(pipeline(kind, "float32"), row, made.facts)[0]
        assert tiny.difference(found, wanted) < (1e-4 if "regional" not in mode else 1e-2)
