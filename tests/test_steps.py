"""Captured and compiled steps. Where there is no GPU a capture stores the call itself: buffers, loading, checking and
fallback are the same."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from batchgen.engine import compiling, decode, steps
from batchgen.engine.checking import Refused, check, deviation_of
from batchgen.engine.denoise import Lanes
from batchgen.engine.engine import Engine
from batchgen.engine.relay import Relay
from batchgen.generator import Context
from batchgen.models.family import Network
from batchgen.records import Bucket, Image, Row
from tests import tiny

SAMPLERS = ["ddim", "pndm", "euler_ancestral", "heun", "dpmpp_2m"]


class Run:
    """An engine, and what it said."""

    def __init__(self, mode: str, *overrides: str, kind: str = "sd1", **context: object) -> None:
        self.said: list[str] = []
        job = tiny.job(tiny.folder(kind), f"engine.mode={mode}", *overrides)
        self.engine = Engine(job, Context(self.said.append, **context))

    def make(self, rows: Sequence[Row], size: int | None = None) -> list[Image]:
        outcomes = self.engine.submit(tiny.batch(rows, self.engine.facts, size), tiny.never)()
        return [one for one in outcomes if isinstance(one, Image)]

    def latents(self, rows: Sequence[Row]) -> torch.Tensor:
        return tiny.denoise(self.engine, rows)


@pytest.fixture(scope="module")
def eager() -> Run:
    return Run("eager")


@pytest.fixture(scope="module")
def graph() -> Run:
    return Run("graph")


LANES = [
    "latents",
    "previous",
    "earlier",
    "position",
    "evaluations",
    "timesteps",
    "input_scale",
    "coefficients",
    "keeps",
]


def names_of_lanes(sampler: str) -> list[str]:
    """Of the tensors of Lanes, in their order."""
    names = [field.name for field in dataclasses.fields(Lanes) if field.name != "form"]
    return [name for name in names if sampler == "heun" or name != "previous"]


def mixed(sampler: str, num: int = 3) -> list[Row]:
    return [
        tiny.row(
            i, sampler=sampler, steps=2 + 2 * i, guidance_scale=2.0 + i, seed=i, negative_prompt=[None, "", "x"][i]
        )
        for i in range(num)
    ]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_replays_are_eager_steps_bit_for_bit(eager: Run, graph: Run, sampler: str) -> None:
    assert torch.equal(graph.latents(mixed(sampler)), eager.latents(mixed(sampler)))


def test_another_batch_through_a_captured_bucket(eager: Run, graph: Run) -> None:
    """Nothing of the batch before, of the capture or of its check is left; step counts may grow within the room."""
    graph.latents(mixed("euler_ancestral"))
    num = len(graph.engine.steps.captures)
    for seed in range(3):
        rows = [
            dataclasses.replace(row, seed=50 + seed, steps=row.steps + 3 * seed) for row in mixed("euler_ancestral")
        ]
        assert torch.equal(graph.latents(rows), eager.latents(rows))
    assert len(graph.engine.steps.captures) == num


def test_what_is_made_ready_is_told_before() -> None:
    """Steps and decoding, each once: a person must not wonder where no image comes."""
    told: list[tuple[str, bool, int]] = []

    @contextmanager
    def preparing(what: str, *, is_long: bool) -> Iterator[None]:
        told.append((what, is_long, len(run.said)))
        yield

    run = Run("graph", preparing=preparing)
    run.make(mixed("ddim"))
    (steps_told, decode_told), num_said = told, len(run.said)
    assert steps_told == ("capturing 64x64, batch 3, guided, x,e", False, 0)
    assert decode_told[0].startswith("capturing the decoding of ")
    assert num_said > 0
    run.make(mixed("ddim"))
    assert len(told) == 2
    assert [compiling.doing(mode) for mode in ("compiled", "regional+graph")] == [
        "compiling",
        "compiling and capturing",
    ]


def test_more_steps_than_the_room_are_captured_again(eager: Run) -> None:
    graph, rows = Run("graph"), mixed("ddim")
    for steps_of_last in (steps.ROOM, steps.ROOM + 1):
        rows[-1] = dataclasses.replace(rows[-1], steps=steps_of_last)
        assert torch.equal(graph.latents(rows), eager.latents(rows))
    assert len(graph.engine.steps.captures) == 2


@pytest.mark.parametrize("changed", ["prompt", "negative_prompt", "seed", "steps", "guidance_scale"])
def test_what_changes_after_the_capture_is_followed(graph: Run, changed: str) -> None:
    """Case 35."""
    rows = mixed("ddim")
    before = graph.latents(rows).clone()
    value = {"prompt": "another", "negative_prompt": "else", "seed": 99, "steps": 5, "guidance_scale": 9.0}[changed]
    after = graph.latents([dataclasses.replace(rows[0], **{changed: value}), *rows[1:]])
    assert not torch.equal(after[0], before[0])
    assert torch.equal(after[1:], before[1:])


def test_samplers_of_one_form_share_a_capture(eager: Run) -> None:
    graph = Run("graph")
    for sampler in ("ddim", "euler"):
        assert torch.equal(graph.latents(mixed(sampler)), eager.latents(mixed(sampler)))
    assert len(graph.engine.steps.captures) == 1


def test_another_group_frees_the_captures(graph: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    freed: list[bool] = []
    free = graph.engine.free
    monkeypatch.setattr(graph.engine, "free", lambda: freed.append(free()))
    graph.latents(mixed("ddim"))
    graph.latents([dataclasses.replace(row, width=96) for row in mixed("ddim")])
    assert freed[-1]


def test_two_batches_may_be_on_their_way(eager: Run, graph: Run) -> None:
    """Case 34: the second batch does not overwrite the first one's pixels."""
    one, two = mixed("ddim"), [dataclasses.replace(row, seed=row.seed + 70) for row in mixed("ddim")]
    facts = graph.engine.facts
    pending = [graph.engine.submit(tiny.batch(rows, facts), tiny.never) for rows in (one, two)]
    for outcomes, rows in zip([pending() for pending in pending], (one, two), strict=True):
        for outcome, wanted in zip(outcomes, eager.make(rows), strict=True):
            assert isinstance(outcome, Image)
            assert outcome.mode == "graph"
            assert np.array_equal(outcome.pixels, wanted.pixels)


def test_each_capture_is_told(graph: Run) -> None:
    graph.latents(mixed("heun"))
    assert graph.said[-1].startswith("graph 64x64, batch 3, guided, x,x1,e,e1: ")
    assert "deviation 0.0e+00" in graph.said[-1]


class TestFallback:
    def test_a_capture_that_fails_is_told_once_and_runs_eager(
        self, eager: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(self: object, call: Callable[[], None]) -> Callable[[], None]:
            raise RuntimeError("no graphs today")

        monkeypatch.setattr(steps.GraphPool, "capture", fail)
        graph = Run("graph")
        for _ in range(2):
            assert [one.mode for one in graph.make(mixed("ddim"))] == ["eager"] * 3
        assert len(graph.said) == 1
        assert "no graphs today" in graph.said[0]

    @pytest.mark.parametrize(
        ("frozen", "sampler"),
        [
            *((name, "heun") for name in ("guidance", "encoder_hidden_states", *LANES)),
            ("noise", "euler_ancestral"),
        ],
    )
    def test_an_input_that_is_not_followed_is_found(
        self, monkeypatch: pytest.MonkeyPatch, frozen: str, sampler: str
    ) -> None:
        """A graph that kept an input of its capture would make wrong pictures without a word."""

        def load(static: steps.Static, values: Sequence[torch.Tensor]) -> None:
            names = ("guidance", "encoder_hidden_states") if len(values) == 2 else names_of_lanes(sampler)
            for name, mine, value in zip(names, static.tensors, values, strict=True):
                if name != frozen:
                    mine.copy_(value)

        monkeypatch.setattr(steps.Static, "load", load)
        graph = Run("graph")
        assert [one.mode for one in graph.make(mixed(sampler))] == ["eager"] * 3
        assert "deviates from eager" in graph.said[0]

    @pytest.mark.parametrize(
        ("sampler", "num_steps", "factor"),
        [("pndm", 50, 1.03), ("ddim", 50, 0.97), ("dpmpp_2m", 50, 0.97), ("euler", 4, 0.97), ("pndm", 20, 0.0)],
    )
    def test_a_network_that_is_wrong_by_little_is_found(
        self, monkeypatch: pytest.MonkeyPatch, sampler: str, num_steps: int, factor: float
    ) -> None:
        """However little a step of the sampler moves the latents."""
        wrong = Run("compiled")
        model, compiler = wrong.engine.model, wrong.engine._compiler

        def network(kernels: str, conditioning: object) -> Network:
            def scaled(*inputs: object, **more: object) -> object:
                return tuple(factor * one for one in model.network(*inputs, **more))

            return model.network if kernels == "eager" else scaled

        monkeypatch.setattr(compiler, "network", network)
        monkeypatch.setattr(compiler, "told", lambda kernels, conditioning: conditioning)
        rows = [tiny.row(i, sampler=sampler, steps=num_steps) for i in range(2)]
        batch = tiny.batch(rows, wrong.engine.facts)
        relay = Relay(model, rows, wrong.engine.tables(rows), wrong.engine.conditioning(batch), 2)
        with torch.inference_mode():
            ready = wrong.engine.steps._made_ready(Bucket(batch.group, 2), "compiled", relay)
        assert ready.mode == "eager"
        assert "deviates from eager" in wrong.said[0]

    @pytest.mark.parametrize("value", [torch.nan, torch.inf])
    @pytest.mark.parametrize("what", ["noise", "encode"])
    def test_a_row_that_is_not_finite_does_not_speak_against_its_bucket(
        self, eager: Run, monkeypatch: pytest.MonkeyPatch, what: str, value: float
    ) -> None:
        """The first batch's row, neither through latents and step noise nor through the texts."""
        graph = Run("graph")
        model = graph.engine.model
        right = getattr(model, what)

        def noise(row: Row, generator: torch.Generator) -> torch.Tensor:
            return right(row, generator) * (value if row.prompt == "bad" else 1)

        def encode(texts: Sequence[str]) -> list[tuple[torch.Tensor, ...]]:
            return [
                tuple(one * value if text == "bad" else one for one in encoded)
                for text, encoded in zip(texts, right(texts), strict=True)
            ]

        monkeypatch.setattr(model, what, {"noise": noise, "encode": encode}[what])
        rows = mixed("euler_ancestral")
        poisoned = [rows[0], dataclasses.replace(rows[1], prompt="bad"), rows[2]]
        wanted = eager.make(rows)
        for asked, kept in ((poisoned, [0, 2]), (rows, [0, 1, 2])):
            made = graph.make(asked)
            assert [one.mode for one in made] == ["graph"] * len(kept)
            for one, number in zip(made, kept, strict=True):
                assert np.array_equal(one.pixels, wanted[number].pixels)
        assert set(graph.engine._decoder._ready) == {("graph", (3, 4, 8, 8))}
        assert not any("eager" in line for line in graph.said)

    def test_a_compile_that_fails_leaves_the_graph(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*arguments: object, **options: object) -> object:
            def call(*inputs: object, **more: object) -> object:
                raise RuntimeError("no compiler")

            return call

        monkeypatch.setattr(torch, "compile", fail)
        both = Run("compiled+graph")
        assert [one.mode for one in both.make(mixed("ddim"))] == ["graph"] * 3
        assert sum("no compiler" in line for line in both.said) == 2, "the network's, and the decoder's"


class TestCapturedDecoding:
    def test_pixels_are_eager_ones_in_every_chunk(self, eager: Run, graph: Run) -> None:
        rows = [tiny.row(i, seed=i) for i in range(6)]
        for one, two in zip(graph.make(rows), eager.make(rows), strict=True):
            assert np.array_equal(one.pixels, two.pixels)
        assert not any("decoding" in line for line in graph.said)

    def test_latents_that_are_not_followed_are_found(self, eager: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        captured = decode._captured
        monkeypatch.setattr(decode, "_captured", lambda call, own, pool: lambda latents: captured(call, own, pool)(own))
        graph = Run("graph")
        for one, two in zip(graph.make(mixed("ddim")), eager.make(mixed("ddim")), strict=True):
            assert np.array_equal(one.pixels, two.pixels)
        assert "decoding does not work graph here (Refused: its result deviates" in graph.said[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_blocks_are_compiled_once_for_every_size_and_batch() -> None:
    """And whichever bucket comes first, the code, so the latents, are the same."""
    wide = [tiny.row(i, width=96, height=64, seed=i) for i in range(2)]
    square = [tiny.row(i, seed=i) for i in range(3)]
    torch._dynamo.reset()
    counters.clear()
    first, second, eager = Run("regional"), Run("regional"), Run("eager")
    one = [first.latents(wide), first.latents(square)]
    num_compiled = counters["stats"]["unique_graphs"]
    assert num_compiled > 4
    # Not its bits: libraries of some processors multiply matrices of another height in another order, eagerly too.
    assert deviation_of(first.latents(wide[:1] * 5), one[0][:1].expand(5, -1, -1, -1)) < 1e-5
    assert counters["stats"]["unique_graphs"] == num_compiled
    torch._dynamo.reset()
    other = [second.latents(square), second.latents(wide)][::-1]
    for made, again, rows in zip(one, other, (wide, square), strict=True):
        assert torch.equal(made, again)
        assert 0 < deviation_of(made, eager.latents(rows)) < 1e-4
    captures = first.engine.steps.captures
    assert [one.mode for one in captures] == ["regional"] * 3, "a check a group, not a bucket"
    assert len({one.bucket.group for one in captures}) == 2
    assert np.abs(first.make(wide)[0].pixels - eager.make(wide)[0].pixels.astype(int)).max() <= 1


def test_memory_that_is_short_frees_the_graphs_before_the_batch_is_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Run("graph")
    graph.latents(mixed("ddim"))
    advance, num_short = steps._advance, 1

    def short(*arguments: object) -> None:
        nonlocal num_short
        if num_short:
            num_short -= 1
            raise torch.OutOfMemoryError("no room")
        advance(*arguments)

    monkeypatch.setattr(steps, "_advance", short)
    assert len(graph.make(mixed("ddim"))) == 3
    assert len(graph.engine.steps.captures) == 2


def test_offloaded_encoders_make_the_same_pixels(eager: Run) -> None:
    offloaded = Run("eager", "engine.text_encoder=offload")
    batch = tiny.batch(mixed("ddim"), offloaded.engine.facts)
    offloaded.engine.prepare([batch], tiny.never)
    for one, two in zip(offloaded.make(mixed("ddim")), eager.make(mixed("ddim")), strict=True):
        assert np.array_equal(one.pixels, two.pixels)


def test_a_decode_that_does_not_fit_frees_the_graphs_and_then_halves_its_chunk(
    eager: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, sizes = Run("graph"), []
    right = graph.engine.model.decode

    def decode(decoder: Network, latents: torch.Tensor) -> torch.Tensor:
        sizes.append(len(latents))
        if len(latents) > 1:
            raise torch.OutOfMemoryError("no room")
        return right(decoder, latents)

    monkeypatch.setattr(graph.engine.model, "decode", decode)
    rows = [*mixed("ddim"), tiny.row(3, sampler="ddim", steps=3)]
    made = graph.make(rows)
    assert sizes[:4] == [4, 4, 2, 1], "with the graphs, without them, halved, halved again"
    assert set(sizes[4:]) == {1}
    assert [one.retries for one in made] == [1, 1, 1, 1]
    for one, wanted in zip(made, eager.make(rows), strict=True):
        assert np.abs(one.pixels.astype(int) - wanted.pixels.astype(int)).max() <= 1
    assert sum("at once does not fit" in line for line in graph.said) == 2


@pytest.mark.parametrize("call", [1, 4, 6], ids=["first call", "capture", "eager comparison"])
def test_a_captured_decode_that_does_not_fit_is_launched(
    eager: Run, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """Wherever in its preparation memory runs out: with the decoder's own graph counted, there would always be some to
    free, and no end."""
    graph, num_calls = Run("graph"), 0
    prepare, right = graph.engine._decoder._prepare, graph.engine.model.decode

    def decode(decoder: Network, latents: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        if is_preparing and num_calls >= call:
            raise torch.OutOfMemoryError("no room")
        return right(decoder, latents)

    def preparing(padded: torch.Tensor, mode: str) -> object:
        nonlocal is_preparing, num_calls
        is_preparing, num_calls = mode == "graph", 0
        try:
            return prepare(padded, mode)
        finally:
            is_preparing = False

    is_preparing = False
    monkeypatch.setattr(graph.engine._decoder, "_prepare", preparing)
    monkeypatch.setattr(graph.engine.model, "decode", decode)
    for _ in range(2):
        made = graph.make(mixed("ddim"))
        assert [one.mode for one in made] == ["graph"] * 3
        for one, wanted in zip(made, eager.make(mixed("ddim")), strict=True):
            assert np.array_equal(one.pixels, wanted.pixels)
    assert sum("captured decode does not fit" in line for line in graph.said) == 1


def test_what_batches_took_is_told(eager: Run, graph: Run) -> None:
    before, started = eager.engine.spent(), time.perf_counter()
    eager.engine.prepare([tiny.batch(mixed("ddim"), eager.engine.facts)], tiny.never)
    eager.make(mixed("ddim"))
    spent, seconds = eager.engine.spent().since(before), time.perf_counter() - started
    assert set(spent.stage_s) == {"text", "denoise", "decode"}
    assert min(spent.stage_s.values()) > 0
    assert sum(spent.stage_s.values()) <= seconds
    assert (spent.captures, spent.peak_bytes, spent.device_bytes) == ((), 0, 0)
    graph.make(mixed("euler"))
    told = graph.engine.spent().captures
    assert [one.bucket for one in told] == [str(one.bucket) for one in graph.engine.steps.captures]
    assert {one.mode for one in told} == {"graph"}
    assert all(one.seconds > 0 for one in told)


@pytest.mark.parametrize(
    ("kernels", "dtype", "most"),
    [
        ("eager", torch.bfloat16, 0.0),
        ("compiled", torch.float32, 0.01),
        ("compiled", torch.float16, 0.01),
        ("regional", torch.bfloat16, 0.079),
    ],
)
def test_a_deviation_is_allowed_that_the_dtype_rounds_by(kernels: str, dtype: torch.dtype, most: float) -> None:
    wanted = torch.ones(2, 4, 8, 8)
    assert check(wanted * (1 + most), wanted, kernels, dtype) == pytest.approx(most, rel=1e-3)
    with pytest.raises(Refused, match="deviates from eager"):
        check(wanted * (1 + 1.1 * most + 1e-3), wanted, kernels, dtype)
