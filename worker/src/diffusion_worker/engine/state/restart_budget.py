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
    """The number of losses within ten minutes after which no restart is tried. Times are monotonic seconds."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._at: list[float] = []

    def spend(self, now_s: float) -> bool:
        """Spend a restart; return False when there have been too many."""
        self._at = [at for at in self._at if now_s - at < WINDOW_S]
        self._at.append(now_s)
        return len(self._at) <= self._limit


class LossRecord(msgspec.Struct):
    """Losses since the server's start."""

    restarts: int = 0
    by_fault: dict[Fault, int] = {}
    last: Loss | None = None
    last_generation: int = 0
    last_at_s: float = 0.0

    def add(self, loss: Loss, generation: int, now_s: float) -> None:
        """Record a loss."""
        self.by_fault[loss.fault] = self.by_fault.get(loss.fault, 0) + 1
        self.last, self.last_generation, self.last_at_s = loss, generation, now_s

    def document(self, now_s: float) -> LossDocument | None:
        """Return the last loss for the state document; None before the first."""
        if self.last is None:
            return None
        return LossDocument(self.last.fault, self.last.reason, self.last_generation, round(now_s - self.last_at_s, 3))
