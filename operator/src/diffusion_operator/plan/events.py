# SPDX-License-Identifier: Apache-2.0
"""Events: told once, when a status moves from one thing to another. The key makes the Event's name, so a repeat is the same Event."""

from enum import StrEnum

import msgspec

from diffusion_operator.api.adapter import AdapterStatus, InstanceState, InstanceStatus, LoRAAdapter
from diffusion_operator.api.deployment import DeploymentStatus, GroupState, GroupStatus
from diffusion_operator.api.meta import ConditionStatus, condition_of


class EventType(StrEnum):
    NORMAL = "Normal"
    WARNING = "Warning"


class PlannedEvent(msgspec.Struct, frozen=True):
    type: EventType
    reason: str
    message: str
    key: str
    """What it is about besides object and reason: usually a boot id."""


def deployment_events(before: DeploymentStatus, after: DeploymentStatus) -> tuple[PlannedEvent, ...]:
    old = {group.index: group for group in before.groups}
    events = [event for group in after.groups for event in _group_events(old.get(group.index), group, generation=after.observed_generation)]
    if _revision_done(before, after):
        message = f"all replicas have revision {after.current_revision}"
        events.append(_normal("RolloutComplete", message, key=after.current_revision or ""))
    return tuple(events)


def _group_events(before: GroupStatus | None, after: GroupStatus, *, generation: int | None) -> list[PlannedEvent]:
    """Ready once in a boot, asleep and awake again once for each change of the spec."""
    events = []
    boot = after.boot_id or after.leader_pod or ""
    was = before.state if before is not None else None
    failure = after.last_failure
    if failure is not None and (before is None or before.last_failure != failure):
        message = f"replica {after.index} ended with exit code {failure.exit_code}: {failure.message}"
        events.append(_warning("GroupRestarted", message, key=f"{after.leader_pod}-{after.restarts}-{failure.time}"))
    if before is not None and before.boot_id == after.boot_id and (after.generation or 1) > (before.generation or 1):
        message = f"replica {after.index} started its ranks again: {after.last_rank_loss}"
        events.append(_warning("RankLost", message, key=f"{boot}-{after.generation}"))
    if was is after.state or was is None:
        return events
    if was in (GroupState.WAKING, GroupState.ASLEEP) and after.state in (GroupState.VERIFYING, GroupState.AWAKE):
        events.append(_normal("Woke", f"replica {after.index} woke up", key=f"{boot}-{generation}"))
    if after.state is GroupState.AWAKE:
        events.append(_normal("GroupReady", f"replica {after.index} is ready", key=boot))
    if after.state is GroupState.ASLEEP:
        message = f"replica {after.index} gave its memory back and is asleep"
        events.append(_normal("Slept", message, key=f"{boot}-{generation}"))
    return events


def _revision_done(before: DeploymentStatus, after: DeploymentStatus) -> bool:
    return before.current_revision is not None and before.current_revision != after.current_revision == after.update_revision


def adapter_events(adapter: LoRAAdapter, after: AdapterStatus) -> tuple[PlannedEvent, ...]:
    before, generation = adapter.status, adapter.metadata.generation
    events = []
    then, accepted = condition_of(before.conditions, "Accepted"), condition_of(after.conditions, "Accepted")
    if accepted is not None and accepted.status is ConditionStatus.FALSE and (then is None or then.reason != accepted.reason):
        events.append(_warning("AdapterRejected", accepted.message, key=f"{generation}-{accepted.reason}"))
    earlier = {instance.group: instance for instance in before.instances}
    events += [event for instance in after.instances for event in _instance_events(earlier.get(instance.group), instance, generation)]
    events += _drift_events(before, after, generation)
    return tuple(events)


def _instance_events(before: InstanceStatus | None, after: InstanceStatus, generation: int) -> list[PlannedEvent]:
    """Once for each spec, each life of a server process, and each code: not with every try."""
    if before is not None and (before.state, before.boot_id, _code(before)) == (after.state, after.boot_id, _code(after)):
        return []
    key = f"{generation}-{after.boot_id}"
    if after.state is InstanceState.LOADED:
        return [_normal("AdapterLoaded", f"loaded on replica {after.group}, {after.digest}", key=f"{key}-{after.digest}")]
    if after.state is InstanceState.FAILED and after.last_error is not None:
        reason = "DigestMismatch" if after.last_error.code == "DigestMismatch" else "AdapterLoadFailed"
        message = f"replica {after.group}: {after.last_error.code}: {after.last_error.message}"
        return [_warning(reason, message, key=f"{key}-{after.last_error.code}")]
    return []


def _drift_events(before: AdapterStatus, after: AdapterStatus, generation: int) -> list[PlannedEvent]:
    then, now = condition_of(before.conditions, "Degraded"), condition_of(after.conditions, "Degraded")
    if now is None or now.reason != "DigestDrift" or (then is not None and then.message == now.message):
        return []
    return [_warning("DigestMismatch", now.message, key=f"{generation}-{now.message}")]


def _code(instance: InstanceStatus) -> str | None:
    return instance.last_error.code if instance.last_error is not None else None


def _normal(reason: str, message: str, *, key: str) -> PlannedEvent:
    return PlannedEvent(type=EventType.NORMAL, reason=reason, message=message[:1000], key=key)


def _warning(reason: str, message: str, *, key: str) -> PlannedEvent:
    return PlannedEvent(type=EventType.WARNING, reason=reason, message=message[:1000], key=key)
