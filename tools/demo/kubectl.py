# SPDX-License-Identifier: Apache-2.0
"""kubectl, run as a person would run it, and the waits on what it shows. Every call and every wait has a deadline."""

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import DemoFailed, TookTooLong

Document = dict[str, Any]
# A call takes a fifth of a second of a core.
POLL_S = 1.0
# Reasons that do not pass by themselves; a moment of them is normal, while a pull or a restart is retried.
HOPELESS = frozenset(
    {"ModelError", "GPUUnavailable", "ImagePullError", "ContainerError", "CrashLooping", "PodsRefused", "NotAccepted", "SourceError"}
)
PATIENCE_S = 45.0


@dataclass(frozen=True)
class Kubectl:
    """Calls of kubectl in one namespace: `command` is kubectl with the words that it needs to reach the cluster.

    A failed call raises DemoFailed.
    """

    command: tuple[str, ...]
    namespace: str

    def text(self, *arguments: str, stdin: str | None = None, deadline_s: float = 60.0) -> str:
        argv = [*self.command, "--namespace", self.namespace, *arguments]
        try:
            done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=deadline_s, check=False)
        except subprocess.TimeoutExpired:
            raise TookTooLong(f"kubectl {' '.join(arguments)}: no answer within {deadline_s:g} s") from None
        if done.returncode != 0:
            raise DemoFailed(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")
        return done.stdout

    def get(self, *arguments: str) -> Document:
        document: Document = json.loads(self.text("get", *arguments, "--output", "json"))
        return document

    def apply(self, manifest: Path) -> str:
        return self.text("apply", "--filename", str(manifest))

    def patch(self, resource: str, change: Document) -> str:
        return self.text("patch", resource, "--type", "merge", "--patch", json.dumps(change))


@dataclass(frozen=True)
class Wanted:
    """A condition to wait for: its type, its status, and its possible reasons; no reasons means any.

    It must be about the newest spec.
    """

    type: str
    status: str
    reasons: Sequence[str] = ()

    def holds(self, resource: Document) -> bool:
        found = condition(resource, self.type)
        return (
            found is not None
            and found["status"] == self.status
            and (not self.reasons or found["reason"] in self.reasons)
            and found.get("observedGeneration", 0) >= resource["metadata"]["generation"]
        )

    def __str__(self) -> str:
        return f"{self.type}={self.status}" + (f" ({' or '.join(self.reasons)})" if self.reasons else "")


def condition(resource: Document, kind: str) -> Document | None:
    found: list[Document] = [c for c in resource.get("status", {}).get("conditions", []) if c["type"] == kind]
    return found[0] if found else None


def describe_condition(resource: Document, kind: str) -> str:
    found = condition(resource, kind)
    if found is None:
        return f"{kind}: not reported yet"
    return f"{kind}={found['status']} {found['reason']}: {found['message']}".rstrip(": ")


def wait_for(
    kubectl: Kubectl, resource: str, wanted: Wanted, *, deadline_s: float, tell: Callable[[str], None] = lambda _: None
) -> Document:
    """Poll an object until the condition holds, and return the object; `tell` gets a line for each change of the condition.

    Raises:
        TookTooLong: the deadline is over, or the reason has for 45 s been one that does not pass by itself.
    """
    end, told, hopeful = time.monotonic() + deadline_s, "", time.monotonic()
    while True:
        found = kubectl.get(resource)
        now = describe_condition(found, wanted.type)
        if now != told:
            tell(f"{resource} {now}")
            told = now
        if wanted.holds(found):
            return found
        if (condition(found, wanted.type) or {}).get("reason") not in HOPELESS:
            hopeful = time.monotonic()
        if time.monotonic() > min(end, hopeful + PATIENCE_S):
            raise TookTooLong(f"{resource} is not {wanted} within {deadline_s:g} s; it is {now}")
        time.sleep(POLL_S)


def wait_until_gone(kubectl: Kubectl, kind: str, selector: str, *, deadline_s: float) -> None:
    end = time.monotonic() + deadline_s
    while items := kubectl.get(kind, "--selector", selector)["items"]:
        if time.monotonic() > end:
            names = ", ".join(item["metadata"]["name"] for item in items)
            raise TookTooLong(f"{kind} {names} still there {deadline_s:g} s after deletion")
        time.sleep(POLL_S)
