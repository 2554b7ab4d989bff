"""A batch's rows taking turns in its lanes: a lane whose row has finished goes on with the next one, in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from batchgen.engine.denoise import NO_PICTURES, Lanes, Pictures, load_lanes
from batchgen.engine.samplers import Table
from batchgen.models.family import Conditioning, Family
from batchgen.records import Row
from batchgen.schedule import turns


class Relay:
    """The rows of one batch, at least as many as it has lanes. A row's noise is drawn, and its init image encoded, when
    its turn comes, so that the device holds step noise for no more rows than lanes."""

    def __init__(
        self,
        model: Family,
        rows: Sequence[Row],
        tables: Sequence[Table],
        conditioning: Conditioning,
        lanes: int,
        pictures: Pictures = NO_PICTURES,
    ) -> None:
        self._model = model
        self._rows = rows
        self._tables = tables
        self._pictures = pictures
        self._conditioning = conditioning
        """Of all rows."""
        found = turns([table.num_evaluations for table in tables], lanes)
        self.longest = max(table.num_evaluations for table in tables)
        """The most evaluations of any row."""
        self.num_evaluations = max(turn.end for turn in found)
        """Of the batch."""
        self._first = [turn.row for turn in found[:lanes]]
        self._waiting = found[lanes:][::-1]
        self._holds = list(self._first)
        """The row in each lane."""
        self._made: dict[int, Tensor] = {}
        """Final latents `[C, h, w]` of rows whose lane another has taken."""

    def first(self, room: int, num: int | None = None) -> tuple[Lanes, Conditioning]:
        """The rows that begin, or the first `num` of them, in tensors of their own."""
        return self._loaded(self._first[:num], room), self._conditioning.of(self._first[:num])

    def tell(self, conditioning: Conditioning) -> None:
        """Have the rows told this instead: another form of the same, of all rows."""
        self._conditioning = conditioning

    def refill(self, number: int, lanes: Lanes, conditioning: Conditioning) -> None:
        """Put the rows whose turns begin with this evaluation into their lanes, in place; nothing waits for it."""
        while self._waiting and self._waiting[-1].start == number:
            turn = self._waiting.pop()
            self._made[self._holds[turn.lane]] = lanes.latents[turn.lane].clone()
            self._holds[turn.lane] = turn.row
            lanes.put(turn.lane, self._loaded([turn.row], lanes.timesteps.shape[1]))
            conditioning.put(turn.lane, self._conditioning, turn.row)

    def latents(self, lanes: Lanes) -> Tensor:
        """Final latents `[R, C, h, w]` of all R rows, after the last evaluation, in a tensor of their own."""
        made = self._made | {row: lanes.latents[lane] for lane, row in enumerate(self._holds)}
        return torch.stack([made[row] for row in range(len(self._rows))])

    def _loaded(self, rows: Sequence[int], room: int) -> Lanes:
        return load_lanes(
            self._model,
            [self._rows[row] for row in rows],
            [self._tables[row] for row in rows],
            max(room, self.longest),
            self._pictures,
        )
