"""Samplers as affine maps, one per model evaluation, with coefficients read off diffusers' own schedulers.

Evaluation i of a sampler maps the latents x_i, the prediction e_i, what it remembers of earlier evaluations
and the row's noise z_i linearly onto x_{i+1}. Feeding unit vectors instead of latents and predictions makes a
scheduler spell out its own coefficients, so a table is right by construction; it is checked once more against
the scheduler on random inputs before it is used.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import Tensor

from batchgen.errors import BatchgenError, UsageError
from batchgen.models.facts import Facts
from batchgen.models.family import UNSHIFTED, Schedule
from batchgen.wording import first_line

Scheduler = Any
"""A diffusers scheduler; the library is untyped."""

_ZERO = 1e-9
"""A coefficient smaller than this part of the largest is rounding of the float64 probe."""
_TOLERANCE = 1e-5
_RESERVED = 16
"""Coordinates of a probe that no unit vector occupies: there the output is noise alone."""


class NotAffineError(BatchgenError):
    """A scheduler is no affine map of the terms that its form names."""


@dataclass(frozen=True, slots=True)
class Table:
    """One sampler at one step count and schedule: n model evaluations, a form of T terms."""

    form: tuple[str, ...]
    timesteps: Tensor
    """`[n]` float32: what the network is told."""
    input_scale: Tensor
    """`[n]` float32: the network sees the latents times this."""
    coefficients: Tensor
    """`[n, T]` float32, in the form's order."""
    keeps: Tensor
    """`[n]` bool: whether evaluation i's prediction is remembered; e1 is the last remembered one."""
    draws: Tensor
    """`[n]` bool: whether evaluation i draws noise from the row's generator."""
    init_scale: float
    """The first latents are unit noise times this."""
    image_scale: float = 0.0
    """And the latents of the row's init image, if it has one, times this."""

    @property
    def num_evaluations(self) -> int:
        return len(self.timesteps)


class Samplers:
    """The samplers of one loaded model: fresh schedulers, and tables kept per (sampler, steps, schedule)."""

    def __init__(self, own: Scheduler, facts: Facts) -> None:
        self._own = own
        self._facts = facts
        self._templates: dict[str, Scheduler] = {}
        self._tables: dict[tuple[str, int, Schedule, int | None], Table] = {}

    def scheduler(
        self, name: str, steps: int, device: torch.device | str = "cpu", schedule: Schedule = UNSHIFTED
    ) -> Scheduler:
        """A scheduler of its own, with timesteps set. Raises UsageError where diffusers cannot make it."""
        if name not in self._templates:
            self._templates[name] = self._build(name)
        scheduler = copy.deepcopy(self._templates[name])
        schedule.set(scheduler, steps, device)
        return scheduler

    def table(self, name: str, steps: int, schedule: Schedule = UNSHIFTED, skipped: int | None = None) -> Table:
        """The sampler's table, from noise alone or from an init image that stands for the first steps. Raises
        NotAffineError where `models/facts.py` is wrong about it."""
        key = (name, steps, schedule, skipped)
        if key not in self._tables:
            form = tuple(self._facts.sampler_facts(name).form.split(","))
            self._tables[key] = probe(lambda: self.scheduler(name, steps, schedule=schedule), form, skipped)
        return self._tables[key]

    def check_own(self, options: Mapping[str, object], schedule: Schedule) -> None:
        """Try the scheduler that a job gives the model. Raises UsageError for an option that the model's pipeline has
        undone, and for a scheduler that cannot step."""
        own, name = self._own, type(self._own).__name__
        for key, value in options.items():
            if key != "_class_name" and own.config[key] != value:
                raise UsageError(
                    f"model.scheduler_options: {key} = {value!r} has no effect: the model's pipeline in diffusers sets "
                    f"it to {own.config[key]!r}; leave it out"
                )
        facts = self._facts.sampler_facts(name)
        steps = next((one for one in range(self._facts.steps, 0, -1) if facts.makes(one)), None)
        if steps is None:
            return
        random = torch.randn((1, 4, 8, 8), generator=torch.Generator("cpu").manual_seed(0))
        try:
            scheduler = copy.deepcopy(own)
            schedule.set(scheduler, steps, "cpu")
            arguments = step_arguments(scheduler, torch.Generator("cpu"))
            for timestep in scheduler.timesteps:
                random = scheduler.step(random, timestep, random, **arguments, return_dict=False)[0]
            if not random.isfinite().all():
                raise ValueError("its steps lead to NaN or Inf")
        except Exception as error:  # diffusers' schedulers raise what they like.
            raise UsageError(
                f"model.scheduler: {name} cannot be used as the job gives it: {first_line(error)}; check "
                "model.scheduler and model.scheduler_options"
            ) from error

    def _build(self, name: str) -> Scheduler:
        facts = self._facts.sampler_facts(name)
        if facts.scheduler == type(self._own).__name__ and not facts.options:
            return self._own
        try:
            return getattr(diffusers, facts.scheduler).from_config(self._own.config, **facts.options)
        except (ImportError, NotImplementedError, ValueError) as error:
            reason = first_line(error)
            raise UsageError(f"sampler {name!r} cannot be made of this model's scheduler: {reason}") from None


def step_arguments(scheduler: Scheduler, generator: object) -> dict[str, object]:
    """What diffusers' pipelines pass to `step` beside its tensors: eta 0 and the generator, if taken."""
    accepted = inspect.signature(scheduler.step).parameters
    offered = {"eta": 0.0, "generator": generator}
    return {name: value for name, value in offered.items() if name in accepted}


def noise_scale(scheduler: Scheduler) -> float:
    """What the first latents are of unit noise; a flow-matching scheduler has no word for it, since it is 1."""
    return float(getattr(scheduler, "init_noise_sigma", 1.0))


def begin(scheduler: Scheduler, skipped: int | None) -> Tensor:
    """The timesteps that are left where an init image stands for the first steps, of which the scheduler is told as
    diffusers' image-to-image pipelines tell it; all of them from noise alone."""
    timesteps: Tensor = scheduler.timesteps
    if skipped is None:
        return timesteps
    first = skipped * scheduler.order
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(first)
    return timesteps[first:]


def noised(scheduler: Scheduler, image: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
    """An init image's latents `[B, C, h, w]` with as much noise as the first of the timesteps has."""
    first = timesteps[:1].expand(len(image))
    if hasattr(scheduler, "add_noise"):
        made: Tensor = scheduler.add_noise(image, noise, first)
    else:
        made = scheduler.scale_noise(image, first, noise)
    return made


def scaled_input(scheduler: Scheduler, latents: Tensor, timestep: Tensor) -> Tensor:
    """The latents as the network sees them; in flow matching as they are."""
    if not hasattr(scheduler, "scale_model_input"):
        return latents
    scaled: Tensor = scheduler.scale_model_input(latents, timestep)
    return scaled


def update(coefficients: Tensor, terms: Sequence[Tensor]) -> Tensor:
    """The affine map: sum over T of coefficients `[B, T]` times terms `[B, C, h, w]`, in float32."""
    products = (coefficients[:, i, None, None, None] * term.to(coefficients.dtype) for i, term in enumerate(terms))
    return torch.stack(tuple(products)).sum(0)


def probe(fresh: Callable[[], Scheduler], form: tuple[str, ...], skipped: int | None = None) -> Table:
    """The table of the scheduler that `fresh` makes. Raises NotAffineError if the form does not hold it."""
    table = _read(fresh(), form, skipped)
    _check(fresh(), table, skipped)
    return table


@dataclass(slots=True)
class _Evaluation:
    """What one probed `step` returned, as coefficients over all latents and predictions up to it."""

    over_latents: Tensor
    over_predictions: Tensor
    over_noise: float
    draws_noise: bool
    input_scale: float


def _read(scheduler: Scheduler, form: tuple[str, ...], skipped: int | None) -> Table:
    timesteps = begin(scheduler, skipped)
    one, nothing = torch.ones((1, 1, 1, 1), dtype=torch.float64), torch.zeros((1, 1, 1, 1), dtype=torch.float64)
    is_begun = skipped is not None
    init_scale = float(noised(scheduler, nothing, one, timesteps)) if is_begun else noise_scale(scheduler)
    image_scale = float(noised(scheduler, one, nothing, timesteps)) if is_begun else 0.0
    evaluations = _evaluate_units(scheduler, timesteps)
    kept = sorted({j for i, e in enumerate(evaluations) for j in _used(e.over_predictions) if j < i})
    rows = [_row(i, evaluation, kept, form) for i, evaluation in enumerate(evaluations)]
    return Table(
        form=form,
        timesteps=timesteps.to(torch.float32),
        input_scale=torch.tensor([evaluation.input_scale for evaluation in evaluations]),
        coefficients=torch.tensor(rows, dtype=torch.float32),
        keeps=torch.tensor([i in kept for i in range(len(evaluations))]),
        draws=torch.tensor([evaluation.draws_noise for evaluation in evaluations]),
        init_scale=init_scale,
        image_scale=image_scale,
    )


def _evaluate_units(scheduler: Scheduler, timesteps: Tensor) -> list[_Evaluation]:
    """Step through the timesteps with x_i = unit vector i and e_i = unit vector n + i, in float64."""
    n = len(timesteps)
    size = 2 * n + _RESERVED
    generator = torch.Generator("cpu").manual_seed(0)
    arguments = step_arguments(scheduler, generator)
    units = torch.eye(size, dtype=torch.float64).view(size, 1, size, 1, 1)
    evaluations = []
    for i, timestep in enumerate(timesteps):
        latents, prediction = units[i], units[n + i]
        input_scale = float(scaled_input(scheduler, latents, timestep)[0, i])
        before = generator.get_state()
        moved = scheduler.step(prediction, timestep, latents, **arguments, return_dict=False)[0].flatten()
        draws_noise = not torch.equal(before, generator.get_state())
        over_noise = 0.0
        if draws_noise:
            noise = _drawn(before, generator.get_state(), prediction).flatten()
            reserved = noise[2 * n :]
            over_noise = float(moved[2 * n :] @ reserved / (reserved @ reserved))
            moved = moved - over_noise * noise
        moved = torch.where(moved.abs() > _ZERO * moved.abs().max(), moved, 0.0)
        evaluations.append(_Evaluation(moved[:n], moved[n : 2 * n], over_noise, draws_noise, input_scale))
    return evaluations


def _drawn(before: Tensor, after: Tensor, like: Tensor) -> Tensor:
    """The noise that took a generator from one state to another."""
    generator = torch.Generator("cpu")
    generator.set_state(before)
    noise = torch.randn(like.shape, generator=generator, dtype=like.dtype)
    if not torch.equal(generator.get_state(), after):
        raise NotAffineError("the scheduler draws noise otherwise than once, in the latents' shape and dtype")
    return noise


def _used(coefficients: Tensor) -> list[int]:
    return [int(j) for j in coefficients.nonzero()]


def _row(i: int, evaluation: _Evaluation, kept: list[int], form: tuple[str, ...]) -> list[float]:
    """Evaluation i's coefficients in the form's order."""
    earlier = [j for j in kept if j < i][::-1]
    values = {f"x{i - j or ''}": float(evaluation.over_latents[j]) for j in _used(evaluation.over_latents)}
    for j in _used(evaluation.over_predictions):
        name = "e" if j == i else f"e{1 + earlier.index(j)}"
        values[name] = float(evaluation.over_predictions[j])
    if evaluation.draws_noise:
        values["z"] = evaluation.over_noise
    strangers = values.keys() - set(form)
    if strangers:
        raise NotAffineError(f"evaluation {i} uses {sorted(strangers)}, which form {','.join(form)!r} lacks")
    return [values.get(name, 0.0) for name in form]


def _check(scheduler: Scheduler, table: Table, skipped: int | None) -> None:
    """Compare table and scheduler on random latents and predictions, float32, relative 1e-5."""
    shape = (1, 4, 4, 4)
    random = torch.Generator("cpu").manual_seed(1)
    own = torch.Generator("cpu").manual_seed(2)
    arguments = step_arguments(scheduler, own)
    zeros = torch.zeros(shape)
    previous, predictions = zeros, [zeros] * 3
    for i, timestep in enumerate(begin(scheduler, skipped)):
        latents, prediction, noise = (
            torch.randn(shape, generator=random),
            torch.randn(shape, generator=random),
            zeros,
        )
        if table.draws[i]:
            twin = torch.Generator("cpu")
            twin.set_state(own.get_state())
            noise = torch.randn(shape, generator=twin)
        scaled = scaled_input(scheduler, latents, timestep)
        wanted = scheduler.step(prediction, timestep, latents, **arguments, return_dict=False)[0]
        values = {"x": latents, "x1": previous, "e": prediction, "z": noise}
        values |= {f"e{k + 1}": earlier for k, earlier in enumerate(predictions)}
        made = update(table.coefficients[i : i + 1], [values[name] for name in table.form])
        for name, left, right in (
            ("input", latents * table.input_scale[i], scaled),
            ("update", made, wanted),
        ):
            if not (left - right).abs().max() <= _TOLERANCE * right.abs().max():
                raise NotAffineError(f"{type(scheduler).__name__}: the {name} of evaluation {i} is not affine")
        previous = latents
        if table.keeps[i]:
            predictions = [prediction, *predictions[:2]]
