# SPDX-License-Identifier: Apache-2.0
"""Puts a rank group to sleep and wakes it, through a loss of the group in the middle of it."""

from diffusion_worker.engine.adapter_loading import AdapterLoader
from diffusion_worker.engine.documents import EngineState, SleepCall, SleepMode, WakeCall
from diffusion_worker.engine.life import EngineLife
from diffusion_worker.engine.step_loop import StepLoop
from diffusion_worker.engine.supervision import Supervisor
from diffusion_worker.engine.tasks import run_task
from diffusion_worker.errors import ErrorCode, GroupFailed, RequestError
from diffusion_worker.messages import SleepTask, WakeTask


class Sleeper:
    """The work of a sleep and of a wake; who may begin one, and when, is the engine's to say."""

    def __init__(self, life: EngineLife, steps: StepLoop, loader: AdapterLoader, supervisor: Supervisor, *, call_timeout_s: float) -> None:
        self._life = life
        self._steps = steps
        self._loader = loader
        self._supervisor = supervisor
        self._call_timeout_s = call_timeout_s

    async def sleep(self, call: SleepCall) -> None:
        """A group that is lost meanwhile is started again first, and then goes on draining or is put to sleep.

        Raises:
            RequestError: the ranks do not sleep; the model serves on. GroupFailed: they are lost for good.
        """
        self._life.enter(EngineState.DRAINING)
        try:
            drain_s = call.deadline_seconds if call.mode is SleepMode.WAIT else 0.0
            await self._steps.drain(drain_s, ErrorCode.ASLEEP, "the model went to sleep before the picture was finished")
            await self._supervisor.settled()
            self._life.enter(EngineState.SLEEPING)
            task = SleepTask(call.operation_id, call.level)
            await run_task(self._loader.call_all, "handle_sleep_task", task, timeout_s=self._call_timeout_s)
        except GroupFailed:
            await self._supervisor.settled()
            if self._life.beneath is EngineState.READY:
                raise RequestError(ErrorCode.RANK_FAILED, "the ranks were lost, and the new ones do not go to sleep") from None
        except RequestError:
            self._life.enter(EngineState.READY)
            raise
        else:
            self._life.enter(EngineState.ASLEEP)

    async def wake(self, call: WakeCall) -> None:
        """A group that is lost meanwhile is started again, and then is awake.

        Raises:
            RequestError: the ranks do not wake; the model sleeps on. GroupFailed: they are lost for good.
        """
        self._life.enter(EngineState.WAKING)
        try:
            task = WakeTask(call.operation_id, call.tags)
            await run_task(self._loader.call_all, "handle_wake_task", task, timeout_s=call.deadline_seconds)
        except GroupFailed:
            await self._supervisor.settled()
        except RequestError:
            self._life.enter(EngineState.ASLEEP)
            raise
        else:
            self._life.enter(EngineState.READY)
