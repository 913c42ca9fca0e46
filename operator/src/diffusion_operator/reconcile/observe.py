# SPDX-License-Identifier: Apache-2.0
"""Observation of one deployment: its pods and adapters from the API server, the state documents from the workers, in parallel."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from diffusion_operator.api.adapter import LoRAAdapter
from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.names import LABEL_DEPLOYMENT, POD
from diffusion_operator.errors import ControlError, OperatorError
from diffusion_operator.plan.observed.observed import Observed
from diffusion_operator.plan.observed.ownership import is_controlled_by
from diffusion_operator.plan.observed.pods import Pod, pod_numbers, read_pod
from diffusion_operator.plan.results.worker_changes import happened
from diffusion_operator.reconcile.memory import DeploymentMemory, PollRecord
from diffusion_operator.reconcile.repairs import repair_pods
from diffusion_operator.reconcile.runtime import Runtime

Parsed = TypeVar("Parsed")

log = logging.getLogger(__name__)


def parse(manifest: dict[str, Any], type_: type[Parsed]) -> Parsed:
    """The edge: after this, structs only."""
    try:
        return msgspec.convert(manifest, type_)
    except msgspec.ValidationError as error:
        name = manifest.get("metadata", {}).get("name")
        raise OperatorError(f"{manifest.get('kind')} {name} is not understood: {error}") from error


async def observe(runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory) -> Observed:
    namespace, name = deployment.metadata.namespace, deployment.metadata.name
    manifests, adapters = await asyncio.gather(
        runtime.cluster.list(POD, namespace, labels={LABEL_DEPLOYMENT: name}),
        adapters_of(runtime, namespace, name),
    )
    manifests = await repair_pods(runtime, deployment, memory, manifests)
    pods, foreign = _sort_pods(deployment, manifests)
    memory.forget_pods({pod.uid for pod in pods})
    memory.tokens.forget_others({pod.ip for pod in pods})
    answering = [pod for pod in pods if _answers(pod)]
    await asyncio.gather(*(_poll(runtime, memory, pod) for pod in answering))
    now = runtime.now()
    memory.recall_attempts(adapters, now)
    return Observed(
        deployment=deployment,
        default_image=runtime.settings.engine_image,
        pods=pods,
        foreign_incarnations=_highest(foreign, memory.taken),
        polls={pod.uid: memory.polls[pod.uid].poll(now) for pod in answering},
        adapters=adapters,
        attempts=dict(memory.attempts),
        departures=memory.departures,
        operation_not_before=dict(memory.operation_not_before),
        unrouted_at=dict(memory.unrouted_at),
        trial=memory.trial,
        policy_possible=runtime.settings.operator_pods is not None,
        children=memory.children,
        refusal=memory.refusal,
    )


async def adapters_of(runtime: Runtime, namespace: str, deployment: str) -> tuple[LoRAAdapter, ...]:
    """Adapters on their way out are gone already: what is no longer declared is removed from what runs."""
    found = await runtime.cluster.adapters_of(namespace, deployment)
    return tuple(parse(one, LoRAAdapter) for one in found if not one["metadata"].get("deletionTimestamp"))


def _sort_pods(deployment: DiffusionDeployment, manifests: Sequence[dict[str, Any]]) -> tuple[tuple[Pod, ...], dict[int, int]]:
    """Ours, and the incarnations that pods of an earlier deployment of this name still hold."""
    ours: list[Pod] = []
    foreign: dict[int, int] = {}
    for manifest in manifests:
        numbers = pod_numbers(deployment.metadata.name, manifest["metadata"]["name"])
        if numbers is None:
            continue
        index, incarnation = numbers
        if is_controlled_by(manifest, deployment.metadata.uid):
            ours.append(read_pod(manifest, index=index, incarnation=incarnation))
        else:
            foreign[index] = max(foreign.get(index, -1), incarnation)
    return tuple(ours), foreign


def _highest(one: dict[int, int], other: dict[int, int]) -> dict[int, int]:
    return {index: max(one.get(index, -1), other.get(index, -1)) for index in one.keys() | other.keys()}


def _answers(pod: Pod) -> bool:
    return bool(pod.ip) and pod.container.running and not pod.terminating and not pod.finished


async def _poll(runtime: Runtime, memory: DeploymentMemory, pod: Pod) -> None:
    record = memory.polls.get(pod.uid)
    if record is None or record.restarts != pod.container.restarts:
        record = memory.polls[pod.uid] = PollRecord(restarts=pod.container.restarts)
    try:
        state = await memory.tokens.call(pod.ip, lambda token: runtime.workers.state(pod.ip, token=token))
    except ControlError as error:
        record.failed(str(error), runtime.now())
    except Exception as error:  # a worker's strange answer must not end the pass over the others
        log.exception("look failed pod=%s", pod.name)
        memory.failures.append(error)
        record.failed(f"{type(error).__name__}: {error}", runtime.now())
    else:
        # Here, and not with the plan's actions: a pass that fails after its looks must lose none of what they told.
        runtime.meter.seen(happened(record.state, state))
        record.succeeded(state)
