# SPDX-License-Identifier: Apache-2.0
"""The outcome of items: figures, their targets, and how each item ended. Needs nothing but Python."""

from __future__ import annotations

import operator
from dataclasses import asdict, dataclass, field
from typing import Any

PASSED, FAILED, NO_TIME, SKIPPED = "passed", "failed", "skipped: time", "skipped"
_COMPARE = {"<=": operator.le, ">=": operator.ge}


@dataclass
class Outcome:
    """The end of an item: its status, figures with targets, notes, and an error if there was one. Figures stay even if it failed later."""

    name: str
    status: str = FAILED
    seconds: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    targets: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    error: str | None = None

    @property
    def missed(self) -> list[str]:
        """The names of the figures that do not meet their target; figures without one do not count."""
        return [name for name, target in self.targets.items() if name in self.figures and not meets(self.figures[name], target)]

    def as_json(self) -> dict[str, Any]:
        """Return all fields and the missed figures as a dictionary for JSON."""
        return {**asdict(self), "missed": self.missed}


def meets(value: float, target: str) -> bool:
    """Return whether a figure meets a target such as `>= 0.95` or `<= 50`."""
    sign, bound = target.split()
    return bool(_COMPARE[sign](value, float(bound)))


def summary(outcomes: list[Outcome], *, device: str, tiny: bool, seconds: float) -> dict[str, Any]:
    """Return the data of a run's last line: the device, counts by status, missed figures, and all outcomes."""
    counts = {status: sum(outcome.status == status for outcome in outcomes) for status in (PASSED, FAILED, NO_TIME, SKIPPED)}
    return {
        "device": device,
        "tiny": tiny,
        "seconds": round(seconds, 1),
        "counts": counts,
        "missed": [f"{outcome.name}.{name}" for outcome in outcomes for name in outcome.missed],
        "items": [outcome.as_json() for outcome in outcomes],
    }
