# SPDX-License-Identifier: Apache-2.0
"""When time alone makes a deployment worth another look.

All else that happens wakes the object: events of the API server, and the watches of its workers.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

from diffusion_operator.api.deployment_spec import SleepPolicy
from diffusion_operator.api.deployment_status import ReplicaState
from diffusion_operator.api.worker_state import RecordState, WorkerState
from diffusion_operator.plan.adapters.plan import AdapterPlan
from diffusion_operator.plan.adapters.records import IN_PROGRESS
from diffusion_operator.plan.adapters.view import UNANSWERED
from diffusion_operator.plan.observed.children import pods_wait_for
from diffusion_operator.plan.observed.observed import UNREACHABLE_AFTER, Observed
from diffusion_operator.plan.observed.replica_state import Group
from diffusion_operator.plan.observed.waiting import EVENTS_EVERY
from diffusion_operator.plan.replicas.recovery import UNREACHABLE_FOR
from diffusion_operator.plan.replicas.rollout import RolloutProgress
from diffusion_operator.plan.sleep.idleness import next_sleep_in_s

SOON_S = 0.5
REFUSED_S = 5.0
STEADY_S = 10.0
"""While something is under way, or was not long ago."""

_CALM = (ReplicaState.PENDING, ReplicaState.AWAKE, ReplicaState.ASLEEP)
"""Only an event ends them. A look at Pending may tell what it waits for."""


def next_look_s(observed: Observed, adapters: AdapterPlan, progress: RolloutProgress, *, acting: bool, now: datetime) -> float | None:
    """Return the seconds until time alone makes the deployment worth another look; None if it never does.

    `acting`: this pass does something, so the next look comes soon.
    """
    if observed.refusal or pods_wait_for(observed.children):
        return REFUSED_S
    if acting or (adapters.again_at is not None and adapters.again_at <= now):
        return SOON_S
    times = [*_times(observed, adapters, progress, now), *_sleep_times(observed, adapters.groups, now)]
    waits = [max(SOON_S, (when - now).total_seconds()) for when in times if when > now]
    return min([*waits, *([] if _is_calm(observed, adapters) else [STEADY_S])], default=None)


def _is_calm(observed: Observed, adapters: AdapterPlan) -> bool:
    moves = bool(observed.departures.leaving) or _adapters_move(adapters.groups) or bool(adapters.tally.count(UNANSWERED))
    return not moves and all(
        group.state in _CALM and group.failures.since is None and group.failures.next_restart is None for group in adapters.groups
    )


def _times(observed: Observed, adapters: AdapterPlan, progress: RolloutProgress, now: datetime) -> Iterator[datetime]:
    if progress.record is not None and progress.record.progress_time is not None and not progress.stalled:
        yield progress.record.progress_time + timedelta(seconds=observed.deployment.spec.rollout.progress_deadline_seconds)
    yield from (node.until for node in observed.deployment.status.avoided_nodes)
    for group in adapters.groups:
        if group.state is ReplicaState.PENDING:
            yield now + EVENTS_EVERY
        if group.failures.next_restart is not None:
            yield group.failures.next_restart
        if group.poll.failures:
            lost_at = now - group.poll.failing_for
            yield from (lost_at + after for after in (UNREACHABLE_AFTER, UNREACHABLE_FOR))
    if adapters.again_at is not None:
        yield adapters.again_at
    yield from observed.operation_not_before.values()


def _sleep_times(observed: Observed, groups: Sequence[Group], now: datetime) -> Iterator[datetime]:
    spec = observed.deployment.spec
    due_in_s = next_sleep_in_s(spec, groups) if spec.sleep.policy is SleepPolicy.ON_IDLE else None
    if due_in_s is not None and due_in_s > 0:
        yield now + timedelta(seconds=due_in_s)


def _adapters_move(groups: Sequence[Group]) -> bool:
    """Return whether adapters move: requests that drain from a sleeper keep them moving until it wakes."""
    return any(_moves(group.document, asleep=group.state is ReplicaState.ASLEEP) for group in groups if group.document is not None)


def _moves(document: WorkerState, *, asleep: bool) -> bool:
    moving = IN_PROGRESS if asleep else (*IN_PROGRESS, RecordState.DRAINING)
    return any(state in document.record_states for state in moving)
