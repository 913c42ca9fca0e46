# SPDX-License-Identifier: Apache-2.0
"""Control calls, outside of the queue's slots: a worker that does not answer holds up nobody but itself.

A worker has the calls of one plan at a time, and until they are over no plan has others for it. Nothing is concluded from an outcome
except when to try again; the worker's watch brings what came of it.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime, timedelta

from diffusion_operator.errors import ControlError, NotLeading
from diffusion_operator.pauses import Backoff
from diffusion_operator.plan.adapters.load_attempts import RACE_RETRY_S, RACES, next_attempt
from diffusion_operator.plan.results.actions import DrainWorker, PutAdapter, RemoveAdapter, SleepWorker, WakeWorker, WorkerAction
from diffusion_operator.plan.sleep.next_look import SOON_S
from diffusion_operator.plan.sleep.policy import retry_key
from diffusion_operator.reconcile.keyed_queue import Key
from diffusion_operator.reconcile.memory import DeploymentMemory
from diffusion_operator.reconcile.runtime import Runtime

OPERATION = Backoff(first_s=5.0, longest_s=60.0)
CALLS_AT_ONCE = 8  # to one worker

_VERBS: dict[type[WorkerAction], str] = {
    SleepWorker: "sleep",
    WakeWorker: "wake",
    DrainWorker: "drain",
    PutAdapter: "put_adapter",
    RemoveAdapter: "remove_adapter",
}

log = logging.getLogger(__name__)


class WorkerCalls:
    """The calls that are under way, of all deployments."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._running: dict[str, asyncio.Task[None]] = {}
        """The running calls, by UID of the pod."""

    @property
    def calling(self) -> frozenset[str]:
        """UIDs of the pods whose worker has a call unanswered."""
        return frozenset(self._running)

    def begin(self, key: Key, memory: DeploymentMemory, calls: Sequence[WorkerAction]) -> None:
        """Begin the calls of a plan in the background. Give it no call to a worker in `calling`."""
        by_worker: dict[str, list[WorkerAction]] = defaultdict(list)
        for call in calls:
            by_worker[call.worker.pod_uid].append(call)
        for uid, group in by_worker.items():
            self._running[uid] = asyncio.create_task(self._call_worker(uid, key, memory, group), name=f"calls to {uid}")

    async def settled(self) -> None:
        """Wait until no call is under way."""
        while self._running:
            await asyncio.gather(*self._running.values())

    async def close(self) -> None:
        """Give up all calls; a worker may have taken one all the same."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _call_worker(self, uid: str, key: Key, memory: DeploymentMemory, calls: Sequence[WorkerAction]) -> None:
        """Make the calls to one worker, and wake the deployment where a pass was held back by them.

        It was held back where the worker was heard meanwhile, or where the look that follows each action came too early. A pass at once
        without news would make the same calls again.
        """
        begun, record = self._runtime.clock(), memory.polls.get(uid)
        known = record.state if record is not None else None
        try:
            await self._call_in_order(memory, calls)
        except NotLeading:
            return  # the process that leads next looks at every object
        finally:
            del self._running[uid]
        record = memory.polls.get(uid)
        heard = record is not None and record.state is not known
        if heard or (self._runtime.clock() - begun).total_seconds() >= SOON_S:
            self._runtime.wake(key)

    async def _call_in_order(self, memory: DeploymentMemory, calls: Sequence[WorkerAction]) -> None:
        """Make the calls to one worker: first those that make room, then puts of adapters, eight side by side at most.

        A worker fetches several adapters at once and answers when one is there. A failure is kept or logged, and stops no other call.
        No call is begun when the time of one call is used up.
        """
        runtime, gate = self._runtime, asyncio.Semaphore(CALLS_AT_ONCE)
        begun = runtime.clock()

        async def call_in_time(call: WorkerAction) -> None:
            async with gate:
                if (runtime.clock() - begun).total_seconds() >= runtime.settings.call_timeout_s:
                    return
                try:
                    await _call(runtime, memory, call)
                except Exception:  # a call that fails must keep none of the others from being made
                    log.exception("control call failed unexpectedly operation=%s worker=%s", call.operation_id, call.worker.ip)

        await asyncio.gather(*(call_in_time(call) for call in calls if not isinstance(call, PutAdapter)))
        await asyncio.gather(*(call_in_time(call) for call in calls if isinstance(call, PutAdapter)))


async def _call(runtime: Runtime, memory: DeploymentMemory, call: WorkerAction) -> None:
    begun, error = runtime.clock(), None
    fields = {"operation": call.operation_id}
    try:
        await memory.tokens.call(call.worker.ip, lambda token: _send(runtime, call, token=token))
        log.info("control call operation=%s worker=%s", call.operation_id, call.worker.ip, extra=fields)
    except ControlError as refused:
        error = refused
        level = logging.INFO if error.code in RACES else logging.WARNING
        what = "control call failed operation=%s worker=%s code=%s error=%s"
        log.log(level, what, call.operation_id, call.worker.ip, error.code, error, extra=fields)
    seconds = (runtime.clock() - begun).total_seconds()
    runtime.meter.called(_VERBS[type(call)], error.code if error is not None else "OK", seconds)
    _remember(memory, call, error, now=runtime.now())


async def _send(runtime: Runtime, call: WorkerAction, *, token: str) -> None:
    match call:
        case SleepWorker():
            await runtime.workers.sleep(call, token=token)
        case WakeWorker():
            await runtime.workers.wake(call, token=token)
        case DrainWorker():
            await runtime.workers.drain(call, token=token)
        case PutAdapter():
            await runtime.workers.put_adapter(call, token=token)
        case RemoveAdapter():
            await runtime.workers.remove_adapter(call, token=token)


def _remember(memory: DeploymentMemory, call: WorkerAction, error: ControlError | None, *, now: datetime) -> None:
    match call:
        case SleepWorker() | WakeWorker():
            delay_s = OPERATION.after_s(call.attempt)
            if error is not None and error.code in RACES:
                delay_s = error.retry_after_s or RACE_RETRY_S
            memory.operation_not_before[retry_key(call)] = now + timedelta(seconds=delay_s)
        case DrainWorker():
            if error is not None:
                memory.undrained |= {call.worker.pod_uid}
        case PutAdapter():
            memory.attempts[call.key] = next_attempt(memory.attempt(call.key), error, now=now)
        case RemoveAdapter():
            pass  # still listed means to be removed: the next look decides
