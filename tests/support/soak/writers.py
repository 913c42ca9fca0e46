# SPDX-License-Identifier: Apache-2.0
"""A judge of an API server's audit log: of several operators with one Lease, only the one that wrote the Lease last may write."""

from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, NamedTuple

WRITES = frozenset({"create", "update", "patch", "delete", "deletecollection"})
LEASE_S = 15.0
POD_NAME = "authentication.kubernetes.io/pod-name"
Entry = dict[str, Any]


class Writers(NamedTuple):
    """The writes of operators in a log."""

    lead_changes: int
    writes: int
    foreign: list[str]
    """Descriptions of the writes by a process that did not lead."""


def foreign_writes(entries: Iterable[Entry], who: Callable[[Entry], str | None]) -> Writers:
    """Return the writes of operators; `who` names the operator of an entry, or None.

    Refused writes, dry runs, and writes before the first of the Lease do not count. A write is foreign if another operator wrote the Lease
    last, or its own last write of the Lease is older than LEASE_S. The first leader counts as a change.
    """
    found = sorted((entry for entry in entries if _is_write(entry) and who(entry)), key=_time)
    holder, changes, writes, foreign = "", 0, 0, list[str]()
    renewed: datetime | None = None
    for entry in found:
        name, when, about = str(who(entry)), _time(entry), entry["objectRef"]
        if about["resource"] == "leases":
            changes += name != holder
            holder, renewed = name, when
            continue
        if renewed is None:
            continue
        writes += 1
        if name != holder or (when - renewed).total_seconds() > LEASE_S:
            what = f"{entry['verb']} {about['resource']} {about.get('namespace')}/{about.get('name')}"
            foreign.append(f"{when:%H:%M:%S.%f} {name} writes ({what}), and {holder} wrote the Lease last, at {renewed:%H:%M:%S.%f}")
    return Writers(changes, writes, foreign)


def pods_of(namespace: str) -> Callable[[Entry], str | None]:
    """Return a function that names the operator's pod of an entry by its token, if it belongs to the release in this namespace."""
    account = f"system:serviceaccount:{namespace}:diffusion-operator"

    def pod_of(entry: Entry) -> str | None:
        pods = entry["user"].get("extra", {}).get(POD_NAME, [])
        return pods[0] if pods and entry["user"].get("username") == account else None

    return pod_of


def _is_write(entry: Entry) -> bool:
    """Return whether an entry changed something."""
    about, code = entry.get("objectRef"), entry.get("responseStatus", {}).get("code", 500)
    return bool(about) and entry["verb"] in WRITES and code < 300 and "dryRun=" not in entry["requestURI"]


def _time(entry: Entry) -> datetime:
    return datetime.fromisoformat(entry["requestReceivedTimestamp"])
