# SPDX-License-Identifier: Apache-2.0
"""Children that are simply as they should be: Service, ConfigMap, Secret. Applied when they differ from what was applied last.

The Secret is never read and so not watched: it is applied again at every resync, and while a pod waits for its volumes, because a
garbage collector that still works on an earlier deployment of this name may have taken it.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from diffusion_operator.api.names import SECRET
from diffusion_operator.cluster import Cluster
from diffusion_operator.plan.pods import Pod
from diffusion_operator.reconcile.memory import Applied, DeploymentMemory

MOUNT_PATIENCE = timedelta(seconds=20)


async def apply_children(
    cluster: Cluster, memory: DeploymentMemory, manifests: Sequence[dict[str, Any]], *, now: datetime, resync: timedelta
) -> None:
    for manifest in manifests:
        last = memory.applied.get(manifest["kind"])
        if last is not None and last.content == manifest and now - last.at < resync:
            continue
        await cluster.apply(manifest)
        memory.applied[manifest["kind"]] = Applied(content=manifest, at=now)


def doubt_secret(memory: DeploymentMemory, pods: Sequence[Pod], *, now: datetime) -> None:
    """Forget that the Secret was applied where a scheduled pod has not come past its volumes for a while."""
    stuck = any(pod.scheduled and pod.container.waiting_reason == "ContainerCreating" for pod in pods if not pod.terminating)
    last = memory.applied.get(SECRET.kind)
    if stuck and last is not None and now - last.at >= MOUNT_PATIENCE:
        del memory.applied[SECRET.kind]
