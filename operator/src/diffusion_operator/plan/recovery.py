# SPDX-License-Identifier: Apache-2.0
"""When a replica's pod is given up for a new one, and when no more: failures are counted, waited for, and kept in the status.

The kubelet starts a container again in place, with pauses of its own that grow to five minutes. A new pod is made where that does not help:
the pod ended for good, its container ended more than three times, its ranks do not come up, or nobody can reach it. Before it there is a
pause that doubles with each failure. After `failureThreshold` of them no pod is made anew until the template changes, and the kubelet's
tries go on. A worker that refuses its configuration or model would say the same in a new pod, so it stays where it is. A node that does
not answer is the cluster's to judge: its pods are removed when their toleration ends, and then replaced without a pause.

Times in a status are the operator's own; ages are the worker's own. They are never subtracted from one another.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from diffusion_operator.api.deployment import DeploymentSpec, GroupRecovery, GroupState, GroupStatus
from diffusion_operator.api.worker_state import WorkerPhase
from diffusion_operator.plan.groups import CRASH_LOOP_RESTARTS, STARTUP_ERROR_EXIT, Failures, Group, Problem

UNREACHABLE_FOR = timedelta(minutes=5)
RESTART_PERIODS = 2  # of startup.timeoutSeconds: what a load of all ranks may take, and once more

_ITS_OWN_WORDS = (Problem.MODEL_ERROR, Problem.NODE_LOST)


def with_failures(groups: Sequence[Group], spec: DeploymentSpec, now: datetime) -> tuple[Group, ...]:
    """The groups with what is known of their failures, and the verdict on those for which no pod is made any more."""
    reasons = given_up(groups, spec)
    return tuple(
        _with_verdict(_counted(group, reasons.get(group.index, ""), spec.group_recovery, now), spec.group_recovery) for group in groups
    )


def given_up(groups: Sequence[Group], spec: DeploymentSpec) -> Mapping[int, str]:
    """Why a pod is to be replaced, by index."""
    reasons = {group.index: why for group in groups if (why := _reason(group, spec))}
    silent = _cut_off(groups)
    return reasons | ({silent.index: "its control endpoint could not be reached for five minutes"} if silent is not None else {})


def due(groups: Sequence[Group], spec: DeploymentSpec, now: datetime) -> Mapping[int, str]:
    """Those of them whose pause is over."""
    times = {group.index: group.failures.next_restart for group in groups}
    return {index: why for index, why in given_up(groups, spec).items() if (when := times[index]) is not None and now >= when}


def backoff(recovery: GroupRecovery, failures: int) -> timedelta:
    return timedelta(seconds=min(recovery.backoff_max_seconds, recovery.backoff_seconds * 2 ** min(failures - 1, 30)))


def _reason(group: Group, spec: DeploymentSpec) -> str:
    container, document = group.pod.container, group.document
    if group.state is GroupState.TERMINATING or group.pod.lost:
        return ""
    if group.pod.finished:
        return "the pod ended for good"
    if not container.running:
        ended = container.last_exit
        looping = ended is not None and ended.code != STARTUP_ERROR_EXIT and container.restarts >= CRASH_LOOP_RESTARTS
        return f"its container ended {container.restarts + 1} times" if looping else ""
    patience_s = RESTART_PERIODS * spec.startup.timeout_seconds
    if document is None or document.state not in (WorkerPhase.RESTARTING, WorkerPhase.FAILED):
        return ""
    return f"its ranks did not come up within {patience_s} s" if document.state_age_seconds >= patience_s else ""


def _cut_off(groups: Sequence[Group]) -> Group | None:
    """One at a time, and none while no other answers either: then it is more likely us who are cut off, and what serves is left alone."""
    silent = [group for group in groups if group.live and group.poll.unreachable and not group.pod.lost]
    long = [group for group in silent if group.poll.failing_for >= UNREACHABLE_FOR]
    alone = len(groups) == 1 or any(group.poll.fresh for group in groups)
    return long[0] if long and alone else None


def _counted(group: Group, reason: str, recovery: GroupRecovery, now: datetime) -> Group:
    """With what is new since the last pass. A pod with another template begins at nothing."""
    before = group.previous
    known = before if before is not None and before.revision in (None, group.pod.revision) else GroupStatus(group.index, group.state)
    count, since = known.failures or 0, known.failing_since
    if group.state is GroupState.TERMINATING:
        return msgspec.structs.replace(group, failures=Failures(count, since))
    same_pod = known.leader_pod == group.pod.name
    next_restart = known.next_restart_time if same_pod and (reason or not group.live) else None
    giving_up = bool(reason) and next_restart is None
    new = max(0, group.pod.container.restarts - (known.restarts or 0 if same_pod else 0))
    # An end that makes it be given up is in no count of restarts. One that was spent before is not given up again and again.
    new += giving_up and count + new < recovery.failure_threshold
    over = since is not None and now - since >= timedelta(seconds=recovery.window_seconds)
    if over and (group.live or (new and count < recovery.failure_threshold)):
        count, since = 0, None
    if new:
        count, since = count + new, since or now
    spent = count >= recovery.failure_threshold
    if giving_up:
        next_restart = now + backoff(recovery, count)
    return msgspec.structs.replace(group, failures=Failures(count, since, None if spent else next_restart, spent=spent))


def _with_verdict(group: Group, recovery: GroupRecovery) -> Group:
    failures = group.failures
    if failures.next_restart is not None:
        pause = f"a new pod is made at {failures.next_restart:%H:%M:%S} UTC (spec.groupRecovery)"
        return msgspec.structs.replace(group, message=f"{group.message[:900]}; {pause}".lstrip("; "))
    if not failures.spent or group.live or group.problem in _ITS_OWN_WORDS or group.state is GroupState.TERMINATING:
        return group
    text = (
        f"{failures.count} failures within {recovery.window_seconds} s (spec.groupRecovery), so no pod is made anew until "
        f"the template or the restartedAt annotation changes: {group.message[:900] or 'it is starting once more'}"
    )
    return msgspec.structs.replace(group, problem=Problem.CRASH_LOOPING, message=text)
