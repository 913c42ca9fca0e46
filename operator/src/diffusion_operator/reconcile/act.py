# SPDX-License-Identifier: Apache-2.0
"""Carrying out a plan: pods through the cluster, calls through the workers. What a call's outcome means for the next is kept in memory.

Nothing is concluded from an outcome except when to try again; what came of it is observed.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime, timedelta

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.names import FIELD_MANAGER, LABEL_DEPLOYMENT, LABEL_MANAGED_BY, LABEL_ROUTABLE, POD
from diffusion_operator.errors import ClusterConflict, ClusterRefused, ControlError, NamespaceEnds, OperatorError
from diffusion_operator.plan.adapters.load_attempts import RACE_RETRY_S, RACES, next_attempt
from diffusion_operator.plan.observed.children import pods_wait_for
from diffusion_operator.plan.observed.ownership import has_our_labels, is_controlled_by
from diffusion_operator.plan.replicas.revision import Template
from diffusion_operator.plan.results.actions import (
    CreatePod,
    DeletePod,
    PodAction,
    PutAdapter,
    RemoveAdapter,
    SetRoutable,
    SleepWorker,
    WakeWorker,
    WorkerAction,
)
from diffusion_operator.plan.results.child_events import pod_name_taken
from diffusion_operator.plan.sleep.policy import retry_key
from diffusion_operator.reconcile.key_secret import guard_key
from diffusion_operator.reconcile.memory import DeploymentMemory
from diffusion_operator.reconcile.repairs import tell, tell_repaired
from diffusion_operator.reconcile.runtime import Runtime
from diffusion_operator.render.pod import pod

OPERATION_BACKOFF_FIRST_S = 5.0
OPERATION_BACKOFF_MAX_S = 60.0
CALLS_AT_ONCE = 8  # to one worker

_VERBS: dict[type[WorkerAction], str] = {
    SleepWorker: "sleep",
    WakeWorker: "wake",
    PutAdapter: "put_adapter",
    RemoveAdapter: "remove_adapter",
}

log = logging.getLogger(__name__)


async def act_on_pods(
    runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, actions: Sequence[PodAction], *, template: Template
) -> bool:
    """Each by itself: one that fails keeps no other from being done. Return whether a pod came that the plan did not know."""
    waits, made, memory.refusal = pods_wait_for(memory.children), False, ""
    for action in actions:
        if isinstance(action, CreatePod) and waits:
            continue
        what = _what(action)
        if error := memory.backoffs.waiting(what, runtime.now()):
            memory.refusal = error if isinstance(action, CreatePod) else memory.refusal
            continue
        try:
            made = await _act_on_pod(runtime, deployment, memory, action, template=template) or made
            memory.backoffs.succeeded(what)
        except NamespaceEnds:
            raise
        except Exception as failure:
            memory.backoffs.failed(what, failure, runtime.now())
            _remember_failure(memory, action, failure)
    return made


def _what(action: PodAction) -> str:
    """Name the action for its backoff."""
    return f"create {action.index}" if isinstance(action, CreatePod) else f"{type(action).__name__} {action.uid}"


def _remember_failure(memory: DeploymentMemory, action: PodAction, error: Exception) -> None:
    """A refused pod is in the status, and tried again soon; a conflict is over by then. All else fails the pass at its end."""
    known = isinstance(error, OperatorError)
    log.log(logging.WARNING if known else logging.ERROR, "pod action failed action=%s error=%s", action, error, exc_info=not known)
    creates = isinstance(action, CreatePod)
    if creates and not isinstance(error, ClusterConflict):
        memory.refusal = str(error)
    if not (creates and isinstance(error, ClusterConflict | ClusterRefused)):
        memory.failures.append(error)


async def _act_on_pod(
    runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, action: PodAction, *, template: Template
) -> bool:
    """Return whether a pod came that the plan did not know."""
    namespace = deployment.metadata.namespace
    match action:
        case CreatePod():
            return await _create(runtime, deployment, memory, action, template=template)
        case SetRoutable(name=name, uid=uid, routable=routable):
            labels = {LABEL_ROUTABLE: "true" if routable else None}
            if memory.routed.get(uid) is routable:
                await tell_repaired(runtime, deployment, f"label {LABEL_ROUTABLE} of pod {name} was changed", about=uid)
            await runtime.cluster.set_labels(POD, namespace, name, uid=uid, labels=labels)
            memory.routed[uid] = routable
            if not routable:
                memory.unrouted_at[uid] = runtime.now()
        case DeletePod(name=name, uid=uid, why=why):
            log.info("deleting pod namespace=%s pod=%s why=%s", namespace, name, why)
            memory.deleted_pods.add(uid)
            await runtime.cluster.delete(POD, namespace, name, uid=uid)
    return False


async def _create(
    runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, action: CreatePod, *, template: Template
) -> bool:
    manifest = pod(deployment, template, index=action.index, incarnation=action.incarnation, avoided_nodes=action.avoided_nodes)
    guard_key(runtime.settings, manifest)
    created = await runtime.cluster.create(manifest)
    log.info("pod made namespace=%s pod=%s new=%s", deployment.metadata.namespace, manifest["metadata"]["name"], created)
    return created or await _is_ours(runtime, deployment, memory, action, manifest["metadata"]["name"])


async def _is_ours(runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, action: CreatePod, name: str) -> bool:
    """Look at the pod that has the name already: ours is taken into account from now on, any other's incarnation is skipped."""
    metadata = deployment.metadata
    live = await runtime.cluster.look_up(POD, metadata.namespace, name)
    if live is not None and is_controlled_by(live, metadata.uid):
        if not has_our_labels(live["metadata"], metadata.name):
            labels = {LABEL_MANAGED_BY: FIELD_MANAGER, LABEL_DEPLOYMENT: metadata.name}
            await runtime.cluster.set_labels(POD, metadata.namespace, name, uid=live["metadata"]["uid"], labels=labels)
        return True
    memory.taken[action.index] = max(action.incarnation, memory.taken.get(action.index, -1))
    if live is not None:
        await tell(runtime, deployment, pod_name_taken(name, index=action.index, uid=live["metadata"]["uid"]))
    return False


async def call_workers(runtime: Runtime, memory: DeploymentMemory, calls: Sequence[WorkerAction]) -> None:
    """Workers side by side, and none is called any more when it has used up the time of one call."""
    by_worker: dict[str, list[WorkerAction]] = defaultdict(list)
    for call in calls:
        by_worker[call.worker.pod_uid].append(call)
    await asyncio.gather(*(_call_one_worker(runtime, memory, group) for group in by_worker.values()))


async def _call_one_worker(runtime: Runtime, memory: DeploymentMemory, calls: Sequence[WorkerAction]) -> None:
    """What makes room comes first; then adapters side by side, because a worker fetches several at once and answers when one is there."""
    begun, gate = runtime.clock(), asyncio.Semaphore(CALLS_AT_ONCE)

    async def call_in_time(call: WorkerAction) -> None:
        async with gate:
            if (runtime.clock() - begun).total_seconds() < runtime.settings.call_timeout_s:
                try:
                    await _call(runtime, memory, call)
                except Exception as error:  # a call that fails must not end the pass over the others
                    log.exception("control call failed operation=%s worker=%s", call.operation_id, call.worker.ip)
                    memory.failures.append(error)

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
        case PutAdapter():
            await runtime.workers.put_adapter(call, token=token)
        case RemoveAdapter():
            await runtime.workers.remove_adapter(call, token=token)


def _remember(memory: DeploymentMemory, call: WorkerAction, error: ControlError | None, *, now: datetime) -> None:
    match call:
        case SleepWorker() | WakeWorker():
            delay_s = min(OPERATION_BACKOFF_MAX_S, OPERATION_BACKOFF_FIRST_S * 2 ** min(call.attempt - 1, 10))
            if error is not None and error.code in RACES:
                delay_s = error.retry_after_s or RACE_RETRY_S
            memory.operation_not_before[retry_key(call)] = now + timedelta(seconds=delay_s)
        case PutAdapter():
            memory.attempts[call.key] = next_attempt(memory.attempts.get(call.key), error, now=now)
        case RemoveAdapter():
            pass  # still listed means to be removed: the next look decides
