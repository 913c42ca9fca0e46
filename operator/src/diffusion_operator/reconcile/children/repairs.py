# SPDX-License-Identifier: Apache-2.0
"""Changes of children that somebody else made: an Event says them, and those of pods are found out here.

It remembers its own changes. After a restart it knows of nothing but the pods that the status names, and tells of nothing else.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.deployment_status import ReplicaState
from diffusion_operator.api.names import DEPLOYMENT, FIELD_MANAGER, LABEL_DEPLOYMENT, LABEL_MANAGED_BY, LABEL_REVISION, POD
from diffusion_operator.errors import ClusterError, NamespaceEnds
from diffusion_operator.plan.deployment import DeploymentPlan
from diffusion_operator.plan.observed.ownership import is_controlled_by
from diffusion_operator.plan.results.actions import CreatePod
from diffusion_operator.plan.results.events import PlannedEvent, repaired
from diffusion_operator.reconcile.memory import DeploymentMemory, KnownPod
from diffusion_operator.reconcile.report import report
from diffusion_operator.reconcile.runtime import Runtime


async def tell_repaired(runtime: Runtime, deployment: DiffusionDeployment, change: str, *, about: str, by: str = "another client") -> None:
    text = f"{change} by {by}; the operator repairs it"
    await tell(runtime, deployment, repaired(text, key=f"{about}-{runtime.now():%Y-%m-%dT%H:%M}"))


async def tell(runtime: Runtime, deployment: DiffusionDeployment, event: PlannedEvent) -> None:
    """Report an Event about the deployment."""
    await report(runtime, (event,), kind=DEPLOYMENT, about=deployment.metadata)


async def repair_pods(
    runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, listed: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the pods of a deployment: those that were listed by its label, and those that only lost it, which is put back.

    Pods that are gone since the last look, and not by this process, are noted as missed.
    """
    metadata, found = deployment.metadata, list(listed)
    lost = _without(memory, found)
    missing = {pod.name for pod in lost.values()}
    if not memory.pods_known:  # this process has just begun
        missing |= {one.leader_pod for one in deployment.status.replica_states if one.leader_pod} - _names(found)
    for name in sorted(missing):
        try:
            await _put_labels_back(runtime, deployment, name)
        except NamespaceEnds:
            raise
        except ClusterError as error:  # the others are looked at all the same
            memory.failures.append(error)
    if missing:
        found = await runtime.cluster.list(POD, metadata.namespace, labels={LABEL_DEPLOYMENT: metadata.name})
    memory.pods_known = True
    staying = {
        one["metadata"]["uid"]: KnownPod(name=one["metadata"]["name"], revision=one["metadata"]["labels"].get(LABEL_REVISION, ""))
        for one in found
        if is_controlled_by(one, metadata.uid) and not one["metadata"].get("deletionTimestamp")
    }
    for uid in lost.keys() & staying.keys():
        change = f"labels of pod {staying[uid].name} were changed"
        await tell_repaired(runtime, deployment, change, about=uid)
    memory.missed_pods |= {uid: pod for uid, pod in memory.pods.items() if uid not in staying and uid not in memory.deleted_pods}
    memory.pods = staying
    return found


async def _put_labels_back(runtime: Runtime, deployment: DiffusionDeployment, name: str) -> None:
    """Look at a pod that is not listed by our labels; one that the deployment controls gets them again."""
    metadata = deployment.metadata
    live = await runtime.cluster.look_up(POD, metadata.namespace, name)
    if live is not None and is_controlled_by(live, metadata.uid):
        await set_our_labels(runtime, deployment, live)


async def set_our_labels(runtime: Runtime, deployment: DiffusionDeployment, pod: dict[str, Any]) -> None:
    """Give a pod the labels by which it is found."""
    metadata, found = deployment.metadata, pod["metadata"]
    labels = {LABEL_MANAGED_BY: FIELD_MANAGER, LABEL_DEPLOYMENT: metadata.name}
    await runtime.cluster.set_labels(POD, metadata.namespace, found["name"], uid=found["uid"], labels=labels)


async def tell_missed_pods(runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, plan: DeploymentPlan) -> None:
    """Report pods that another client deleted, or that the cluster evicted or preempted, and forget all missed pods.

    Only sound pods of the current template are reported, and only as many as are made now: another operator may have ended others.
    """
    made = sum(isinstance(action, CreatePod) for action in plan.pods)
    failed = {group.leader_pod for group in deployment.status.replica_states if group.state is ReplicaState.FAILED}
    sound = {uid: pod.name for uid, pod in memory.missed_pods.items() if pod.revision == plan.template.revision and pod.name not in failed}
    disrupted = {group.pod.uid: group.pod.disruption for group in plan.groups}
    for uid, name in list(sound.items())[:made]:
        change = f"pod {name} was deleted"
        await tell_repaired(runtime, deployment, change, about=uid, by=disrupted.get(uid) or "another client")
    memory.missed_pods = {}


def _names(found: Sequence[Mapping[str, Any]]) -> set[str]:
    return {one["metadata"]["name"] for one in found}


def _without(memory: DeploymentMemory, found: Sequence[Mapping[str, Any]]) -> dict[str, KnownPod]:
    """Return by UID the pods that were there and are not listed, though this process did not delete them."""
    present = {one["metadata"]["uid"] for one in found}
    return {uid: pod for uid, pod in memory.pods.items() if uid not in present and uid not in memory.deleted_pods}
