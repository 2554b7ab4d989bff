"""Which mode pays, by arithmetic, and how a run settles it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchgen.engine import attention
from batchgen.engine.chunks import chunk_of, most_decoded
from batchgen.engine.forecasts import UNCAPTURED, decodes_that_pay, forecasts
from batchgen.engine.tuning import Tuning
from batchgen.errors import UsageError
from batchgen.generator import Context
from batchgen.job import Engine
from batchgen.records import Bucket, Group, Work

COMPILE_S = 55.0


def bucket(size: int, side: int = 512) -> Bucket:
    return Bucket(Group(side, side, True, 77, "x,e"), size)


def mode(size: int, evaluations: int, *others: tuple[int, int]) -> str:
    """Of Stable Diffusion 1.5 on an H200: 6 ms a row of a batch, 25 ms at least, 55 s to compile."""
    work = {bucket(size): Work(1, evaluations)} | {bucket(10, 8 * side): Work(1, num) for side, num in others}
    told = forecasts(work, bucket(8), 0.048, COMPILE_S)[bucket(size)]
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
    told = forecasts(work, bucket(8), 0.048, COMPILE_S)
    assert {one.mode for one in told.values()} == {"graph", "regional+graph"}
    assert told[alone].mode == "graph"


def test_other_buckets_are_predicted_by_their_pixels() -> None:
    large = bucket(4, 1024)
    told = forecasts({large: Work(1, 100)}, bucket(8, 512), 0.05, COMPILE_S)
    assert told[large].eager_s == pytest.approx(100 * 0.05 * 2 * UNCAPTURED)


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

    def time(name: str, probe: object) -> float:
        if name == "flash":
            raise RuntimeError("no such kernel\nand more")
        return 0.05

    made._time = time
    made.choose(bucket(8), 10**9, lambda: None)
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
        made._time = lambda name, probe: 0.05
        made.choose(bucket(8), 10**9, lambda: None)
        return made, said

    def test_another_workers_choice(self) -> None:
        name = str(bucket(8))
        made, said = self.tuning(
            f'{{"attention": "cudnn", "modes": {{"{name}": "compiled+graph"}}, "decodes": {{"512x512": "regional"}}, '
            '"chunks": {"512x512": 6}}'
        )
        assert made.mode(bucket(8)) == "compiled+graph"
        assert made.mode(bucket(4)) == "eager"
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

    @pytest.mark.parametrize("settled", ["", "[]", "{}", '{"attention": null, "modes": 5}'])
    def test_a_choice_that_cannot_be_read(self, settled: str) -> None:
        with pytest.raises(UsageError, match="cannot be read"):
            self.tuning(settled)
