# SPDX-License-Identifier: Apache-2.0
"""The state of one engine: what it does, what comes after a restart, why it failed."""

import time

from diffusion_worker.engine.documents import EngineState, LoadStage, Problem
from diffusion_worker.engine.rank_group import Loss
from diffusion_worker.engine.recovery import AFTER, LossRecord
from diffusion_worker.errors import ErrorCode, RequestError

ENDING = (EngineState.FAILED, EngineState.TERMINATING)

REFUSALS: dict[EngineState, tuple[ErrorCode, str, float | None]] = {
    EngineState.STARTING: (ErrorCode.STARTING, "the model is still loading", 5.0),
    EngineState.DRAINING: (ErrorCode.ASLEEP, "the model is going to sleep", None),
    EngineState.SLEEPING: (ErrorCode.ASLEEP, "the model is going to sleep", None),
    EngineState.ASLEEP: (ErrorCode.ASLEEP, "the model is asleep, because its sleep policy says so", None),
    EngineState.WAKING: (ErrorCode.BUSY, "the model is waking up", 1.0),
    EngineState.RESTARTING: (ErrorCode.BUSY, "the rank group was lost and is being started again", 1.0),
    EngineState.FAILED: (ErrorCode.ENGINE_FAILED, "the rank group is lost; the server is about to restart", 10.0),
    EngineState.TERMINATING: (ErrorCode.TERMINATING, "the server is shutting down", 1.0),
}


class EngineLife:
    """What an engine is doing. While its group is started again, `beneath` is the state that comes after."""

    def __init__(self) -> None:
        self.beneath = EngineState.STARTING
        self.restarting = False
        self.loaded = False
        self.stage = LoadStage.STARTING_RANKS
        self.failure: str | None = None
        self.losses = LossRecord()

    @property
    def state(self) -> EngineState:
        """The state as it is shown."""
        return EngineState.RESTARTING if self.restarting and self.beneath not in ENDING else self.beneath

    def enter(self, state: EngineState) -> None:
        """The state from now on, unless the engine failed or is ending."""
        if self.beneath not in ENDING:
            self.beneath = state

    def fail(self, reason: str) -> bool:
        """The engine cannot go on; False if that was known."""
        if self.beneath is EngineState.FAILED:
            return False
        self.beneath, self.failure = EngineState.FAILED, reason
        return True

    def lose_group(self, loss: Loss, generation: int) -> None:
        """The group is lost and is about to be started again."""
        self.losses.add(loss, generation, time.monotonic())
        self.restarting = True
        self.beneath = AFTER.get(self.beneath, self.beneath)

    def load_stage(self, bytes_total: int) -> LoadStage:
        """Where a load is: the ranks are starting until one of them knows how much there is to load."""
        starting = self.stage is LoadStage.STARTING_RANKS
        return LoadStage.LOADING_WEIGHTS if starting and bytes_total else self.stage

    def problem(self) -> Problem | None:
        """Why it does not serve now, where that is a fault."""
        if self.failure is not None:
            return Problem(ErrorCode.ENGINE_FAILED, self.failure, True)
        if self.restarting and self.losses.last is not None:
            return Problem(ErrorCode.RANK_FAILED, self.losses.last.reason, True)
        return None

    def require_ready(self, what: str, *, restarting_too: bool) -> None:
        """Raises RequestError with the reason; `restarting_too` is for what can wait until a new group is there."""
        state = self.beneath if restarting_too else self.state
        if state is not EngineState.READY:
            code, why, retry_after_s = REFUSALS[state]
            raise RequestError(code, f"{what} is refused: {why}", retry_after_s=retry_after_s)
