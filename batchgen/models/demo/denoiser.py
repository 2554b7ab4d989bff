"""The second stage of the demo model's training: text encoder and UNet together, to predict velocity."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from diffusers import DDPMScheduler
from torch import Tensor
from torch.nn.functional import mse_loss

from batchgen.models.demo.networks import SCHEDULER
from batchgen.models.demo.training import Data, Pace, Record, Settings, autocast, optimizer, step, tokens


def train_denoiser(
    pipeline: Any,
    data: Data,
    settings: Settings,
    pace: Pace,
    record: Record,
    on_sample: Callable[[], None],
    *,
    resumed: bool,
) -> None:
    """Train copies of the pipeline's text encoder and UNet until `pace` is over; the pipeline's own are their moving
    average all along, and `on_sample` may look at them."""
    stage = _Stage(pipeline, settings)
    rate = settings.denoiser.resumed_rate if resumed else settings.denoiser.rate
    made = optimizer(stage.parameters, rate, stage.device)
    pictures, total, counted, said_s, sampled_s = 0, torch.zeros((), device=stage.device), 0, 0.0, 0.0
    for batch in data.batches():
        if pace.share >= 1:
            break
        loss = stage.loss(batch.pictures, batch.tokens)
        step(made, loss, stage.parameters, rate * pace.factor)
        pace.steps += 1
        stage.average(pace.steps)
        pictures, total, counted = pictures + len(batch.pictures), total + loss.detach(), counted + 1
        if pace.elapsed_s - said_s >= settings.log_every_s:
            said_s = pace.elapsed_s
            record.add("denoiser", pace, pictures, loss=float(total) / counted, rate=rate * pace.factor)
            total, counted = torch.zeros_like(total), 0
        if pace.elapsed_s - sampled_s >= settings.denoiser.sample_every_s:
            sampled_s = pace.elapsed_s
            on_sample()


class _Stage:
    """The networks in training, and their averages."""

    def __init__(self, pipeline: Any, settings: Settings) -> None:
        averaged = (pipeline.unet, pipeline.text_encoder)
        self.device: torch.device = next(pipeline.unet.parameters()).device
        self._vae, self._settings = pipeline.vae, settings
        self._unet, self._text = (copy.deepcopy(one).train().requires_grad_(True) for one in averaged)
        self.parameters = [*self._unet.parameters(), *self._text.parameters()]
        for one in averaged:
            one.eval().requires_grad_(False)
        self._averages = [parameter for one in averaged for parameter in one.parameters()]
        kept = DDPMScheduler.from_config(SCHEDULER).alphas_cumprod.to(self.device)
        self._signal, self._noise = kept.sqrt(), (1 - kept).sqrt()
        self._empty = tokens(pipeline.tokenizer, [""]).to(self.device).long()

    def loss(self, pictures: Tensor, captions: Tensor) -> Tensor:
        """Mean squared error of the velocity (Salimans and Ho 2022, appendix D) at evenly drawn timesteps."""
        number = len(pictures)
        with torch.no_grad(), autocast(self.device):
            latents = self._vae.encode(pictures).latent_dist.mean.float()
        even = (torch.rand(1, device=self.device) + torch.arange(number, device=self.device) / number) % 1
        timesteps = (even * len(self._signal)).long().clamp(max=len(self._signal) - 1)
        signal, share = self._signal[timesteps, None, None, None], self._noise[timesteps, None, None, None]
        noise = torch.randn_like(latents)
        noisy, velocity = signal * latents + share * noise, signal * noise - share * latents
        is_dropped = torch.rand(number, 1, device=self.device) < self._settings.denoiser.drop
        with autocast(self.device):
            encoded = self._text(torch.where(is_dropped, self._empty, captions))[0]
            predicted = self._unet(noisy, timesteps, encoded).sample
        return mse_loss(predicted.float(), velocity)

    @torch.no_grad()
    def average(self, steps: int) -> None:
        """Move the averages towards the weights; at first faster, so that the beginning is forgotten."""
        decay = min(self._settings.denoiser.average, (1 + steps) / (10 + steps))
        torch._foreach_lerp_(self._averages, self.parameters, 1 - decay)
