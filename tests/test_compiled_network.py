"""The generic family with its network compiled: what is compiled, what it is held against, and what happens if it does
not work."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from batchgen.engine.whole import WholePipeline
from batchgen.errors import UsageError
from batchgen.generator import Context
from batchgen.models import generic
from batchgen.records import Image
from tests import families, tiny

MODE = "engine.mode=compiled"


def compile_as(monkeypatch: pytest.MonkeyPatch, changed: Callable[[Any], Any]) -> list[str]:
    """torch.compile's code makes eager's result, changed; its calls are noted."""
    calls: list[str] = []

    def compiled(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append("compiled")
            return changed(forward(*args, **kwargs))

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    return calls


def made_by(engine: WholePipeline, **values: Any) -> Image:
    row = tiny.row(sampler=engine.facts.sampler, **{"steps": 3, "guidance_scale": 4.0, **values})
    (outcome,) = engine.submit(tiny.batch([row], engine.facts), tiny.never)()
    assert isinstance(outcome, Image)
    return outcome


def test_its_code_makes_the_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, said = compile_as(monkeypatch, lambda result: result), list[str]()
    engine = WholePipeline(tiny.job(families.folder("bria"), MODE), Context(said.append))
    first, other = made_by(engine), made_by(engine, width=96)
    assert (first.mode, other.mode, len(calls), said) == ("compiled", "compiled", 6, [])
    for one in (first, other):
        assert np.array_equal(one.pixels, made_by(families.engine("bria"), width=one.row.width).pixels)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (lambda result: tuple(one + 1 for one in result), r"Refused: its result deviates from eager by .*; allowed is"),
        (lambda result: tuple(one * torch.nan for one in result), "Refused: its result deviates from eager by nan"),
        (lambda result: [].pop(), "IndexError: pop from empty list"),
    ],
)
def test_what_does_not_work_is_said_and_done_eagerly(
    monkeypatch: pytest.MonkeyPatch, changed: Callable[[Any], Any], why: str
) -> None:
    calls, said = compile_as(monkeypatch, changed), list[str]()
    engine = WholePipeline(tiny.job(families.folder("bria"), MODE), Context(said.append))
    made = made_by(engine)
    assert (made.mode, len(calls)) == ("eager", 1)
    (line,) = said
    assert re.search(rf"the compiled network does not work here \({why}.*\); it runs eager", line)
    assert np.array_equal(made.pixels, made_by(families.engine("bria")).pixels)


def test_a_later_shape_that_deviates_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_as(monkeypatch, lambda result: tuple(one if one.shape[1] == 16 else one + 1 for one in result))
    engine = WholePipeline(tiny.job(families.folder("bria"), MODE))
    assert [made_by(engine, width=width).mode for width in (64, 96, 64)] == ["compiled", "eager", "eager"]


def test_an_error_of_the_network_itself_is_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_as(monkeypatch, lambda result: result)
    engine = WholePipeline(tiny.job(families.folder("bria"), MODE))
    assert engine._compiled is not None
    with pytest.raises(TypeError, match="missing"):
        engine._pipeline.transformer()
    assert made_by(engine).mode == "compiled"


def test_a_pipeline_without_such_a_network_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    known = generic.layout
    monkeypatch.setattr(generic, "layout", lambda index: dataclasses.replace(known(index), network=""))
    with pytest.raises(UsageError, match=r"compiles a pipeline's transformer or unet, and model .* has neither, but"):
        WholePipeline(tiny.job(families.folder("bria"), MODE))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["bria", "pag"])
def test_compiled_for_real(kind: str) -> None:
    """Sizes and texts of several lengths, by one compile."""
    said: list[str] = []
    engine = WholePipeline(tiny.job(families.folder(kind), MODE), Context(said.append))
    for values in ({}, {"width": 96, "prompt": tiny.LONG}, {"prompt": "", "height": 96}, {"seed": 5}):
        made = made_by(engine, **values)
        assert (made.mode, said) == ("compiled", [])
        wanted = np.asarray(families.reference(kind, made.row), int)
        assert np.abs(wanted - np.asarray(made.pixels, int)).max() <= 1
    # As LoRA sets are put into the weights.
    network = engine._pipeline.transformer
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(1.1)
    changed = made_by(engine, seed=5)
    network.forward = engine._compiled._eager if engine._compiled else None
    wanted, before = (np.asarray(one.pixels, int) for one in (made_by(engine, seed=5), made))
    assert changed.mode == "compiled"
    assert np.abs(np.asarray(changed.pixels, int) - wanted).max() <= 1 < np.abs(wanted - before).max()
