"""Which mode pays, by arithmetic, and how a run settles it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchgen.chunks import chunk_of, most_decoded
from batchgen.engine import attention
from batchgen.engine.forecasts import UNCAPTURED, Speed, decodes_that_pay, forecasts
from batchgen.engine.tuning import Timed, Tuning
from batchgen.errors import UsageError
from batchgen.generator import Context
from batchgen.job import Engine
from batchgen.records import Bucket, Group, Work

COMPILE_S = 55.0


def bucket(size: int, side: int = 512) -> Bucket:
    return Bucket(Group(side, side, True, 77, "x,e"), size)


H200 = Speed(0.025, 0.048 / bucket(8).pixels)
"""Stable Diffusion 1.5: 6 ms a row of a batch, 25 ms at least."""


def mode(size: int, evaluations: int, *others: tuple[int, int]) -> str:
    work = {bucket(size): Work(1, evaluations)} | {bucket(10, 8 * side): Work(1, num) for side, num in others}
    told = forecasts(work, H200, COMPILE_S)[bucket(size)]
    assert told.seconds <= told.eager_s
    return told.mode


@pytest.mark.parametrize(
    ("size", "evaluations", "wanted"),
    [
        (1, 5, "eager"),
        (1, 1_000, "graph"),
        (32, 400, "eager"),
        (32, 620, "graph"),
        (32, 20_000, "compiled+graph"),
        (1, 200_000, "compiled+graph"),
        (32, 0, "eager"),
    ],
)
def test_what_is_paid_beforehand_must_be_earned_back(size: int, evaluations: int, wanted: str) -> None:
    assert mode(size, evaluations) == wanted


def test_blocks_are_compiled_where_all_buckets_together_pay_for_it() -> None:
    many = [(side, 500) for side in range(40, 80)]
    assert mode(32, 100) == "eager"
    assert mode(32, 100, *many[:1]) == "eager"
    assert mode(32, 100, *many) == "regional"
    assert mode(2, 100, *many) == "regional+graph"
    assert mode(32, 20_000, *many) == "compiled+graph", "the whole, where one bucket alone pays for it"


def test_one_row_of_the_network_is_never_run_by_blocks() -> None:
    alone = Bucket(Group(512, 512, False, 77, "x,e"), 1)
    work = {alone: Work(1, 1_000)} | {bucket(10, 8 * side): Work(1, 500) for side in range(40, 80)}
    told = forecasts(work, H200, COMPILE_S)
    assert {one.mode for one in told.values()} == {"graph", "regional+graph"}
    assert told[alone].mode == "graph"


def test_other_buckets_are_predicted_by_their_pixels() -> None:
    large = bucket(4, 1024)
    told = forecasts({large: Work(1, 100)}, H200, COMPILE_S)
    assert told[large].eager_s == pytest.approx(100 * 0.048 * 2 * UNCAPTURED)


def test_decoders_are_compiled_where_enough_images_are_left() -> None:
    few, many = {bucket(8, 512): Work(10, 200)}, {bucket(8, 1024): Work(1_000, 20_000), bucket(1, 512): Work(3, 60)}
    assert decodes_that_pay(few) == {}
    assert decodes_that_pay(many) == {"1024x1024": "compiled"}
    sizes = {bucket(8, 8 * side): Work(100, 2_000) for side in range(50, 80)}
    assert decodes_that_pay(sizes) == {f"{8 * side}x{8 * side}": "regional" for side in range(50, 80)}


def test_attention_kernels_that_do_not_work_are_left_out() -> None:
    said: list[str] = []
    context = Context(said.append, lambda name, value: value, {bucket(8): Work(10, 200)})
    made = Tuning(Engine(), torch.device("cuda:0"), "a device", 80 * 10**9, context)

    def time(name: str, probe: object) -> Timed:
        if name == "flash":
            raise RuntimeError("no such kernel\nand more")
        return Timed(0.05, 0.02)

    made._time = time
    made.choose(bucket(8), 10**9, lambda times: None)
    assert said[:2] == [
        "attention kernels flash do not work here (no such kernel)",
        f"fastest attention kernels here: cudnn (an eager evaluation of {bucket(8)}: cudnn 50.0 ms)",
    ]


def test_flash_attention_3_is_tried_where_its_package_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert attention.present() == ("flash", "cudnn")
    (tmp_path / "flash_attn_interface.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert attention.present() == ("flash", "cudnn", "flash3")


def test_as_many_images_are_decoded_at_once_as_memory_allows() -> None:
    gigabytes = {memory: memory * 10**9 for memory in (8, 24, 80, 143)}
    assert [most_decoded(512, 512, one) for one in gigabytes.values()] == [3, 11, 16, 16]
    assert [most_decoded(1024, 1024, one) for one in gigabytes.values()] == [1, 2, 9, 16]
    assert most_decoded(2048, 2048, None) == 4


@given(st.integers(1, 500), st.integers(1, 40))
def test_a_batch_is_decoded_in_equal_parts(size: int, most: int) -> None:
    chunk = chunk_of(size, most)
    parts = -(-size // chunk)
    assert chunk <= most
    assert parts == -(-size // most)
    assert parts * chunk - size < parts


class TestSettled:
    """What another worker has settled decides, whatever this one would choose."""

    def tuning(self, settled: str, mode: str = "auto") -> tuple[Tuning, list[str]]:
        said: list[str] = []
        context = Context(said.append, lambda name, value: settled, {bucket(8): Work(10, 200)})
        # A device that is not there: nothing is asked of it, since another has settled everything.
        made = Tuning(Engine(mode=mode, attention="cudnn"), torch.device("cuda:0"), "a device", 80 * 10**9, context)
        made._time = lambda name, probe: Timed(0.05, 0.02)
        made.choose(bucket(8), 10**9, lambda times: None)
        return made, said

    def test_another_workers_choice(self) -> None:
        name = str(bucket(8))
        made, said = self.tuning(
            f'{{"attention": "cudnn", "modes": {{"{name}": "compiled+graph"}}, "decodes": {{"512x512": "regional"}}, '
            '"chunks": {"512x512": 6}}'
        )
        assert made.mode(bucket(8)) == "compiled+graph"
        assert made.mode(bucket(4)) == "compiled+graph", "what memory has left of 8"
        assert made.mode(bucket(9)) == made.mode(bucket(4, 1024)) == "eager"
        assert made.is_compiled
        assert made.decoding(bucket(8)) == ("regional", 6)
        assert made.decoding(bucket(4)) == ("regional", 4)
        assert made.decoding(bucket(40, 768)) == ("eager", 14)
        assert said[1].startswith("mode compiled+graph (predicted ")
        assert said[1].endswith(f" s) for {name}")
        assert said[2] == "mode regional for decoding 512x512"

    @pytest.mark.parametrize("mode", ["eager", "graph", "regional", "regional+graph", "compiled", "compiled+graph"])
    def test_a_mode_that_was_asked_for(self, mode: str) -> None:
        made, said = self.tuning('{"attention": null, "modes": {}, "decodes": {}}', mode)
        assert made.mode(bucket(8)) == mode
        kernels = mode.split("+")[0].replace("graph", "eager")
        assert made.decoding(bucket(8)) == (kernels, 8)
        assert made.is_compiled == (kernels != "eager")
        assert said == []

    @pytest.mark.parametrize(
        "settled",
        [
            "",
            "[]",
            "{}",
            '{"attention": null, "modes": 5}',
            '{"attention": "flash4"}',
            '{"attention": null, "modes": {"a": "turbo"}}',
            '{"attention": null, "decodes": {"64x64": "graph"}}',
            '{"attention": null, "chunks": {"64x64": 0}}',
            '{"attention": null, "chunks": {"64x64": -3}}',
        ],
    )
    def test_a_choice_that_cannot_be_read(self, settled: str) -> None:
        with pytest.raises(UsageError, match="cannot be read"):
            self.tuning(settled)


class TestExtended:
    """Choices of a run whose plan grows, by workers that each know the plan of their time."""

    def tuning(self, slots: dict[str, str], work: dict[Bucket, Work]) -> tuple[Tuning, list[str]]:
        said: list[str] = []
        context = Context(said.append, slots.setdefault, work)
        made = Tuning(Engine(attention="cudnn"), torch.device("cuda:0"), "a device", 143 * 10**9, context)
        made._time = lambda name, probe: Timed(0.048, 0.025)
        made.choose(bucket(8), 860 * 10**6, lambda times: None)
        return made, said

    def test_buckets_that_come_later_are_settled_too_and_others_stay(self) -> None:
        slots: dict[str, str] = {}
        few, many = Work(2, 40), Work(5_000, 100_000)
        first, _ = self.tuning(slots, {bucket(8): few})
        assert first.mode(bucket(8)) == "eager"
        later, said = self.tuning(slots, {bucket(8): many, bucket(32): many, bucket(4, 1024): many})
        assert later.mode(bucket(8)) == "eager"
        assert later.mode(bucket(32)) == later.mode(bucket(4, 1024)) == "compiled+graph"
        assert later.decoding(bucket(32)) == ("eager", 8), "the size's decoding was settled"
        assert later.decoding(bucket(4, 1024)) == ("compiled", 4)
        assert "mode eager (predicted 4896 s, eager 4896 s) for 512x512, batch 8, guided, x,e" in said
        assert sorted(slots) == ["choice-a-device", "choice-a-device.1"]

    def test_all_workers_agree_whichever_plan_they_know(self) -> None:
        slots: dict[str, str] = {}
        many = Work(5_000, 100_000)
        works = [{bucket(8): many}, {bucket(8): many, bucket(32): many}, {bucket(size): many for size in (8, 32, 4)}]
        made = [self.tuning(slots, work)[0] for work in (works[0], works[1], works[2], *works)]
        for one in (made[1], made[2], made[4], made[5]):
            assert one.mode(bucket(32)) == "compiled+graph"
        assert len(slots) == 3
        before = dict(slots)
        self.tuning(slots, {bucket(32): Work(1, 1)})
        assert slots == before


EAGER_MS = {2: 25.4, 4: 25.6, 8: 30.1, 16: 50.1, 32: 96.7}
"""Measured steps of SD1.5 at 512x512 in float16 on an H200, by rows of the network."""
GRAPH_MS = 11.9
"""The same of two rows, replayed."""


class TestLaunchBound:
    def tuning(self, first: int, work: dict[Bucket, Work], most: int = 64) -> Tuning:
        made = Tuning(Engine(attention="cudnn"), torch.device("cuda:0"), "a device", 143 * 10**9, Context(work=work))

        def time(name: str, call: Callable[[], object]) -> Timed:
            rows = 2 * first * call()
            if rows > most:
                raise torch.OutOfMemoryError("no room")
            return Timed(EAGER_MS[rows] / 1000, 0.0254)

        made._time = time
        made.choose(bucket(first), 860 * 10**6, lambda times: times)
        return made

    @pytest.mark.parametrize("first", [1, 2, 4, 16])
    def test_what_launching_takes_is_no_kernel_time(self, first: int) -> None:
        work = {bucket(16): Work(250, 1_700), bucket(1): Work(200, 4_000)}
        told = self.tuning(first, work)._forecasts
        assert told[bucket(16)].eager_s == pytest.approx(1_700 * 0.0967, rel=0.1)
        assert told[bucket(1)].eager_s == pytest.approx(4_000 * 0.0254, rel=0.01)
        assert told[bucket(16)].mode == "graph"
        assert told[bucket(1)].mode == "graph"
        assert told[bucket(1)].seconds < 4_000 * GRAPH_MS / 1000

    def test_memory_that_is_short_ends_the_probing(self) -> None:
        made = self.tuning(1, {bucket(1): Work(200, 4_000)}, most=4)
        assert made.mode(bucket(1)) == "graph"
