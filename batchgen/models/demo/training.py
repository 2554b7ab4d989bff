"""What the two stages of the demo model's training share: settings, data, pace and record."""

from __future__ import annotations

import json
import math
import random
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchgen.models.demo import TEXT_LENGTH
from batchgen.models.demo.captions import caption
from batchgen.models.demo.drawing import Painter
from batchgen.models.demo.scenes import Scenes, training_scenes
from batchgen.models.demo.vocabulary import FOLDER, colours

_WARM_UP = 0.02
"""Share of a stage in which the learning rate rises."""
_LEAST_RATE = 0.01
_UNSAID_WHITE, _UNSAID = 0.6, 0.055
"""How often a caption is silent about a white background, and about another: half of the silent ones mean white."""


@dataclass(frozen=True, slots=True)
class Autoencoder:
    """The table [autoencoder]."""

    share: float
    resumed_share: float
    rate: float
    resumed_rate: float
    edges: float
    divergence: float


@dataclass(frozen=True, slots=True)
class Denoiser:
    """The table [denoiser]."""

    rate: float
    resumed_rate: float
    drop: float
    average: float
    sample_every_s: float


@dataclass(frozen=True, slots=True)
class Settings:
    """`training.toml`."""

    seed: int
    batch_pixels: int
    sizes: tuple[tuple[int, int, float], ...]
    scenes: int
    log_every_s: float
    reserve_s: float
    autoencoder: Autoencoder
    denoiser: Denoiser
    max_steps: int | None = None
    """Of each stage; None where time alone ends it."""
    num_judged: int = 200
    num_shown: int = 48
    """Pictures in `samples.png`."""
    judged_steps: int = 15
    """Of the sampler, for both."""


def load_settings(path: Path = FOLDER / "training.toml") -> Settings:
    """The settings of a file."""
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    content["sizes"] = tuple((int(width), int(height), float(share)) for width, height, share in content["sizes"])
    content["autoencoder"] = Autoencoder(**content["autoencoder"])
    content["denoiser"] = Denoiser(**content["denoiser"])
    return Settings(**content)


def smoke(settings: Settings) -> Settings:
    """The same stages on next to nothing."""
    return replace(
        settings,
        batch_pixels=4 * 64 * 64,
        scenes=32,
        max_steps=3,
        num_judged=1,
        num_shown=2,
        judged_steps=2,
        log_every_s=0.0,
    )


@dataclass(frozen=True, slots=True)
class Batch:
    """Training pictures of one size, and their captions; on the device."""

    pictures: Tensor
    """`[B, 3, H, W]`, -1 to 1."""
    tokens: Tensor
    """`[B, 77]`."""


class Data:
    """Scenes with captions, and pictures of them as they are asked for."""

    def __init__(self, settings: Settings, tokenizer: Any, device: torch.device, seed: int) -> None:
        self._device = device
        scenes = training_scenes(np.random.default_rng(seed), settings.scenes)
        captions = _captions(scenes, random.Random(seed))
        self._tokens = tokens(tokenizer, captions).to(device)
        self._random = torch.Generator(device).manual_seed(seed)
        self._sizes = random.Random(seed)
        painter = Painter(device, sorted({min(width, height) for width, height, _ in settings.sizes}))
        self._painter, self._settings = painter, settings
        self._places = {(width, height): painter.place(scenes, width, height) for width, height, _ in settings.sizes}

    def batches(self) -> Iterator[Batch]:
        """Without end, each of one size, chosen by its share."""
        sizes = [(width, height) for width, height, _ in self._settings.sizes]
        shares = [share for *_, share in self._settings.sizes]
        while True:
            yield self.batch(*self._sizes.choices(sizes, shares)[0])

    def batch(self, width: int, height: int) -> Batch:
        """One of this size."""
        number = max(self._settings.batch_pixels // (width * height), 1)
        chosen = torch.randint(len(self._tokens), (number,), generator=self._random, device=self._device)
        pictures = self._painter.paint(self._places[width, height], chosen, width, height, self._random)
        return Batch(pictures, self._tokens[chosen].long())


def _captions(scenes: Scenes, rng: random.Random) -> list[str]:
    white = colours().index("white")
    unsaid = [_UNSAID_WHITE if one == white else _UNSAID for one in scenes.background]
    return [caption(scenes[number], rng, rng.random() >= share) for number, share in enumerate(unsaid)]


def tokens(tokenizer: Any, texts: list[str]) -> Tensor:
    """Token numbers int16 `[N, 77]`, padded and cut as the pipeline does."""
    found = np.full((len(texts), TEXT_LENGTH), tokenizer.pad_token_id, np.int16)
    for row, ids in zip(found, tokenizer(texts, truncation=True, max_length=TEXT_LENGTH).input_ids, strict=True):
        row[: len(ids)] = ids
    return torch.from_numpy(found)


class Pace:
    """How far a stage is: by its time, and by its steps where they are limited."""

    def __init__(self, seconds: float, max_steps: int | None) -> None:
        self._start, self._seconds, self._max_steps = time.monotonic(), seconds, max_steps
        self.steps = 0

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    @property
    def share(self) -> float:
        """From 0 to 1, which ends it."""
        by_steps = self.steps / self._max_steps if self._max_steps else 0.0
        return min(max(self.elapsed_s / self._seconds if self._seconds > 0 else 1.0, by_steps), 1.0)

    @property
    def factor(self) -> float:
        """Of the learning rate: a short rise, then half a cosine down (Loshchilov and Hutter 2017)."""
        rise = min(self.share / _WARM_UP, 1.0) if self._max_steps is None else 1.0
        return rise * (_LEAST_RATE + (1 - _LEAST_RATE) * (1 + math.cos(math.pi * self.share)) / 2)


@dataclass(slots=True)
class Record:
    """The loss curve of one stretch, written as it goes."""

    path: Path
    earlier: list[dict[str, Any]]
    """The stretches before this one."""
    facts: dict[str, Any]
    curve: list[dict[str, Any]] = field(default_factory=list)

    def add(self, stage: str, pace: Pace, pictures: int, **values: float) -> None:
        """One point, written, and printed with the speed since the one before."""
        point = {"stage": stage, "step": pace.steps, "seconds": round(pace.elapsed_s, 1), "pictures": pictures}
        before = self.curve[-1] if self.curve and self.curve[-1]["stage"] == stage else {"seconds": 0, "pictures": 0}
        rate = round((pictures - before["pictures"]) / max(pace.elapsed_s - before["seconds"], 1e-3), 1)
        self.curve.append(point | {name: float(f"{value:.4g}") for name, value in values.items()})
        print(json.dumps(self.curve[-1] | {"pictures_per_s": rate}), flush=True)
        self.write()

    def write(self) -> None:
        """All stretches, one point a line."""
        stretches = [*self.earlier, self.facts | {"curve": self.curve}]
        self.path.write_text(json.dumps({"stretches": stretches}, indent=None).replace('{"stage"', '\n{"stage"') + "\n")


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 on a GPU; on a CPU, where it is slow, float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def optimizer(parameters: list[torch.nn.Parameter], rate: float, device: torch.device) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter 2019), as one kernel on a GPU."""
    return torch.optim.AdamW(parameters, rate, betas=(0.9, 0.99), weight_decay=0.01, fused=device.type == "cuda")


def step(made: torch.optim.Optimizer, loss: Tensor, parameters: list[torch.nn.Parameter], rate: float) -> None:
    """One update, gradients clipped to norm 1."""
    made.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    for group in made.param_groups:
        group["lr"] = rate
    made.step()
