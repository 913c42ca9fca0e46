# SPDX-License-Identifier: Apache-2.0
"""The state of one engine, the state after its restart, and the reason of its failure."""

import asyncio
import time
from collections.abc import Callable

from diffusion_worker.engine.state.rank_protocol import Loss
from diffusion_worker.engine.state.restart_budget import AFTER, LossRecord
from diffusion_worker.engine.state.state_document import EngineState, LoadStage, ProblemReport
from diffusion_worker.errors import ErrorCode, RequestError

ENDING = (EngineState.FAILED, EngineState.TERMINATING)

REFUSALS: dict[EngineState, tuple[ErrorCode, str, float | None]] = {
    EngineState.STARTING: (ErrorCode.STARTING, "the model is still loading", 5.0),
    EngineState.DRAINING: (ErrorCode.ASLEEP, "the model is going to sleep", None),
    EngineState.SLEEPING: (ErrorCode.ASLEEP, "the model is going to sleep", None),
    EngineState.ASLEEP: (ErrorCode.ASLEEP, "the model is asleep by its sleep policy", None),
    EngineState.WAKING: (ErrorCode.BUSY, "the model is waking up", 1.0),
    EngineState.RESTARTING: (ErrorCode.BUSY, "the rank group was lost and is being started again", 1.0),
    EngineState.FAILED: (ErrorCode.ENGINE_FAILED, "the worker has failed and is about to end; it serves again after a restart", 10.0),
    EngineState.TERMINATING: (ErrorCode.TERMINATING, "the worker is shutting down", 1.0),
}


class EngineLife:
    """The state of an engine. While its group is started again, `state_after_restart` is the state that follows."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, on_change: Callable[[], None] = lambda: None) -> None:
        """Begin in state STARTING; `on_change` is called at every change of the shown state."""
        self.loaded = False
        self.stage = LoadStage.STARTING_RANKS
        self.failure: str | None = None
        self.losses = LossRecord()
        self._clock = clock
        self._on_change = on_change
        self._state_after_restart = EngineState.STARTING
        self._restarting = False
        self._loss_code = ErrorCode.RANK_FAILED
        self._shown, self._since_s = self.state, clock()
        self._changed = asyncio.Event()

    @property
    def state(self) -> EngineState:
        """The state as shown: RESTARTING while a lost group is started again, unless the engine failed or is ending."""
        return EngineState.RESTARTING if self._restarting and self._state_after_restart not in ENDING else self._state_after_restart

    @property
    def state_after_restart(self) -> EngineState:
        """The state behind RESTARTING, which follows once the group is back; the same as `state` at all other times."""
        return self._state_after_restart

    @property
    def restarting(self) -> bool:
        """Return whether the group was lost and its next generation has not started yet."""
        return self._restarting

    @property
    def state_age_seconds(self) -> float:
        """Return the seconds since the shown state began."""
        return round(self._clock() - self._since_s, 3)

    async def wait_for_change(self) -> None:
        """Wait until the shown state changes."""
        await self._changed.wait()

    def enter(self, state: EngineState) -> None:
        """Set the state, or during a restart the state that follows it; no effect once the engine failed or is ending."""
        if self._state_after_restart not in ENDING:
            self._state_after_restart = state
            self._show()

    def fail(self, reason: str) -> bool:
        """Enter FAILED with the reason and return True; if it had failed before, keep the first reason and return False."""
        if self._state_after_restart is EngineState.FAILED:
            return False
        self._state_after_restart, self.failure = EngineState.FAILED, reason
        self._show()
        return True

    def blame(self, code: ErrorCode) -> None:
        """Set the error code that `problem` shows for the coming loss of the group, which the server causes itself; for one restart."""
        self._loss_code = code

    def lose_group(self, loss: Loss, generation: int) -> None:
        """Record the loss of the group, which is about to be started again, and choose the state that follows by `AFTER`."""
        self.losses.add(loss, generation, time.monotonic())
        self._restarting = True
        self._state_after_restart = AFTER.get(self._state_after_restart, self._state_after_restart)
        self._show()

    def group_is_back(self) -> None:
        """Record that the next generation of the group has started."""
        self._restarting, self._loss_code = False, ErrorCode.RANK_FAILED
        self._show()

    def _show(self) -> None:
        """Wake all waiters if the shown state changed."""
        if self.state is not self._shown:
            self._shown, self._since_s = self.state, self._clock()
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()
            self._on_change()

    def load_stage(self, bytes_total: int) -> LoadStage:
        """Return the stage of the start as set, but LOADING_WEIGHTS in place of STARTING_RANKS once there are bytes to load."""
        starting = self.stage is LoadStage.STARTING_RANKS
        return LoadStage.LOADING_WEIGHTS if starting and bytes_total else self.stage

    def problem(self) -> ProblemReport | None:
        """Return the engine's failure, or during a restart the loss of the group; None otherwise, also while it starts or sleeps."""
        if self.failure is not None:
            return ProblemReport(ErrorCode.ENGINE_FAILED, self.failure, True)
        if self._restarting and self.losses.last is not None:
            return ProblemReport(self._loss_code, self.losses.last.reason, True)
        return None

    def require_ready(self, what: str, *, restarting_too: bool) -> None:
        """Raise RequestError `<what> is refused: <why>`, with the state's code, unless the engine is READY.

        With `restarting_too` a restart into READY is enough.
        """
        state = self._state_after_restart if restarting_too else self.state
        if state is not EngineState.READY:
            code, why, retry_after_s = REFUSALS[state]
            raise RequestError(code, f"{what} is refused: {why}", retry_after_s=retry_after_s)
