# SPDX-License-Identifier: Apache-2.0
"""Sleep and wake of a rank group. After any fault it ends asleep, or awake and verified, or lost and started again.

The supervisor handles a loss of the group in the middle. It starts the next group into the requested state (see `restart_budget.AFTER`),
and the work here continues from there. So a fault that cannot be undone otherwise is made a loss.
"""

import asyncio
import logging

from diffusion_worker.engine.scheduling.step_hold import Pauser, Pausing
from diffusion_worker.engine.sleep.rank_tasks import SleepingRanks
from diffusion_worker.engine.sleep.record import SleepNotes
from diffusion_worker.engine.startup.preparation import Preparation
from diffusion_worker.engine.startup.supervisor import Supervisor
from diffusion_worker.engine.state.lifecycle import EngineLife
from diffusion_worker.engine.state.operations import TaskOutcome
from diffusion_worker.engine.state.state_document import EngineState, SleepCall, SleepMode, WakeCall
from diffusion_worker.errors import ErrorCode, GroupFailed, RequestError
from diffusion_worker.messages import SleepLevel, SleepTask, TaskAck, WakeTask

log = logging.getLogger(__name__)

ABORTED = "the model went to sleep before the image was finished"


class Sleeper:
    """The work of a sleep and of a wake; `sleep.calls` decides when one may begin."""

    def __init__(
        self,
        life: EngineLife,
        ranks: SleepingRanks,
        pausing: Pausing,
        preparation: Preparation,
        supervisor: Supervisor,
        notes: SleepNotes,
    ) -> None:
        self.ranks = ranks
        self._life = life
        self._pausing = pausing
        self._preparation = preparation
        self._supervisor = supervisor
        self._notes = notes
        self._quieting: asyncio.Task[None] | None = None
        self._cancelled = False

    def begin_sleep(self) -> None:
        """Set the state for a sleep, so that no request is admitted: DRAINING, or SLEEPING if the model sleeps. `sleep` does the work."""
        self._cancelled = False
        self._life.enter(EngineState.DRAINING if self._life.state_after_restart is EngineState.READY else EngineState.SLEEPING)

    def cancel_drain(self) -> None:
        """Cancel a draining sleep and let the model serve on; no effect once the ranks have their task."""
        self._cancelled = True
        if self._quieting is not None:
            self._quieting.cancel()

    async def sleep(self, call: SleepCall) -> TaskOutcome:
        """Drain the requests, let every rank free memory to the level of the call, and check that it did; call `begin_sleep` before.

        A first sleep at HostMemory makes the mirrors that no policy asked for at the load, since nobody waits for the ranks now.
        A model that is asleep already skips the drain. Ranks that are lost meanwhile come back asleep, and acknowledgements may then be
        missing.

        Raises:
            RequestError: Cancelled by a wake during the drain, or a refusal by the ranks: requests are served again. Timeout,
                MemoryNotReleased, or any error of a model that slept before: it sleeps on new ranks. GroupFailed: no ranks are left.
        """
        was_asleep = self._life.state_after_restart is EngineState.SLEEPING
        if not was_asleep:
            await self._quiet_down(call)
        self._life.enter(EngineState.SLEEPING)
        acks: list[TaskAck] = []
        try:
            if call.level is SleepLevel.HOST_MEMORY:
                await self.ranks.mirror()
            acks = await self.ranks.tell(SleepTask(call.operation_id, call.level))
            await self.ranks.require_released()
        except GroupFailed:
            await self._supervisor.settled()
        except RequestError as error:
            if was_asleep or error.code in (ErrorCode.TIMEOUT, ErrorCode.MEMORY_NOT_RELEASED):
                await self._restart(error)
                self._fell_asleep(call.level)
            else:
                await self._wake_again(call, error)
            raise
        self._fell_asleep(call.level)
        return TaskOutcome(acks, call.level)

    async def wake(self, call: WakeCall) -> TaskOutcome:
        """Wake the model, in state WAKING. With tags it may end asleep as well: it serves only when all memory is back.

        Raises:
            RequestError: InsufficientMemory: the model sleeps as before. Any other code: the group was started again, and is
                awake. GroupFailed: it is lost for good.
        """
        level, acks = self.ranks.level, []
        self._notes.remove()
        try:
            acks = await self._bring_back(WakeTask(call.operation_id, call.tags), timeout_s=call.deadline_seconds)
        except GroupFailed:
            await self._supervisor.settled()
        except RequestError as error:
            if error.code is ErrorCode.INSUFFICIENT_MEMORY:
                await self._sleep_again(call, level or SleepLevel.HOST_MEMORY)
            else:
                await self._restart(error)
                self._serve()
            raise
        if self.ranks.whole:
            self._serve()
        else:
            self._life.enter(EngineState.ASLEEP)
        return TaskOutcome(acks, level)

    # --- steps of a sleep -----------------------------------------------------------------------------------------------

    async def _quiet_down(self, call: SleepCall) -> None:
        """Finish or end all requests, and stop the steps. Raises RequestError; the model then serves on."""
        self._quieting = asyncio.create_task(self._drain(call))
        try:
            if not self._cancelled:  # before this began
                await self._quieting
        except asyncio.CancelledError:
            if not self._cancelled:
                raise  # the server ends
        except RequestError:
            self._serve()
            raise
        finally:
            self._quieting.cancel()
            self._quieting = None
        if self._cancelled:
            self._serve()
            raise RequestError(ErrorCode.CANCELLED, "sleep: given up for a wake that came while requests were still finishing")

    async def _drain(self, call: SleepCall) -> None:
        """Drain the requests and hold the steps; if the group is lost meanwhile, begin again with the next one."""
        abort = call.mode is SleepMode.ABORT
        while True:
            try:
                if abort:
                    self._pausing.begin(Pauser.SLEEP)
                await self._pausing.drain(0.0 if abort else call.deadline_seconds, ErrorCode.ASLEEP, ABORTED)
                await self._supervisor.settled()
                await self._pausing.hold(Pauser.SLEEP, timeout_s=self.ranks.call_timeout_s)
                return
            except GroupFailed:
                await self._supervisor.settled()

    async def _wake_again(self, call: SleepCall, error: RequestError) -> None:
        """Wake and verify all ranks after a failed sleep, or start the group again."""
        log.error("sleep operation=%s failed and is undone: %s", call.operation_id, error.message)
        self._life.enter(EngineState.WAKING)
        try:
            await self._bring_back(WakeTask(f"{call.operation_id}-undo"), timeout_s=self.ranks.call_timeout_s)
        except GroupFailed:
            await self._supervisor.settled()
        except RequestError as second:
            await self._restart(second)
        self._serve()

    # --- steps of a wake ------------------------------------------------------------------------------------------------

    async def _bring_back(self, task: WakeTask, *, timeout_s: float) -> list[TaskAck]:
        """Bring the memory of the tags back; once all is there, load and verify the rest."""
        until_s = asyncio.get_running_loop().time() + timeout_s
        acks = await self.ranks.tell(task, timeout_s=timeout_s)
        if self.ranks.whole:
            await self._preparation.after_wake(until_s)
        return acks

    async def _sleep_again(self, call: WakeCall, level: SleepLevel) -> None:
        """Put all ranks to sleep again after a failed wake, or start the group again asleep."""
        self._life.enter(EngineState.SLEEPING)
        try:
            await self.ranks.tell(SleepTask(f"{call.operation_id}-undo", level))
        except GroupFailed:
            await self._supervisor.settled()
        except RequestError as error:
            await self._restart(error)
        self._fell_asleep(level)

    # --- how both end ---------------------------------------------------------------------------------------------------

    def _fell_asleep(self, level: SleepLevel) -> None:
        if level is SleepLevel.DISCARD:
            self._preparation.discarded()
        self._life.enter(EngineState.ASLEEP)
        self._notes.write(level)

    def _serve(self) -> None:
        self._life.enter(EngineState.READY)
        self._pausing.release(Pauser.SLEEP)

    async def _restart(self, error: RequestError) -> None:
        """End these ranks, whose state is unknown, and wait for the next ones, in the state that was asked for."""
        self._life.blame(error.code)
        self.ranks.lose(error)
        await self._supervisor.settled()
