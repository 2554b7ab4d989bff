"""The first stage of the demo model's training: the autoencoder, by pixels and edges, with latents of unit variance."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import l1_loss

from batchgen.models.demo.training import Data, Pace, Record, Settings, autocast, optimizer, step

_FIRST_LOGVAR = -6.0
"""Of the latents' posterior. At 0 their noise would drown what they say at first, so that they might never say it."""
_MEASURED = 4096
"""Pictures over which the latents' mean and deviation are taken."""


def train_autoencoder(vae: Any, data: Data, settings: Settings, pace: Pace, record: Record, *, resumed: bool) -> None:
    """Train until `pace` is over: encoder and decoder, then the latents are standardised; resumed, the decoder alone,
    because the denoiser knows these latents."""
    device = next(vae.parameters()).device
    vae.train().requires_grad_(True)
    vae.encoder.requires_grad_(not resumed)
    vae.quant_conv.requires_grad_(not resumed)
    if not resumed:
        vae.quant_conv.bias.data[vae.config.latent_channels :] = _FIRST_LOGVAR
    parameters = [one for one in vae.parameters() if one.requires_grad]
    rate = settings.autoencoder.resumed_rate if resumed else settings.autoencoder.rate
    made = optimizer(parameters, rate, device)
    pictures, total, counted, said_s = 0, torch.zeros((), device=device), 0, 0.0
    for batch in data.batches():
        if pace.share >= 1:
            break
        with autocast(device):
            loss = _loss(vae, batch.pictures, settings)
        step(made, loss, parameters, rate * pace.factor)
        pace.steps += 1
        pictures, total, counted = pictures + len(batch.pictures), total + loss.detach(), counted + 1
        if pace.elapsed_s - said_s >= settings.log_every_s:
            said_s = pace.elapsed_s
            record.add("autoencoder", pace, pictures, loss=float(total) / counted)
            total, counted = torch.zeros_like(total), 0
    vae.eval().requires_grad_(False)
    if not resumed:
        _standardise(vae, data, settings)
    record.add("autoencoder", pace, pictures, decibels=_decibels(vae, data, settings))


def _loss(vae: Any, pictures: Tensor, settings: Settings) -> Tensor:
    posterior = vae.encode(pictures).latent_dist
    made = vae.decode(posterior.sample()).sample.float()
    edges = sum(l1_loss(made.diff(dim=axis), pictures.diff(dim=axis)) for axis in (-1, -2))
    mean, logvar = posterior.mean.float(), posterior.logvar.float()
    divergence = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
    weights = settings.autoencoder
    loss: Tensor = l1_loss(made, pictures) + weights.edges * edges + weights.divergence * divergence
    return loss


@torch.no_grad()
def _standardise(vae: Any, data: Data, settings: Settings) -> None:
    """Give each latent channel mean 0 and deviation 1, in the 1x1 convolutions before and after the latents, so that
    the pipeline's one scaling factor is 1."""
    found: list[Tensor] = []
    num_pictures = min(_MEASURED, settings.scenes)
    while sum(map(len, found)) < num_pictures:
        found.append(vae.encode(data.batch(*settings.sizes[0][:2]).pictures).latent_dist.mean)
    latents = torch.cat(found)
    mean, deviation = latents.mean(dim=(0, 2, 3)), latents.std(dim=(0, 2, 3))
    size, before, after = len(mean), vae.quant_conv, vae.post_quant_conv
    before.bias[:size].sub_(mean).div_(deviation)
    before.weight[:size].div_(deviation[:, None, None, None])
    before.bias[size:].sub_(2 * deviation.log())
    after.bias.add_(after.weight[:, :, 0, 0] @ mean)
    after.weight.mul_(deviation[None, :, None, None])


@torch.no_grad()
def _decibels(vae: Any, data: Data, settings: Settings) -> float:
    """Peak signal-to-noise ratio of reconstructions."""
    pictures = data.batch(*settings.sizes[0][:2]).pictures
    made = vae.decode(vae.encode(pictures).latent_dist.mean).sample.clamp(-1, 1)
    return float(10 * torch.log10(4 / (made - pictures).square().mean()))
