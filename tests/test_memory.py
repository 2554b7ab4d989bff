"""Faults of the device: memory that runs out in one place or another, and what CUDA's libraries report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from batchgen.engine import steps
from batchgen.engine.devices import errors_named
from batchgen.engine.engine import Engine
from batchgen.engine.whole import open_model
from batchgen.errors import UsageError
from batchgen.generator import Context, DeviceLost, OutOfMemory
from batchgen.making import Maker
from batchgen.records import UNSAFE, Image, Outcome, Row
from batchgen.stopping import Stop
from tests import checkers, families, tiny
from tests.test_steps import Run

CAPTURE = "CUDA error: operation failed due to a previous error during capture"


def make(run: Run, rows: Sequence[Row], size: int | None = None) -> list[Outcome]:
    """As a worker does, with all that it tries again."""
    return maker_of(run).start(tiny.batch(rows, run.engine.facts, size))()


def maker_of(run: Run) -> Maker:
    return Maker(run.engine, Stop(), 25.0, run.said.append)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), OutOfMemory),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), OutOfMemory),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), OutOfMemory),
        (torch.AcceleratorError("CUDA error: out of memory"), OutOfMemory),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), DeviceLost),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"), DeviceLost),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), DeviceLost),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"), RuntimeError),
        (RuntimeError("shapes do not match"), RuntimeError),
        (ValueError("CUBLAS_STATUS_ALLOC_FAILED"), ValueError),
    ],
)
def test_what_a_device_reports(error: Exception, raised: type[Exception]) -> None:
    with pytest.raises(raised) as caught, errors_named("an H200"):
        raise error
    assert caught.type is raised


@pytest.mark.parametrize("kind", ["sd1", "pag"])
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no room"), torch.AcceleratorError("CUDA error: out of memory")]
)
def test_weights_that_do_not_fit_are_the_users_to_know_of(
    kind: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def to(network: nn.Module, *where: object, **how: object) -> None:
        raise error

    job = tiny.job(tiny.folder(kind) if kind == "sd1" else families.folder(kind))
    monkeypatch.setattr(nn.Module, "to", to)
    with pytest.raises(UsageError, match=r"the weights of model .* do not fit into the memory that is free on cpu"):
        open_model(job, None)


def test_a_libraries_lack_of_memory_halves_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("eager")
    right = run.engine.model.predict

    def predict(network: object, latents: torch.Tensor, *told: object) -> torch.Tensor:
        if len(latents) > 2:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        return right(network, latents, *told)

    monkeypatch.setattr(run.engine.model, "predict", predict)
    assert [one.batch_size for one in make(run, [tiny.row(i) for i in range(4)])] == [2, 2, 2, 2]


def test_a_capture_that_does_not_fit_once_makes_no_batch_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it has left is given back, as what graphs hold is, before the batch is halved."""
    run = Run("graph")
    step = steps.step
    monkeypatch.setattr(steps, "step", short(step, lambda number: number == 2))
    assert [(one.batch_size, one.mode) for one in make(run, [tiny.row(i) for i in range(4)])] == [(4, "graph")] * 4


def test_a_capture_that_fails_on_a_device_that_still_answers_runs_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("graph")

    def capture(call: Callable[[], None]) -> Callable[[], None]:
        raise torch.AcceleratorError(CAPTURE)

    monkeypatch.setattr(run.engine._pool, "capture", capture)
    assert [one.mode for one in make(run, [tiny.row(i) for i in range(2)])] == ["eager"] * 2
    monkeypatch.setattr("batchgen.engine.steps.is_alive", lambda device: False)
    with pytest.raises(DeviceLost, match="during capture"):
        make(run, [tiny.row(i) for i in range(3)])


def test_blocks_that_do_not_work_at_another_batch_size_run_eager_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code that another bucket of the group has was checked is taken, not that it works here."""
    run = Run("regional")
    model, compiler = run.engine.model, run.engine._compiler

    def network(kernels: str, conditioning: object) -> object:
        def blocks(latents: torch.Tensor, *told: object, **more: object) -> object:
            if len(latents) in (1, 3):
                raise RuntimeError("recompile limit")
            return model.network(latents, *told, **more)

        return model.network if kernels == "eager" else blocks

    monkeypatch.setattr(compiler, "network", network)
    monkeypatch.setattr(compiler, "decoder", lambda kernels: model.decoder)
    rows = [tiny.row(i, guidance_scale=1.0) for i in range(3)]
    modes = [make(run, rows[:size])[0].mode for size in (2, 3, 1, 2)]
    assert modes == ["regional", "eager", "eager", "regional"]
    assert sum("recompile limit" in line for line in run.said) == 2


def short(call: Callable[..., object], is_short: Callable[[int], bool]) -> Callable[..., object]:
    """The call, for which memory is short the n-th times that a rule says, from 1."""
    number = 0

    def limited(*arguments: object) -> object:
        nonlocal number
        number += 1
        if is_short(number):
            raise torch.OutOfMemoryError("no room")
        return call(*arguments)

    return limited


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_second_decode_that_does_not_fit_costs_its_row_alone(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row keeps its own error, and no batch is made smaller."""
    run = Run(mode, "model.dtype=bfloat16")
    model = run.engine.model
    noise = model.noise
    monkeypatch.setattr(
        model, "noise", lambda row, random: noise(row, random) * (torch.nan if row.prompt == "bad" else 1)
    )
    monkeypatch.setattr(model, "decode_float32", short(model.decode_float32, lambda number: True))
    maker, rows = maker_of(run), [tiny.row(i, prompt="bad" if i == 1 else "good") for i in range(4)]
    outcomes = maker.start(tiny.batch(rows, run.engine.facts))()
    assert [getattr(one, "error", "") for one in outcomes] == ["", "NotFinite", "", ""]
    assert outcomes[1].message == (
        "the decoded image has NaN or Inf in it; in float32, decoding does not fit into memory: no room"
    )
    rest = maker.start(tiny.batch(rows[2:], run.engine.facts, 4))()
    assert [one.batch_size for one in rest] == [4, 4]


@pytest.mark.parametrize("num_short", [1, 2, 99])
@pytest.mark.parametrize("place", ["encode", "checker"])
def test_what_takes_the_same_memory_for_any_batch_halves_none(
    place: str, num_short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short once, the graphs go; twice, the rows are tried alone; always, they fail."""
    run = Run("graph")
    run.engine = Engine(
        tiny.job(checkers.folder(), "engine.safety_checker=true", "engine.mode=graph"), Context(run.said.append)
    )
    model = run.engine.model
    owner, name = (model, "encode") if place == "encode" else (model.checker, "cosines")
    monkeypatch.setattr(owner, name, short(getattr(owner, name), lambda number: number <= num_short))
    maker, rows = maker_of(run), checkers.ROWS[:1] + checkers.ROWS[2:4]
    for _ in range(2):
        outcomes = maker.start(tiny.batch(rows, run.engine.facts))()
        if num_short == 99:
            assert [one.error for one in outcomes] == ["NoRoom"] * 3
        else:
            assert {getattr(one, "batch_size", 3) for one in outcomes} == {3}
            assert all(isinstance(one, Image) or one.error == UNSAFE for one in outcomes)
    assert not any("from now on" in line for line in run.said)


def test_rows_of_a_smaller_chunk_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their last bits may be others than those of a run whose memory was not short."""
    run = Run("eager")
    right = run.engine.model.decode

    def decode(decoder: object, latents: torch.Tensor) -> torch.Tensor:
        if len(latents) > 2:
            raise torch.OutOfMemoryError("no room")
        return right(decoder, latents)

    monkeypatch.setattr(run.engine.model, "decode", decode)
    maker = maker_of(run)
    made = [maker.start(tiny.batch([tiny.row(i) for i in range(size)], run.engine.facts))() for size in (2, 4, 4, 1, 2)]
    assert [[one.retries for one in batch] for batch in made] == [[0] * 2, [1] * 4, [1] * 4, [0], [0] * 2]
    assert {one.batch_size for one in made[1]} == {4}
