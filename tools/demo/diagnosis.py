# SPDX-License-Identifier: Apache-2.0
"""Diagnosis of a failed step: objects with their conditions, events, the pods' messages and logs."""

from collections.abc import Iterator

from .errors import DemoFailed
from .kubectl import Document, Kubectl

LOG_LINES = "40"
KINDS = "diffusiondeployments,loraadapters"


def diagnose(kubectl: Kubectl) -> Iterator[str]:
    """Yield texts to print about a failed step: objects, their conditions, the pods' states and logs, and events.

    If kubectl fails, its error stands in place of the text.
    """
    yield _of(kubectl, "get", f"{KINDS},pods,services", "--output", "wide")
    yield "\n".join(_conditions(kubectl))
    for pod in _items(kubectl, "pods"):
        yield from _pod(kubectl, pod)
    yield _of(kubectl, "get", "events", "--sort-by", ".lastTimestamp")


def _conditions(kubectl: Kubectl) -> Iterator[str]:
    for resource in _items(kubectl, KINDS):
        for one in resource.get("status", {}).get("conditions", []):
            name = f"{resource['kind']}/{resource['metadata']['name']}"
            yield f"{name}  {one['type']}={one['status']}  {one['reason']}  {one['message']}"


def _pod(kubectl: Kubectl, pod: Document) -> Iterator[str]:
    name = pod["metadata"]["name"]
    for container in pod.get("status", {}).get("containerStatuses", []):
        if not container["ready"] or container["restartCount"]:
            yield f"pod/{name}: {container['restartCount']} restarts, now {container['state']}, before {container.get('lastState', {})}"
        if container["restartCount"]:
            yield f"--- the end of the log of pod/{name} before its last restart"
            yield _of(kubectl, "logs", name, "--previous", "--tail", LOG_LINES)
    yield f"--- the end of the log of pod/{name}"
    yield _of(kubectl, "logs", name, "--tail", LOG_LINES)


def _items(kubectl: Kubectl, kinds: str) -> list[Document]:
    try:
        items: list[Document] = kubectl.get(kinds)["items"]
    except DemoFailed:
        return []
    return items


def _of(kubectl: Kubectl, *arguments: str) -> str:
    try:
        return kubectl.text(*arguments, deadline_s=20.0)
    except DemoFailed as error:
        return f"({error})"
