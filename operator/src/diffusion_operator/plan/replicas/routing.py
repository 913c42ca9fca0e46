# SPDX-License-Identifier: Apache-2.0
"""The pods that carry the routable label.

While a replica is awake only awake ones carry it. While none is, every live one does: its server answers by policy, which is better
than a refused connection. A replica that is about to be removed never does. A ready one that has not answered this process yet keeps what
it has: a replica may serve that the operator cannot ask.
"""

from collections.abc import Mapping, Sequence

from diffusion_operator.api.deployment_status import ReplicaState
from diffusion_operator.plan.observed.replica_state import Group
from diffusion_operator.plan.results.actions import SetRoutable


def plan_routing(groups: Sequence[Group], *, retiring: Mapping[str, str]) -> tuple[SetRoutable, ...]:
    """Plan the changes of the label by which the Service selects pods: awake replicas get it, or all live ones while none is awake.

    A pod whose UID is in `retiring`, which has the reason, loses it.
    Terminating pods, and ready ones that have not answered yet, are left unchanged.
    """
    candidates = [group for group in groups if group.pod.uid not in retiring]
    awake = {group.pod.uid for group in candidates if group.state is ReplicaState.AWAKE}
    wanted = awake or {group.pod.uid for group in candidates if group.live}
    kept = {group.pod.uid for group in candidates if group.pod.ready and group.document is None}
    return tuple(
        SetRoutable(name=group.pod.name, uid=group.pod.uid, routable=group.pod.uid in wanted, why=retiring.get(group.pod.uid, ""))
        for group in groups
        if group.pod.routable is not (group.pod.uid in wanted) and group.pod.uid not in kept and not group.pod.terminating
    )
