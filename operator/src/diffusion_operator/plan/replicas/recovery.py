# SPDX-License-Identifier: Apache-2.0
"""When a replica's pod is given up for a new one, and when no more: failures are counted, waited for, and kept in the status.

The kubelet starts a container again in place, with pauses of its own that grow to five minutes. A new pod is made where a restart in place
does not help. Either the pod ended for good, its container ended more than three times, its ranks fail to start, or it is unreachable.
Before it there is a pause that doubles with each failure. After `failureThreshold` of them a pod is made every ten minutes at most: nothing
is given up for good. A worker that refuses its configuration or model would say the same in a new pod, so it stays where it is. A node that
does not answer is the cluster's to judge: its pods are removed when their toleration ends, and then replaced without a pause. A pod that
its node ended or refused has not failed; see node_faults.py.

Times in a status are the operator's own; ages are the worker's own. They are never subtracted from one another.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta

import msgspec

from diffusion_operator.api.deployment_spec import DeploymentSpec, ReplicaRecovery
from diffusion_operator.api.deployment_status import ReplicaState, ReplicaStatus
from diffusion_operator.api.worker_state import WorkerPhase
from diffusion_operator.pauses import Backoff
from diffusion_operator.plan.observed.replica_state import CRASH_LOOP_RESTARTS, STARTUP_ERROR_EXIT, Failures, Group, Problem

UNREACHABLE_FOR = timedelta(minutes=5)
SLOW_PAUSE = timedelta(minutes=10)
"""Between the pods of a replica that failed too often."""
RESTART_PERIODS = 2  # times startup.timeoutSeconds: a load of all ranks, and as long again

_ITS_OWN_WORDS = (Problem.MODEL_ERROR, Problem.NODE_LOST, Problem.DEVICE, Problem.INSUFFICIENT_MEMORY)


class Reason(msgspec.Struct, frozen=True):
    """A reason for giving up a pod. It adds a failure, unless its node is at fault or the end is `in_place`.

    Ends in place are counted when the kubelet restarts the container.
    """

    text: str
    in_place: bool = False
    of_node: bool = False
    """The node is at fault, so the replica has not failed."""


def with_failures(groups: Sequence[Group], spec: DeploymentSpec, now: datetime, *, faults: Mapping[str, int]) -> tuple[Group, ...]:
    """Return the groups with their failures counted, the time of the next pod for each that is given up, and messages of both.

    `faults` are of nodes, by name: they lengthen the pause after a fault of the node.
    """
    recovery = spec.replica_recovery
    counted = [_counted(group, recovery, now) for group in groups]
    reasons = given_up(counted, spec)
    paused = [_with_pause(group, reasons.get(group.index), recovery, now, faults=faults.get(group.pod.node, 1)) for group in counted]
    return tuple(_with_verdict(group, recovery) for group in paused)


def given_up(groups: Sequence[Group], spec: DeploymentSpec) -> Mapping[int, Reason]:
    """Decide which replicas need a new pod, and return the reason for each by replica index.

    The failures in `groups` must be counted already.
    """
    reasons = {group.index: why for group in groups if (why := _why_pod_is_replaced(group, spec)) is not None}
    silent = _cut_off(groups)
    why_pod_is_replaced = Reason("the operator could not reach its control port for five minutes")
    return reasons | ({silent.index: why_pod_is_replaced} if silent is not None else {})


def due(groups: Sequence[Group], spec: DeploymentSpec, now: datetime) -> Mapping[int, str]:
    """Select the replicas from `given_up` that may get their new pod now, because the pause has passed.

    Returns the reason as text, by replica index.
    """
    times = {group.index: group.failures.next_restart for group in groups}
    return {index: why.text for index, why in given_up(groups, spec).items() if (when := times[index]) is not None and now >= when}


def backoff(recovery: ReplicaRecovery, failures: int) -> timedelta:
    return timedelta(seconds=Backoff(recovery.backoff_seconds, recovery.backoff_max_seconds).after_s(failures))


def _why_pod_is_replaced(group: Group, spec: DeploymentSpec) -> Reason | None:
    container, document = group.pod.container, group.document
    if group.state is ReplicaState.TERMINATING or group.pod.lost:
        return None
    if group.pod.finished:
        return Reason("the pod ended, and the kubelet does not start it again", of_node=group.pod.node_fault)
    if not container.running:
        refused = container.last_exit is None or container.last_exit.code == STARTUP_ERROR_EXIT
        # A container may have ended that often in the course of months.
        looping = min(container.restarts, group.failures.count) >= CRASH_LOOP_RESTARTS
        return Reason(f"its container ended {container.restarts + 1} times", in_place=True) if looping and not refused else None
    if document is None or document.state not in (WorkerPhase.RESTARTING, WorkerPhase.FAILED):
        return None
    patience_s = RESTART_PERIODS * spec.startup.timeout_seconds
    if group.poll.state_age_s < patience_s:
        return None
    return Reason(f"its ranks were not up again within {patience_s} s, twice spec.startup.timeoutSeconds")


def _cut_off(groups: Sequence[Group]) -> Group | None:
    """Return the first replica that could not be reached for five minutes; None without one.

    None too while no replica answers, unless there is only one: the operator itself is probably cut off, and serving replicas must stay.
    """
    silent = [group for group in groups if group.live and group.poll.unreachable and not group.pod.lost]
    long = [group for group in silent if group.poll.failing_for >= UNREACHABLE_FOR]
    alone = len(groups) == 1 or any(group.poll.fresh for group in groups)
    return long[0] if long and alone else None


def _counted(group: Group, recovery: ReplicaRecovery, now: datetime) -> Group:
    """Return the group with its recorded failures, and those of container restarts since the last pass.

    A pod with another template begins at 0, and so does a live replica whose window is over.
    """
    before = group.previous
    known = before if before is not None and before.revision in (None, group.pod.revision) else ReplicaStatus(group.index, group.state)
    same_pod = known.leader_pod == group.pod.name
    failures = Failures(known.failures or 0, known.failing_since)
    if group.state is ReplicaState.TERMINATING:
        return msgspec.structs.replace(group, failures=failures)
    new = max(0, group.pod.container.restarts - (known.restarts or 0 if same_pod else 0))
    failures = msgspec.structs.replace(failures, next_restart=known.next_restart_time if same_pod else None)
    if group.live and _is_over(failures, recovery, now):
        failures = Failures(next_restart=failures.next_restart)
    return msgspec.structs.replace(group, failures=_more(failures, new, recovery, now))


def _is_over(failures: Failures, recovery: ReplicaRecovery, now: datetime) -> bool:
    return failures.since is not None and now - failures.since >= timedelta(seconds=recovery.window_seconds)


def _more(failures: Failures, new: int, recovery: ReplicaRecovery, now: datetime) -> Failures:
    """Return the failures with `new` more; the first one after the window begins a new count."""
    if not new:
        return failures
    before = Failures(next_restart=failures.next_restart) if _is_over(failures, recovery, now) else failures
    return msgspec.structs.replace(before, count=before.count + new, since=before.since or now)


def _with_pause(group: Group, reason: Reason | None, recovery: ReplicaRecovery, now: datetime, *, faults: int) -> Group:
    """Return the group with the time of its next pod, if there is a reason to give it up; `faults` are those of its node.

    Once set, the time stays until the replica is live again or replaced.
    """
    failures = group.failures
    if group.live and reason is None:
        failures = msgspec.structs.replace(failures, next_restart=None)
    if reason is not None and failures.next_restart is None:
        if not reason.of_node:
            failures = _more(failures, int(not reason.in_place), recovery, now)
        pause = backoff(recovery, faults if reason.of_node else failures.count)
        spent = failures.count >= recovery.failure_threshold and not reason.of_node
        failures = msgspec.structs.replace(failures, next_restart=now + (max(SLOW_PAUSE, pause) if spent else pause))
    return msgspec.structs.replace(group, failures=msgspec.structs.replace(failures, spent=failures.count >= recovery.failure_threshold))


def _with_verdict(group: Group, recovery: ReplicaRecovery) -> Group:
    """Return the group with the time of its next pod in its message.

    A replica that failed too often gets the problem CrashLooping, unless the problem that it has says more.
    """
    failures, message = group.failures, group.message[:900]
    when = f"{failures.next_restart:%H:%M:%S} UTC (spec.replicaRecovery)" if failures.next_restart is not None else ""
    if when and group.pod.node_fault:
        fault = f"{message}; node {group.pod.node} is at fault; a new pod, which prefers other nodes, is made at {when}"
        return msgspec.structs.replace(group, message=fault.lstrip("; "))
    own = group.problem in _ITS_OWN_WORDS or group.state is ReplicaState.TERMINATING
    if failures.spent and not group.live and not own:
        pace = f"{failures.count} failures within {recovery.window_seconds} s, so a new pod is made every ten minutes at most"
        loop = f"{pace}{f', the next at {when}' if when else ''}: {message or 'the replica is starting again'}"
        return msgspec.structs.replace(group, problem=Problem.CRASH_LOOPING, message=loop)
    if when:
        return msgspec.structs.replace(group, message=f"{message}; a new pod is made at {when}".lstrip("; "))
    return group
