"""The demo model's pictures, made by `batchgen run` and judged: mistakes of the engine that only pictures show."""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchgen import codec
from batchgen.models import unet
from batchgen.models.demo import WEIGHTS
from batchgen.models.demo.captions import plain
from batchgen.models.demo.judge import Verdict, judge
from batchgen.models.demo.scenes import Scene, held_out_scenes
from batchgen.models.demo.vocabulary import COMMONEST, named
from batchgen.records import Pixels
from tests import runs

torch.set_num_threads(1)

CAT = Scene("white", (named("cat"),), "medium", "in the middle")
NEGATIVE = "a white background"


def scenes(number: int) -> list[Scene]:
    """Of one thing with a common name, on a background that training never showed it on."""
    drawn = held_out_scenes(np.random.default_rng(8), 20 * number)
    every = [drawn[one] for one in range(len(drawn))]
    return [one for one in every if len(one.things) == 1 and one.things[0] < COMMONEST][:number]


def made(rows: Sequence[dict[str, Any]], *options: object, batch_sizes: set[int] | None = None) -> list[Pixels]:
    """The pictures of rows, in their order; `batch_sizes` are those of the batches that they must come from."""
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "m.parquet", Path(folder) / "out"
        ids = [{"id": str(number), "steps": 10, **row} for number, row in enumerate(rows)]
        ended = runs.run(runs.manifest(source, ids), out, *options, model="demo")
        assert ended.code == 0, ended.err
        files, lines = runs.images(out), runs.by_id(out)
        assert batch_sizes in (None, {line["batch_size"] for line in lines.values()})
        return [codec.decode(files[lines[row["id"]]["file_name"]]) for row in ids]


def asked(wanted: Sequence[Scene]) -> list[dict[str, Any]]:
    sizes = ((64, 64), (96, 64), (64, 96))
    return [
        {"prompt": plain(one), "width": sizes[number % 3][0], "height": sizes[number % 3][1], "seed": number}
        for number, one in enumerate(wanted)
    ]


@functools.cache
def pictures() -> tuple[list[Scene], list[Pixels]]:
    wanted = scenes(24)
    return wanted, made(asked(wanted))


def share_of_things(verdicts: Sequence[Verdict]) -> float:
    return sum(one.has_things for one in verdicts) / len(verdicts)


def test_pictures_show_what_was_asked() -> None:
    verdicts = [judge(picture, scene) for scene, picture in zip(*pictures(), strict=True)]
    assert sum(one.has_background for one in verdicts) >= 23
    assert share_of_things(verdicts) >= 0.8


def test_swapped_prompts_would_show() -> None:
    wanted, shown = pictures()
    verdicts = [judge(picture, scene) for scene, picture in zip(wanted, [*shown[3:], *shown[:3]], strict=True)]
    assert share_of_things(verdicts) <= 0.1


def test_turned_guidance_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    right = unet.guide

    def turned(prediction: torch.Tensor, conditioning: Any) -> torch.Tensor:
        return right(torch.cat(prediction.chunk(2)[::-1]), conditioning)

    monkeypatch.setattr(unet, "guide", turned)
    wanted = scenes(8)
    verdicts = [judge(picture, scene) for scene, picture in zip(wanted, made(asked(wanted)), strict=True)]
    assert share_of_things(verdicts) <= 0.3


def test_a_lost_negative_prompt_would_show() -> None:
    """A cat on no particular background comes out on a white one, unless that is what is not wanted."""
    rows = [{"prompt": "a cat", "width": 64, "height": 64, "seed": seed, "guidance_scale": 6.0} for seed in range(16)]
    with_negative = made([row | {"negative_prompt": NEGATIVE} for row in rows])
    without = made(rows)
    white = [sum(judge(one, CAT).background == "white" for one in some) for some in (with_negative, without)]
    assert white[0] <= 2
    assert white[1] >= 12


def apart(one: Pixels, other: Pixels) -> float:
    """Of 255, on average."""
    return float(np.abs(one.astype(int) - other).mean())


def test_each_row_of_a_batch_has_its_own_prompt_seed_guidance_and_negative_prompt() -> None:
    """Rows that differ in one of them, in batches of 4 and 2: each is what it is alone, and unlike all others."""
    base = {"prompt": "a cat", "width": 64, "height": 64, "steps": 4, "seed": 1, "guidance_scale": 6.0}
    own: list[dict[str, Any]] = [
        {},
        {"seed": 2},
        {"guidance_scale": 1.5},
        {"negative_prompt": NEGATIVE},
        {"negative_prompt": "a red background"},
        {"prompt": "a red square on a blue background"},
    ]
    rows = [{"negative_prompt": None, **base, **one} for one in own]
    together = made(rows, batch_sizes={2, 4})
    alone = made(rows, "--set", "plan.batch_sizes=[1]", batch_sizes={1})
    for number, (one, other) in enumerate(zip(together, alone, strict=True)):
        assert np.abs(one.astype(int) - other).max() <= 2, own[number]
    pairs = itertools.combinations(range(len(rows)), 2)
    close = {(one, other): apart(together[one], together[other]) for one, other in pairs}
    assert min(close.values()) >= 4, close


def test_the_weights_name_no_place_of_the_machine_that_trained_them() -> None:
    texts = [path.read_text(encoding="utf-8") for path in WEIGHTS.rglob("*.json") if path.name != "tokenizer.json"]
    assert len(texts) >= 5
    assert not [text for text in texts if "_name_or_path" in text or "/tmp" in text]
