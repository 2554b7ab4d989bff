"""What planning must know of a model without torch: a table per family, and the JSON files of a model folder.

A test holds each entry equal to what the family does with its real scheduler objects.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from batchgen.errors import UsageError

OWN_UPDATE = ""
"""The form of a sampler that is no affine map per evaluation: it runs its own update, one (sampler, steps) at
a time."""


@dataclass(frozen=True, slots=True)
class SamplerFacts:
    """How a sampler's name maps onto diffusers, and what its update needs."""

    scheduler: str
    """The diffusers class, built by `from_config` from the model folder's own scheduler configuration."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Configuration laid over the folder's."""
    form: str = OWN_UPDATE
    """The terms of one update, comma-separated: x (latents), x1 (previous latents), e (prediction),
    e1, e2, e3 (earlier predictions), z (the row's noise)."""
    evaluations: Callable[[int], int] = lambda steps: steps
    """Model evaluations for a step count."""


@dataclass(frozen=True, slots=True)
class Facts:
    """One model, as far as planning is concerned."""

    family: str
    size_multiple: int
    min_size: int
    width: int
    height: int
    steps: int
    guidance_scale: float
    sampler: str
    """Defaults of the family, taken where neither manifest nor job file says anything."""
    text_length: int
    samplers: Mapping[str, SamplerFacts]
    """By name; any of `schedulers` may also be named, as a diffusers class."""
    guided_above: float | None = 1.0
    """A row is guided if its guidance scale exceeds this; None where guidance is no matter."""
    needs_torch: bool = True

    def is_guided(self, guidance_scale: float) -> bool:
        """The family's own rule for running the network twice per step."""
        return self.guided_above is not None and guidance_scale > self.guided_above

    def sampler_facts(self, name: str) -> SamplerFacts:
        """Facts of a sampler by name. Raises UsageError, with the nearest name, if there is none."""
        if name in self.samplers:
            return self.samplers[name]
        near = difflib.get_close_matches(name, self.samplers, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(self.samplers)}"
        raise UsageError(f"there is no sampler {name!r}; {hint}")
