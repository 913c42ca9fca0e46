# SPDX-License-Identifier: Apache-2.0
"""The children of a deployment, written when they differ from the last write: Secret, ConfigMap, Service, NetworkPolicy and
PodDisruptionBudget. A spec may do without the last two.

Each is written by itself, and one that fails keeps no other from being written. What is watched is compared with what is rendered, so a
start of the operator writes nothing that is there. The Secret is never read: the ConfigMap says that it was written. It is tried again at
every resync, and while a pod waits for its volumes, because nobody hears of its deletion.
"""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

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
    control_policy_name,
    desired_config_name,
)
from diffusion_operator.errors import ClusterConflict, ClusterError, ClusterUnavailable, NamespaceEnds
from diffusion_operator.plan.observed.children import (
    PASS_FAILED,
    ChildState,
    Repairs,
    contested,
    leaving,
    refused,
    stranger,
    tried,
)
from diffusion_operator.plan.observed.ownership import Ownership, is_controlled_by
from diffusion_operator.plan.observed.pods import Pod
from diffusion_operator.plan.results.drift import drift
from diffusion_operator.reconcile.child_writes import remove_child, write_child, write_secret
from diffusion_operator.reconcile.memory import Applied, DeploymentMemory
from diffusion_operator.reconcile.repairs import tell_repaired
from diffusion_operator.reconcile.runtime import Runtime
from diffusion_operator.render.disruption_budget import disruption_budget
from diffusion_operator.render.network_policy import network_policy
from diffusion_operator.settings import OperatorPods

MOUNT_PATIENCE = timedelta(seconds=20)

log = logging.getLogger(__name__)


class Child(NamedTuple):
    """A child as the spec asks for it."""

    kind: Kind
    name: str
    manifest: dict[str, Any] | None
    """None where there must be none."""


async def keep_children(
    runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, manifests: Sequence[dict[str, Any]]
) -> tuple[ChildState, ...]:
    """Write what is not as the spec asks, and return the state of each. The order is that of `manifests`, then the optional ones."""
    states: list[ChildState] = []
    for manifest in manifests:
        secret = next((one for one in states if one.kind == SECRET.kind), None)
        written = secret is not None and not secret.reason
        child = Child(KINDS[manifest["kind"]], manifest["metadata"]["name"], _marked(manifest, manifests, secret_written=written))
        states.append(await _keep(runtime, deployment, memory, child))
    for child in _optional(deployment, runtime.settings.operator_pods):
        states.append(await _keep(runtime, deployment, memory, child))
    return tuple(states)


def next_try_s(memory: DeploymentMemory, now: datetime) -> float | None:
    """Seconds until a child that is not as the spec asks is tried again. None where all are."""
    return min((max(0.5, (one.again_at - now).total_seconds()) for one in memory.tries.values()), default=None)


def recheck_secret(memory: DeploymentMemory, pods: Sequence[Pod], *, now: datetime) -> None:
    """Forget that the Secret was written where a scheduled pod has not come past its volumes for a while."""
    stuck = any(pod.scheduled and pod.container.waiting_reason == "ContainerCreating" for pod in pods if not pod.terminating)
    last = memory.applied.get(SECRET.kind)
    if stuck and last is not None and now - last.at >= MOUNT_PATIENCE:
        memory.applied[SECRET.kind] = Applied(content=None, at=now)


def _optional(deployment: DiffusionDeployment, operator: OperatorPods | None) -> Iterator[Child]:
    spec, name = deployment.spec, deployment.metadata.name
    policy = network_policy(deployment, operator) if spec.control.network_policy is PolicyMode.MANAGED and operator is not None else None
    budget = disruption_budget(deployment) if spec.pod_disruption_budget is BudgetMode.AUTO else None
    yield Child(NETWORK_POLICY, control_policy_name(name), _with_mark(policy) if policy is not None else None)
    yield Child(DISRUPTION_BUDGET, name, _with_mark(budget) if budget is not None else None)


async def _keep(runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, child: Child) -> ChildState:
    """Write a child, which fails by itself. An error that nobody expected is raised at the end of the pass."""
    kind, content, before = child.kind.kind, _mark(child.manifest), memory.tries.get(child.kind.kind)
    doubted = kind in memory.doubted
    if before is not None and before.content == content and not doubted and runtime.now() < before.again_at:
        return before.state
    try:
        state = await _kept(runtime, deployment, memory, child)
    except NamespaceEnds:
        raise
    except ClusterError as error:
        ours = await _is_there(runtime, deployment, memory, child)
        passing = isinstance(error, ClusterConflict | ClusterUnavailable)
        asked = runtime.now() + timedelta(seconds=error.retry_after_s)
        state = refused(child.kind, child.name, ours=ours, reason=error.reason, message=error.said, passing=passing, not_before=asked)
        if isinstance(error, ClusterUnavailable):
            memory.failures.append(error)
    except Exception as error:
        log.exception("child failed namespace=%s child=%s %s", deployment.metadata.namespace, kind, child.name)
        memory.failures.append(error)
        ours = await _is_there(runtime, deployment, memory, child)
        text = f"{kind} {child.name}: the pass failed with {type(error).__name__}: {error}"
        state = ChildState(kind=kind, name=child.name, ours=ours, reason=PASS_FAILED, message=text)
    if not state.reason:
        memory.tries.pop(kind, None)
        return state
    attempt = memory.tries[kind] = tried(before, state, content=content, now=runtime.now())
    if before is None or before.state.message != state.message:
        log.warning("child not written namespace=%s reason=%s %s", deployment.metadata.namespace, state.reason, state.message)
    return attempt.state


async def _kept(runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, child: Child) -> ChildState:
    kind, ours = child.kind.kind, ChildState(kind=child.kind.kind, name=child.name, ours=True)
    repaired = await _to_repair(runtime, deployment, memory, child)
    if repaired is None:
        return ours
    repairs = memory.repairs.get(kind, Repairs())
    if repaired and child.manifest is not None:
        there = await _is_there(runtime, deployment, memory, child)
        again_at = repairs.next_at(child.kind, runtime.now(), missing=not there)
        if again_at > runtime.now():
            memory.repairs[kind] = repairs.put_off()
            return contested(child.kind, child.name, repaired, ours=there, not_before=again_at)
    if child.manifest is None:
        await remove_child(runtime, deployment, child.kind)
    else:
        write = write_secret if child.kind == SECRET else write_child
        found = await write(runtime, deployment, child.manifest)
        if found is Ownership.LEAVING:
            return leaving(child.kind, child.name)
        if found is Ownership.STRANGER:
            return stranger(child.kind, child.name)
    memory.applied[kind] = Applied(content=_mark(child.manifest), at=runtime.now())
    if repaired:
        repairs = memory.repairs[kind] = repairs.and_now(runtime.now())
        await tell_repaired(runtime, deployment, repaired, about=kind)
    left = await _changed(runtime, deployment, child, known=True) if child.manifest is not None else None
    if left:  # an admission webhook changed the write itself
        again_at = repairs.next_at(child.kind, runtime.now(), missing=False)
        return contested(child.kind, child.name, left, ours=True, not_before=again_at)
    return ours


async def _to_repair(runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, child: Child) -> str | None:
    """None where nothing is to be done. Empty where it is to be written, and a text where somebody else changed what was written."""
    kind, last = child.kind.kind, memory.applied.get(child.kind.kind)
    doubted = kind in memory.doubted and child.kind != SECRET
    memory.doubted.discard(kind)
    if last is not None and last.content != _mark(child.manifest):
        return ""
    failing = kind in memory.tries
    if last is not None and not doubted and not failing and runtime.now() - last.at < timedelta(seconds=runtime.settings.resync_s):
        return None
    changed = await _changed(runtime, deployment, child, known=last is not None)
    if changed is None:
        memory.applied[kind] = Applied(content=_mark(child.manifest), at=runtime.now())
        return None
    return changed if last is not None else ""  # a process that has just begun does not know who changed it


async def _changed(runtime: Runtime, deployment: DiffusionDeployment, child: Child, *, known: bool) -> str | None:
    """None where it is as it was written. Looked for by its label, so one without it counts as deleted."""
    metadata = deployment.metadata
    if child.manifest is None:
        found = await runtime.cluster.list(child.kind, metadata.namespace, labels={LABEL_DEPLOYMENT: metadata.name})
        return "" if any(is_controlled_by(one, metadata.uid) for one in found) else None
    if child.kind == SECRET:
        written = not known and await _secret_mark(runtime, deployment) == child.manifest["metadata"]["annotations"][ANNOTATION_APPLIED]
        return None if written else ""
    found = await runtime.cluster.list(child.kind, metadata.namespace, labels={LABEL_DEPLOYMENT: metadata.name})
    live = next((one for one in found if one["metadata"]["name"] == child.name), None)
    if live is None:
        return f"{child.kind.kind} {child.name} was deleted or its labels taken off"
    paths = drift(live, child.manifest)
    return f"{child.kind.kind} {child.name} was changed: {', '.join(paths)}" if paths else None


async def _is_there(runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, child: Child) -> bool:
    """Return whether our object controls the live one, though the last write of it failed."""
    if child.kind == SECRET:
        last = memory.applied.get(SECRET.kind)
        return bool(last.content) if last is not None else bool(await _secret_mark(runtime, deployment))
    found = await runtime.cluster.get(child.kind, deployment.metadata.namespace, child.name)
    return found is not None and is_controlled_by(found, deployment.metadata.uid)


async def _secret_mark(runtime: Runtime, deployment: DiffusionDeployment) -> str:
    """Return the hash of the Secret that an earlier process wrote before the ConfigMap. Empty where it wrote none."""
    metadata = deployment.metadata
    found = await runtime.cluster.get(CONFIG_MAP, metadata.namespace, desired_config_name(metadata.name))
    if found is None or not is_controlled_by(found, metadata.uid):
        return ""
    return str(found["metadata"].get("annotations", {}).get(ANNOTATION_SECRET, ""))


def _marked(manifest: dict[str, Any], manifests: Sequence[dict[str, Any]], *, secret_written: bool) -> dict[str, Any]:
    """With a hash of itself; the ConfigMap with that of the Secret too, once it was written."""
    if manifest["kind"] != CONFIG_MAP.kind:
        return _with_mark(manifest)
    secret = next((_mark(one) for one in manifests if one["kind"] == SECRET.kind), "") if secret_written else ""
    return _with_mark(manifest, **{ANNOTATION_SECRET: secret})


def _with_mark(manifest: dict[str, Any], **annotations: str) -> dict[str, Any]:
    metadata = manifest["metadata"]
    asked = metadata.get("annotations", {}) | annotations
    return manifest | {"metadata": metadata | {"annotations": asked | {ANNOTATION_APPLIED: _mark(manifest)}}}


def _mark(manifest: dict[str, Any] | None) -> str:
    """Empty where there must be none."""
    return hashlib.sha256(msgspec.json.encode(manifest, order="deterministic")).hexdigest()[:16] if manifest is not None else ""
