# SPDX-License-Identifier: Apache-2.0
"""Replacing replicas after a template change: how many may go, how many may come, how far it is, and when it counts as stuck.

A rolling update keeps two promises. At least `replicas - maxUnavailable` serve, unless fewer did before. At most `replicas + maxSurge` pods
exist, terminating ones not counted. It looks at what is and remembers no step, so a spec that changes in the middle simply has other
replicas to replace. `Recreate` ends all old pods and makes new ones when the last is gone.
"""

from collections.abc import Sequence
from datetime import datetime, timedelta

import msgspec

from diffusion_operator.api.deployment_spec import DeploymentSpec, Rollout, RolloutType
from diffusion_operator.api.deployment_status import DeploymentStatus, ReplicaState, RolloutStatus
from diffusion_operator.plan.observed.observed import Observed
from diffusion_operator.plan.observed.pods import Pod
from diffusion_operator.plan.observed.replica_state import Group
from diffusion_operator.plan.observed.states import MOVING_STATES

_REMOVED_FIRST = (ReplicaState.FAILED, ReplicaState.PENDING, ReplicaState.STARTING, ReplicaState.ASLEEP, ReplicaState.SLEEPING)


class RolloutProgress(msgspec.Struct, frozen=True):
    """Progress of the rollout of the current template."""

    record: RolloutStatus | None = None
    """To be kept in the status; None while nothing is to be rolled out."""
    done: bool = False
    """Every replica has the template and serves, or did so before."""
    stalled: bool = False
    served: int = 0
    """Replicas that serve with the new template now. The record keeps the most so far."""


def max_surge(rollout: Rollout, replicas: int) -> int:
    """Return how many replicas more there may be. Absent is 0; a share is rounded up."""
    return _share(rollout.max_surge or 0, replicas, up=True)


def max_unavailable(rollout: Rollout, replicas: int) -> int:
    """Return how many replicas may be missing. Absent is 1; a share is rounded down, but not to 0 where no surge is allowed either."""
    if rollout.max_unavailable is None:
        return 1
    missing = _share(rollout.max_unavailable, replicas, up=False)
    return missing or (1 if isinstance(rollout.max_unavailable, str) and not max_surge(rollout, replicas) else 0)


def _share(given: int | str, replicas: int, *, up: bool) -> int:
    """Return a number, or so many percent of the replicas, as Kubernetes rounds them for a Deployment."""
    if isinstance(given, int):
        return given
    hundredths = int(given.removesuffix("%")) * replicas
    return -(-hundredths // 100) if up else hundredths // 100


def usable(group: Group, revision: str) -> bool:
    """Return whether a replica serves: it is in its desired state, and a new one is routed to as well."""
    routed = group.pod.routable or group.state is not ReplicaState.AWAKE or group.pod.revision != revision
    return group.settled and routed


def progress_of(
    spec: DeploymentSpec,
    before: DeploymentStatus,
    groups: Sequence[Group],
    *,
    revision: str,
    paused: int = 0,
    refused: bool = False,
    now: datetime,
) -> RolloutProgress:
    """Return how far the rollout of a template is. `groups` are those that are not on their way out.

    It gets further with every replica more that serves the new template, and every old one less; the best so far is kept.
    While pods are `paused` its clock stands, and it begins again with each of them less.
    Empty while the deployment is suspended or the template is `refused`: there is no rollout yet.
    """
    if spec.suspend or refused:
        return RolloutProgress()
    served = sum(group.pod.revision == revision and usable(group, revision) for group in groups)
    remaining = sum(group.pod.revision != revision for group in groups)
    known = before.rollout if before.rollout is not None and before.rollout.revision == revision else None
    if remaining == 0 and (served >= spec.replicas or (known is None and before.current_revision == revision)):
        return RolloutProgress(done=True)
    best = known or RolloutStatus(revision=revision, served=served, remaining=remaining, paused=paused, progress_time=now)
    further = served > best.served or remaining < best.remaining or paused < best.paused
    record = msgspec.structs.replace(
        best,
        served=max(served, best.served),
        remaining=min(remaining, best.remaining),
        paused=paused,
        progress_time=now if further else best.progress_time,
    )
    deadline = timedelta(seconds=spec.rollout.progress_deadline_seconds)
    return RolloutProgress(record=record, stalled=not paused and now - record.progress_time >= deadline, served=served)


def count_paused(observed: Observed) -> int:
    """Count the pods that the rollout waits for, however long that takes.

    On their way out they may finish requests, as `spec.drain` allows. Behind a scheduling gate they wait for quota. Those that ended, or
    whose node is lost, do not count.
    """
    return sum((observed.leaves(pod) or pod.gated) and not pod.finished and not pod.lost for pod in observed.pods)


def allowed(rollout: Rollout, groups: Sequence[Group], *, replicas: int, revision: str) -> int:
    """Return the largest number of pods allowed now: `replicas`, and the surge as well while one has an older template."""
    rolling = any(group.pod.revision != revision for group in groups)
    return replicas + max_surge(rollout, replicas) if rolling and replicas else replicas


def missing(rollout: Rollout, groups: Sequence[Group], pods: Sequence[Pod], *, replicas: int, revision: str, stalled: bool) -> int:
    """Count the pods to create now, so that `replicas` have the template and no more exist than allowed.

    It is 0 before a Recreate has ended all old pods. There is no surge if the rollout is `stalled`.
    """
    if rollout.type is RolloutType.RECREATE and any(_holds_up(pod, revision) for pod in pods):
        return 0
    fresh = sum(group.pod.revision == revision for group in groups)
    most = replicas if stalled else allowed(rollout, groups, replicas=replicas, revision=revision)
    return max(0, min(most - len(groups), replicas - fresh))


def to_replace(rollout: Rollout, groups: Sequence[Group], *, replicas: int, revision: str) -> Sequence[Group]:
    """Return the old replicas that go now; with Recreate they are all of them.

    Replicas that will never serve go first and alone. Serving ones go only as far as maxUnavailable allows.
    None of them goes for a new one that does not serve yet.
    """
    old = by_removal_priority([group for group in groups if group.pod.revision != revision], revision=revision)
    if rollout.type is RolloutType.RECREATE:
        return old
    useless = [group for group in old if not group.live and not _comes_back(group)]
    if useless:
        return useless
    serving = [group for group in groups if usable(group, revision)]
    promised = max(0, replicas - max_unavailable(rollout, replicas))
    coming = sum(group.pod.revision == revision and group not in serving for group in groups)
    budget = max(0, len(groups) - promised - coming)
    broken = [group for group in old if group not in serving and group.state not in MOVING_STATES][:budget]
    spare = [group for group in old if group in serving][: max(0, min(budget, len(serving) - promised))]
    return [*broken, *spare]


def by_removal_priority(groups: Sequence[Group], *, revision: str) -> list[Group]:
    """Order replicas for removal. First come those without held requests, then the least useful, old revisions by age, those already
    unrouted, the least busy, and the newest."""
    made: dict[str, datetime] = {}
    for group in groups:
        made[group.pod.revision] = min(group.pod.created_at, made.get(group.pod.revision, group.pod.created_at))

    def key(group: Group) -> tuple[bool, int, bool, datetime, bool, int, float, int]:
        state = _REMOVED_FIRST.index(group.state) if group.state in _REMOVED_FIRST else len(_REMOVED_FIRST)
        current, since = group.pod.revision == revision, made[group.pod.revision]
        return (group.held > 0, state, current, since, group.pod.routable, group.in_flight, -group.pod.created_at.timestamp(), -group.index)

    return sorted(groups, key=key)


def _comes_back(group: Group) -> bool:
    """Return whether a replica's container ended and starts again without a problem so far, so that it may serve again."""
    return group.problem is None and group.pod.container.last_exit is not None


def _holds_up(pod: Pod, revision: str) -> bool:
    return pod.revision != revision and not pod.finished and not (pod.terminating and pod.lost)
