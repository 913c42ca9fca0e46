# SPDX-License-Identifier: Apache-2.0
"""Sleep and wake by policy: which calls to start now. They are started, then observed in the state document.

An operation id is made from the spec's generation, the attempt and the operation that the worker ended last. A call repeated after an
operator's restart or a lost answer is therefore the same call to the worker. After a failure, and in the next idle cycle, it is a new one.
"""

import hashlib
from collections.abc import Collection, Sequence
from datetime import datetime

from diffusion_operator.api.deployment_spec import DeploymentSpec, DrainMode, SleepLevel, SleepPolicy
from diffusion_operator.api.deployment_status import ReplicaState
from diffusion_operator.api.worker_state import RecordState, WorkerPhase, WorkerState
from diffusion_operator.plan.adapters.instances import worker_address
from diffusion_operator.plan.adapters.records import IN_PROGRESS
from diffusion_operator.plan.observed.observed import Observed
from diffusion_operator.plan.observed.replica_state import Group
from diffusion_operator.plan.observed.states import RESTING_PHASES, WAKING_STATES
from diffusion_operator.plan.results.actions import SleepWorker, WakeWorker
from diffusion_operator.plan.sleep.idleness import idle_for_s, may_sleep_in_s, needed_awake, wanted_awake, work_of

_MOVING = IN_PROGRESS | {RecordState.DRAINING}
_AT_HAND = (RecordState.LOADED, RecordState.CACHED)

_Known = tuple[Group, WorkerState]
"""A replica and what it says."""


def plan_sleep(
    observed: Observed, groups: Sequence[Group], now: datetime, *, rolling: bool = False, busy: Collection[str] = ()
) -> tuple[SleepWorker | WakeWorker, ...]:
    """Return the calls by which the spec's policy puts replicas to sleep or wakes them, without those in backoff.

    `groups` excludes replicas on their way out. Idleness sends nobody to sleep during a rollout (`rolling`), nor a pod with pending adapter
    calls, whose UID is in `busy`.
    """
    spec, generation = observed.deployment.spec, observed.deployment.metadata.generation
    to_sleep, to_wake = _chosen(spec, groups, rolling=rolling, busy=busy)
    calls: list[SleepWorker | WakeWorker | None] = [_sleep(spec, group, generation) for group in groups if group.index in to_sleep]
    calls += [_wake(spec, group, generation) for group in groups if group.index in to_wake]
    return tuple(call for call in calls if call is not None and now >= observed.operation_not_before.get(retry_key(call), now))


def retry_key(call: SleepWorker | WakeWorker) -> str:
    """Return the backoff key of a call: each pod, kind and generation has its own, so a wake never waits for a sleep's backoff."""
    kind, generation, _ = call.operation_id.split("-", 2)
    return f"{call.worker.pod_uid}/{kind}-{generation}"


def _chosen(spec: DeploymentSpec, groups: Sequence[Group], *, rolling: bool, busy: Collection[str]) -> tuple[set[int], set[int]]:
    """Choose the indices to put to sleep and those to wake. A replica already at rest is called again, so that it learns of a new policy or
    frees more memory."""
    known = [(group, group.document) for group in groups if group.document is not None]
    untold = {group.index for group, document in known if document.state in RESTING_PHASES and _is_untold(spec, document)}
    match spec.sleep.policy:
        case SleepPolicy.ALWAYS_AWAKE:
            return set(), {group.index for group, document in known if _may_wake(document)}
        case SleepPolicy.ASLEEP:
            return untold | {group.index for group, document in known if _is_free(document)}, set()
        case SleepPolicy.ON_IDLE:
            woken = _needed(spec, groups, known)
            idle = set() if rolling else _idle(spec, groups, [one for one in known if one[0].pod.uid not in busy])
            return (untold - woken) | idle, woken
        case _:  # the schema is newer than the operator
            return set(), set()


def _is_untold(spec: DeploymentSpec, document: WorkerState) -> bool:
    too_light = spec.sleep.level is SleepLevel.DISCARD and document.sleeps_at is SleepLevel.HOST_MEMORY
    return document.policy is not spec.sleep.policy or (too_light and document.operation is None)


def _may_wake(document: WorkerState) -> bool:
    """Return whether a wake is accepted now. During a drain it cancels the sleep; while memory is being freed it must wait."""
    return document.state is WorkerPhase.DRAINING or (document.state is WorkerPhase.ASLEEP and document.operation is None)


def _is_free(document: WorkerState) -> bool:
    return document.state is WorkerPhase.READY and document.operation is None


def _idle(spec: DeploymentSpec, groups: Sequence[Group], known: Sequence[_Known]) -> set[int]:
    """Choose the indices of replicas to put to sleep: the longest idle first, and no more than are too many.

    A replica that failed to sleep last time comes last.
    """
    surplus = sum(group.state is ReplicaState.AWAKE for group in groups) - wanted_awake(spec, groups)
    candidates = [(group, document) for group, document in known if _may_sleep(spec, group, document)]
    candidates.sort(key=lambda one: (_failed(one[1], "sleep"), -idle_for_s(one[0]), one[0].index))
    return {group.index for group, _ in candidates[: max(0, surplus)]}


def _may_sleep(spec: DeploymentSpec, group: Group, document: WorkerState) -> bool:
    due_in_s = may_sleep_in_s(group, spec.sleep)
    return due_in_s is not None and due_in_s <= 0 and _is_free(document) and not any(state in document.record_states for state in _MOVING)


def _needed(spec: DeploymentSpec, groups: Sequence[Group], known: Sequence[_Known]) -> set[int]:
    """Choose the sleeping replicas to wake until `needed_awake` is reached; return their indices.

    Replicas that are awake, waking or restarting count as up, and so do sleepers with requests, which wake without a call. The choice
    avoids replicas that failed to wake. It prefers more adapters at hand, and then a shorter sleep.
    """
    up = sum(group.state is ReplicaState.AWAKE or group.state in WAKING_STATES or group.restarting for group in groups)
    asleep = [(group, document) for group, document in known if group.state is ReplicaState.ASLEEP]
    up += sum(work_of(document) > 0 for _, document in asleep)
    candidates = [(group, document) for group, document in asleep if group.poll.fresh and not work_of(document)]
    candidates.sort(key=lambda one: (_failed(one[1], "wake"), -_adapters_at_hand(one[1]), one[0].poll.state_age_s, one[0].index))
    return {group.index for group, _ in candidates[: max(0, needed_awake(spec, groups) - up)]}


def _sleep(spec: DeploymentSpec, group: Group, generation: int) -> SleepWorker | None:
    document, address, sleep = group.document, worker_address(group), spec.sleep
    if document is None or address is None:
        return None
    operation_id, attempt = _operation("sleep", generation, document)
    patient = sleep.drain_timeout_seconds > 0  # no time to drain is Abort, and a deadline must be positive
    return SleepWorker(
        worker=address,
        operation_id=operation_id,
        attempt=attempt,
        mode=sleep.drain if patient else DrainMode.ABORT,
        deadline_s=max(1, sleep.drain_timeout_seconds),
        level=sleep.level,
        policy=sleep.policy,
        if_idle_since_s=sleep.idle_seconds if sleep.policy is SleepPolicy.ON_IDLE else None,
    )


def _wake(spec: DeploymentSpec, group: Group, generation: int) -> WakeWorker | None:
    document, address, sleep = group.document, worker_address(group), spec.sleep
    if document is None or address is None:
        return None
    operation_id, attempt = _operation("wake", generation, document)
    return WakeWorker(
        worker=address, operation_id=operation_id, attempt=attempt, deadline_s=sleep.wake_timeout_seconds, policy=sleep.policy
    )


def _operation(kind: str, generation: int, document: WorkerState) -> tuple[str, int]:
    """Return an operation's id, `<kind>-<generation>-<attempt>-<hash>`, and its attempt, which is 1 plus the failures in a row before it.

    The hash is of the worker's boot and last operation, so a repeated plan gives the same id.
    """
    last, prefix = document.last_operation, f"{kind}-{generation}-"
    failed = last is not None and last.failed and last.operation_id.startswith(prefix)
    tried = last.operation_id.removeprefix(prefix).partition("-")[0] if last is not None and failed else "0"
    attempt = (int(tried) if tried.isdecimal() else 0) + 1
    after = f"{document.boot_id}/{last.operation_id if last is not None else ''}"
    return f"{prefix}{attempt}-{hashlib.sha256(after.encode()).hexdigest()[:8]}", attempt


def _failed(document: WorkerState, kind: str) -> bool:
    last = document.last_operation
    return last is not None and last.kind == kind and last.failed


def _adapters_at_hand(document: WorkerState) -> int:
    return sum(document.record_states.get(state, 0) for state in _AT_HAND)
