# SPDX-License-Identifier: Apache-2.0
"""A watch of each worker: one request for the next change of its state is open at a time, outside of the queue's slots.

The answers are kept in the deployment's memory, and a change wakes the deployment. So no pass waits for a worker, and a worker that
is cut off costs one connection.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from diffusion_operator.api.merged_state import merged
from diffusion_operator.api.meta import ObjectMeta
from diffusion_operator.api.worker_state import WorkerState
from diffusion_operator.errors import ControlError, NotLeading
from diffusion_operator.pauses import Backoff
from diffusion_operator.plan.observed.pods import Pod, read_pod
from diffusion_operator.plan.results.worker_changes import happened
from diffusion_operator.reconcile.memory import DeploymentMemory, PollRecord, life_of
from diffusion_operator.reconcile.runtime import Runtime, deployment_key

WAIT_S = 30.0
"""For a change. The worker answers then, at the latest."""
RECONNECT = Backoff(first_s=0.5, longest_s=5.0)
QUICK_S = 1.0
"""An answer in less time is one of a burst."""
BURST_STEP_S = 0.05
BURST_PAUSE_MAX_S = 1.0
"""A worker that answers at once again and again, as a tenant's may, is asked once a second in the end."""

Place = tuple[str, str]

log = logging.getLogger(__name__)


class _Worker(NamedTuple):
    """The fields of a pod by which its worker is called. The pod itself is not kept for as long as it is watched."""

    pod: str
    uid: str
    ip: str


@dataclass(slots=True)
class _Watch:
    """The task of a pod, for one life of its container at one address. It writes into the memory of one object."""

    life: tuple[str, int]
    memory: DeploymentMemory
    task: asyncio.Task[None]


class WorkerWatches:
    """The watches of the workers of all deployments.

    They are open only between `start` and `stop`: an operator that does not lead calls no worker.
    """

    def __init__(self, runtime: Runtime, *, random: Callable[[], float], monotonic: Callable[[], float]) -> None:
        """`random` gives numbers in [0, 1)."""
        self._runtime = runtime
        self._random = random
        self._monotonic = monotonic
        self._open = False
        self._watches: dict[Place, dict[str, _Watch]] = {}
        """Keys are namespace and name of the deployment, then the UID of the pod."""

    def __len__(self) -> int:
        return sum(map(len, self._watches.values()))

    def start(self) -> None:
        """Let passes open watches from now on."""
        self._open = True

    async def stop(self) -> None:
        """Close all connections; what they brought is kept."""
        self._open = False
        tasks = [watch.task for watches in self._watches.values() for watch in watches.values()]
        self._watches.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def follow(self, deployment: ObjectMeta, memory: DeploymentMemory, pods: Sequence[Pod]) -> None:
        """Watch the workers of these pods of a deployment in the background, and of no others of it.

        It opens no watch before `start`.
        """
        place = (deployment.namespace, deployment.name)
        lives = {pod.uid: life_of(pod) for pod in pods}
        watches = self._watches.get(place, {})
        # An object that was deleted and made again in one moment has another memory, and its pods may be those of before.
        for uid in [uid for uid, watch in watches.items() if lives.get(uid) != watch.life or watch.memory is not memory]:
            watches.pop(uid).task.cancel()
        for pod in pods if self._open else ():
            if pod.uid not in watches:
                worker, record = _Worker(pod.name, pod.uid, pod.ip), memory.record_of(pod, self._runtime.now())
                task = asyncio.create_task(self._run(place, memory, worker, record), name=f"watch {pod.name}")
                watches[pod.uid] = _Watch(life=lives[pod.uid], memory=memory, task=task)
        if watches:
            self._watches[place] = watches
        else:
            self._watches.pop(place, None)

    def see_pod(self, namespace: str, deployment: str, manifest: Mapping[str, Any], *, gone: bool) -> None:
        """End the watch of a pod at its event, before any pass, where its worker or its address may be another one."""
        uid, watches = manifest["metadata"]["uid"], self._watches.get((namespace, deployment), {})
        watch = watches.get(uid)
        if watch is not None and (gone or life_of(read_pod(manifest, index=0, incarnation=0)) != watch.life):
            watches.pop(uid).task.cancel()

    def forget(self, namespace: str, deployment: str) -> None:
        """End the watches of a deployment that is gone."""
        for watch in self._watches.pop((namespace, deployment), {}).values():
            watch.task.cancel()

    async def _run(self, place: Place, memory: DeploymentMemory, worker: _Worker, record: PollRecord) -> None:
        """Ask a worker for its state again and again until the task is cancelled; wake the deployment at news."""
        quick = 0
        while True:
            begun = self._monotonic()
            changed = await self._ask(memory, worker, record)
            if changed:
                self._runtime.wake(deployment_key(*place))
            if record.failures:
                await asyncio.sleep(RECONNECT.jittered_s(record.failures, self._random))
                continue
            quick = quick + 1 if self._monotonic() - begun < QUICK_S else 0
            await asyncio.sleep(min(BURST_PAUSE_MAX_S, BURST_STEP_S * max(0, quick - 1)))

    async def _ask(self, memory: DeploymentMemory, worker: _Worker, record: PollRecord) -> bool:
        """Ask a worker for its next state and keep the answer; return whether the answer, or its absence, is news.

        A worker that was lost is asked to answer at once.
        """
        wait_s = WAIT_S if record.revision and not record.failures else 0.0
        workers, runtime = self._runtime.workers, self._runtime
        try:
            state = await memory.tokens.call(
                worker.ip,
                lambda token: workers.state(worker.ip, token=token, pod_uid=worker.uid, after=record.revision, wait_s=wait_s),
            )
            return hear(runtime, record, state)
        except NotLeading:
            return False  # this watch is about to be closed
        except ControlError as error:
            return record.failed(str(error), runtime.now())
        except Exception as error:  # a worker's strange answer must not end its watch
            log.exception("reading the state of a worker failed unexpectedly, it is tried again pod=%s", worker.pod)
            return record.failed(f"{type(error).__name__}: {error}", runtime.now())


def hear(runtime: Runtime, record: PollRecord, state: WorkerState) -> bool:
    """Take a worker's answer, whole or changes only, into its record and the metrics; return whether it is news."""
    state = merged(record.state, state)
    runtime.meter.seen(happened(record.state, state))
    return record.succeeded(state, runtime.clock())
