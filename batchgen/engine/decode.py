"""Latents into pixels, in chunks of one padded size; what is no picture is told apart before uint8 hides it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.checking import check
from batchgen.engine.compiling import Compiler, doing, mode_of
from batchgen.engine.devices import is_alive, is_memory
from batchgen.engine.graphs import GraphPool, reserved_bytes
from batchgen.engine.room import with_room
from batchgen.generator import NoRoom, Preparing, unannounced
from batchgen.models.family import Family
from batchgen.models.transfer import Mark, to_host
from batchgen.records import Pixels
from batchgen.wording import counted, first_line

CHECKED_IMAGES = 2
"""Of a chunk whose kernels' code is the same for any number of images."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why decoded pixels are no picture."""

    error: str
    message: str


IN_FLOAT32 = ", in float32 too"
NOT_FINITE = Fault("NotFinite", f"the decoded image has NaN or Inf in it{IN_FLOAT32}")
CONSTANT = Fault("Constant", f"the decoded image is one single colour{IN_FLOAT32}")
Decoding = Callable[[], list[Pixels | Fault]]
"""Waits for a batch's pixels."""
_Decode = Callable[[Tensor], Tensor]
"""Images `[B, 3, H, W]` of latents `[B, C, h, w]`."""


@dataclass(frozen=True, slots=True)
class _Judged:
    """A chunk, B images, on the device or on its way to the host."""

    pixels: Tensor
    """`[B, H, W, 3]` uint8."""
    is_finite: Tensor
    """`[B]` bool, like the next."""
    is_constant: Tensor


class Decoder:
    """The VAE of one model. Whoever changes to another group has this one's graph forgotten before."""

    def __init__(
        self,
        model: Family,
        compiler: Compiler,
        pool: GraphPool,
        say: Callable[[str], None],
        free: Callable[[], object] = lambda: None,
        preparing: Preparing = unannounced,
    ) -> None:
        """`free` gives back what all graphs hold."""
        self.held_bytes = 0
        """That the device's memory has grown by for a graph."""
        self._model = model
        self._compiler = compiler
        self._pool = pool
        self._say = say
        self._free = free
        self._preparing = preparing
        self._ready: dict[tuple[str, torch.Size], _Decode] = {}
        self._instead: dict[str, str] = {}
        """Modes that do not work here, and what runs in their place."""
        self._most: int | None = None
        """Images at once, where memory was short."""

    def start(self, latents: Tensor, mode: str, chunk: int) -> Decoding:
        """Queue the decoding of `[R, C, h, w]`, `chunk` images at once, and the copies to the host."""
        chunk = min(chunk, self._most or chunk)
        judged = [self._start_chunk(part, chunk, mode) for part in torch.split(latents, chunk)]
        mark = Mark(self._model.device)

        def finish() -> list[Pixels | Fault]:
            mark.wait()
            results = [result for one in judged for result in _results(one)]
            return [self._again(latents[i : i + 1], result) for i, result in enumerate(results)]

        return finish

    def is_cut(self, chunk: int) -> bool:
        """Whether fewer images are decoded at once than `chunk`, since memory was short."""
        return self._most is not None and self._most < chunk

    def shrink(self, chunk: int) -> bool:
        """Decode half as many at once from now on; False if it is one already."""
        chunk = min(chunk, self._most or chunk)
        if chunk == 1:
            return False
        self._most = chunk // 2
        self._say(f"decoding {chunk} images at once does not fit into memory; from now on {self._most} are")
        return True

    def forget(self) -> None:
        """Drop what serves one size."""
        self._ready.clear()
        self.held_bytes = 0

    def _start_chunk(self, latents: Tensor, chunk: int, mode: str) -> _Judged:
        padding = latents[-1:].expand(chunk - len(latents), *latents.shape[1:])
        padded = torch.cat([latents, padding])
        judged = judge(self._made_ready(padded, mode)(padded)[: len(latents)])
        return _Judged(to_host(judged.pixels), to_host(judged.is_finite), to_host(judged.is_constant))

    def _made_ready(self, padded: Tensor, mode: str) -> _Decode:
        place = mode, padded.shape
        while place not in self._ready:
            mode = self._instead.get(mode, mode)
            try:
                self._ready[place] = self._made(padded, mode)
            except Exception as error:  # whatever torch.compile and capture raise: there is another way to decode
                if is_memory(error) or not is_alive(self._model.device):
                    raise
                reason = first_line(error)
                self._say(f"decoding does not work {mode} here ({type(error).__name__}: {reason}); it runs eager")
                self._instead[mode] = "eager"
        return self._ready[place]

    def _made(self, padded: Tensor, mode: str) -> _Decode:
        if mode == "eager":
            return self._prepare(padded, mode)
        images, (_, _, height, width) = counted(len(padded), "image"), padded.shape
        what = f"{doing(mode)} the decoding of {images} from latents of {width}x{height}"
        with self._preparing(what, is_long=mode_of(mode)[0] != "eager"):
            return self._prepare(padded, mode)

    def _prepare(self, padded: Tensor, mode: str) -> _Decode:
        """Compile and capture as the mode says, and check the result against eager. Raises Refused."""
        kernels, is_captured = mode_of(mode)
        decoder = self._compiler.decoder(kernels)

        def decode(latents: Tensor) -> Tensor:
            return self._model.decode(decoder, latents)

        if mode == "eager":
            return decode
        if mode == "regional":
            # The code is the same for any number of images.
            padded = padded[:CHECKED_IMAGES]
        decode(padded)
        before = reserved_bytes(self._model.device)
        made = _captured(decode, padded.clone(), self._pool) if is_captured else decode
        # Not of the batch's own: one row that is not finite would speak against all.
        random = torch.Generator(padded.device).manual_seed(0)
        other = torch.empty_like(padded).normal_(generator=random)
        check(made(other), self._model.decode(self._model.decoder, other), kernels, self._model.vae.dtype)
        self.held_bytes += max(0, reserved_bytes(self._model.device) - before) if is_captured else 0
        return made

    def _again(self, latents: Tensor, result: Pixels | Fault) -> Pixels | Fault:
        """A faulty row's second chance, in float32 and alone; a float32 decode would only repeat itself. Where it does
        not fit into memory, even without the graphs, the row has had none."""
        if not isinstance(result, Fault) or self._model.vae.dtype == torch.float32:
            return result
        try:
            judged = with_room("decoding", lambda: judge(self._model.decode_float32(latents)), self._free)
        except NoRoom as error:
            message = result.message.removesuffix(IN_FLOAT32)
            return Fault(result.error, f"{message}; in float32, {error}")
        return _results(_Judged(judged.pixels.cpu(), judged.is_finite.cpu(), judged.is_constant.cpu()))[0]


def _captured(decode: _Decode, own: Tensor, pool: GraphPool) -> _Decode:
    """The same as replays of a graph that reads `own`; its result is overwritten by the next."""
    images = own

    def record() -> None:
        nonlocal images
        images = decode(own)

    replay = pool.capture(record)

    def decode_by_replay(latents: Tensor) -> Tensor:
        own.copy_(latents)
        replay()
        return images

    return decode_by_replay


def judge(images: Tensor) -> _Judged:
    """Pixels of images `[B, 3, H, W]`, rounded as diffusers' image processor rounds, and whether they are pictures."""
    unit = (images * 0.5 + 0.5).clamp(0, 1).permute(0, 2, 3, 1).float()
    pixels = (unit * 255).round().to(torch.uint8)
    flat = pixels.flatten(1, 2)
    is_constant = (flat.amax(1) == flat.amin(1)).all(1)
    return _Judged(pixels.contiguous(), images.isfinite().flatten(1).all(1), is_constant)


def _results(judged: _Judged) -> list[Pixels | Fault]:
    pixels: list[Pixels] = [np.asarray(one) for one in judged.pixels.numpy()]
    faults = zip(judged.is_finite.tolist(), judged.is_constant.tolist(), strict=True)
    return [
        NOT_FINITE if not is_finite else CONSTANT if is_constant else pixels[i]
        for i, (is_finite, is_constant) in enumerate(faults)
    ]
