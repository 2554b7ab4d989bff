"""Hypothesis profiles: the same few examples each time, or (HYPOTHESIS_PROFILE=thorough) many new ones. What tests of
several files need."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

_CHECKS = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
settings.register_profile("quick", max_examples=50, deadline=None, derandomize=True, suppress_health_check=_CHECKS)
settings.register_profile("thorough", max_examples=1000, deadline=None, suppress_health_check=_CHECKS)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture
def whole_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions on a GPU without TF32: it rounds to ten bits, and differently for different batch sizes."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
