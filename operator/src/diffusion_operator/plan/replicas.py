# SPDX-License-Identifier: Apache-2.0
"""Which pods to make and which to let go: scale, failed pods, and one-by-one replacement after a template change.

The replacement is deliberately small: one serving replica at a time, in place, waiting until all others have settled. A later rollout
(surge, deadlines) takes the place of `_outdated`; nothing else knows about it. A pod that carries the routable label is unrouted
first and deleted a moment later, so that no new connection meets a closing server.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from diffusion_operator.api.deployment import GroupState, GroupStatus
from diffusion_operator.plan.actions import CreatePod, DeletePod
from diffusion_operator.plan.groups import Group
from diffusion_operator.plan.pods import Pod

FAILED_POD_BACKOFF = timedelta(seconds=30)
"""Since the pod was made: a node that refuses a pod at once would be asked again without end."""

_VICTIM_ORDER = (GroupState.FAILED, GroupState.PENDING, GroupState.STARTING, GroupState.ASLEEP, GroupState.SLEEPING)


class ReplicaPlan(msgspec.Struct, frozen=True):
    create: tuple[CreatePod, ...] = ()
    retire: tuple[DeletePod, ...] = ()
    """To be deleted, once they are not routable any more."""
    outdated: int = 0
    """Replicas that still have an older revision."""


def plan_replicas(
    groups: Sequence[Group],
    *,
    replicas: int,
    revision: str,
    taken: Mapping[int, int],
    pods: Sequence[Pod],
    now: datetime,
    recorded: Sequence[GroupStatus],
) -> ReplicaPlan:
    """`taken` and `pods` are for names only: a new pod's incarnation is above every one that was ever seen at its index."""
    present = [group for group in groups if group.state is not GroupState.TERMINATING]
    surplus = sorted(present, key=_victim_key)[: max(0, len(present) - replicas)]
    kept = [group for group in present if group not in surplus]
    outdated = [group for group in kept if group.pod.revision != revision]
    retire = [_retire(group, "there are more replicas than asked for") for group in surplus]
    retire += [_retire(group, "the pod ended for good") for group in kept if _dead(group, now)]
    if not retire:
        retire = [_retire(group, "the template changed") for group in _outdated(kept, outdated, replicas=replicas)]
    missing = _free_indices({group.index for group in present}, replicas - len(present))
    incarnations = _incarnations(taken, pods, recorded)
    return ReplicaPlan(
        create=tuple(CreatePod(index=index, incarnation=incarnations.get(index, -1) + 1) for index in missing),
        retire=tuple(retire),
        outdated=len(outdated),
    )


def _victim_key(group: Group) -> tuple[bool, int, bool, int, float, int]:
    """None that holds requests, if another will do; the least useful; one that is already unrouted; the least busy; the newest."""
    order = _VICTIM_ORDER.index(group.state) if group.state in _VICTIM_ORDER else len(_VICTIM_ORDER)
    return (group.held > 0, order, group.pod.routable, group.in_flight, -group.pod.created_at.timestamp(), -group.index)


def _outdated(kept: Sequence[Group], outdated: Sequence[Group], *, replicas: int) -> Sequence[Group]:
    """What does not serve may go at once; of what does, one, and only while all the others have settled."""
    if not outdated:
        return ()
    idle = [group for group in outdated if not group.live]
    if idle:
        return idle[:1]
    fresh = [group for group in kept if group not in outdated and group.state is GroupState.AWAKE]
    if len(kept) < replicas or not all(group.settled for group in kept) or not all(group.pod.routable for group in fresh):
        return ()
    return sorted(outdated, key=_victim_key)[:1]


def _dead(group: Group, now: datetime) -> bool:
    return group.pod.finished and now - group.pod.created_at >= FAILED_POD_BACKOFF


def _retire(group: Group, why: str) -> DeletePod:
    return DeletePod(name=group.pod.name, uid=group.pod.uid, why=why)


def _free_indices(used: set[int], count: int) -> list[int]:
    candidates = (index for index in range(len(used) + max(count, 0)) if index not in used)
    return [index for index, _ in zip(candidates, range(max(count, 0)), strict=False)]


def _incarnations(taken: Mapping[int, int], pods: Sequence[Pod], recorded: Sequence[GroupStatus]) -> dict[int, int]:
    highest = dict(taken)
    for index, incarnation in [(pod.index, pod.incarnation) for pod in pods] + [(one.index, one.incarnation or 0) for one in recorded]:
        highest[index] = max(highest.get(index, -1), incarnation)
    return highest
