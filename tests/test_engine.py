"""Batches through the engine: neighbours, seeds, tokens, faults, padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from batchgen.engine.compiling import Compiler
from batchgen.engine.decode import Decoder
from batchgen.engine.denoise import load_lanes
from batchgen.engine.engine import Engine
from batchgen.engine.graphs import GraphPool
from batchgen.engine.prompts import Prompts
from batchgen.engine.residence import Residence
from batchgen.errors import UsageError
from batchgen.generator import Dropped, open_generator
from batchgen.models import demo
from batchgen.models.family import Network
from batchgen.models.folder import facts_of, find_model
from batchgen.models.tokens import count_tokens, load_tokenizer
from batchgen.records import Failure, Image, Outcome, Row
from batchgen.weights import Model
from tests import tiny


def generate(engine: Engine, rows: Sequence[Row], size: int | None = None) -> list[Outcome]:
    return engine.submit(tiny.batch(rows, engine.facts, size), tiny.never)()


def images(engine: Engine, rows: Sequence[Row], size: int | None = None) -> list[Image]:
    outcomes = generate(engine, rows, size)
    assert all(isinstance(outcome, Image) for outcome in outcomes)
    return [outcome for outcome in outcomes if isinstance(outcome, Image)]


def in_batches(engine: Engine, rows: Sequence[Row], size: int) -> list[Image]:
    cuts = (rows[start : start + size] for start in range(0, len(rows), size))
    return [image for cut in cuts for image in images(engine, cut)]


def deviation(left: Image, right: Image) -> int:
    return int(np.abs(left.pixels.astype(int) - right.pixels.astype(int)).max())


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny.engine("sd1")


@pytest.mark.parametrize("sampler", ["pndm", "euler_ancestral", "DDPMScheduler"])
def test_batch_size_does_not_matter(engine: Engine, sampler: str) -> None:
    """Cases 1 and 8: seeds 1 to 5 alone, and in fours with a tail of one; step noise is the row's own too."""
    rows = [tiny.row(i, seed=1 + i, prompt="a boat", sampler=sampler) for i in range(5)]
    alone, fours = in_batches(engine, rows, 1), in_batches(engine, rows, 4)
    assert max(map(deviation, alone, fours)) <= 1
    assert [image.batch_size for image in fours] == [4, 4, 4, 4, 1]
    assert [image.row for image in fours] == rows
    assert min(deviation(fours[i], fours[i + 1]) for i in range(4)) > 1


def test_a_rows_noise_is_the_same_bits_in_any_batch(engine: Engine) -> None:
    rows = [tiny.row(i, seed=1 + i, sampler="euler_ancestral") for i in range(4)]
    tables = [engine.samplers.table(row.sampler, row.steps) for row in rows]
    together = load_lanes(engine.model, rows, tables)
    for i in range(4):
        alone = load_lanes(engine.model, rows[i : i + 1], tables[i : i + 1])
        assert torch.equal(alone.latents[0], together.latents[i])
        assert torch.equal(alone.noise[0], together.noise[i])


def test_only_what_the_form_needs_is_remembered(engine: Engine) -> None:
    def lanes(sampler: str):
        return load_lanes(engine.model, [tiny.row(sampler=sampler)], [engine.samplers.table(sampler, 3)])

    assert (lanes("ddim").previous, lanes("ddim").earlier.numel(), lanes("ddim").noise.numel()) == (
        None,
        0,
        0,
    )
    assert lanes("heun").earlier.shape[1] == 1
    assert lanes("pndm").earlier.shape[1] == 3
    assert lanes("euler_ancestral").noise.shape[1] == 3


def test_equal_seeds_give_equal_images(engine: Engine) -> None:
    """Case 5."""
    made = images(engine, [tiny.row(i, seed=seed, prompt="a boat") for i, seed in enumerate((1, 1, 2))])
    assert np.array_equal(made[0].pixels, made[1].pixels)
    assert not np.array_equal(made[0].pixels, made[2].pixels)


def test_a_long_neighbour_changes_nothing(engine: Engine) -> None:
    """Case 6: the same bits beside 200 words as beside one."""
    short, one, long = tiny.row(0), tiny.row(1, prompt="b"), tiny.row(1, prompt=tiny.LONG)
    beside_one, beside_long = images(engine, [short, one]), images(engine, [short, long])
    assert np.array_equal(beside_one[0].pixels, beside_long[0].pixels)
    assert not np.array_equal(beside_one[1].pixels, beside_long[1].pixels)


def test_encoding_and_decoding_do_not_depend_on_what_else_is_to_do(engine: Engine) -> None:
    texts = [f"text {i}" for i in range(11)]
    folder = find_model(Model(path=str(tiny.folder("sd1"))))
    together = Prompts(engine.model, engine._loras, Residence("gpu", engine.model, folder)).encoded("", texts)
    for text in texts:
        alone = Prompts(engine.model, engine._loras, Residence("offload", engine.model, folder)).encoded("", [text])
        assert torch.equal(alone[text][0], together[text][0])
    latents = torch.randn(6, 4, 8, 8)
    decoder = Decoder(engine.model, Compiler(engine.model), GraphPool(engine.device), print)
    decoded = decoder.start(latents, "eager", 4)()
    for i in range(6):
        alone = decoder.start(latents[i : i + 1], "eager", 4)()[0]
        assert isinstance(alone, np.ndarray)
        assert np.array_equal(decoded[i], alone)


def test_tokens_are_counted(engine: Engine) -> None:
    """Case 9. The tiny tokenizer makes one token of a byte."""
    rows = [
        tiny.row(0, prompt="a" * 75),
        tiny.row(1, prompt="a" * 100),
        tiny.row(2, prompt=""),
        tiny.row(3, prompt="abc", negative_prompt="b" * 80),
    ]
    counts = [(image.tokens, image.tokens_dropped) for image in images(engine, rows)]
    assert counts == [(75, 0), (75, 25), (0, 0), (3, 5)]
    unguided = images(engine, [dataclasses.replace(rows[3], guidance_scale=1.0)])
    assert unguided[0].tokens_dropped == 0, "an unguided row reads no negative prompt"


def test_tokens_are_counted_without_the_model() -> None:
    model = tiny.job(tiny.folder("sd1")).model
    tokenizer, known = load_tokenizer(model), facts_of(model)
    assert [(count.read, count.dropped) for count in count_tokens(tokenizer, ["ab c", "a" * 80], known)] == [
        (3, 0),
        (75, 5),
    ]
    assert load_tokenizer(tiny.job("pattern").model) is None
    assert count_tokens(tokenizer, [], known) == []


def test_null_negative_prompt_is_the_empty_one(engine: Engine) -> None:
    """Case 11 as far as this family goes; a text negative prompt differs."""
    rows = [
        tiny.row(i, prompt="a\x00b", seed=3, negative_prompt=negative) for i, negative in enumerate((None, "", "x"))
    ]
    null, empty, text = images(engine, rows)
    assert np.array_equal(null.pixels, empty.pixels)
    assert not np.array_equal(null.pixels, text.pixels)


def test_padding_is_never_returned(engine: Engine) -> None:
    """Case 19 as far as the engine goes: five rows in a batch of eight."""
    rows = [tiny.row(i) for i in range(5)]
    padded, full = images(engine, rows, 8), images(engine, [*rows, *(tiny.row(9) for _ in range(3))])
    assert [image.row for image in padded] == rows
    assert {image.batch_size for image in padded} == {8}
    assert all(np.array_equal(a.pixels, b.pixels) for a, b in zip(padded, full[:5], strict=True))


def test_the_same_batch_twice_is_the_same_bits(engine: Engine) -> None:
    rows = [tiny.row(i, sampler="euler_ancestral", steps=3 + i) for i in range(3)]
    assert all(
        np.array_equal(a.pixels, b.pixels)
        for a, b in zip(images(engine, rows), images(Engine(tiny.job(tiny.folder("sd1"))), rows), strict=True)
    )


@pytest.mark.parametrize("sampler", ["ddim", "UniPCMultistepScheduler"])
def test_a_batch_can_be_dropped_between_evaluations(engine: Engine, sampler: str) -> None:
    asked = 0

    def after_two() -> bool:
        nonlocal asked
        asked += 1
        return asked > 2

    with pytest.raises(Dropped):
        engine.submit(tiny.batch([tiny.row(sampler=sampler, steps=5)], engine.facts), after_two)()
    assert asked == 3


class TestFaults:
    """Case 32: what is no picture fails alone."""

    @pytest.fixture
    def faulty(self, monkeypatch: pytest.MonkeyPatch) -> Engine:
        """An engine whose decoder gives NaN for row 1, Inf for row 2 and one colour for row 3."""
        engine = Engine(tiny.job(tiny.folder("sd1")))
        right = engine.model.decode

        def wrong(decoder: Network, latents: torch.Tensor) -> torch.Tensor:
            images = right(decoder, latents).clone()
            images[1, 0, 5, 5] = torch.nan
            images[2, 0, 5, 5] = torch.inf
            images[3] = torch.tensor([0.1, 0.2, 0.3])[:, None, None]
            return images

        monkeypatch.setattr(engine.model, "decode", wrong)
        return engine

    def test_rows_fail_alone(self, engine: Engine, faulty: Engine) -> None:
        rows = [tiny.row(i) for i in range(4)]
        good, outcomes = images(engine, rows), generate(faulty, rows)
        assert isinstance(outcomes[0], Image)
        assert np.array_equal(outcomes[0].pixels, good[0].pixels)
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        assert [failure.error for failure in failures] == ["NotFinite", "NotFinite", "Constant"]
        assert [failure.row for failure in failures] == rows[1:]

    @pytest.mark.parametrize("sampler", ["ddim", "pndm", "UniPCMultistepScheduler"])
    def test_nan_stays_in_its_row_and_its_batch(self, engine: Engine, sampler: str) -> None:
        rows = [tiny.row(i, sampler=sampler) for i in range(3)]
        before = images(engine, rows)
        poisoned = [rows[0], dataclasses.replace(rows[1], guidance_scale=1e38), rows[2]]
        outcomes = generate(engine, poisoned)
        assert isinstance(outcomes[1], Failure)
        for i in (0, 2):
            made = outcomes[i]
            assert isinstance(made, Image)
            assert np.array_equal(made.pixels, before[i].pixels)
        after = images(engine, rows)
        assert all(np.array_equal(a.pixels, b.pixels) for a, b in zip(before, after, strict=True))

    def test_half_precision_gets_a_second_chance(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A decoder that overflows in float16 and not in float32."""
        engine = Engine(tiny.job(tiny.folder("sd1"), "model.dtype=float16"))
        right = engine.model.decode

        def overflowing(decoder: Network, latents: torch.Tensor) -> torch.Tensor:
            images = right(decoder, latents)
            if latents.dtype == torch.float16:
                images = images.clone()
                images[1] = torch.inf
            return images

        monkeypatch.setattr(engine.model, "decode", overflowing)
        made = images(engine, [tiny.row(i, steps=2) for i in range(2)])
        assert made[1].pixels.std() > 0
        assert engine.model._pipeline.vae.dtype == torch.float16


@pytest.mark.parametrize(("dtype", "least_db"), [("float16", 40), ("bfloat16", 25)])
@pytest.mark.parametrize("sampler", ["pndm", "euler_ancestral", "dpmpp_2m"])
def test_half_precision_is_near_diffusers(dtype: str, least_db: float, sampler: str) -> None:
    engine = Engine(tiny.job(tiny.folder("sd1"), f"model.dtype={dtype}"))
    pipe = tiny.reference_pipeline(tiny.folder("sd1"), torch_dtype=getattr(torch, dtype))
    rows = [tiny.row(i, sampler=sampler, steps=3 + i) for i in range(2)]
    for row, made in zip(rows, images(engine, rows), strict=True):
        wanted = np.asarray(tiny.reference(pipe, row, engine.facts, "pil")[0])
        assert tiny.psnr(made.pixels, wanted) >= least_db


def test_the_demo_model_makes_the_same_picture_again() -> None:
    job = tiny.job("demo")
    facts = facts_of(job.model)
    generator = open_generator(job)
    row = tiny.row(steps=facts.steps, sampler=facts.sampler, width=facts.width, height=facts.height)
    batch = tiny.batch([row], facts)
    first = generator.submit(batch, tiny.never)()[0]
    second = open_generator(job).submit(batch, tiny.never)()[0]
    assert isinstance(first, Image)
    assert isinstance(second, Image)
    assert first.pixels.shape == (facts.height, facts.width, 3)
    assert np.array_equal(first.pixels, second.pixels)
    assert "for trying and testing" in facts.note
    assert {"torch", "diffusers", "transformers", "device"} <= generator.versions.keys()


def test_the_demo_model_is_small_and_leaves_torchs_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    made = demo.build()
    assert torch.equal(before, torch.random.get_rng_state())
    networks = (made.unet, made.vae, made.text_encoder)
    assert sum(p.numel() * 4 for network in networks for p in network.parameters()) < 4e6


def test_the_demo_tokenizer_takes_any_text() -> None:
    tokenizer = demo.tokenizer()
    for text in ("", "a\x00b", "🐉龍é", "\ud7ff", "Ǆ ß \u202e", "<script>"):
        ids = tokenizer(text).input_ids
        assert (ids[0], ids[-1]) == (0, 1)
        assert 1 not in ids[1:-1], "no unknown tokens"


@pytest.mark.parametrize("device", ["cuda:99", "tpu9", "no such"])
def test_a_device_that_is_not_there(device: str) -> None:
    with pytest.raises(UsageError, match=r"is not there.*cpu"):
        Engine(tiny.job("demo", f"engine.device={device}"))
