# SPDX-License-Identifier: Apache-2.0
"""Children that are simply as they should be, applied when they differ from what was applied last: Service, ConfigMap, Secret, and two
that a spec may do without, NetworkPolicy and PodDisruptionBudget.

The Secret is never read and so not watched: it is applied again at every resync, and while a pod waits for its volumes, because a
garbage collector that still works on an earlier deployment of this name may have taken it.
"""

import logging
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from diffusion_operator.api.deployment import BudgetMode, DiffusionDeployment, PolicyMode
from diffusion_operator.api.names import DISRUPTION_BUDGET, KINDS, LABEL_DEPLOYMENT, NETWORK_POLICY, SECRET, Kind
from diffusion_operator.errors import ClusterRefused
from diffusion_operator.plan.drift import drift
from diffusion_operator.plan.pods import Pod, is_owned_by
from diffusion_operator.reconcile.memory import Applied, DeploymentMemory
from diffusion_operator.reconcile.repairs import tell_repaired
from diffusion_operator.reconcile.runtime import Runtime
from diffusion_operator.render.disruption_budget import disruption_budget
from diffusion_operator.render.network_policy import network_policy
from diffusion_operator.settings import OperatorPods

MOUNT_PATIENCE = timedelta(seconds=20)

log = logging.getLogger(__name__)


async def apply_children(
    runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, manifests: Sequence[dict[str, Any]]
) -> None:
    for manifest in manifests:
        kind = KINDS[manifest["kind"]]
        if not await _is_applied(runtime, deployment, memory, kind, manifest):
            await runtime.cluster.apply(manifest)
            memory.applied[kind.kind] = Applied(content=manifest, at=runtime.now())


async def keep_optional_children(runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory) -> None:
    """Applied, or removed where there must be none. A refusal, as by missing rights, keeps no model from being served; it is remembered."""
    for kind, manifest in _optional(deployment, runtime.settings.operator_pods).items():
        if await _is_applied(runtime, deployment, memory, kind, manifest):
            continue
        try:
            await (runtime.cluster.apply(manifest) if manifest is not None else _remove(runtime, deployment, kind))
        except ClusterRefused as error:
            if memory.refused_children.get(kind.kind) != str(error):
                log.warning("child refused namespace=%s error=%s", deployment.metadata.namespace, error)
            memory.refused_children[kind.kind] = str(error)
            continue
        memory.refused_children.pop(kind.kind, None)
        memory.applied[kind.kind] = Applied(content=manifest, at=runtime.now())


def doubt_secret(memory: DeploymentMemory, pods: Sequence[Pod], *, now: datetime) -> None:
    """Forget that the Secret was applied where a scheduled pod has not come past its volumes for a while."""
    stuck = any(pod.scheduled and pod.container.waiting_reason == "ContainerCreating" for pod in pods if not pod.terminating)
    last = memory.applied.get(SECRET.kind)
    if stuck and last is not None and now - last.at >= MOUNT_PATIENCE:
        del memory.applied[SECRET.kind]


def _optional(deployment: DiffusionDeployment, operator: OperatorPods | None) -> dict[Kind, dict[str, Any] | None]:
    spec = deployment.spec
    wanted = spec.control.network_policy is PolicyMode.MANAGED
    budget = spec.pod_disruption_budget is BudgetMode.AUTO
    return {
        NETWORK_POLICY: network_policy(deployment, operator) if wanted and operator is not None else None,
        DISRUPTION_BUDGET: disruption_budget(deployment) if budget else None,
    }


async def _is_applied(
    runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, kind: Kind, content: dict[str, Any] | None
) -> bool:
    """Whether nothing is to be done. Where another hand was at it, that is told before it is put right."""
    last, doubted = memory.applied.get(kind.kind), kind.kind in memory.doubted
    memory.doubted.discard(kind.kind)
    if last is None or last.content != content:
        return False
    if not doubted:
        return runtime.now() - last.at < timedelta(seconds=runtime.settings.resync_s)
    if content is None:
        return False
    if changed := await _changed(runtime, deployment, kind, content):
        await tell_repaired(runtime, deployment, f"{kind.kind} {content['metadata']['name']} {changed}", about=kind.kind)
    return not changed


async def _changed(runtime: Runtime, deployment: DiffusionDeployment, kind: Kind, content: dict[str, Any]) -> str:
    """What is not as it was applied, as the end of a sentence. Looked for by its label, so one without it counts as deleted."""
    metadata = deployment.metadata
    found = await runtime.cluster.list(kind, metadata.namespace, labels={LABEL_DEPLOYMENT: metadata.name})
    live = next((one for one in found if one["metadata"]["name"] == content["metadata"]["name"]), None)
    if live is None:
        return "was deleted, or lost its labels"
    paths = drift(live, content)
    return f"was changed: {', '.join(paths)}" if paths else ""


async def _remove(runtime: Runtime, deployment: DiffusionDeployment, kind: Kind) -> None:
    """Only what is this deployment's own: somebody else's may have our label."""
    metadata = deployment.metadata
    for found in await runtime.cluster.list(kind, metadata.namespace, labels={LABEL_DEPLOYMENT: metadata.name}):
        if is_owned_by(found, metadata.uid):
            await runtime.cluster.delete(kind, metadata.namespace, found["metadata"]["name"], uid=found["metadata"]["uid"])
