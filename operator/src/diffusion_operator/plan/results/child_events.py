# SPDX-License-Identifier: Apache-2.0
"""Events about children and their names: once where a condition turns, and once for each other pod that has our name."""

from diffusion_operator.api.deployment_status import DeploymentStatus
from diffusion_operator.api.meta import ConditionStatus, condition_of
from diffusion_operator.plan.observed.children import NAME_CONFLICT
from diffusion_operator.plan.results.events import EventType, PlannedEvent

CHILD_REFUSED = "ChildRefused"


def child_events(before: DeploymentStatus, after: DeploymentStatus) -> tuple[PlannedEvent, ...]:
    """Return one Event if ChildrenReady is False with a new message, else none."""
    then, now = condition_of(before.conditions, "ChildrenReady"), condition_of(after.conditions, "ChildrenReady")
    if now is None or now.status is not ConditionStatus.FALSE or (then is not None and then.message == now.message):
        return ()
    reason = NAME_CONFLICT if now.reason == NAME_CONFLICT else CHILD_REFUSED
    key = f"{after.observed_generation}-{now.last_transition_time:%Y-%m-%dT%H:%M}-{now.message}"
    return (PlannedEvent(type=EventType.WARNING, reason=reason, message=now.message[:1000], key=key),)


def pod_adopted(name: str, *, index: int, uid: str) -> PlannedEvent:
    earlier = "which an earlier DiffusionDeployment of this name left"
    text = f"pod {name}, {earlier}, has the same template and model: it serves on as replica {index}"
    return PlannedEvent(type=EventType.NORMAL, reason="PodAdopted", message=text, key=uid)


def orphan_replaced(name: str, *, why: str, uid: str) -> PlannedEvent:
    return PlannedEvent(type=EventType.NORMAL, reason="OrphanReplaced", message=f"pod {name} is deleted: {why}"[:1000], key=uid)


def pod_deleted(name: str, *, why: str, uid: str) -> PlannedEvent:
    """Return the Event about a pod that goes. The first one counts, which has the reason; a later one says how its drain ended."""
    return PlannedEvent(type=EventType.NORMAL, reason="PodDeleted", message=f"pod {name} is deleted: {why}"[:1000], key=uid)


def pod_name_taken(name: str, *, index: int, uid: str) -> PlannedEvent:
    """Return the Event about somebody else's pod under a name of replica `index`."""
    found = f"pod {name} is not managed by this DiffusionDeployment and is left alone"
    text = f"{found}; replica {index} gets a pod with another name (status.replicaStates)"
    return PlannedEvent(type=EventType.WARNING, reason=NAME_CONFLICT, message=text, key=uid)
