# SPDX-License-Identifier: Apache-2.0
"""Replicas on their way up: since when, and what their pods wait for, by Warnings among their Events and by deployments that sleep.

Ages here compare the cluster's clock with the operator's, so they are good for waits of half a minute and more.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import msgspec

from diffusion_operator.api.deployment_spec import Rollout
from diffusion_operator.api.deployment_status import ReplicaState
from diffusion_operator.api.foreign_text import plain_text
from diffusion_operator.plan.observed.observed import Observed
from diffusion_operator.plan.observed.pods import Pod
from diffusion_operator.plan.observed.replica_state import QUIET_REASONS, Group, Problem

EVENTS_EVERY = timedelta(seconds=30)
"""The age of a pod at which its Events are asked for, and the pause between two questions."""
_WORDS = 900


def late(groups: Sequence[Group], now: datetime, rollout: Rollout) -> Group | None:
    """Return the first replica that has been on its way up for longer than `progressDeadlineSeconds`; None without one.

    It is for replicas that come after the rollout, which has a clock of its own. A scheduling gate has no deadline.
    """
    limit = timedelta(seconds=rollout.progress_deadline_seconds)
    return next((group for group in groups if (since := _since(group)) is not None and now - since >= limit), None)


def _since(group: Group) -> datetime | None:
    pod, container = group.pod, group.pod.container
    if group.state not in (ReplicaState.PENDING, ReplicaState.STARTING) or group.restarting or pod.gated:
        return None
    return (container.started_at if container.running else None) or pod.scheduled_at or pod.created_at


def waits_silently(pod: Pod, now: datetime) -> bool:
    """Return whether a pod has waited for 30 s and neither its conditions nor its container say what for."""
    container = pod.container
    silent = not container.running and container.last_exit is None and container.waiting_reason in QUIET_REASONS
    told = pod.terminating or pod.finished or pod.lost or pod.gated or pod.unschedulable
    return silent and not told and now - pod.created_at >= EVENTS_EVERY


def last_warning(events: Sequence[Mapping[str, Any]], *, after: datetime | None) -> str:
    """Return reason and message of the last of a pod's Warnings; empty without one.

    Those before `after`, when its node had set the pod up, are settled.
    """
    times = [(msgspec.convert(one.get("lastTimestamp") or one["metadata"]["creationTimestamp"], datetime), one) for one in events]
    unsettled = [one for one in times if after is None or one[0] >= after]
    last = max(unsettled, key=lambda one: one[0])[1] if unsettled else {}
    return plain_text(f"{last.get('reason')}: {last.get('message')}", _WORDS) if last else ""


def with_words(observed: Observed, groups: Sequence[Group]) -> tuple[Group, ...]:
    """Return the groups with what is known of the waits of their pods in their messages."""
    return tuple(msgspec.structs.replace(group, message=_words(observed, group)) for group in groups)


def _words(observed: Observed, group: Group) -> str:
    sleepers = _sleepers(observed) if group.problem is Problem.WAITING_FOR_GPU else ""
    return "; ".join(words for words in (group.message or observed.warnings.get(group.pod.uid, ""), sleepers) if words)


def _sleepers(observed: Observed) -> str:
    """Name the sleepers of the namespace that keep devices of the awaited kind, and count those elsewhere; empty without any."""
    metadata, devices = observed.deployment.metadata, observed.deployment.spec.resources.devices
    found = [one for one in observed.asleep if one.replicas and one.devices & devices]
    near = [f"{one.name} ({one.replicas})" for one in found if one.namespace == metadata.namespace and one.name != metadata.name]
    far = sum(one.namespace != metadata.namespace for one in found)
    places = ([f"in this namespace {', '.join(near)}"] if near else []) + ([f"in others {far}"] if far else [])
    return f"deployments that sleep and keep such devices: {', '.join(places)}; spec.suspend frees them" if places else ""
