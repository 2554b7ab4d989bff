"""Hypothesis profiles: the same few examples each time, or (HYPOTHESIS_PROFILE=thorough) many new ones."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

_CHECKS = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
settings.register_profile("quick", max_examples=50, deadline=None, derandomize=True, suppress_health_check=_CHECKS)
settings.register_profile("thorough", max_examples=1000, deadline=None, suppress_health_check=_CHECKS)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
