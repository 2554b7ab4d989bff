"""Cross-attention to a text that stays the same over all steps: its keys and values are computed once a batch.

A UNet's blocks attend to the text encoder's output, and each computes keys and values of it anew at every step. Where
the network is compiled as a whole, it is given all of them instead of the text, side by side, and each block takes its
own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from diffusers import UNet2DConditionModel
from diffusers.models.attention_processor import Attention
from torch import Tensor, nn

from batchgen.models.family import Conditioning

TEXT = "encoder_hidden_states"
_PROJECTIONS = ("to_k", "to_v")
_EMBEDDINGS = (None, "text_time")
"""Kinds of a UNet's additional embedding that leave the text to its blocks."""


class Taken(nn.Module):
    """What of the keys and values of all blocks is one block's."""

    def __init__(self, start: int, width: int) -> None:
        super().__init__()
        self._start = start
        self._end = start + width

    def forward(self, all_of_them: Tensor) -> Tensor:
        """`[B, L, sum of widths]` to `[B, L, width]`."""
        return all_of_them[..., self._start : self._end]


def projections(network: nn.Module) -> list[nn.Linear]:
    """What makes keys and values of the text, in the order of the blocks; none where it is used for more than that."""
    if not isinstance(network, UNet2DConditionModel) or network.encoder_hid_proj is not None:
        return []
    if network.config.addition_embed_type not in _EMBEDDINGS:
        return []
    return [getattr(one, name) for one in _attentions(network) for name in _PROJECTIONS]


def taking_projected(network: nn.Module) -> nn.Module:
    """The network itself, whose blocks take their keys and values from what `projected` makes of the text."""
    if projections(network):
        start = 0
        for one in _attentions(network):
            for name in _PROJECTIONS:
                width = getattr(one, name).out_features
                setattr(one, name, Taken(start, width))
                start += width
    return network


def projected(network: nn.Module, conditioning: Conditioning) -> Conditioning:
    """A batch's conditioning whose text is the keys and values that a network's blocks make of it: `[B or 2B, L, D]` to
    `[B or 2B, L, sum of widths]`."""
    layers = projections(network)
    if not layers:
        return conditioning
    text = conditioning.inputs[TEXT]
    widths = [one.out_features for one in layers]
    made = text.new_empty((*text.shape[:-1], sum(widths)))
    for layer, place in zip(layers, torch.split(made, widths, -1), strict=True):
        place.copy_(layer(text))
    return replace(conditioning, inputs={**conditioning.inputs, TEXT: made})


def _attentions(network: nn.Module) -> Iterator[Attention]:
    return (one for one in network.modules() if isinstance(one, Attention) and one.is_cross_attention)
