# SPDX-License-Identifier: Apache-2.0
"""Cost of a class's step by batch size, learned from the ranks' reports. Pure.

A larger batch pays while a step is bound by launches or memory, and only delays everybody where it is bound by arithmetic. The border
depends on the shape, the device and the model, so it is measured.
"""

import statistics
from collections import deque

# Reports of a size that it takes to judge it, and the newest that count.
ENOUGH = 3
KEPT = 9
# A larger batch has to save this share of the time per image; otherwise the smaller one is taken, as it answers sooner.
WORTH = 0.03
# If a smaller batch raises the time per image by this share, still smaller ones need no measuring.
CLEARLY_WORSE = 0.10
# Steps after which a size is measured again: device clocks or other work on the device may have changed.
FORGET_AFTER = 2000
# Steps without a failure after which a batch that did not fit may be tried again.
RETRY_AFTER = 300


class _Level:
    """Reports of batches of 2^(k-1)+1 to 2^k requests."""

    def __init__(self) -> None:
        self.per_image_s: deque[float] = deque(maxlen=KEPT)
        self.last_step = 0

    @property
    def known(self) -> bool:
        return len(self.per_image_s) >= ENOUGH

    @property
    def cost_s(self) -> float:
        return statistics.median(self.per_image_s)


class CostCurve:
    """Seconds of a step for one class, and the batch that makes an image cheapest."""

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}
        self._steps = 0
        self._fits: int | None = None
        self._failed_at = 0

    @property
    def measured(self) -> bool:
        """Return whether a step of any batch size was observed; before that, `seconds` is None."""
        return bool(self._levels)

    def observe(self, batch: int, seconds: float) -> None:
        """Add one measured step; a level of sizes that FORGET_AFTER steps did not have starts from scratch."""
        self._steps += 1
        level = self._levels.setdefault(_level_of(batch), _Level())
        if self._steps - level.last_step > FORGET_AFTER:
            level.per_image_s.clear()
        level.per_image_s.append(seconds / batch)
        level.last_step = self._steps

    def split(self, batch: int) -> None:
        """Record that a batch of this size could not run as one step: half of it is the most, doubled every `RETRY_AFTER` steps."""
        self._fits = max(1, batch // 2)
        self._failed_at = self._steps

    def batch(self, demand: int) -> int:
        """Return the batch size for `demand` requests: the smallest at which an image is about as cheap as can be.

        A size without enough measurements is taken first, so that it gets measured.
        """
        demand = min(demand, self._most())
        costs: dict[int, float] = {}
        for level in range(_level_of(demand), -1, -1):
            if not self._is_known(level):
                if level and _is_flat(list(costs.values())):
                    continue  # compare with single images only
                return min(demand, 1 << level)
            costs[level] = self._levels[level].cost_s
            if costs[level] > min(costs.values()) * (1 + CLEARLY_WORSE):
                break
        return min(demand, 1 << min(level for level, cost_s in costs.items() if cost_s <= min(costs.values()) * (1 + WORTH)))

    def seconds(self, batch: int) -> float | None:
        """Estimate a step's seconds with `batch` requests from the level nearest to it, a slow guess rather than a fast one.

        None means that no step of this class was measured yet.
        """
        if not self._levels:
            return None
        wanted = _level_of(batch)
        nearest = min(self._levels, key=lambda level: (abs(level - wanted), level))
        cost_s = self._levels[nearest].cost_s
        # A batch smaller than the nearest measured one may take as long as that. A larger one takes at most proportionally longer.
        return cost_s * (batch if nearest <= wanted else 2**nearest)

    def _is_known(self, level: int) -> bool:
        found = self._levels.get(level)
        return found is not None and found.known and self._steps - found.last_step <= FORGET_AFTER

    def _most(self) -> int:
        if self._fits is None:
            return 1 << 30
        return self._fits << ((self._steps - self._failed_at) // RETRY_AFTER)


def _is_flat(costs: list[float]) -> bool:
    """Return True if the last cost per image, that of a smaller batch, is at most WORTH above the one before; False without two costs."""
    return len(costs) >= 2 and costs[-1] <= costs[-2] * (1 + WORTH)


def _level_of(batch: int) -> int:
    """Return the exponent of the least power of two that holds the batch: 0 for 1, 1 for 2, 2 for 4, 3 for 8."""
    return (batch - 1).bit_length()
