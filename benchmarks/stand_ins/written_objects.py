# SPDX-License-Identifier: Apache-2.0
"""An API server in memory that takes every write and tells the store of it, as the answers and watches of a real one do.

Real: the versions, UIDs and generations of objects. Not real: everything that refuses, admits, merges or waits.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from diffusion_operator.api.names import KINDS, Kind
from diffusion_operator.cluster import Manifest, Operation
from diffusion_operator.reconcile.store.object_store import ObjectStore

MADE_AT = "2026-01-01T00:00:00Z"


class WrittenObjects:
    """The Cluster behind a WatchedCluster: it keeps objects in memory, and hands each one that it writes to the store.

    Listing and deleting are not implemented, and patches change nothing. `writes` counts the rest.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._numbers = itertools.count(1)
        self._objects: dict[tuple[str, str, str], Manifest] = {}
        self.writes = 0

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        return self._objects.get((kind.kind, namespace, name))

    async def warnings(self, namespace: str, uid: str) -> Sequence[Manifest]:
        return ()

    async def look_up(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        return await self.get(kind, namespace, name)

    async def adapter_versions(self, namespace: str, deployment: str) -> Mapping[str, object]:
        raise NotImplementedError

    async def list(self, kind: Kind, namespace: str, *, labels: Mapping[str, str] | None = None) -> list[Manifest]:
        raise NotImplementedError

    async def create(self, manifest: Manifest) -> bool:
        metadata = manifest["metadata"]
        if await self.get(KINDS[manifest["kind"]], metadata["namespace"], metadata["name"]) is not None:
            return False
        made = {"uid": f"uid-{next(self._numbers)}", "generation": 1, "creationTimestamp": MADE_AT}
        self._write(manifest, metadata=made | metadata)
        return True

    async def try_create(self, manifest: Manifest) -> None:
        """Accept every manifest, and create nothing."""

    async def apply(self, manifest: Manifest) -> Manifest:
        before = self._there(KINDS[manifest["kind"]], manifest["metadata"]["namespace"], manifest["metadata"]["name"])
        return self._write(before | manifest, metadata=before["metadata"] | manifest["metadata"])

    async def patch(self, kind: Kind, namespace: str, name: str, operations: Sequence[Operation]) -> Manifest:
        return self._there(kind, namespace, name)

    async def apply_status(self, kind: Kind, namespace: str, name: str, *, status: Manifest, version: str) -> None:
        before = self._there(kind, namespace, name)
        self._write(before | {"status": status}, metadata=before["metadata"])

    async def set_labels(self, kind: Kind, namespace: str, name: str, *, uid: str, labels: Mapping[str, str | None]) -> None:
        before = self._there(kind, namespace, name)
        self._write(before, metadata=before["metadata"] | {"labels": before["metadata"]["labels"] | labels})

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        raise NotImplementedError

    def change(self, kind: Kind, namespace: str, name: str, **parts: Any) -> None:
        """Replace parts of an object as somebody else does, such as a user its spec or a kubelet a pod's status.

        A new `spec` raises the generation.
        """
        before = self._there(kind, namespace, name)
        generation = before["metadata"]["generation"] + ("spec" in parts)
        self._write(before | parts, metadata=before["metadata"] | {"generation": generation})

    def _there(self, kind: Kind, namespace: str, name: str) -> Manifest:
        return self._objects[kind.kind, namespace, name]

    def _write(self, manifest: Manifest, *, metadata: Manifest) -> Manifest:
        self.writes += 1
        after = manifest | {"metadata": metadata | {"resourceVersion": str(next(self._numbers))}}
        self._objects[after["kind"], metadata["namespace"], metadata["name"]] = after
        self._store.learn(KINDS[after["kind"]], after)
        return after
