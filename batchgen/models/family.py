"""What the engine asks of a model family, and the pieces that families share.

A family does what diffusers' pipeline does at five points: it encodes prompts to conditioning, draws a row's noise,
places the timesteps, predicts for one step, and decodes latents; at a sixth, if a row may begin from a picture: it
encodes that to latents. B is the batch size; h and w are height and width over
the VAE's scale (8). Latents are pictures in the VAE's space for every family: one whose network takes a sequence of
patches makes it within `predict`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from batchgen.models.safety import SafetyChecker
from batchgen.records import Group, Pixels, Row

Encoded = tuple[Tensor, ...]
"""What the text encoders make of one text, without the batch dimension."""
Network = Callable[..., Any]
"""A network, or a compiled form of it."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """What a pipeline tells its scheduler of the timesteps beside their number."""

    shift: float | None = None
    """diffusers' `mu`: how far the image's size moves the steps towards noise; None where it does not."""
    is_even: bool = False
    """Whether the pipeline gives the noise levels itself, evenly from 1 to 1/n."""
    is_whole: bool = False
    """Whether it gives timesteps, evenly from the last one of training to 1, cut to whole numbers, which the network is
    told as they are, and the noise levels that they stand for."""

    def set(self, scheduler: Any, steps: int, device: torch.device | str) -> None:
        """Set a scheduler's timesteps."""
        shift = {} if self.shift is None else {"mu": self.shift}
        if self.is_whole:
            num = scheduler.config.num_train_timesteps
            timesteps = np.linspace(num, 1.0, steps).astype(np.int64).astype(np.float32)
            scheduler.set_timesteps(timesteps=timesteps, sigmas=timesteps / num, device=device, **shift)
        elif self.is_even:
            scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), device=device, **shift)
        else:
            scheduler.set_timesteps(steps, device=device, **shift)


UNSHIFTED = Schedule()


@dataclass(frozen=True, slots=True)
class Conditioning:
    """What the network is told beside latents and timesteps. All tensors lie on the device."""

    guidance: Tensor
    """`[B]` float32: each row's scale of the guidance that doubles the batch."""
    is_guided: bool
    inputs: Mapping[str, Tensor]
    """By the network's names for them; `[B, …]`, or `[2B, …]` where the batch is guided: the negative prompts' half,
    then the prompts'."""

    def of(self, rows: Sequence[int]) -> Conditioning:
        """That of some of the rows, in tensors of their own."""
        inputs = {
            name: torch.stack([self._halves(one)[:, row] for row in rows], 1).flatten(0, 1)
            for name, one in self.inputs.items()
        }
        return Conditioning(torch.stack([self.guidance[row] for row in rows]), self.is_guided, inputs)

    def put(self, lane: int, other: Conditioning, row: int) -> None:
        """Overwrite one row's by that of another batch's row."""
        self.guidance[lane].copy_(other.guidance[row])
        for name, mine in self.inputs.items():
            self._halves(mine)[:, lane].copy_(other._halves(other.inputs[name])[:, row])

    def _halves(self, one: Tensor) -> Tensor:
        """`[1, B, …]`, or `[2, B, …]` of a guided batch's input."""
        return one.view(-1, len(self.guidance), *one.shape[1:])


class Family(Protocol):
    """A loaded pipeline on one device."""

    @property
    def pipeline(self) -> Any:
        """diffusers' own, which holds the networks."""

    device: torch.device
    dtype: torch.dtype
    scheduler: Any
    tokenizer: Any
    network: torch.nn.Module
    vae: Any
    decoder: Network
    """The call of the VAE that makes images `[B, 3, H, W]` of its own latents."""
    encoders: Sequence[torch.nn.Module]
    blocks: tuple[type[torch.nn.Module], ...]
    """What network and VAE are built of for the most part, to be compiled by itself."""
    channels: int
    """Of the latents."""
    sample_side: int
    """Height and width of the latents that the network was trained on."""
    checker: SafetyChecker | None
    """None where the job asks for none."""

    def texts(self, rows: Sequence[Row], is_guided: bool) -> list[str]:
        """The texts that these rows' conditioning needs."""

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Run the text encoders on one chunk of texts."""

    def conditioning(self, rows: Sequence[Row], group: Group, encoded: Mapping[str, Encoded]) -> Conditioning:
        """The batch's conditioning from its texts' encodings."""

    def schedule(self, width: int, height: int, steps: int) -> Schedule:
        """How the timesteps of images of a size in pixels are placed, of so many steps."""

    def noise(self, row: Row, generator: torch.Generator) -> Tensor:
        """A row's next unit noise `[1, C, h, w]`, on the CPU, from its own generator as diffusers draws it."""

    def encode_image(self, pixels: Pixels, generator: torch.Generator) -> Tensor:
        """The latents `[1, C, h, w]` of a picture, on the device: a sample of what the VAE finds likely, drawn from the
        row's own generator before its noise."""

    def predict(self, network: Network, latents: Tensor, timesteps: Tensor, conditioning: Conditioning) -> Tensor:
        """The guided prediction `[B, C, h, w]` for latents `[B, C, h, w]` at timesteps `[B]`."""

    def decode(self, decoder: Network, latents: Tensor) -> Tensor:
        """Images `[B, 3, H, W]`, about -1 to 1, of latents `[B, C, h, w]`."""

    def decode_float32(self, latents: Tensor) -> Tensor:
        """`decode` in float32, whatever the family's dtype, not compiled."""


def doubled(tensor: Tensor, is_guided: bool) -> Tensor:
    """The network's input for a batch: once, or twice where it is guided."""
    return torch.cat([tensor, tensor]) if is_guided else tensor


def guide(prediction: Tensor, conditioning: Conditioning) -> Tensor:
    """Classifier-free guidance (Ho and Salimans 2022, equation 6, in diffusers' scale): the difference of the two
    halves of a prediction `[2B, …]`, weighted by each row's own scale."""
    if not conditioning.is_guided:
        return prediction
    negative, positive = prediction.chunk(2)
    scale = conditioning.guidance.view(-1, *[1] * (prediction.ndim - 1))
    return negative + (scale * (positive - negative)).to(prediction.dtype)


def as_long(guided: Tensor, positive: Tensor) -> Tensor:
    """A guided prediction whose vectors along the last dimension have the length of the prompt's own prediction."""
    wanted, found = (torch.linalg.vector_norm(one, dim=-1, keepdim=True) for one in (positive, guided))
    rescaled: Tensor = guided * (wanted / found)
    return rescaled
