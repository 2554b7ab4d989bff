"""The denoising loop: from a batch's noise to its final latents, every row at its own pace.

All that a step reads or writes is a tensor on the device, and no step waits for a value of one: the loop
runs equal steps until the last row has had all its model evaluations, and a row that has finished stands still
until another takes its lane.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from batchgen.engine.samplers import (
    Scheduler,
    Table,
    begin,
    noise_scale,
    noised,
    scaled_input,
    step_arguments,
    update,
)
from batchgen.generator import Dropped
from batchgen.models.family import Conditioning, Family, Network
from batchgen.models.transfer import to_device
from batchgen.records import Pixels, Row

_EARLIER = ("e1", "e2", "e3")
Pictures = Mapping[int, Pixels]
"""The init images of a batch's rows that have one, by `Row.index`, each in its row's size."""
NO_PICTURES: Pictures = {}


@dataclass(slots=True)
class Lanes:
    """A batch on the device, a lane a row; n is the most evaluations of any row, T the terms of the form."""

    form: tuple[str, ...]
    latents: Tensor
    """`[B, C, h, w]`, in the network's dtype; likewise the next three."""
    previous: Tensor | None
    """`[B, C, h, w]`: the latents one evaluation ago; None where the form has no x1."""
    earlier: Tensor
    """`[B, K, C, h, w]`: remembered predictions, the newest first, as many as the form names."""
    noise: Tensor
    """`[B, n, C, h, w]`: step noise, drawn beforehand; n is 0 where the form has none."""
    position: Tensor
    """`[B]` int64: the evaluation a row is at."""
    evaluations: Tensor
    """`[B]` int64: how many a row has."""
    timesteps: Tensor
    """`[B, n]` float32."""
    input_scale: Tensor
    """`[B, n]` float32."""
    coefficients: Tensor
    """`[B, n, T]` float32."""
    keeps: Tensor
    """`[B, n]` bool."""

    def tensors(self) -> list[Tensor]:
        """All of them, in a fixed order."""
        values = [getattr(self, field.name) for field in fields(self)]
        return [value for value in values if isinstance(value, Tensor)]

    def put(self, lane: int, other: Lanes) -> None:
        """Overwrite a lane by the only one of others that have as much room."""
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            mine[lane].copy_(theirs[0])


def load_lanes(
    model: Family, rows: Sequence[Row], tables: Sequence[Table], room: int = 0, pictures: Pictures = NO_PICTURES
) -> Lanes:
    """Draw the rows' noise, encode their init images and lay their tables side by side; nothing is remembered from
    another batch.

    n is the most evaluations of any row, or `room` if that is more.
    """
    form = tables[0].form
    assert all(table.form == form for table in tables)
    n = max(room, *(table.num_evaluations for table in tables))
    drawn = [_draw(model, row, table, pictures.get(row.index)) for row, table in zip(rows, tables, strict=True)]
    first = torch.cat([one.first * table.init_scale for one, table in zip(drawn, tables, strict=True)])
    device = model.device
    latents = to_device(first, device)
    for lane, (one, table) in enumerate(zip(drawn, tables, strict=True)):
        if one.image is not None:
            latents[lane] += one.image[0] * table.image_scale
    num_earlier = sum(name in form for name in _EARLIER)

    def beside(columns: Sequence[Tensor]) -> Tensor:
        return to_device(torch.stack([_lengthen(column, n) for column in columns]), device)

    return Lanes(
        form=form,
        latents=latents,
        previous=torch.zeros_like(latents) if "x1" in form else None,
        earlier=latents.new_zeros((len(rows), num_earlier, *latents.shape[1:])),
        noise=to_device(torch.stack([_lengthen(one.later, n if "z" in form else 0) for one in drawn]), device),
        position=torch.zeros(len(rows), dtype=torch.int64, device=device),
        evaluations=to_device(torch.tensor([table.num_evaluations for table in tables]), device),
        timesteps=beside([table.timesteps for table in tables]),
        input_scale=beside([table.input_scale for table in tables]),
        coefficients=beside([table.coefficients for table in tables]),
        keeps=beside([table.keeps for table in tables]),
    )


@dataclass(frozen=True, slots=True)
class _Drawn:
    """What a row's generator gives, in diffusers' order."""

    image: Tensor | None
    """`[1, C, h, w]`, on the device; None without an init image."""
    first: Tensor
    """Noise `[1, C, h, w]`."""
    later: Tensor
    """Step noise `[n, C, h, w]`."""


def _draw(model: Family, row: Row, table: Table, picture: Pixels | None) -> _Drawn:
    generator = torch.Generator("cpu").manual_seed(row.seed)
    image = None if picture is None else model.encode_image(picture, generator)
    first = model.noise(row, generator)
    later = first.new_zeros((table.num_evaluations if "z" in table.form else 0, *first.shape[1:]))
    for i in table.draws.nonzero().flatten().tolist():
        later[i] = model.noise(row, generator)[0]
    return _Drawn(image, first, later)


def _lengthen(column: Tensor, n: int) -> Tensor:
    """Repeat the last entry up to n, so that a finished row computes on numbers that are harmless."""
    return torch.cat([column, column[-1:].expand(n - len(column), *column.shape[1:])])


def step(model: Family, network: Network, lanes: Lanes, conditioning: Conditioning) -> None:
    """One model evaluation of every lane, in place: the network, guidance, and the sampler's update."""
    lane = torch.arange(len(lanes.position), device=lanes.position.device)
    at = torch.minimum(lanes.position, lanes.evaluations - 1)
    is_running = (lanes.position < lanes.evaluations)[:, None, None, None]
    scaled = (lanes.latents * lanes.input_scale[lane, at, None, None, None]).to(lanes.latents.dtype)
    prediction = model.predict(network, scaled, lanes.timesteps[lane, at], conditioning)
    moved = update(lanes.coefficients[lane, at], _terms(lanes, prediction, lane, at)).to(lanes.latents.dtype)
    if lanes.earlier.shape[1]:
        pushed = torch.cat([prediction[:, None], lanes.earlier[:, :-1]], dim=1)
        keeps = lanes.keeps[lane, at, None, None, None, None]
        lanes.earlier.copy_(torch.where(keeps, pushed, lanes.earlier))
    if lanes.previous is not None:
        lanes.previous.copy_(lanes.latents)
    lanes.latents.copy_(torch.where(is_running, moved, lanes.latents))
    lanes.position.add_(1)


def _terms(lanes: Lanes, prediction: Tensor, lane: Tensor, at: Tensor) -> list[Tensor]:
    values = {"x": lanes.latents, "e": prediction}
    if lanes.previous is not None:
        values["x1"] = lanes.previous
    values |= {name: lanes.earlier[:, k] for k, name in enumerate(_EARLIER[: lanes.earlier.shape[1]])}
    if "z" in lanes.form:
        values["z"] = lanes.noise[lane, at]
    return [values[name] for name in lanes.form]


def denoise_own(
    model: Family,
    rows: Sequence[Row],
    scheduler: Scheduler,
    conditioning: Conditioning,
    should_drop: Callable[[], bool],
    pictures: Pictures = NO_PICTURES,
    skipped: int | None = None,
) -> Tensor:
    """Final latents `[B, C, h, w]` under a scheduler that is no table: it steps the batch itself, with a generator for
    each row. All rows have an init image, which stands for `skipped` steps, or none has. Raises Dropped."""
    generators = [torch.Generator("cpu").manual_seed(row.seed) for row in rows]
    owned = list(zip(rows, generators, strict=True))
    images = [] if skipped is None else [model.encode_image(pictures[row.index], one) for row, one in owned]
    noise = to_device(torch.cat([model.noise(row, one) for row, one in owned]), model.device)
    timesteps = begin(scheduler, skipped)
    latents = noised(scheduler, torch.cat(images), noise, timesteps) if images else noise * noise_scale(scheduler)
    arguments = step_arguments(scheduler, generators)
    for timestep in timesteps:
        if should_drop():
            raise Dropped
        scaled = scaled_input(scheduler, latents, timestep)
        prediction = model.predict(model.network, scaled, timestep.expand(len(rows)), conditioning)
        latents = scheduler.step(prediction, timestep, latents, **arguments, return_dict=False)[0]
    return latents
