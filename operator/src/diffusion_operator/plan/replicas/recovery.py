# SPDX-License-Identifier: Apache-2.0
"""When a replica's pod is given up for a new one, and when no more: failures are counted, waited for, and kept in the status.

The kubelet starts a container again in place, with pauses of its own that grow to five minutes. A new pod is made where that does not help:
the pod ended for good, its container ended more than three times, its ranks do not come up, or nobody can reach it. Before it there is a
pause that doubles with each failure. After `failureThreshold` of them no pod is made again until the template changes, and the kubelet's
tries go on. A worker that refuses its configuration or model would say the same in a new pod, so it stays where it is. A node that does
not answer is the cluster's to judge: its pods are removed when their toleration ends, and then replaced without a pause.

Times in a status are the operator's own; ages are the worker's own. They are never subtracted from one another.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from diffusion_operator.api.deployment_spec import DeploymentSpec, ReplicaRecovery
from diffusion_operator.api.deployment_status import ReplicaState, ReplicaStatus
from diffusion_operator.api.worker_state import WorkerPhase
from diffusion_operator.plan.observed.replica_state import CRASH_LOOP_RESTARTS, STARTUP_ERROR_EXIT, Failures, Group, Problem

UNREACHABLE_FOR = timedelta(minutes=5)
RESTART_PERIODS = 2  # of startup.timeoutSeconds: what a load of all ranks may take, and once more

_ITS_OWN_WORDS = (Problem.MODEL_ERROR, Problem.NODE_LOST)


class Reason(msgspec.Struct, frozen=True):
    """Why a pod is given up: a failure more, unless it was for ends `in_place`, each of which counts when the kubelet starts it again."""

    text: str
    in_place: bool = False


def with_failures(groups: Sequence[Group], spec: DeploymentSpec, now: datetime) -> tuple[Group, ...]:
    """The groups with what is known of their failures, and the verdict on those for which no pod is made any more."""
    recovery = spec.replica_recovery
    counted = [_counted(group, recovery, now) for group in groups]
    reasons = given_up(counted, spec)
    return tuple(_with_verdict(_with_pause(group, reasons.get(group.index), recovery, now), recovery) for group in counted)


def given_up(groups: Sequence[Group], spec: DeploymentSpec) -> Mapping[int, Reason]:
    """By index; `groups` with their failures."""
    reasons = {group.index: why for group in groups if (why := _reason(group, spec)) is not None}
    silent = _cut_off(groups)
    return reasons | ({silent.index: Reason("its control endpoint could not be reached for five minutes")} if silent is not None else {})


def due(groups: Sequence[Group], spec: DeploymentSpec, now: datetime) -> Mapping[int, str]:
    """Those of them whose pause is over, with the reason in words."""
    times = {group.index: group.failures.next_restart for group in groups}
    return {index: why.text for index, why in given_up(groups, spec).items() if (when := times[index]) is not None and now >= when}


def backoff(recovery: ReplicaRecovery, failures: int) -> timedelta:
    return timedelta(seconds=min(recovery.backoff_max_seconds, recovery.backoff_seconds * 2 ** min(failures - 1, 30)))


def _reason(group: Group, spec: DeploymentSpec) -> Reason | None:
    container, document = group.pod.container, group.document
    if group.state is ReplicaState.TERMINATING or group.pod.lost:
        return None
    if group.pod.finished:
        return Reason("the pod ended for good")
    if not container.running:
        refused = container.last_exit is None or container.last_exit.code == STARTUP_ERROR_EXIT
        # A container may have ended that often in the course of months.
        looping = min(container.restarts, group.failures.count) >= CRASH_LOOP_RESTARTS
        return Reason(f"its container ended {container.restarts + 1} times", in_place=True) if looping and not refused else None
    if document is None or document.state not in (WorkerPhase.RESTARTING, WorkerPhase.FAILED):
        return None
    patience_s = RESTART_PERIODS * spec.startup.timeout_seconds
    return Reason(f"its ranks did not come up within {patience_s} s") if document.state_age_seconds >= patience_s else None


def _cut_off(groups: Sequence[Group]) -> Group | None:
    """One at a time, and none while no other answers either: then it is more likely us who are cut off, and what serves is left alone."""
    silent = [group for group in groups if group.live and group.poll.unreachable and not group.pod.lost]
    long = [group for group in silent if group.poll.failing_for >= UNREACHABLE_FOR]
    alone = len(groups) == 1 or any(group.poll.fresh for group in groups)
    return long[0] if long and alone else None


def _counted(group: Group, recovery: ReplicaRecovery, now: datetime) -> Group:
    """With the ends in place since the last pass. A pod with another template begins at nothing."""
    before = group.previous
    known = before if before is not None and before.revision in (None, group.pod.revision) else ReplicaStatus(group.index, group.state)
    same_pod = known.leader_pod == group.pod.name
    failures = Failures(known.failures or 0, known.failing_since)
    if group.state is ReplicaState.TERMINATING:
        return msgspec.structs.replace(group, failures=failures)
    new = max(0, group.pod.container.restarts - (known.restarts or 0 if same_pod else 0))
    failures = msgspec.structs.replace(failures, next_restart=known.next_restart_time if same_pod else None)
    window = timedelta(seconds=recovery.window_seconds)
    over = failures.since is not None and now - failures.since >= window
    if over and (group.live or (new and failures.count < recovery.failure_threshold)):
        failures = Failures(next_restart=failures.next_restart)
    return msgspec.structs.replace(group, failures=_more(failures, new, now))


def _more(failures: Failures, new: int, now: datetime) -> Failures:
    return msgspec.structs.replace(failures, count=failures.count + new, since=failures.since or now) if new else failures


def _with_pause(group: Group, reason: Reason | None, recovery: ReplicaRecovery, now: datetime) -> Group:
    """What was given up stays so until it is live, or replaced; what failed too often gets no pause any more."""
    failures, threshold = group.failures, recovery.failure_threshold
    if group.live and reason is None:
        failures = msgspec.structs.replace(failures, next_restart=None)
    if reason is not None and failures.next_restart is None and failures.count < threshold:
        failures = _more(failures, int(not reason.in_place), now)
        failures = msgspec.structs.replace(failures, next_restart=now + backoff(recovery, failures.count))
    if failures.count >= threshold:
        failures = msgspec.structs.replace(failures, next_restart=None, spent=True)
    return msgspec.structs.replace(group, failures=failures)


def _with_verdict(group: Group, recovery: ReplicaRecovery) -> Group:
    failures = group.failures
    if failures.next_restart is not None:
        pause = f"a new pod is made at {failures.next_restart:%H:%M:%S} UTC (spec.replicaRecovery)"
        return msgspec.structs.replace(group, message=f"{group.message[:900]}; {pause}".lstrip("; "))
    if not failures.spent or group.live or group.problem in _ITS_OWN_WORDS or group.state is ReplicaState.TERMINATING:
        return group
    text = (
        f"{failures.count} failures within {recovery.window_seconds} s (spec.replicaRecovery), so no pod is made again until "
        f"the template or the restartedAt annotation changes: {group.message[:900] or 'it is starting once more'}"
    )
    return msgspec.structs.replace(group, problem=Problem.CRASH_LOOPING, message=text)
