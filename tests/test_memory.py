"""Faults of the device: memory that runs out in one place or another, and what CUDA's libraries report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from batchgen.engine.devices import errors_named
from batchgen.generator import DeviceLost, OutOfMemory
from batchgen.making import Maker
from batchgen.records import Outcome, Row
from batchgen.stopping import Stop
from tests import tiny
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


def test_a_libraries_lack_of_memory_halves_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("eager")
    right = run.engine.model.predict

    def predict(network: object, latents: torch.Tensor, *told: object) -> torch.Tensor:
        if len(latents) > 2:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
        return right(network, latents, *told)

    monkeypatch.setattr(run.engine.model, "predict", predict)
    assert [one.batch_size for one in make(run, [tiny.row(i) for i in range(4)])] == [2, 2, 2, 2]


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
