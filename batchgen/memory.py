"""What a model needs of a GPU's memory, estimated without one: which batches fit, and what helps where none does.

The estimate is meant to lie above what a run was seen to take, and below its double. Weights are exact; what network
and decoder work in is linear in pixels, as with kernels that never hold an attention matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from batchgen.chunks import most_decoded
from batchgen.cost import HEAD_ROOM
from batchgen.errors import UsageError
from batchgen.job import Job
from batchgen.records import Group
from batchgen.wording import listed, sized

CARDS = (24 * 10**9, 48 * 10**9, 80 * 10**9)
"""Bytes of common kinds of GPU; what CUDA itself takes of them is in what a GiB has more than a GB."""
_MOST = 4096


@dataclass(frozen=True, slots=True)
class Demand:
    """A model's bytes on a device."""

    network: int
    """Weights, like the next two."""
    vae: int
    encoders: int
    row_pixel: float
    """That one row of the network works in, for each pixel of its image."""
    row: float
    """Likewise, for its text."""
    decoded_pixel: float
    """That the decoder works in, for each pixel of the images that are decoded at once."""
    encoding: float
    """That the text encoders work in."""
    tile: int
    """Pixels of a tile, where the decoder works in tiles."""
    dtype: str
    has_choices: bool = True
    """Whether the model can work in the other ways of `Room.easier`; the generic family's pipelines cannot."""

    @property
    def weights(self) -> int:
        return self.network + self.vae + self.encoders


@dataclass(frozen=True, slots=True)
class Room:
    """A limit, and how a job works within it."""

    demand: Demand
    limit_bytes: int
    is_away: bool = False
    """Whether the text encoders leave the device while they have nothing to do."""
    is_tiled: bool = False
    decode_batch: int | None = None

    def needed(self, group: Group, size: int) -> float:
        """Bytes at the peak of a batch: while texts are encoded, or later, when a captured graph keeps what it works in
        while images are decoded."""
        demand, pixels = self.demand, group.width * group.height
        rows = size * (2 if group.is_guided else 1)
        decoded = min(size, self.decode_batch or most_decoded(group.width, group.height, self.limit_bytes))
        tile = min(pixels, demand.tile) if self.is_tiled else pixels
        working = rows * (demand.row + demand.row_pixel * pixels) + decoded * demand.decoded_pixel * tile
        staying = demand.weights - (demand.encoders if self.is_away else 0)
        return max(demand.weights + demand.encoding, staying + working)

    def fits(self, group: Group, size: int) -> bool:
        """Whether a batch fits, some room for fragments left."""
        return self.needed(group, size) <= HEAD_ROOM * self.limit_bytes

    def most(self, group: Group) -> int:
        """Rows of the largest batch that fits; 0 where not even one does."""
        low, high = 0, _MOST
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.fits(group, middle) else (low, middle - 1)
        return low

    def within(self, group: Group, sizes: Sequence[int]) -> tuple[int, ...]:
        """The batch sizes that fit. Raises UsageError, which says what would help, where none does."""
        most = self.most(group)
        allowed = tuple(size for size in sizes if size <= most)
        if not allowed:
            least = f"a batch of {min(sizes)}" if most else "a single image"
            also = f"; {most} at once would fit: allow smaller ones in plan.batch_sizes" if most else ""
            raise UsageError(
                f"{least} of {group.width}x{group.height} does not fit into {sized(self.limit_bytes)} "
                f"(engine.max_memory): it takes about {sized(self.needed(group, min(sizes)) / HEAD_ROOM)}"
                f"{also or f'; {self.advice(group)}'}"
            )
        return allowed

    def easier(self) -> Iterator[tuple[str, Room]]:
        """Other ways of working that need less, each with the keys for it, the gentlest first."""
        away, tiled = 'engine.text_encoder = "offload"', "engine.vae_tiling = true"
        if not self.demand.has_choices:
            return
        if not self.is_away:
            yield away, replace(self, is_away=True)
        if self.decode_batch != 1:
            yield "engine.decode_batch = 1", replace(self, decode_batch=1)
        if not self.is_away:
            yield f"{away} and engine.decode_batch = 1", replace(self, is_away=True, decode_batch=1)
        if not self.is_tiled:
            yield f"{tiled} (other pixels)", replace(self, decode_batch=1, is_tiled=True)
            yield f"{away} and {tiled} (other pixels)", replace(self, is_away=True, decode_batch=1, is_tiled=True)

    def advice(self, group: Group) -> str:
        """What would make a batch fit that does not."""
        for keys, room in self.easier():
            if room.most(group):
                return f"set {keys}"
        demand = self.demand
        what = f"the weights alone are {sized(demand.weights)} in {demand.dtype}"
        if demand.dtype == "float32":
            return f"{what}: set model.dtype to a half precision"
        return f"{what}: take a larger GPU, a smaller image or a smaller model"


def room_of(job: Job, demand: Demand, limit_bytes: int) -> Room:
    """As the job works within a limit."""
    engine = job.engine
    return Room(demand, limit_bytes, engine.text_encoder != "gpu", engine.vae_tiling, engine.decode_batch)


def lines(job: Job, demand: Demand, planned: Sequence[tuple[Group, int]]) -> list[str]:
    """What planned batches take, each a group and its largest size, for people: and whether that fits into the job's
    limit, or into common kinds of GPU."""
    parts = {"network": demand.network, "text encoders": demand.encoders, "VAE": demand.vae}
    told = ", ".join(f"{name} {sized(size)}" for name, size in parts.items() if size)
    rooms = _rooms(job, demand)
    needed = max((room.needed(*one) for room in rooms[-1:] for one in planned), default=0)
    head = f"memory: weights of {sized(demand.weights)} in {demand.dtype} ({told}), with batches up to {sized(needed)}"
    short = [line for room in rooms if (line := _shortage(room, planned))]
    fitting = [sized(room.limit_bytes) for room in rooms if not _shortage(room, planned)]
    return [f"{head}: {f'fits into {listed(fitting)}' if fitting else 'too much'}", *(f"  {line}" for line in short)]


def _shortage(room: Room, planned: Sequence[tuple[Group, int]]) -> str:
    """What does not fit, and what would help; "" where all does."""
    most = {one: room.most(one) for one, size in planned if not room.fits(one, size)}
    if not most:
        return ""
    worst = min(most, key=lambda one: most[one])
    size = f"{worst.width}×{worst.height}{' guided' if worst.is_guided else ''}"
    limit = sized(room.limit_bytes)
    if most[worst]:
        return f"{limit}: {most[worst]} of {size} at once; --max-memory {limit.replace(' ', '')} plans for that"
    return f"{limit}: not a single {size}; {room.advice(worst)}"


def _rooms(job: Job, demand: Demand) -> list[Room]:
    limit = job.engine.max_memory_bytes
    return [room_of(job, demand, one) for one in (CARDS if limit is None else (limit,))]


def facts(job: Job, demand: Demand, groups: Sequence[Group]) -> dict[str, Any]:
    """The same for programs: bytes, and by limit the rows of the largest batch of each size, 0 where none fits."""
    return {
        "weights": {"network": demand.network, "text_encoders": demand.encoders, "vae": demand.vae},
        "dtype": demand.dtype,
        "limits": [
            {"bytes": room.limit_bytes, "largest_batch": _by_size(room, groups)} for room in _rooms(job, demand)
        ],
    }


def _by_size(room: Room, groups: Sequence[Group]) -> dict[str, int]:
    most: dict[str, int] = {}
    for one in groups:
        size = f"{one.width}x{one.height}"
        most[size] = min(room.most(one), most.get(size, _MOST))
    return most
