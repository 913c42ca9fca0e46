# SPDX-License-Identifier: Apache-2.0
"""Facts about a replica, read from its pod's manifest.

Index and incarnation come from the pod's name, which cannot be edited. Labels are not trusted as facts, except `routable`, which only the
operator writes and compares with its desired value.
"""

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from diffusion_operator.api.foreign_text import plain_text
from diffusion_operator.api.names import (
    ANNOTATION_OWNER_UID,
    CONTAINER,
    LABEL_REVISION,
    LABEL_ROUTABLE,
)

NODE_FAULTS = ("NodeShutdown", "Terminated", "UnexpectedAdmissionError", "TopologyAffinityError", "NodeAffinity")
"""Reasons of a finished pod that say something of its node, beside those that begin with `OutOf` and the condition DisruptionTarget.

An eviction for the pod's own use of a disk has no such condition.
"""
UID_LENGTH = 64
WORDS = 8192
"""Characters of a container's last words: the kubelet keeps 4096 bytes, which are longer when they are escaped."""


class Exit(msgspec.Struct, frozen=True):
    """The last exit of the container."""

    code: int
    reason: str = ""
    message: str = ""
    finished_at: datetime | None = None


class Container(msgspec.Struct, frozen=True):
    running: bool = False
    restarts: int = 0
    waiting_reason: str = ""
    waiting_message: str = ""
    started_at: datetime | None = None
    last_exit: Exit | None = None


class Pod(msgspec.Struct, frozen=True):
    name: str
    uid: str
    index: int
    incarnation: int
    created_at: datetime
    revision: str = ""
    image: str = ""
    terminating: bool = False
    finished: bool = False
    """Phase Failed or Succeeded: evicted or refused by the node; the kubelet will not start it again."""
    finished_message: str = ""
    node_fault: bool = False
    """It is finished because of its node, which lacked something, went away or refused it: the same pod may do well elsewhere."""
    disruption: str = ""
    """The cluster's reason for telling it to go: an eviction, a preemption, a tainted node. Not the kubelet's, which ends what failed."""
    disrupted: bool = False
    """The cluster ends it for a cause of its own: it has the condition DisruptionTarget, also the kubelet's."""
    scheduled: bool = False
    scheduled_at: datetime | None = None
    unschedulable: str = ""
    """The scheduler's message, empty while it has none."""
    gated: bool = False
    """Somebody set a scheduling gate, as Kueue does until there is quota: the scheduler does not look at it yet."""
    node: str = ""
    set_up_at: datetime | None = None
    """When its node had all that the containers need but their container images."""
    ip: str = ""
    ready: bool = False
    lost: bool = False
    """The cluster says that its node does not answer."""
    routable: bool = False
    container: Container = Container()
    owner_uid: str = ""
    """The UID of the object for which it was made. Empty where the annotation is gone."""
    orphan: bool = False
    """It was left by an earlier object of the deployment's name, and nobody controls it."""
    left: str = ""
    """The reason for which an orphan is to be replaced. Empty where it is not, or where that is not known yet."""


_NUMBERS = re.compile(r"(\d+)-(\d+)")


def pod_numbers(deployment: str, name: str) -> tuple[int, int] | None:
    """Parse replica index and incarnation from a pod's name; None if the name does not follow this deployment's pattern."""
    prefix = f"{deployment}-"  # not in the expression, which would be compiled for each deployment
    match = _NUMBERS.fullmatch(name, len(prefix)) if name.startswith(prefix) else None
    return (int(match[1]), int(match[2])) if match else None


def read_pod(manifest: Mapping[str, Any], *, index: int, incarnation: int, orphan: bool = False) -> Pod:
    metadata, spec, status = manifest["metadata"], manifest.get("spec", {}), manifest.get("status", {})
    labels = metadata.get("labels", {})
    conditions = {condition["type"]: condition for condition in status.get("conditions", ())}
    scheduling = conditions.get("PodScheduled", {})
    finished = status.get("phase") in ("Failed", "Succeeded")
    return Pod(
        name=metadata["name"],
        uid=metadata["uid"],
        index=index,
        incarnation=incarnation,
        created_at=_time(metadata["creationTimestamp"]),
        revision=labels.get(LABEL_REVISION, ""),
        image=next((one["image"] for one in spec.get("containers", ()) if one["name"] == CONTAINER), ""),
        terminating=bool(metadata.get("deletionTimestamp")),
        finished=finished,
        finished_message=plain_text(_sentence(status.get("reason"), status.get("message")).strip(), WORDS),
        node_fault=finished and _is_fault_of_node(status, conditions),
        disruption=_disruption(conditions.get("DisruptionTarget", {})),
        disrupted=conditions.get("DisruptionTarget", {}).get("status") == "True",
        scheduled=bool(spec.get("nodeName")),
        scheduled_at=_when(scheduling),
        unschedulable=scheduling.get("message", "") if scheduling.get("reason") == "Unschedulable" else "",
        gated=bool(spec.get("schedulingGates")),
        node=spec.get("nodeName", ""),
        set_up_at=_when(conditions.get("PodReadyToStartContainers", {})),
        ip=status.get("podIP", ""),
        ready=conditions.get("Ready", {}).get("status") == "True",
        lost=_lost(status, conditions),
        routable=labels.get(LABEL_ROUTABLE) == "true",
        container=_container(status),
        owner_uid=metadata.get("annotations", {}).get(ANNOTATION_OWNER_UID, "")[:UID_LENGTH],
        orphan=orphan,
    )


def _lost(status: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether the pod's node has stopped answering, judged by the pod alone: the operator has no right to read nodes.

    If it has, the node controller sets Ready to False. ContainersReady stays True, since only the kubelet changes it.
    """
    ready, containers = conditions.get("Ready", {}), conditions.get("ContainersReady", {})
    taken = ready.get("status") == "False" and containers.get("status") == "True" and ready.get("reason") in (None, "", "NodeLost")
    return taken or status.get("reason") == "NodeLost"


def _is_fault_of_node(status: Mapping[str, Any], conditions: Mapping[str, Mapping[str, Any]]) -> bool:
    reason = status.get("reason") or ""
    return conditions.get("DisruptionTarget", {}).get("status") == "True" or reason in NODE_FAULTS or reason.startswith("OutOf")


def _disruption(condition: Mapping[str, Any]) -> str:
    if condition.get("status") != "True" or condition.get("reason") == "TerminationByKubelet":
        return ""
    return plain_text(_sentence(condition.get("reason"), condition.get("message")) or "DisruptionTarget", WORDS)


def _container(status: Mapping[str, Any]) -> Container:
    found = next((entry for entry in status.get("containerStatuses", ()) if entry["name"] == CONTAINER), None)
    if found is None:
        return Container()
    state, last = found.get("state", {}), found.get("lastState", {})
    ended = state.get("terminated") or last.get("terminated")
    waiting, started_at = state.get("waiting", {}), state.get("running", {}).get("startedAt")
    return Container(
        running="running" in state,
        restarts=found.get("restartCount", 0),
        waiting_reason=waiting.get("reason", ""),
        waiting_message=plain_text(waiting.get("message", ""), WORDS),
        started_at=_time(started_at) if started_at else None,
        last_exit=_exit(ended) if ended else None,
    )


def _when(condition: Mapping[str, Any]) -> datetime | None:
    since = condition.get("lastTransitionTime")
    return _time(since) if condition.get("status") == "True" and since else None


def _exit(terminated: Mapping[str, Any]) -> Exit:
    finished = terminated.get("finishedAt")
    return Exit(
        code=terminated.get("exitCode", 0),
        reason=terminated.get("reason", ""),
        message=plain_text((terminated.get("message") or "").strip(), WORDS),
        finished_at=_time(finished) if finished else None,
    )


def _sentence(*parts: str | None) -> str:
    return ": ".join(part for part in parts if part)


def _time(text: str) -> datetime:
    return msgspec.convert(text, datetime)
