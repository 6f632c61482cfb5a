"""Settings of property tests whose examples take long."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings


def slow_property(examples: int) -> settings:
    """So many examples; one that fails is reported as it is, since shrinking it would take minutes."""
    phases = Phase.explicit, Phase.reuse, Phase.generate
    return settings(max_examples=examples, deadline=None, phases=phases, suppress_health_check=[HealthCheck.too_slow])
