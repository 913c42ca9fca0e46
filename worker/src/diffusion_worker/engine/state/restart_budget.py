# SPDX-License-Identifier: Apache-2.0
"""Consequences of a rank group's loss: the next state, the number of restarts allowed, and the report. Pure."""

import msgspec

from diffusion_worker.engine.state.rank_protocol import Loss
from diffusion_worker.engine.state.state_document import EngineState, LossDocument
from diffusion_worker.errors import Fault

WINDOW_S = 600.0

# States after a restart by states at the loss. A sleeping group restarts asleep, a waking one awake, and a draining one drains on.
AFTER: dict[EngineState, EngineState] = {
    EngineState.READY: EngineState.READY,
    EngineState.DRAINING: EngineState.DRAINING,
    EngineState.SLEEPING: EngineState.ASLEEP,
    EngineState.ASLEEP: EngineState.ASLEEP,
    EngineState.WAKING: EngineState.READY,
    EngineState.TERMINATING: EngineState.TERMINATING,
}


class RestartBudget:
    """The budget of restarts: up to `limit` unexplained losses within ten minutes are restarted. Times are monotonic seconds."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        # The time of each loss, by its number.
        self._at: dict[int, float] = {}

    def spend(self, number: int, now_s: float) -> bool:
        """Count loss `number`; return False if the last WINDOW_S seconds, this loss included, had more losses than `--max-restarts`."""
        self._at = {loss: at for loss, at in self._at.items() if now_s - at < WINDOW_S} | {number: now_s}
        return len(self._at) <= self._limit

    def explain(self, numbers: set[int]) -> None:
        """Take these losses out of the count, because a request caused them that is made no more; unknown numbers are ignored."""
        for number in numbers:
            self._at.pop(number, None)


class LossRecord(msgspec.Struct):
    """Counts of the rank group's losses by fault, with details of the latest, for the life of this process.

    `add` does not count `restarts`; the supervisor does.
    """

    restarts: int = 0
    by_fault: dict[Fault, int] = {}
    last: Loss | None = None
    last_generation: int = 0
    last_at_s: float = 0.0

    def add(self, loss: Loss, generation: int, now_s: float) -> None:
        """Count a loss by its fault, and keep it as the last one, with its generation and time."""
        self.by_fault[loss.fault] = self.by_fault.get(loss.fault, 0) + 1
        self.last, self.last_generation, self.last_at_s = loss, generation, now_s

    def document(self, now_s: float) -> LossDocument | None:
        """Describe the latest loss, with its generation and the seconds since then; None if no group was lost."""
        if self.last is None:
            return None
        return LossDocument(self.last.fault, self.last.reason, self.last_generation, round(now_s - self.last_at_s, 3))
