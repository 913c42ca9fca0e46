# SPDX-License-Identifier: Apache-2.0
"""Decision on a call to sleep or wake: begin, join or cancel an operation, find nothing to do, or refuse."""

import asyncio
import itertools
import logging
from collections.abc import Callable

from diffusion_worker.engine.sleep.policy import SleepRules
from diffusion_worker.engine.sleep.sleeper import Sleeper
from diffusion_worker.engine.state.lifecycle import ENDING, EngineLife
from diffusion_worker.engine.state.operations import Operations
from diffusion_worker.engine.state.state_document import EngineState, OperationResult, SleepCall, SleepPolicy, WakeCall
from diffusion_worker.errors import ErrorCode, RequestError
from diffusion_worker.messages import MemoryTag, SleepLevel

log = logging.getLogger(__name__)

# Pauses between tries to wake a model for held requests while memory is missing: somebody else has to free it.
FIRST_RETRY_S = 0.5
LAST_RETRY_S = 10.0


class SleepCalls:
    """The calls to sleep and wake. `idle_s` returns the seconds without a request, `held` the number of requests held for the model."""

    def __init__(
        self,
        life: EngineLife,
        rules: SleepRules,
        operations: Operations,
        sleeper: Sleeper,
        *,
        idle_s: Callable[[], float],
        held: Callable[[], int],
    ) -> None:
        self._life = life
        self._rules = rules
        self._operations = operations
        self._sleeper = sleeper
        self._idle_s = idle_s
        self._held = held
        self._demands = itertools.count(1)
        self._on_demand: asyncio.Task[None] | None = None
        # Tags that the wake in progress restores; None for everything.
        self._waking: list[MemoryTag] | None = None

    def sleep(self, call: SleepCall) -> bool:
        """Begin a sleep in the background or join one in progress, and return True; also for an id that runs already.

        Return False if the model sleeps deep enough, or the operation is over. The policy of the call takes effect even if the call fails.

        Raises:
            RequestError: Conflict with a wake, Starting, Busy while the group is started again or if a request came too recently.
        """
        self._rules.declare(call.policy)
        if (running := self._repeated(call.operation_id)) is not None:
            return running
        if self._is_running("sleep"):
            self._operations.join(call.operation_id)
            return True
        self._operations.require_idle("sleep")
        state = self._life.state
        if state is EngineState.ASLEEP and not self._has_more_to_give(call.level):
            return False
        if state is not EngineState.ASLEEP:
            self._life.require_ready("sleep", restarting_too=False)
            self._require_idle_since(call.if_idle_since)
        self._sleeper.begin_sleep()
        self._operations.start(call.operation_id, "sleep", self._sleeper.sleep(call))
        return True

    def wake(self, call: WakeCall) -> bool:
        """Begin a wake in the background, cancel a draining sleep, or join a wake of at least the same tags, and return True.

        Return False if the model is awake or the operation is over. The policy of the call takes effect even if the call fails.

        Raises:
            RequestError: Conflict with a sleep after its drain, or with a wake of fewer tags. Starting. Busy during a restart.
        """
        self._rules.declare(call.policy)
        if (running := self._repeated(call.operation_id)) is not None:
            return running
        if self._cancel_drain() or self._is_covered(call):
            self._operations.join(call.operation_id)
            return True
        self._operations.require_idle("wake")
        state = self._life.state
        if state is EngineState.READY:
            return False
        if state is not EngineState.ASLEEP:
            self._life.require_ready("wake", restarting_too=False)
        self._waking = call.tags
        self._life.enter(EngineState.WAKING)
        self._operations.start(call.operation_id, "wake", self._sleeper.wake(call))
        return True

    def wake_on_demand(self) -> None:
        """Wake the model for held requests under policy OnIdle, as soon as possible, in the background; harmless when repeated."""
        if self._on_demand is None or self._on_demand.done():
            self._on_demand = asyncio.create_task(self._wake_for_held())

    async def end(self) -> None:
        """Cancel the operation in progress and all wakes for held requests, and wait for their end."""
        if self._on_demand is not None:
            self._on_demand.cancel()
            await asyncio.gather(self._on_demand, return_exceptions=True)
        await self._operations.end()

    # --- what goes on ---------------------------------------------------------------------------------------------------

    def _repeated(self, operation_id: str) -> bool | None:
        """Return whether the operation of a known id is in progress; None for a new id."""
        if self._operations.is_running(operation_id):
            return True
        return False if self._operations.is_done(operation_id) else None

    def _is_running(self, kind: str) -> bool:
        running = self._operations.running()
        return running is not None and running.kind == kind

    def _cancel_drain(self) -> bool:
        """Cancel a sleep that still drains; return False if there is none."""
        if not self._is_running("sleep") or self._life.state_after_restart is not EngineState.DRAINING:
            return False
        self._sleeper.cancel_drain()
        return True

    def _is_covered(self, call: WakeCall) -> bool:
        """Return whether the wake in progress restores everything that this one asks for."""
        if not self._is_running("wake"):
            return False
        return self._waking is None or (call.tags is not None and set(call.tags) <= set(self._waking))

    def _has_more_to_give(self, level: SleepLevel) -> bool:
        """Return whether a sleeping group is awake in part, or keeps more than the level allows."""
        deeper = level is SleepLevel.DISCARD and self._sleeper.ranks.level is SleepLevel.HOST_MEMORY
        return deeper or self._sleeper.ranks.partly_awake

    def _require_idle_since(self, seconds: float | None) -> None:
        if seconds is not None and (idle_s := self._idle_s()) < seconds:
            message = f"sleep: expected no request for {seconds:g} s, found the last one {idle_s:.3f} s ago"
            raise RequestError(ErrorCode.BUSY, message, retry_after_s=round(seconds - idle_s, 3))

    # --- on demand ------------------------------------------------------------------------------------------------------

    async def _wake_for_held(self) -> None:
        """Wake the model; after pauses try again while only memory is missing and requests still wait."""
        pause_s = FIRST_RETRY_S
        while (result := await self._wake_when_possible()) is not None and result.error is not None:
            if result.error.code != ErrorCode.INSUFFICIENT_MEMORY:
                return  # the group was started again
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_RETRY_S)
            if not self._held():
                return

    async def _wake_when_possible(self) -> OperationResult | None:
        """Begin a wake as soon as the engine allows it, and return its result; None if none is wanted any more."""
        while self._rules.policy is SleepPolicy.ON_IDLE and self._life.state_after_restart not in (EngineState.READY, *ENDING):
            self._cancel_drain()
            running = self._operations.running()
            if running is not None:
                await self._operations.over(running.operation_id)
            elif self._life.state is EngineState.ASLEEP:
                operation_id = f"demand-{next(self._demands)}"
                self.wake(WakeCall(operation_id=operation_id, deadline_seconds=self._rules.sleep.wake_timeout_seconds))
                return await self._operations.over(operation_id)
            else:
                await self._life.wait_for_change()
        return None
