"""The denoising steps of a batch, as its bucket's mode says: eager, compiled, or replays of a captured graph."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from batchgen.engine.checking import check
from batchgen.engine.compiling import Compiler, doing, mode_of
from batchgen.engine.denoise import NO_PICTURES, Lanes, Pictures, step
from batchgen.engine.devices import is_alive, is_memory
from batchgen.engine.graphs import GraphPool, Static, reserved_bytes
from batchgen.engine.relay import Relay
from batchgen.engine.samplers import Table
from batchgen.generator import Context, Dropped
from batchgen.models.family import Conditioning, Family, Network
from batchgen.models.transfer import Mark
from batchgen.records import Bucket, Row
from batchgen.wording import first_line

LEAD_S = 2.0
"""Work that may be queued beyond the evaluation the device is at: what the host has for everything else between two
batches, and what a stop has to wait for."""
MIN_LEAD = 3
"""Evaluations, where one takes long or it is not known how long."""
ROOM = 32
"""Captured tables hold a multiple of this many evaluations, so that another step count rarely needs another capture."""
CHECKED_STEPS = 2
CHECKED_ROWS = 2
"""Of a batch whose kernels' code is the same for any number of rows."""


@dataclass(frozen=True, slots=True)
class Capture:
    """What a capture took, for the log."""

    bucket: Bucket
    mode: str
    seconds: float
    compile_s: float
    before_bytes: int
    """Reserved on the device."""
    after_bytes: int
    deviation: float
    """From eager, over two steps; 0 is bit for bit."""

    def __str__(self) -> str:
        compiled = f", of which {self.compile_s:.0f} s compiling" if self.compile_s else ""
        memory = f"{self.before_bytes / 1e9:.2f} to {self.after_bytes / 1e9:.2f} GB"
        return f"{self.mode} {self.bucket}: {self.seconds:.1f} s{compiled}, {memory}, deviation {self.deviation:.1e}"


@dataclass(slots=True)
class _Ready:
    """A bucket that is prepared for its mode."""

    mode: str
    network: Network
    room: int
    lanes: Lanes | None = None
    conditioning: Conditioning | None = None
    replay: Callable[[], None] | None = None
    held_bytes: int = 0
    """That the device's memory has grown by for it."""


class Steps:
    """One model's denoising. Whoever changes to another group has this one's graphs forgotten before."""

    def __init__(self, model: Family, compiler: Compiler, pool: GraphPool, context: Context) -> None:
        self.captures: list[Capture] = []
        self._model = model
        self._compiler = compiler
        self._say = context.say
        self._preparing = context.preparing
        self._pool = pool
        self._ready: dict[Bucket, _Ready] = {}
        self._broken: dict[Bucket, str] = {}
        """Buckets that could not be made ready, and the mode that they run in instead."""

    def run(
        self,
        bucket: Bucket,
        mode: str,
        rows: Sequence[Row],
        tables: Sequence[Table],
        conditioning: Conditioning,
        should_drop: Callable[[], bool],
        pictures: Pictures = NO_PICTURES,
    ) -> tuple[Tensor, str]:
        """Final latents `[R, C, h, w]` of R rows, at least as many as the bucket has lanes, queued; and the mode that
        ran. Raises Dropped."""
        relay = Relay(self._model, rows, tables, conditioning, bucket.size, pictures)
        ready = self._made_ready(bucket, mode, relay)
        relay.tell(self._told(ready.mode, conditioning))
        lanes, told = relay.first(ready.room)
        if ready.replay is not None:
            lanes, told = _load(ready, lanes, told)

        def evaluate(number: int) -> None:
            relay.refill(number, lanes, told)
            if ready.replay is not None:
                ready.replay()
            else:
                step(self._model, ready.network, lanes, told)

        _advance(evaluate, relay.num_evaluations, self._model.device, should_drop)
        return relay.latents(lanes), ready.mode

    @property
    def held_bytes(self) -> int:
        """What the graphs of the group at work hold beside what is allocated for a batch."""
        return sum(ready.held_bytes for ready in self._ready.values())

    def forget(self) -> None:
        """Drop the group's graphs."""
        self._ready.clear()

    def _told(self, mode: str, conditioning: Conditioning) -> Conditioning:
        return self._compiler.told(mode_of(mode)[0], conditioning)

    def _made_ready(self, bucket: Bucket, mode: str, relay: Relay) -> _Ready:
        mode = self._broken.get(bucket, mode)
        ready = self._ready.get(bucket)
        if ready is not None and (ready.replay is None or ready.room >= relay.longest):
            return ready
        # The code of blocks is the same for every batch size, and is checked once with a group's width and height; but
        # a single row of the network has its own.
        alike = next(
            (
                one
                for other, one in self._ready.items()
                if one.mode == mode == "regional" and (other.rows == 1) == (bucket.rows == 1)
            ),
            None,
        )
        room = -(-relay.longest // ROOM) * ROOM
        num = CHECKED_ROWS if mode == "regional" else None
        while mode != "eager":
            try:
                if alike is not None:
                    step(self._model, alike.network, *relay.first(room))
                    ready = alike
                    break
                with self._preparing(f"{doing(mode)} {bucket}", is_long=mode_of(mode)[0] != "eager"):
                    ready = self._prepare(bucket, mode, *relay.first(room, num))
                break
            except Exception as error:  # whatever torch.compile and capture raise: the bucket has other ways to run
                if is_memory(error) or not is_alive(self._model.device):
                    raise
                kernels, is_captured = mode_of(mode)
                instead = "graph" if is_captured and kernels != "eager" else "eager"
                reason = first_line(error)
                self._say(f"{bucket}: {mode} does not work here ({type(error).__name__}: {reason}); it runs {instead}")
                self._broken[bucket] = mode = instead
                alike = None
        else:
            ready = _Ready("eager", self._model.network, 0)
        self._ready[bucket] = ready
        return ready

    def _prepare(self, bucket: Bucket, mode: str, lanes: Lanes, conditioning: Conditioning) -> _Ready:
        """Compile and capture as the mode says, and check the result against eager. Raises Refused."""
        model, device = self._model, self._model.device
        started, before = time.perf_counter(), reserved_bytes(device)
        kernels, is_captured = mode_of(mode)
        network = self._compiler.network(kernels, conditioning)
        told = self._told(mode, conditioning)
        compile_s = 0.0
        if kernels != "eager":
            step(model, network, lanes, told)
            Mark(device).wait()
            compile_s = time.perf_counter() - started
        ready = _Ready(mode, network, lanes.timesteps.shape[1])
        if is_captured:
            ready.lanes, ready.conditioning = lanes, told
            ready.replay = self._pool.capture(lambda: step(model, network, lanes, told))
        deviation = self._check(ready, lanes, conditioning)
        capture = Capture(
            bucket, mode, time.perf_counter() - started, compile_s, before, reserved_bytes(device), deviation
        )
        self.captures.append(capture)
        ready.held_bytes = max(0, capture.after_bytes - before) if is_captured else 0
        self._say(str(capture))
        return ready

    def _check(self, ready: _Ready, lanes: Lanes, conditioning: Conditioning) -> float:
        """Two steps with every input overwritten, against eager; the deviation. Raises Refused above tolerance."""
        other_lanes, other_conditioning = _others(lanes, conditioning)
        eager = _cloned(other_lanes)
        made = _cloned(other_lanes)
        for _ in range(CHECKED_STEPS):
            step(self._model, self._model.network, eager, other_conditioning)
        told = self._told(ready.mode, other_conditioning)
        if ready.replay is not None:
            _load(ready, other_lanes, told)
            made = lanes
        for _ in range(CHECKED_STEPS):
            if ready.replay is not None:
                ready.replay()
            else:
                step(self._model, ready.network, made, told)
        return check(made.latents, eager.latents, mode_of(ready.mode)[0], self._model.dtype)


def _advance(call: Callable[[int], None], num: int, device: torch.device, should_drop: Callable[[], bool]) -> None:
    """Queue the evaluations, never more than the lead ahead of the device. Raises Dropped."""
    marks, lead = deque([Mark(device)]), MIN_LEAD
    for number in range(num):
        while len(marks) > lead:
            passed = marks.popleft()
            marks[0].wait()
            seconds = marks[0].seconds_since(passed)
            lead = max(MIN_LEAD, int(LEAD_S / seconds)) if seconds else MIN_LEAD
        if should_drop():
            raise Dropped
        call(number)
        marks.append(Mark(device))


def _load(ready: _Ready, lanes: Lanes, conditioning: Conditioning) -> tuple[Lanes, Conditioning]:
    """Overwrite every static input and all that is remembered; what was overwritten."""
    assert ready.lanes is not None
    assert ready.conditioning is not None
    Static(ready.lanes.tensors()).load(lanes.tensors())
    Static(_inputs(ready.conditioning)).load(_inputs(conditioning))
    return ready.lanes, ready.conditioning


def _inputs(conditioning: Conditioning) -> list[Tensor]:
    return [conditioning.guidance, *(conditioning.inputs[name] for name in sorted(conditioning.inputs))]


def _cloned(lanes: Lanes) -> Lanes:
    values = {field.name: getattr(lanes, field.name) for field in dataclasses.fields(lanes)}
    copies: dict[str, Any] = {name: one.clone() for name, one in values.items() if isinstance(one, Tensor)}
    return dataclasses.replace(lanes, **copies)


def _others(lanes: Lanes, conditioning: Conditioning) -> tuple[Lanes, Conditioning]:
    """A batch of the same shape with every input another one, and all of them finite, whatever the rows hold.

    The updates weigh the prediction as much as all else together, which no sampler's first steps do: so latents are off
    by as much as the network is. Lanes stand still after one step or go on, and keep their predictions or do not.
    """
    other = _cloned(lanes)
    random = torch.Generator(lanes.latents.device).manual_seed(0)
    other.latents.normal_(generator=random)
    other.noise.normal_(generator=random)
    for memory in (other.previous, other.earlier):
        if memory is not None:
            memory.zero_()
    other.position.zero_()
    other.evaluations.fill_(CHECKED_STEPS)[1::2].fill_(1)
    other.keeps.fill_(True)[2::4].fill_(False)
    other.timesteps.mul_(0.9)
    other.input_scale.fill_(0.9)
    weights = [1.0 if term == "e" else 0.5 for term in lanes.form]
    other.coefficients.copy_(torch.tensor(weights))
    inputs = {name: _another(one.roll(1, 0)) for name, one in conditioning.inputs.items()}
    # Small ones: guidance multiplies what the two halves of a prediction deviate by.
    guidance = torch.where(conditioning.guidance > 1.4, 1.2, 1.6)
    return other, Conditioning(guidance, conditioning.is_guided, inputs)


def _another(one: Tensor) -> Tensor:
    """An input that is not this one and finite; a mask stays as it is."""
    return one if one.dtype == torch.bool else 0.9 * torch.nan_to_num(one, nan=0.0, posinf=0.0, neginf=0.0)
