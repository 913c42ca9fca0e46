# SPDX-License-Identifier: Apache-2.0
"""The children of a deployment: Secret, ConfigMaps, Service, NetworkPolicy and PodDisruptionBudget. A spec may do without the last two.

Each is written by itself, and one that fails keeps no other from being written. Nobody hears of the Secret's deletion. So it is tried again
before each pod is made, while a pod waits for its volumes, and at every resync.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

import msgspec

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.deployment_spec import BudgetMode, PolicyMode
from diffusion_operator.api.deployment_status import ModelStatus
from diffusion_operator.api.names import (
    ANNOTATION_SECRET,
    DISRUPTION_BUDGET,
    NETWORK_POLICY,
    SECRET,
    control_policy_name,
    control_secret_name,
)
from diffusion_operator.plan.adapters.mounted_file import FILE_BYTES, AdapterFile
from diffusion_operator.plan.observed.children import ChildState
from diffusion_operator.plan.observed.pods import Pod
from diffusion_operator.reconcile.children.one_child import keep_child
from diffusion_operator.reconcile.memory import NONE, Applied, DeploymentMemory, WrittenFile
from diffusion_operator.reconcile.runtime import Runtime
from diffusion_operator.render import Manifest
from diffusion_operator.render.child import Child, absent, asked, child_key
from diffusion_operator.render.desired_config import desired_config
from diffusion_operator.render.disruption_budget import disruption_budget
from diffusion_operator.render.network_policy import network_policy
from diffusion_operator.settings import OperatorPods

MOUNT_PATIENCE = timedelta(seconds=5)
BYTES_A_SECOND = FILE_BYTES / 15
"""The pace of the adapters' file: a full file is written every 15 s, a shorter one sooner. Calls tell workers of each change at once."""


class DesiredFiles(msgspec.Struct, frozen=True):
    """The content of the mounted folder."""

    adapters: AdapterFile
    model: ModelStatus | None


async def keep_children(
    runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, secret: Manifest, files: DesiredFiles, service: Manifest
) -> tuple[ChildState, ...]:
    """Write each child that is not as the spec asks, and return the state of every child.

    A child that fails keeps no other from being written; its error is in its state.
    """
    token = asked(secret)
    states = [await keep_child(runtime, deployment, memory, token)]
    main = desired_config(deployment, _due(memory, files.adapters, runtime.now()).content, files.model)
    secret_mark = token.written if not states[0].reason else ""
    states.append(await keep_child(runtime, deployment, memory, asked(main, **{ANNOTATION_SECRET: secret_mark})))
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


def _due(memory: DeploymentMemory, file: AdapterFile, now: datetime) -> AdapterFile:
    """Return the file to write now: the last one, while the pause after it lasts."""
    last = memory.file
    if last is not None:
        if last.file is file:
            return file
        left_s = len(last.file.content) / BYTES_A_SECOND - (now - last.at).total_seconds()
        if left_s > 0:
            memory.withhold(left_s)
            return last.file
    memory.file = WrittenFile(file, now)
    return file
