# SPDX-License-Identifier: Apache-2.0
"""Events: recorded once, when a status changes. The key makes the Event's name, so a repeat is the same Event."""

from collections.abc import Iterator
from enum import StrEnum

import msgspec

from diffusion_operator.api.adapter import AdapterStatus, InstanceState, InstanceStatus, LoRAAdapter
from diffusion_operator.api.deployment_status import DeploymentStatus, OperationStatus, ReplicaState, ReplicaStatus
from diffusion_operator.api.meta import ConditionStatus, condition_of, reason_of
from diffusion_operator.api.worker_state import NO_FAILURES
from diffusion_operator.plan.observed.children import NAME_CONFLICT

_FAILURES = {
    ("wake", "InsufficientMemory"): "WakeRefusedMemory",
    ("wake", "VerificationFailed"): "VerificationFailed",
    ("sleep", "VerificationFailed"): "VerificationFailed",
}
"""Events of failed operations that have a name of their own, by the operation and the worker's code."""


class EventType(StrEnum):
    NORMAL = "Normal"
    WARNING = "Warning"


class PlannedEvent(msgspec.Struct, frozen=True):
    type: EventType
    reason: str
    message: str
    key: str
    """The subject besides object and reason: usually a boot id."""


def deployment_events(before: DeploymentStatus, after: DeploymentStatus) -> tuple[PlannedEvent, ...]:
    old = {group.index: group for group in before.replica_states}
    events = [
        event
        for group in after.replica_states
        for event in _group_events(old.get(group.index), group, generation=after.observed_generation)
    ]
    events += _model_events(before, after)
    if after.replica_states_truncated and not before.replica_states_truncated:
        shown = f"it lists {len(after.replica_states)} replicas, those with a message or failures first, and long messages may be shortened"
        message = f"status.replicaStates is cut to bound its size: {shown}; the counts in the status are not cut"
        events.append(_normal("StatusTruncated", message, key=str(after.observed_generation)))
    if _revision_done(before, after):
        message = f"all replicas have the template's revision {after.current_revision}"
        events.append(_normal("RolloutComplete", message, key=after.current_revision or ""))
    looping = condition_of(after.conditions, "Degraded")
    if looping is not None and looping.reason == "CrashLooping" != reason_of(before.conditions, "Degraded"):
        pods = ",".join(group.leader_pod or "" for group in after.replica_states if group.failures)
        events.append(_warning(looping.reason, looping.message, key=f"{after.update_revision}-{pods}"))
    return tuple(events)


def _model_events(before: DeploymentStatus, after: DeploymentStatus) -> list[PlannedEvent]:
    """Return an Event for a new pin of the model, and one for a new reason for which it cannot be had."""
    events = []
    was, model = before.model, after.model
    if model is not None and model.resolved_at is not None and (was is None or was.resolved_at != model.resolved_at):
        version = ", ".join(found for found in (model.revision, model.digest) if found) or "unknown"
        source = model.source or "the model"
        message = f"{source} has the version {version}, which is pinned for all replicas"
        events.append(_normal("ModelResolved", message, key=f"{model.pinned_for}-{model.revision or model.digest}"))
    then, now = condition_of(before.conditions, "ModelResolved"), condition_of(after.conditions, "ModelResolved")
    if now is not None and now.status is ConditionStatus.FALSE and (then is None or then.reason != now.reason):
        events.append(_warning(f"Model{now.reason}", now.message, key=f"{after.observed_generation}-{now.reason}"))
    return events


def _group_events(before: ReplicaStatus | None, after: ReplicaStatus, *, generation: int | None) -> list[PlannedEvent]:
    """Return the Events of a replica between two statuses: a failure, a new pod, lost ranks, readiness, an ended operation.

    `generation` is the deployment's. In a life of the server, readiness is recorded once, and so is the success of each operation.
    The same failure of a sleep or wake is recorded once for each life of the server and each `generation`.
    """
    events = []
    boot = after.boot_id or after.leader_pod or ""
    was_ready = before is not None and before.state is ReplicaState.AWAKE and before.boot_id == after.boot_id
    failure = after.last_failure
    if failure is not None and (before is None or before.last_failure != failure):
        how = f"ended with exit code {failure.exit_code}" if failure.exit_code is not None else "failed"
        message = f"replica {after.index} {how}: {_why(None, failure.message or failure.code)}"
        events.append(_warning("ReplicaRestarted", message, key=f"{after.leader_pod}-{after.restarts}-{failure.time}"))
    if before is not None and after.failures and (before.incarnation or 0) < (after.incarnation or 0):
        pod = after.leader_pod or "a new pod"
        message = f"replica {after.index} is made again as {pod} after {after.failures} failures"
        events.append(_warning("ReplicaRestarted", message, key=after.leader_pod or ""))
    if before is not None and before.boot_id == after.boot_id and (after.generation or 1) > (before.generation or 1):
        message = f"replica {after.index} started its ranks again: {_why(None, after.last_rank_loss)}"
        events.append(_warning("RankLost", message, key=f"{boot}-{after.generation}"))
    if after.state is ReplicaState.AWAKE and not was_ready:
        events.append(_normal("ReplicaReady", f"replica {after.index} is ready", key=boot))
    ended = ended_operation(before, after)
    if ended is not None:
        events += _operation_events(after.index, ended, boot=boot, generation=generation)
    return events


def ended_operation(before: ReplicaStatus | None, after: ReplicaStatus) -> OperationStatus | None:
    """Return the sleep or wake that ended since the previous status; if two did, the later; None without one."""
    last = after.last_operation
    told = before.last_operation if before is not None and before.boot_id == after.boot_id else None
    return last if last is not None and (told is None or told.id != last.id) else None


def wakes_between(before: DeploymentStatus, after: DeploymentStatus) -> Iterator[OperationStatus]:
    """Yield the latest operation of each replica that ended between two statuses, if it is a wake that succeeded.

    They feed the metric of wake durations.
    """
    old = {group.index: group for group in before.replica_states}
    for group in after.replica_states:
        ended = ended_operation(old.get(group.index), group)
        if ended is not None and ended.kind == "wake" and ended.code is None:
            yield ended


def _operation_events(index: int, ended: OperationStatus, *, boot: str, generation: int | None) -> list[PlannedEvent]:
    """Return the Event of a sleep or wake that succeeded or failed; none for one that something else came before.

    The same failure is recorded once for each life of the server and each `generation`, since a worker keeps trying.
    """
    if ended.code in NO_FAILURES:
        return []
    took = f"in {ended.seconds} s" if ended.seconds else "in an unknown time"
    if ended.code is None:
        key, level, amount = f"{boot}-{ended.id}", ended.level.value if ended.level is not None else "unknown", _size(ended.bytes)
        if ended.kind == "wake":
            message = f"replica {index} woke {took} from a sleep of the level {level}; {amount} of weights are in memory again"
            return [_normal("Woke", message, key=key)]
        return [_normal("Slept", f"replica {index} fell asleep {took} at the level {level} and freed {amount} of memory", key=key)]
    kind = "wake" if ended.kind == "wake" else "sleep"
    message = f"replica {index}: the {kind} failed {took}: {_why(ended.code, ended.message)}"
    key = f"{boot}-{generation}-{ended.kind}-{ended.code}"
    return [_warning(_FAILURES.get((kind, ended.code)) or ("WakeFailed" if kind == "wake" else "SleepFailed"), message, key=key)]


def _why(code: str | None, message: str | None) -> str:
    """Return code and words as far as there are any: an Event always says why, if only that nobody knows."""
    return ": ".join(reason for reason in (code, message) if reason) or "no reason is known"


def _size(count: int | None) -> str:
    """Return a size as `2.98 GiB`, in powers of two as Kubernetes' quantities."""
    if count is None:
        return "an unknown number of bytes"
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 2**power:
            return f"{count / 2**power:.2f} {unit}"
    return f"{count} bytes"


def _revision_done(before: DeploymentStatus, after: DeploymentStatus) -> bool:
    return before.current_revision is not None and before.current_revision != after.current_revision == after.update_revision


def repaired(what: str, *, key: str) -> PlannedEvent:
    """Return the Event about a child that was put back; `what` is its message.

    `key` holds the object and the minute of its change, so a client that keeps changing it causes one Event a minute.
    """
    return _normal("Repaired", what, key=key)


_WARNINGS = {
    "Scheduled": ("QuotaExceeded", "PodsRefused"),
    "Progressing": ("ImagePullError", "ContainerError", "TemplateInvalid", "DeadlineExceeded"),
}
"""Reasons of a condition that is False, which an Event repeats with the condition's message."""
PAUSED = "Paused"
"""The reason of Progressing while `spec.suspend` is true."""


def condition_events(before: DeploymentStatus, after: DeploymentStatus) -> Iterator[PlannedEvent]:
    """Yield an Event for a condition that turns to a reason that somebody should hear of, and for a suspend or its end."""
    for type_, reasons in _WARNINGS.items():
        found = condition_of(after.conditions, type_)
        if found is None or found.status is not ConditionStatus.FALSE or found.reason not in reasons:
            continue
        if reason_of(before.conditions, type_) != found.reason:
            key = f"{after.observed_generation}-{found.last_transition_time:%Y-%m-%dT%H:%M:%S}"
            yield _warning(found.reason, found.message, key=key)
    yield from _suspended(before, after)


def _suspended(before: DeploymentStatus, after: DeploymentStatus) -> Iterator[PlannedEvent]:
    was, found = reason_of(before.conditions, "Progressing"), condition_of(after.conditions, "Progressing")
    if found is None or (was == PAUSED) is (found.reason == PAUSED):
        return
    key = str(after.observed_generation)
    if found.reason == PAUSED:
        yield _normal("Suspended", "spec.suspend is true: the pods are deleted, and everything else is kept", key=key)
    elif was:
        yield _normal("Resumed", "spec.suspend is no longer true: the pods are made again", key=key)


CHILD_REFUSED = "ChildRefused"


def child_events(before: DeploymentStatus, after: DeploymentStatus) -> tuple[PlannedEvent, ...]:
    """Return one Event if ChildrenReady is False with a new message, else none."""
    then, now = condition_of(before.conditions, "ChildrenReady"), condition_of(after.conditions, "ChildrenReady")
    if now is None or now.status is not ConditionStatus.FALSE or (then is not None and then.message == now.message):
        return ()
    reason = NAME_CONFLICT if now.reason == NAME_CONFLICT else CHILD_REFUSED
    key = f"{after.observed_generation}-{now.last_transition_time:%Y-%m-%dT%H:%M}-{now.message}"
    return (_warning(reason, now.message, key=key),)


def pod_adopted(name: str, *, index: int, uid: str) -> PlannedEvent:
    earlier = "which an earlier DiffusionDeployment of this name left"
    text = f"pod {name}, {earlier}, has the same template and model: it serves on as replica {index}"
    return _normal("PodAdopted", text, key=uid)


def pod_deleted(name: str, *, why: str, uid: str, reason: str = "PodDeleted") -> PlannedEvent:
    """Return the Event about a pod that goes. The first one counts, which has the reason; a later one says how its drain ended."""
    return _normal(reason, f"pod {name} is deleted: {why}", key=uid)


def pod_name_taken(name: str, *, index: int, uid: str) -> PlannedEvent:
    """Return the Event about somebody else's pod under a name of replica `index`."""
    found = f"pod {name} is not managed by this DiffusionDeployment and is left alone"
    text = f"{found}; replica {index} gets a pod with another name (status.replicaStates)"
    return _warning(NAME_CONFLICT, text, key=uid)


def adapter_events(adapter: LoRAAdapter, after: AdapterStatus) -> tuple[PlannedEvent, ...]:
    before, generation = adapter.status, adapter.metadata.generation
    events = []
    then, accepted = condition_of(before.conditions, "Accepted"), condition_of(after.conditions, "Accepted")
    if accepted is not None and accepted.status is ConditionStatus.FALSE and (then is None or then.reason != accepted.reason):
        events.append(_warning("AdapterRejected", accepted.message, key=f"{generation}-{accepted.reason}"))
    earlier = {instance.replica: instance for instance in before.replica_instances}
    events += [
        event for instance in after.replica_instances for event in _instance_events(earlier.get(instance.replica), instance, generation)
    ]
    events += _drift_events(before, after, generation)
    return tuple(events)


def _instance_events(before: InstanceStatus | None, after: InstanceStatus, generation: int) -> list[PlannedEvent]:
    """Return the Event for an adapter that was loaded or failed on a replica since the status `before`; an empty list if nothing changed.

    Retries give no further Event: its key has the spec's generation, the server process, and the digest or the error code.
    """
    if before is not None and (before.state, before.boot_id, _code(before)) == (after.state, after.boot_id, _code(after)):
        return []
    key = f"{generation}-{after.boot_id}"
    if after.state is InstanceState.LOADED:
        message = f"loaded on replica {after.replica} with {f'the digest {after.digest}' if after.digest else 'an unknown digest'}"
        return [_normal("AdapterLoaded", message, key=f"{key}-{after.digest}")]
    if after.state is InstanceState.FAILED and after.last_error is not None:
        code, named = after.last_error.code or "", ("DigestMismatch", "IdentityMismatch")
        message = f"replica {after.replica} could not load the adapter: {_why(code, after.last_error.message)}"
        return [_warning(code if code in named else "AdapterLoadFailed", message, key=f"{key}-{after.last_error.code}")]
    return []


_DRIFTS = {"DigestDrift": "DigestMismatch", "IdentityMismatch": "IdentityMismatch"}
"""Reasons of Events, by the reason of Degraded."""


def _drift_events(before: AdapterStatus, after: AdapterStatus, generation: int) -> list[PlannedEvent]:
    then, now = condition_of(before.conditions, "Degraded"), condition_of(after.conditions, "Degraded")
    reason = _DRIFTS.get(now.reason) if now is not None else None
    if now is None or reason is None or (then is not None and then.message == now.message):
        return []
    return [_warning(reason, now.message, key=f"{generation}-{now.message}")]


def _code(instance: InstanceStatus) -> str | None:
    return instance.last_error.code if instance.last_error is not None else None


def _normal(reason: str, message: str, *, key: str) -> PlannedEvent:
    return PlannedEvent(type=EventType.NORMAL, reason=reason, message=message[:1000], key=key)


def _warning(reason: str, message: str, *, key: str) -> PlannedEvent:
    return PlannedEvent(type=EventType.WARNING, reason=reason, message=message[:1000], key=key)
