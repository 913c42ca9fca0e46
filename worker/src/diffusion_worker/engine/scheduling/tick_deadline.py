# SPDX-License-Identifier: Apache-2.0
"""Deadline of a tick, after which the ranks count as hung. Pure.

No constant fits: a step of a long video on a small device takes minutes, one of a small image milliseconds. So the limit is a multiple of
the expected time of the whole request, which also covers its decoding. The warm-up measures before the first request, and sizes that were
not measured are estimated from those that were. The rest of the work has a floor.
"""

from diffusion_worker.engine.scheduling.scheduler import TickEstimate

# Allowance for a device that is hot or that others use as well.
FACTOR = 3.0
# Allowance for text encoders, compiling again for another batch, and a slow disk under a mapped model.
FLOOR_S = 60.0
# A first step of its shape tunes kernels, and may compile again for as long as in the warm-up, which its estimate has.
FLOOR_OF_NEW_CLASS_S = 120.0
# Without a warm-up a first step has nothing to be compared with.
UNMEASURED_S = 1800.0


def wave_limit_s(wave: TickEstimate, override_s: float | None) -> float:
    """Return the seconds that a tick may take from its start to its report; an override is returned unchanged."""
    if override_s is not None:
        return override_s
    if wave.step_s is None:
        return UNMEASURED_S
    return max(FLOOR_S if wave.same_class else FLOOR_OF_NEW_CLASS_S, (wave.steps * wave.step_s + wave.once_s) * FACTOR)
