# SPDX-License-Identifier: Apache-2.0
"""Children that are simply as they should be, applied when they differ from what was applied last: Service, ConfigMap, Secret, and two
that a spec may do without, NetworkPolicy and PodDisruptionBudget.

What is watched is compared with what is rendered, so a start of the operator writes nothing that is there. The Secret is never read: the
ConfigMap tells that it was applied. It is applied again at every resync, and while a pod waits for its volumes, because a garbage
collector that still works on an earlier deployment of this name may have taken it.
"""

import hashlib
import logging
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.deployment_spec import BudgetMode, PolicyMode
from diffusion_operator.api.names import (
    ANNOTATION_APPLIED,
    ANNOTATION_SECRET,
    CONFIG_MAP,
    DISRUPTION_BUDGET,
    KINDS,
    LABEL_DEPLOYMENT,
    NETWORK_POLICY,
    SECRET,
    Kind,
    desired_config_name,
)
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
    for manifest in _marked(manifests):
        kind = KINDS[manifest["kind"]]
        if not await _is_applied(runtime, deployment, memory, kind, manifest):
            await runtime.cluster.apply(manifest)
            memory.applied[kind.kind] = Applied(content=_mark(manifest), at=runtime.now())


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
        memory.applied[kind.kind] = Applied(content=_mark(manifest), at=runtime.now())


def doubt_secret(memory: DeploymentMemory, pods: Sequence[Pod], *, now: datetime) -> None:
    """Forget that the Secret was applied where a scheduled pod has not come past its volumes for a while."""
    stuck = any(pod.scheduled and pod.container.waiting_reason == "ContainerCreating" for pod in pods if not pod.terminating)
    last = memory.applied.get(SECRET.kind)
    if stuck and last is not None and now - last.at >= MOUNT_PATIENCE:
        memory.applied[SECRET.kind] = Applied(content=None, at=now)


def _optional(deployment: DiffusionDeployment, operator: OperatorPods | None) -> dict[Kind, dict[str, Any] | None]:
    spec = deployment.spec
    wanted = spec.control.network_policy is PolicyMode.MANAGED
    budget = spec.pod_disruption_budget is BudgetMode.AUTO
    return {
        NETWORK_POLICY: _with_mark(network_policy(deployment, operator)) if wanted and operator is not None else None,
        DISRUPTION_BUDGET: _with_mark(disruption_budget(deployment)) if budget else None,
    }


def _marked(manifests: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each with a hash of itself, and the ConfigMap with that of the Secret, which comes before it."""
    secret = next((_mark(one) for one in manifests if one["kind"] == SECRET.kind), "")
    return [_with_mark(one, **({ANNOTATION_SECRET: secret} if one["kind"] == CONFIG_MAP.kind else {})) for one in manifests]


def _with_mark(manifest: dict[str, Any], **annotations: str) -> dict[str, Any]:
    metadata = manifest["metadata"]
    asked = metadata.get("annotations", {}) | annotations
    return manifest | {"metadata": metadata | {"annotations": asked | {ANNOTATION_APPLIED: _mark(manifest)}}}


def _mark(manifest: dict[str, Any] | None) -> str:
    """Empty where there must be none."""
    return hashlib.sha256(msgspec.json.encode(manifest, order="deterministic")).hexdigest()[:16] if manifest is not None else ""


async def _is_applied(
    runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, kind: Kind, content: dict[str, Any] | None
) -> bool:
    """Whether nothing is to be done. A change by another client is reported before it is put right."""
    last, doubted = memory.applied.get(kind.kind), kind.kind in memory.doubted and kind != SECRET
    memory.doubted.discard(kind.kind)
    if last is not None and last.content != _mark(content):
        return False
    if last is not None and not doubted and runtime.now() - last.at < timedelta(seconds=runtime.settings.resync_s):
        return True
    if kind == SECRET:
        applied = last is None and content is not None and await _is_told_of(runtime, deployment, content)
    elif content is None:
        applied = not await runtime.cluster.list(kind, deployment.metadata.namespace, labels={LABEL_DEPLOYMENT: deployment.metadata.name})
    else:
        changed = await _changed(runtime, deployment, kind, content)
        applied = not changed
        if changed and last is not None:  # a process that has just begun does not know whether it was another client
            await tell_repaired(runtime, deployment, f"{kind.kind} {content['metadata']['name']} {changed}", about=kind.kind)
    if applied:
        memory.applied[kind.kind] = Applied(content=_mark(content), at=runtime.now())
    return applied


async def _is_told_of(runtime: Runtime, deployment: DiffusionDeployment, secret: dict[str, Any]) -> bool:
    """An earlier process applied this very Secret, and then the ConfigMap."""
    metadata = deployment.metadata
    found = await runtime.cluster.get(CONFIG_MAP, metadata.namespace, desired_config_name(metadata.name))
    told = found["metadata"].get("annotations", {}).get(ANNOTATION_SECRET) if found is not None else None
    return bool(told == secret["metadata"]["annotations"][ANNOTATION_APPLIED])


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
