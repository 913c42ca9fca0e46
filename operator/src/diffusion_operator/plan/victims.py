# SPDX-License-Identifier: Apache-2.0
"""In which order replicas go, where some have to: the one that is missed least comes first."""

from collections.abc import Sequence
from datetime import datetime

from diffusion_operator.api.deployment_status import ReplicaState
from diffusion_operator.plan.groups import Group

_STATES = (ReplicaState.FAILED, ReplicaState.PENDING, ReplicaState.STARTING, ReplicaState.ASLEEP, ReplicaState.SLEEPING)


def victims_first(groups: Sequence[Group], *, revision: str) -> list[Group]:
    """None that holds requests, if another will do; the least useful; one of an old revision, the oldest first; one that was chosen, and so
    unrouted, before; the least busy; the newest."""
    made: dict[str, datetime] = {}
    for group in groups:
        made[group.pod.revision] = min(group.pod.created_at, made.get(group.pod.revision, group.pod.created_at))

    def key(group: Group) -> tuple[bool, int, bool, datetime, bool, int, float, int]:
        state = _STATES.index(group.state) if group.state in _STATES else len(_STATES)
        current, since = group.pod.revision == revision, made[group.pod.revision]
        return (group.held > 0, state, current, since, group.pod.routable, group.in_flight, -group.pod.created_at.timestamp(), -group.index)

    return sorted(groups, key=key)
