# SPDX-License-Identifier: Apache-2.0
"""Events about conditions: once where a condition turns to a reason that somebody should hear of."""

from collections.abc import Iterator

from diffusion_operator.api.deployment_status import DeploymentStatus
from diffusion_operator.api.meta import ConditionStatus, condition_of, reason_of
from diffusion_operator.plan.results.events import EventType, PlannedEvent

_WARNINGS = {
    "Scheduled": ("QuotaExceeded", "PodsRefused"),
    "Progressing": ("ImagePullError", "ContainerError"),
}
"""Reasons of a condition that is False, which an Event repeats with the condition's message."""
PAUSED = "Paused"
"""The reason of Progressing while `spec.suspend` is true."""


def condition_events(before: DeploymentStatus, after: DeploymentStatus) -> Iterator[PlannedEvent]:
    """Yield an Event for a condition that turns to refused pods or an image that cannot be pulled, and for a suspend or its end.

    A condition that keeps its reason gives none.
    """
    for type_, reasons in _WARNINGS.items():
        found = condition_of(after.conditions, type_)
        if found is None or found.status is not ConditionStatus.FALSE or found.reason not in reasons:
            continue
        if reason_of(before.conditions, type_) != found.reason:
            key = f"{after.observed_generation}-{found.last_transition_time:%Y-%m-%dT%H:%M:%S}"
            yield PlannedEvent(type=EventType.WARNING, reason=found.reason, message=found.message[:1000], key=key)
    yield from _suspended(before, after)


def _suspended(before: DeploymentStatus, after: DeploymentStatus) -> Iterator[PlannedEvent]:
    was, found = reason_of(before.conditions, "Progressing"), condition_of(after.conditions, "Progressing")
    if found is None or (was == PAUSED) is (found.reason == PAUSED):
        return
    if found.reason == PAUSED:
        yield _normal("Suspended", "spec.suspend is true: the pods are deleted, and everything else is kept", after)
    elif was:
        yield _normal("Resumed", "spec.suspend is no longer true: the pods are made again", after)


def _normal(reason: str, message: str, after: DeploymentStatus) -> PlannedEvent:
    return PlannedEvent(type=EventType.NORMAL, reason=reason, message=message, key=str(after.observed_generation))
