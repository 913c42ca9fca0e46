# SPDX-License-Identifier: Apache-2.0
"""The children of a deployment: Secret, ConfigMaps, Service, NetworkPolicy and PodDisruptionBudget. A spec may do without the last two.

Each is written by itself, and one that fails keeps no other from being written. The ConfigMaps with adapters come before the one that
names them. Nobody hears of the Secret's deletion. So it is tried again before each pod is made, while a pod waits for its volumes, and at
every resync.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

import msgspec

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.deployment_spec import BudgetMode, PolicyMode
from diffusion_operator.api.deployment_status import ModelStatus
from diffusion_operator.api.names import (
    ANNOTATION_SECRET,
    CONFIG_MAP,
    DISRUPTION_BUDGET,
    NETWORK_POLICY,
    SECRET,
    SHARDS,
    control_policy_name,
    control_secret_name,
    desired_config_name,
    shard_config_name,
)
from diffusion_operator.plan.adapters.shards import Shard, Shards, packed
from diffusion_operator.plan.observed.children import ChildState
from diffusion_operator.plan.observed.ownership import Ownership, is_controlled_by, ownership
from diffusion_operator.plan.observed.pods import Pod
from diffusion_operator.reconcile.children.one_child import keep_child
from diffusion_operator.reconcile.memory import NONE, Applied, DeploymentMemory
from diffusion_operator.reconcile.runtime import Runtime
from diffusion_operator.render import Manifest
from diffusion_operator.render.child import Child, absent, asked, child_key
from diffusion_operator.render.desired_config import ShardReference, desired_config, named_shards, reference_to, shard_config
from diffusion_operator.render.disruption_budget import disruption_budget
from diffusion_operator.render.network_policy import network_policy
from diffusion_operator.settings import OperatorPods

MOUNT_PATIENCE = timedelta(seconds=5)


class DesiredFiles(msgspec.Struct, frozen=True):
    """The content of the mounted folder."""

    shards: Shards
    model: ModelStatus | None


async def keep_children(
    runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, secret: Manifest, files: DesiredFiles, service: Manifest
) -> tuple[ChildState, ...]:
    """Write each child that is not as the spec asks, and return the state of every child.

    A child that fails keeps no other from being written; its error is in its state.
    """
    token = asked(secret)
    states = [await keep_child(runtime, deployment, memory, token)]
    references, shards = await _keep_shards(runtime, deployment, memory, files.shards)
    main = desired_config(deployment, files.model, references)
    secret_mark = token.written if not states[0].reason else ""
    states.append(await keep_child(runtime, deployment, memory, asked(main, **{ANNOTATION_SECRET: secret_mark})))
    states += shards
    for child in (asked(service), *_optional(deployment, runtime.settings.operator_pods)):
        states.append(await keep_child(runtime, deployment, memory, child))
    memory.doubted = memory.doubted & {one.what for one in states} or NONE
    return tuple(states)


def next_try_s(memory: DeploymentMemory, now: datetime) -> float | None:
    """Return the seconds until a child that is not as the spec asks is tried again; None where all are as it asks."""
    return min((max(0.5, (one.again_at - now).total_seconds()) for one in memory.tries.values()), default=None)


def recheck_secret(deployment: DiffusionDeployment, memory: DeploymentMemory, pods: Sequence[Pod], *, makes: bool, now: datetime) -> None:
    """Forget that the control Secret was written, so that this pass writes it again.

    It does so if this pass creates a pod or a trial of one (`makes`), or if a pod has long waited for its volumes.
    """
    key = child_key(SECRET.kind, control_secret_name(deployment.metadata.name))
    last = memory.applied.get(key)
    if last is not None and (makes or (now - last.at >= MOUNT_PATIENCE and any(_waits_for_volumes(pod) for pod in pods))):
        memory.applied[key] = Applied(content=None, at=now)


def _waits_for_volumes(pod: Pod) -> bool:
    """Return whether a scheduled pod waits for its volumes. Images are pulled after the volumes are there."""
    waits = pod.scheduled and pod.container.waiting_reason == "ContainerCreating" and pod.set_up_at is None
    return waits and not pod.terminating


def _optional(deployment: DiffusionDeployment, operator: OperatorPods | None) -> Iterator[Child]:
    spec, name = deployment.spec, deployment.metadata.name
    policy = network_policy(deployment, operator) if spec.control.network_policy is PolicyMode.MANAGED and operator is not None else None
    budget = disruption_budget(deployment) if spec.pod_disruption_budget is BudgetMode.AUTO else None
    yield asked(policy) if policy is not None else absent(NETWORK_POLICY, control_policy_name(name))
    yield asked(budget) if budget is not None else absent(DISRUPTION_BUDGET, name)


async def _keep_shards(
    runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, files: Shards
) -> tuple[tuple[ShardReference, ...], list[ChildState]]:
    """Write the shards, and return the entries of the index and the state of each.

    A shard that could not be written keeps the entry that the main file has of it.
    """
    states: list[ChildState] = []
    references: list[ShardReference] = []
    shards = {shard.number: shard for shard in files.shards}
    for number in range(SHARDS):
        shard = shards.get(number)
        if shard is None and number not in files.foreign and not await _is_there(runtime, deployment, number):
            continue
        state = await keep_child(runtime, deployment, memory, _shard_child(deployment, memory, number, shard))
        states.append(msgspec.structs.replace(state, shard=number))
        if shard is not None and not state.reason:
            references.append(reference_to(shard))
        elif state.reason and state.ours:
            references += await _earlier_reference(runtime, deployment, number)
    return tuple(references), states


async def _is_there(runtime: Runtime, deployment: DiffusionDeployment, number: int) -> bool:
    """Return whether a shard without adapters is there from before. It stays, and is empty."""
    metadata = deployment.metadata
    live = await runtime.cluster.get(CONFIG_MAP, metadata.namespace, shard_config_name(metadata.name, number))
    return live is not None and ownership(live, metadata) in (Ownership.OURS, Ownership.ORPHAN)


def _shard_child(deployment: DiffusionDeployment, memory: DeploymentMemory, number: int, shard: Shard | None) -> Child:
    """Return a shard's rendered child; the same object as in the pass before where the shard is the same."""
    known = memory.shard_children.get(number)
    if known is not None and known[0] is shard:
        return known[1]
    child = asked(shard_config(deployment, number, shard.content if shard is not None else packed(())))
    memory.shard_children[number] = (shard, child)
    return child


async def _earlier_reference(runtime: Runtime, deployment: DiffusionDeployment, number: int) -> list[ShardReference]:
    metadata = deployment.metadata
    main = await runtime.cluster.get(CONFIG_MAP, metadata.namespace, desired_config_name(metadata.name))
    if main is None or not is_controlled_by(main, metadata.uid):
        return []
    return [one for one in named_shards(main) if one.number == number]
