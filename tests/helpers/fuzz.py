"""The budget of tests that draw their inputs at random and take long for each."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def one_in(count: int) -> settings:
    """Return the settings for so many times fewer examples than the profile has; fixtures serve them all."""
    fewer = max(settings().max_examples // count, 1)
    return settings(
        max_examples=fewer, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    )
