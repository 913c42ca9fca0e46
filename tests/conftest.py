# SPDX-License-Identifier: Apache-2.0
"""For every test session."""

# Hypothesis' plugin imports this after the last test in any case. There pytest compiles it from deep in its stack, and where the garbage
# collector then reports an event loop that looptime left open, CPython 3.11 fails with "AST constructor recursion depth mismatch"
# (gh-106905). Here nothing is left open yet.
import hypothesis.internal.observability  # noqa: F401
from hypothesis import HealthCheck, settings

# How long an example takes is the machine's affair.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
