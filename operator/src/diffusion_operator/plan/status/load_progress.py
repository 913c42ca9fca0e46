# SPDX-License-Identifier: Apache-2.0
"""Load progress of a replica that is not ready: from its pod until the worker answers, then from the worker's report. Nothing is
guessed."""

from diffusion_operator.api.deployment_status import LoadStatus, ReplicaState
from diffusion_operator.plan.observed.replica_state import IMAGE_REASONS, Group


def load_status(group: Group) -> LoadStatus | None:
    """Return the progress of a replica that is pending or starting, as far as it is known; otherwise None.

    Times are the cluster's and the node's own.
    """
    if group.state is ReplicaState.PENDING:
        return LoadStatus(stage="Scheduling", started_at=group.pod.created_at)
    if group.state is not ReplicaState.STARTING:
        return None
    if not group.pod.container.running:
        return _pulling(group)
    if group.document is None or not group.document.load.stage:
        return None
    load = group.document.load
    return LoadStatus(
        stage=load.stage[:32],
        bytes_done=load.bytes_done,
        bytes_total=load.bytes_total,
        percent=min(100, 100 * load.bytes_done // load.bytes_total) if load.bytes_total else None,
        started_at=None if group.restarting else group.pod.container.started_at,
    )


def _pulling(group: Group) -> LoadStatus | None:
    """Return the stage ImagePull if a container waits for its image, which it does once its volumes are ready; else None."""
    pod = group.pod
    creating = pod.container.waiting_reason == "ContainerCreating" and pod.set_up_at is not None
    if creating or pod.container.waiting_reason in IMAGE_REASONS:
        return LoadStatus(stage="ImagePull", started_at=pod.set_up_at)
    return None
