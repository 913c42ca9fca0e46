# SPDX-License-Identifier: Apache-2.0
"""Carrying out a plan on pods. Nothing is concluded from an outcome except when to try again; what came of it is observed."""

import logging
from collections.abc import Sequence

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.names import LABEL_ROUTABLE, POD
from diffusion_operator.errors import ClusterConflict, ClusterRefused, NamespaceEnds, OperatorError
from diffusion_operator.plan.observed.children import pods_wait_for
from diffusion_operator.plan.observed.ownership import Ownership, adopt, has_our_labels, is_controlled_by, ownership
from diffusion_operator.plan.replicas.revision import Template
from diffusion_operator.plan.results.actions import AdoptPod, CreateCheckPod, CreatePod, DeletePod, PodAction, SetRoutable
from diffusion_operator.plan.results.events import pod_adopted, pod_deleted, pod_name_taken
from diffusion_operator.reconcile.children.repairs import set_our_labels, tell, tell_repaired
from diffusion_operator.reconcile.memory import DeploymentMemory
from diffusion_operator.reconcile.pod_guard import guard
from diffusion_operator.reconcile.runtime import Runtime
from diffusion_operator.render.check_pod import check_pod
from diffusion_operator.render.metadata import controller_reference
from diffusion_operator.render.pod import pod

CREATES = (CreatePod, CreateCheckPod)
"""Actions whose refusal a condition repeats."""

log = logging.getLogger(__name__)


async def act_on_pods(
    runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, actions: Sequence[PodAction], *, template: Template
) -> bool:
    """Carry out actions on pods, and return whether a pod came that the plan did not know.

    An action that fails is kept in `memory` and waits, and the others are done all the same; only NamespaceEnds is raised.
    No pod is created while the Secret or ConfigMap that it mounts is missing.
    """
    waits, made, memory.refusal = pods_wait_for(memory.children), False, ""
    for action in actions:
        if isinstance(action, CreatePod) and waits:
            continue
        what = _what(action)
        if error := memory.backoffs.waiting(what, runtime.now()):
            memory.refusal = error if isinstance(action, CREATES) else memory.refusal
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
    if isinstance(action, CreateCheckPod):
        return "create check pod"
    return f"create {action.index}" if isinstance(action, CreatePod) else f"{type(action).__name__} {action.uid}"


def _remember_failure(memory: DeploymentMemory, action: PodAction, error: Exception) -> None:
    """Keep an action's failure: a refused pod is shown in the status and retried soon, and a conflict passes. All else fails the pass at
    its end."""
    known = isinstance(error, OperatorError)
    log.log(logging.WARNING if known else logging.ERROR, "pod action failed action=%s error=%s", action, error, exc_info=not known)
    creates = isinstance(action, CREATES)
    if creates and not isinstance(error, ClusterConflict):
        memory.refusal = str(error)
    if not (creates and isinstance(error, ClusterConflict | ClusterRefused)):
        memory.failures.append(error)


async def _act_on_pod(
    runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, action: PodAction, *, template: Template
) -> bool:
    """Create, label, adopt or delete a pod as planned.

    Returns True if a pod exists afterwards that was missing in the plan's view, so the plan is out of date.
    """
    namespace = deployment.metadata.namespace
    match action:
        case CreatePod():
            return await _create(runtime, deployment, memory, action, template=template)
        case CreateCheckPod(nodes=nodes):
            manifest = check_pod(deployment, template, nodes=nodes)
            guard(runtime.settings, manifest)
            created = await runtime.cluster.create(manifest)
            log.info("check pod made namespace=%s pod=%s new=%s", namespace, manifest["metadata"]["name"], created)
        case SetRoutable(name=name, uid=uid, routable=routable, why=why):
            labels = {LABEL_ROUTABLE: "true" if routable else None}
            if memory.routed.get(uid) is routable:
                change = f"label {LABEL_ROUTABLE} of pod {name} was changed"
                await tell_repaired(runtime, deployment, change, about=uid)
            await runtime.cluster.set_labels(POD, namespace, name, uid=uid, labels=labels)
            memory.routed[uid] = routable
            if not routable:
                memory.unrouted_at[uid] = runtime.now()
            if why:
                await tell(runtime, deployment, pod_deleted(name, why=why, uid=uid))
        case AdoptPod():
            await _adopt(runtime, deployment, action)
        case DeletePod(name=name, uid=uid, why=why):
            log.info("deleting pod namespace=%s pod=%s why=%s", namespace, name, why)
            memory.deleted_pods |= {uid}
            await runtime.cluster.delete(POD, namespace, name, uid=uid)
            reason = "OrphanReplaced" if action.orphan else "PodDeleted"
            await tell(runtime, deployment, pod_deleted(name, why=why, uid=uid, reason=reason))
    return False


async def _create(
    runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, action: CreatePod, *, template: Template
) -> bool:
    manifest = pod(deployment, template, index=action.index, incarnation=action.incarnation, avoided_nodes=action.avoided_nodes)
    guard(runtime.settings, manifest)
    created = await runtime.cluster.create(manifest)
    log.info("pod made namespace=%s pod=%s new=%s", deployment.metadata.namespace, manifest["metadata"]["name"], created)
    return created or await _is_ours(runtime, deployment, memory, action, manifest["metadata"]["name"])


async def _adopt(runtime: Runtime, deployment: DiffusionDeployment, action: AdoptPod) -> None:
    """Adopt the pod as it is now, unless somebody else controls it meanwhile."""
    metadata = deployment.metadata
    live = await runtime.cluster.look_up(POD, metadata.namespace, action.name)
    if live is None or live["metadata"]["uid"] != action.uid or ownership(live, metadata) is not Ownership.ORPHAN:
        return
    await runtime.cluster.patch(POD, metadata.namespace, action.name, adopt(live, controller_reference(metadata)))
    log.info("pod adopted namespace=%s pod=%s", metadata.namespace, action.name)
    await tell(runtime, deployment, pod_adopted(action.name, index=action.index, uid=action.uid))


async def _is_ours(runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, action: CreatePod, name: str) -> bool:
    """Return whether the pod that has the name already is ours; it gets lost labels again.

    The incarnation of any other's pod is skipped from now on, and an Event reports that pod.
    """
    metadata = deployment.metadata
    live = await runtime.cluster.look_up(POD, metadata.namespace, name)
    if live is not None and is_controlled_by(live, metadata.uid):
        if not has_our_labels(live["metadata"], metadata.name):
            await set_our_labels(runtime, deployment, live)
        return True
    memory.taken[action.index] = max(action.incarnation, memory.taken.get(action.index, -1))
    if live is not None:
        await tell(runtime, deployment, pod_name_taken(name, index=action.index, uid=live["metadata"]["uid"]))
    return False
