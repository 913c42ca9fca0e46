# SPDX-License-Identifier: Apache-2.0
"""Events: told once, when a status moves from one thing to another. The key makes the Event's name, so a repeat is the same Event."""

from enum import StrEnum

import msgspec

from diffusion_operator.api.adapter import AdapterStatus, InstanceState, LoRAAdapter
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
    states = {instance.group: instance.state for instance in before.instances}
    for instance in after.instances:
        if states.get(instance.group) is instance.state:
            continue
        key = f"{generation}-{instance.boot_id}-{instance.attempts or 0}"
        if instance.state is InstanceState.LOADED:
            events.append(_normal("AdapterLoaded", f"loaded on replica {instance.group}, {instance.digest}", key=key))
        if instance.state is InstanceState.FAILED and instance.last_error is not None:
            message = f"replica {instance.group}: {instance.last_error.code}: {instance.last_error.message}"
            events.append(_warning("AdapterLoadFailed", message, key=key))
    return tuple(events)


def _normal(reason: str, message: str, *, key: str) -> PlannedEvent:
    return PlannedEvent(type=EventType.NORMAL, reason=reason, message=message[:1000], key=key)


def _warning(reason: str, message: str, *, key: str) -> PlannedEvent:
    return PlannedEvent(type=EventType.WARNING, reason=reason, message=message[:1000], key=key)
