# SPDX-License-Identifier: Apache-2.0
"""The Lease by which the operator's processes agree on a leader, as a struct and as a manifest.

The leader's epoch is an annotation. `leaseTransitions` would not do: an epoch jumps above what workers report, and that field
counts changes of the holder.
"""

from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec

from diffusion_operator.api.names import GROUP, LEASE, Kind
from diffusion_operator.settings import ElectionSettings

ANNOTATION_EPOCH = f"{GROUP}/epoch"
MICRO_TIME = "%Y-%m-%dT%H:%M:%S.%fZ"
MOST_DURATION_S = 3600
"""The longest duration that is believed. A Lease that claims more would lock its pods out."""

Manifest = dict[str, Any]


class Lease(msgspec.Struct, frozen=True):
    """A Lease as it was read, or as it is to be written."""

    holder: str
    """The identity of the leader. Empty where the last one gave it up."""
    epoch: int
    acquired: str
    renewed: str
    duration_s: int
    transitions: int = 0
    version: str = ""
    uid: str = ""

    @property
    def record(self) -> tuple[object, ...]:
        """The part whose change shows that a leader lives. Labels that somebody adds do not."""
        return self.uid, self.holder, self.epoch, self.acquired, self.renewed


class Leases(Protocol):
    """The part of the API client that reads and writes Leases."""

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None: ...

    async def create(self, manifest: Manifest) -> bool: ...

    async def merge(self, manifest: Manifest) -> Manifest: ...


def read_lease(manifest: Manifest | None) -> Lease | None:
    """Parse the Lease that the API server returned, or return None if there is none.

    Any program may have written it, so a field without a usable value counts as empty or 0. A duration counts for an hour at most.
    """
    if manifest is None:
        return None
    metadata, spec = manifest["metadata"], manifest.get("spec") or {}
    epoch = (metadata.get("annotations") or {}).get(ANNOTATION_EPOCH, "")
    return Lease(
        holder=spec.get("holderIdentity") or "",
        epoch=int(epoch) if epoch.isdecimal() and epoch.isascii() and len(epoch) < 20 else 0,
        acquired=spec.get("acquireTime") or "",
        renewed=spec.get("renewTime") or "",
        duration_s=min(spec.get("leaseDurationSeconds") or 0, MOST_DURATION_S),
        transitions=spec.get("leaseTransitions") or 0,
        version=metadata["resourceVersion"],
        uid=metadata["uid"],
    )


def lease_manifest(place: ElectionSettings, lease: Lease) -> Manifest:
    """Render a Lease as a manifest.

    The uid and the version bind the write to the Lease that was read; a Lease without a version is one to create.
    """
    bound = {"uid": lease.uid, "resourceVersion": lease.version} if lease.version else {}
    return {
        "apiVersion": LEASE.api_version,
        "kind": LEASE.kind,
        "metadata": {"name": place.name, "namespace": place.namespace, "annotations": {ANNOTATION_EPOCH: str(lease.epoch)}, **bound},
        "spec": {
            "holderIdentity": lease.holder or None,
            "leaseDurationSeconds": lease.duration_s,
            "acquireTime": lease.acquired,
            "renewTime": lease.renewed,
            "leaseTransitions": lease.transitions,
        },
    }


def micro_time(now: datetime) -> str:
    """Format a time as a Lease has it: in UTC, with microseconds."""
    return now.astimezone(UTC).strftime(MICRO_TIME)
