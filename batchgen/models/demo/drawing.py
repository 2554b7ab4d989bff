"""Training pictures, drawn from scenes in batches on the device where they are used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchgen.models.demo.scenes import JITTER, Scenes, box_side, boxes
from batchgen.models.demo.sprites import drawings
from batchgen.models.demo.vocabulary import COLOURS, SIZES
from batchgen.records import Pixels

SHORTER_SIDES = (64, 96, 128)
"""Of the pictures that can be drawn."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where the things of scenes lie in pictures of one size; tensors on the device."""

    side: Tensor
    """`[N]`, pixels."""
    x: Tensor
    y: Tensor
    """Left and upper edges `[N, 2]`."""
    start: Tensor
    """`[N, 2]`: where each thing's drawing begins among all pixels; 0 where there is none."""
    background: Tensor
    """RGB `[N, 3]`, 0 to 255."""


class Painter:
    """All drawings on one device, in every size that they are needed in."""

    def __init__(self, device: torch.device, shorter_sides: Sequence[int] = SHORTER_SIDES) -> None:
        self._device = device
        nothing = np.zeros((1, 4), np.uint8)
        pixels, self._starts = [nothing], {}
        for side in sorted({box_side(size, shorter) for size in SIZES for shorter in shorter_sides}):
            self._starts[side] = sum(map(len, pixels))
            pixels.append(drawings(side).reshape(-1, 4))
        self._pixels = torch.from_numpy(np.concatenate(pixels)).to(device)
        """uint8 `[P, 4]`; the first is transparent."""

    def place(self, scenes: Scenes, width: int, height: int) -> Places:
        """Lay scenes out for pictures of one size."""
        side, x, y = boxes(scenes, width, height)
        first = np.vectorize(self._starts.__getitem__, otypes=[np.int64])(side)[:, None]
        things = np.stack([scenes.first, scenes.second], axis=-1)
        start = np.where(things < 0, 0, first + things * (side * side)[:, None])
        rgb = np.array(list(COLOURS.values()), np.float32)[scenes.background]
        return Places(*(torch.from_numpy(one).to(self._device) for one in (side, x, y, start, rgb)))

    def paint(
        self, places: Places, chosen: Tensor, width: int, height: int, generator: torch.Generator | None = None
    ) -> Tensor:
        """Pictures of the chosen scenes `[B]`, float32 `[B, 3, H, W]`, -1 to 1; with a generator of the device, each
        thing lies a little beside its place."""
        side, start = places.side[chosen, None, None], places.start[chosen]
        canvas = places.background[chosen, :, None, None].expand(-1, -1, height, width)
        columns = torch.arange(width, device=self._device)[None, None]
        rows = torch.arange(height, device=self._device)[None, :, None]
        for number in range(2):
            left, upper = (edge[chosen, number, None, None] for edge in (places.x, places.y))
            if generator is not None:
                most = round(JITTER * min(width, height))
                off = torch.randint(-most, most + 1, (2, len(chosen), 1, 1), generator=generator, device=self._device)
                left, upper = left + off[0], upper + off[1]
            x, y = columns - left, rows - upper
            begin = start[:, number, None, None]
            is_inside = (x >= 0) & (y >= 0) & (x < side) & (y < side) & (begin > 0)
            rgba = self._pixels[torch.where(is_inside, begin + y * side + x, 0)].float().movedim(-1, 1)
            alpha = rgba[:, 3:] / 255
            canvas = canvas + alpha * (rgba[:, :3] - canvas)
        return canvas / 127.5 - 1


def draw(scenes: Scenes, width: int, height: int, seed: int | None = None) -> list[Pixels]:
    """Pictures of scenes, on the CPU; with a seed, things lie a little beside their places."""
    painter = Painter(torch.device("cpu"), (min(width, height),))
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    painted = painter.paint(
        painter.place(scenes, width, height), torch.arange(len(scenes)), width, height, generator=generator
    )
    return list(((painted + 1) * 127.5).round().to(torch.uint8).movedim(1, -1).numpy())
