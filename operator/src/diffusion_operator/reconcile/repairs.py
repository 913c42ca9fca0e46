# SPDX-License-Identifier: Apache-2.0
"""What another hand did to a deployment's children: told by an Event, and for pods also found out here.

What this process did itself it remembers; after a restart it knows of nothing and so tells of nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.names import DEPLOYMENT, FIELD_MANAGER, LABEL_DEPLOYMENT, LABEL_MANAGED_BY, POD
from diffusion_operator.plan.events import repaired
from diffusion_operator.plan.pods import is_owned_by
from diffusion_operator.reconcile.memory import DeploymentMemory
from diffusion_operator.reconcile.report import report
from diffusion_operator.reconcile.runtime import Runtime


async def tell_repaired(runtime: Runtime, deployment: DiffusionDeployment, what: str, *, about: str) -> None:
    event = repaired(f"{what} by another hand", key=f"{about}-{runtime.now():%Y-%m-%dT%H:%M}")
    await report(runtime, (event,), kind=DEPLOYMENT, about=deployment.metadata)


async def repair_pods(
    runtime: Runtime, deployment: DiffusionDeployment, memory: DeploymentMemory, listed: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The pods of a deployment, by those that were listed by its label: with the ones that only lost it, which is put back.

    Pods that another hand deleted are told of; the plan makes others in their place.
    """
    metadata, found = deployment.metadata, list(listed)
    lost = _without(memory, found)
    if lost:
        ours = {LABEL_MANAGED_BY: FIELD_MANAGER, LABEL_DEPLOYMENT: metadata.name}
        for uid, name in lost.items():  # nothing happens where it is gone
            await runtime.cluster.set_labels(POD, metadata.namespace, name, uid=uid, labels=ours)
        found = await runtime.cluster.list(POD, metadata.namespace, labels={LABEL_DEPLOYMENT: metadata.name})
    present = {one["metadata"]["uid"]: one["metadata"] for one in found if is_owned_by(one, metadata.uid)}
    staying = {uid: one["name"] for uid, one in present.items() if not one.get("deletionTimestamp")}
    for uid, name in memory.pods.items():
        if uid in lost and uid in staying:
            await tell_repaired(runtime, deployment, f"labels of pod {name} were changed", about=uid)
        elif uid not in staying and uid not in memory.deleted_pods:
            await tell_repaired(runtime, deployment, f"pod {name} was deleted", about=uid)
    memory.pods = staying
    return found


def _without(memory: DeploymentMemory, found: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Pods that were there and are not listed, though this process did not delete them."""
    present = {one["metadata"]["uid"] for one in found}
    return {uid: name for uid, name in memory.pods.items() if uid not in present and uid not in memory.deleted_pods}
