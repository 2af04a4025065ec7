"""What every test shares: hypothesis profiles and the limit on threads."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Set before anything imports torch: results and speed must not depend on the machine's cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile(
    "ci",
    derandomize=True,
    max_examples=40,
    deadline=None,  # no timing asserts: a slow machine is not a failure
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", max_examples=2_000, deadline=None)
settings.load_profile(os.environ.get("STRETTO_HYPOTHESIS_PROFILE", "ci"))
