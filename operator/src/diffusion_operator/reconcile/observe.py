# SPDX-License-Identifier: Apache-2.0
"""Observation of one deployment: its pods and adapters from the store, and of its workers what their watches brought last.

Nobody is waited for, except once: a process that has just begun waits a moment for workers that served before it.
"""

import asyncio
import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.names import LABEL_DEPLOYMENT, POD, check_pod_name
from diffusion_operator.errors import ClusterError
from diffusion_operator.plan.observed.observed import Observed
from diffusion_operator.plan.observed.ownership import Ownership, ownership
from diffusion_operator.plan.observed.pods import Pod, pod_numbers, read_pod
from diffusion_operator.plan.observed.waiting import EVENTS_EVERY, last_warning, waits_silently
from diffusion_operator.reconcile.children.repairs import repair_pods
from diffusion_operator.reconcile.memory import DeploymentMemory
from diffusion_operator.reconcile.runtime import Runtime

log = logging.getLogger(__name__)

FIRST_ANSWER = timedelta(seconds=2)
"""For the first answer of a worker that is ready and that this process has not heard of yet. Without it a status would say for a
moment that it is not known."""


class Unheard(Exception):
    """A worker's first answer is about to come, and wakes the deployment."""


async def observe(runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory) -> Observed:
    namespace, name = deployment.metadata.namespace, deployment.metadata.name
    manifests, _ = await asyncio.gather(
        runtime.cluster.list(POD, namespace, labels={LABEL_DEPLOYMENT: name}),
        memory.parsed.read(runtime.cluster, namespace, name),
    )
    manifests = await repair_pods(runtime, deployment, memory, manifests)
    pods, checks, foreign = _sort_pods(deployment, manifests)
    memory.forget_pods({pod.uid for pod in pods})
    memory.tokens.forget_others({pod.ip for pod in pods})
    memory.tokens.inherit({pod.ip: pod.owner_uid for pod in pods if pod.owner_uid not in ("", memory.uid)})
    answering, now = [pod for pod in pods if _answers(pod)], runtime.now()
    records = {pod.uid: memory.record_of(pod, now) for pod in answering}
    runtime.watches.follow(deployment.metadata, memory, answering)
    if any(pod.ready and records[pod.uid].unheard and now - records[pod.uid].since < FIRST_ANSWER for pod in answering):
        raise Unheard
    return Observed(
        deployment=deployment,
        default_image=runtime.settings.engine_image,
        pods=pods,
        foreign_incarnations=_highest(foreign, memory.taken),
        polls={uid: record.poll(now) for uid, record in records.items()},
        adapters=memory.parsed.all,
        attempts=dict(memory.attempts),
        departures=memory.departures,
        calling=runtime.calls.calling & records.keys(),
        operation_not_before=dict(memory.operation_not_before),
        unrouted_at=dict(memory.unrouted_at),
        undrained=memory.undrained,
        trial=memory.trial,
        check=memory.check,
        checks=checks,
        policy_possible=runtime.settings.operator_pods is not None,
        children=memory.children,
        warnings=await _warnings(runtime, memory, namespace, pods),
        asleep=tuple(runtime.asleep.values()) if any(pod.unschedulable for pod in pods) else (),
        refusal=memory.refusal,
    )


async def _warnings(runtime: Runtime, memory: DeploymentMemory, namespace: str, pods: Sequence[Pod]) -> dict[str, str]:
    """Return the last Warning about each pod that waits and does not say for what, by UID. They are read once in 30 s."""
    now = runtime.now()
    waiting = [pod for pod in pods if waits_silently(pod, now)]
    memory.warnings = {pod.uid: memory.warnings.get(pod.uid, (pod.created_at, "")) for pod in waiting}
    for pod in waiting:
        asked_at, text = memory.warnings[pod.uid]
        if now - asked_at < EVENTS_EVERY:
            continue
        try:
            text = last_warning(await runtime.cluster.warnings(namespace, pod.uid), after=pod.set_up_at)
        except ClusterError as error:
            log.warning("Events not read namespace=%s pod=%s error=%s", namespace, pod.name, error)
        memory.warnings[pod.uid] = (now, text)
    return {uid: text for uid, (_, text) in memory.warnings.items()}


def _sort_pods(
    deployment: DiffusionDeployment, manifests: Sequence[dict[str, Any]]
) -> tuple[tuple[Pod, ...], tuple[Pod, ...], dict[int, int]]:
    """Read the pods that are ours or orphans, and our check pods; of all others keep only the highest incarnation at each index.

    Names of those others, such as an earlier deployment's, are still taken. A pod with another name is ignored.
    """
    ours: list[Pod] = []
    checks: list[Pod] = []
    foreign: dict[int, int] = {}
    for manifest in manifests:
        numbers = pod_numbers(deployment.metadata.name, manifest["metadata"]["name"])
        owner = ownership(manifest, deployment.metadata)
        if numbers is None:
            if owner is Ownership.OURS and manifest["metadata"]["name"].startswith(check_pod_name(deployment.metadata.name, "")):
                checks.append(read_pod(manifest, index=0, incarnation=0))
            continue
        index, incarnation = numbers
        if owner in (Ownership.OURS, Ownership.ORPHAN):
            ours.append(read_pod(manifest, index=index, incarnation=incarnation, orphan=owner is Ownership.ORPHAN))
        else:
            foreign[index] = max(foreign.get(index, -1), incarnation)
    return tuple(ours), tuple(checks), foreign


def _highest(one: dict[int, int], other: dict[int, int]) -> dict[int, int]:
    return {index: max(one.get(index, -1), other.get(index, -1)) for index in one.keys() | other.keys()}


def _answers(pod: Pod) -> bool:
    return bool(pod.ip) and pod.container.running and not pod.terminating and not pod.finished
