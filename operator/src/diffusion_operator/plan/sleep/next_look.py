# SPDX-License-Identifier: Apache-2.0
"""When a deployment is to be looked at again: the more moves, the sooner."""

from collections.abc import Iterator, Sequence
from datetime import datetime

from diffusion_operator.api.adapter import InstanceState
from diffusion_operator.api.deployment_spec import SleepPolicy
from diffusion_operator.api.deployment_status import ReplicaState
from diffusion_operator.api.worker_state import RecordState
from diffusion_operator.plan.adapters.plan import AdapterPlan
from diffusion_operator.plan.adapters.records import IN_PROGRESS
from diffusion_operator.plan.observed.children import pods_wait_for
from diffusion_operator.plan.observed.observed import Observed
from diffusion_operator.plan.observed.replica_state import Group
from diffusion_operator.plan.observed.states import MOVING_STATES
from diffusion_operator.plan.sleep.idleness import next_sleep_in_s

MOVING_POLL_S = 0.5
LOADING_POLL_S = 1.0
FAILING_POLL_S = 5.0
WAKEABLE_POLL_S = 2.0  # a request wakes a replica without us, and the others are to be routed around


def next_look_s(observed: Observed, adapters: AdapterPlan, *, acting: bool, now: datetime) -> float | None:
    """Seconds; None: nothing moves, the steady poll is soon enough."""
    groups = adapters.groups
    if observed.refusal or pods_wait_for(observed.children):
        return FAILING_POLL_S
    if acting or any(group.state in MOVING_STATES and not group.poll.failures for group in groups) or _adapters_move(groups):
        return MOVING_POLL_S
    if any(group.state is ReplicaState.STARTING and group.pod.container.running for group in groups) or _push_unanswered(adapters):
        return LOADING_POLL_S
    return min(_waits(observed, adapters, now), default=None)


def _waits(observed: Observed, adapters: AdapterPlan, now: datetime) -> Iterator[float]:
    spec = observed.deployment.spec
    if spec.sleep.policy is SleepPolicy.ON_IDLE:
        yield from (WAKEABLE_POLL_S for group in adapters.groups if group.state is ReplicaState.ASLEEP)
        due_in_s = next_sleep_in_s(spec, adapters.groups)
        if due_in_s is not None and due_in_s > 0:
            yield max(MOVING_POLL_S, due_in_s)
    yield from (FAILING_POLL_S for group in adapters.groups if group.poll.failures or group.pod.finished)
    yield from (
        max(MOVING_POLL_S, (group.failures.next_restart - now).total_seconds()) for group in adapters.groups if group.failures.next_restart
    )
    times = [one.next_retry for one in adapters.attempts.values() if one.error is not None and one.error.retryable]
    times += [when for when in observed.operation_not_before.values() if when > now]
    yield from (max(MOVING_POLL_S, (when - now).total_seconds()) for when in times)


def _adapters_move(groups: Sequence[Group]) -> bool:
    """What drains from a sleeper does so until it wakes."""
    known = [(group, record) for group in groups if group.document for record in group.document.adapters]
    draining = any(record.state is RecordState.DRAINING and group.state is not ReplicaState.ASLEEP for group, record in known)
    return draining or any(record.state in IN_PROGRESS for _, record in known)


def _push_unanswered(adapters: AdapterPlan) -> bool:
    """Its worker shows nothing of it yet."""
    return any(view.count(InstanceState.LOADING, InstanceState.PENDING) for view in adapters.views)
