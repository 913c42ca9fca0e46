# SPDX-License-Identifier: Apache-2.0
"""The idleness of a deployment with `OnIdle`: how many replicas it needs awake, and when the next of them may sleep.

Every duration is an age that a worker measured by its own clock, and the time since its answer by ours. Times of two machines are never
compared. Requests that came since that answer are not known here, so a worker refuses a sleep if one did (`ifIdleSince`). A request less
than `idleSeconds` ago keeps one replica awake. Without this rule the last one could sleep between two requests of a busy client.
"""

import math
from collections.abc import Sequence

from diffusion_operator.api.deployment_spec import DeploymentSpec, Sleep
from diffusion_operator.api.deployment_status import ReplicaState
from diffusion_operator.api.worker_state import WorkerState
from diffusion_operator.plan.observed.replica_state import Group


def work_of(document: WorkerState) -> int:
    """Count running, queued and held requests."""
    return document.in_flight + document.queued + document.held.current


def idle_for_s(group: Group) -> float:
    """Return the seconds since a replica's last request; without one, those since it became ready."""
    age_s = group.poll.request_age_s
    return group.poll.state_age_s if age_s is None else age_s


def always_awake(spec: DeploymentSpec) -> int:
    """Return `minAwake`, but at most the number of replicas. A validation rule comparing the two would refuse an autoscaler's scaling
    down."""
    return min(spec.sleep.min_awake, spec.replicas)


def needed_awake(spec: DeploymentSpec, groups: Sequence[Group]) -> int:
    """Return the number of replicas that current requests need awake; with OnIdle, sleeping replicas are woken to reach it.

    The requests are divided by the batch size and rounded up. The result is at most the number of `groups`, but at least `always_awake`.
    """
    work = sum(work_of(group.document) for group in groups if group.document is not None)
    return max(always_awake(spec), min(math.ceil(work / spec.engine.max_batch_size), len(groups)))


def wanted_awake(spec: DeploymentSpec, groups: Sequence[Group]) -> int:
    """Return how many replicas are let stay awake with OnIdle: those that are needed, and at least one after a recent request.

    An unknown answer of a live replica counts as a request.
    """
    unknown = any(group.live and not group.poll.fresh for group in groups)
    recent = _recent_for_s(spec.sleep, groups) > 0
    return max(needed_awake(spec, groups), int(unknown or recent))


def may_sleep_in_s(group: Group, sleep: Sleep) -> float | None:
    """Return the seconds until a replica has been idle and awake for long enough; 0 or less if it has been.

    None if it is not awake, has requests, or has no fresh answer.
    """
    document = group.document
    if group.state is not ReplicaState.AWAKE or document is None or not group.poll.fresh or work_of(document):
        return None
    return max(sleep.idle_seconds - idle_for_s(group), sleep.min_awake_seconds - group.poll.state_age_s)


def next_sleep_in_s(spec: DeploymentSpec, groups: Sequence[Group]) -> float | None:
    """Return the seconds until a replica may sleep if no request comes; 0 or less if one may now.

    None if all are busy, or if all awake ones must stay awake.
    """
    times = [when for group in groups if (when := may_sleep_in_s(group, spec.sleep)) is not None]
    awake = sum(group.state is ReplicaState.AWAKE for group in groups)
    if not times or awake <= always_awake(spec):
        return None
    if awake > wanted_awake(spec, groups):
        return min(times)
    return max(min(times), _recent_for_s(spec.sleep, groups))


def _recent_for_s(sleep: Sleep, groups: Sequence[Group]) -> float:
    """Return the seconds until the latest request will be `idleSeconds` old; 0 if it is older.

    An awake replica without a request so far counts from the time when it became ready.
    """
    ages = [
        idle_for_s(group)
        for group in groups
        if group.document is not None and (group.state is ReplicaState.AWAKE or group.document.last_request_age_seconds is not None)
    ]
    return max([0.0, *(sleep.idle_seconds - age for age in ages)])
