# SPDX-License-Identifier: Apache-2.0
"""The Cluster of the process: looks are answered from the store that watches fill, so a pass that has nothing to do asks nobody.

Writes go to the API server, and their answers are stored before they return. So a pass sees the effects of the one before it.
"""

from collections.abc import Mapping, Sequence

from diffusion_operator.api.names import (
    ADAPTER,
    CONFIG_MAP,
    DEPLOYMENT,
    DISRUPTION_BUDGET,
    FIELD_MANAGER,
    LABEL_DEPLOYMENT,
    LABEL_MANAGED_BY,
    NETWORK_POLICY,
    POD,
    SERVICE,
    Kind,
)
from diffusion_operator.cluster import Cluster, Manifest, Operation
from diffusion_operator.errors import ClusterConflict
from diffusion_operator.reconcile.store.object_store import ObjectStore

CHILD_KINDS = (POD, SERVICE, CONFIG_MAP, NETWORK_POLICY, DISRUPTION_BUDGET)
DECLARED_KINDS = (DEPLOYMENT, ADAPTER)
"""Users write them."""
WATCHED = (*DECLARED_KINDS, *CHILD_KINDS)


class WatchedCluster:
    """A Cluster that reads from the store; its writes and `look_up` go to the API server.

    Kinds that are not watched (Secrets and Events) seem absent; Warnings about an object can be read.
    """

    def __init__(self, cluster: Cluster, store: ObjectStore) -> None:
        self._cluster = cluster
        self._store = store

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        return self._store.get(kind, namespace, name)

    async def adapter_versions(self, namespace: str, deployment: str) -> Mapping[str, object]:
        return self._store.versions(ADAPTER, namespace, deployment)

    async def list(self, kind: Kind, namespace: str, *, labels: Mapping[str, str] | None = None) -> list[Manifest]:
        if labels is not None and labels.keys() == {LABEL_DEPLOYMENT}:
            return self._store.of_deployment(kind, namespace, labels[LABEL_DEPLOYMENT])
        wanted = labels or {}
        return [one for one in self._store.manifests(kind, namespace) if wanted.items() <= one["metadata"].get("labels", {}).items()]

    async def look_up(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        """Ask the API server for an object; None if it is missing.

        It is put into the store, too, if it has the label that is watched for.
        """
        found = await self._cluster.look_up(kind, namespace, name)
        if found is not None and found["metadata"].get("labels", {}).get(LABEL_MANAGED_BY) == FIELD_MANAGER:
            self._store.learn(kind, found)
        return found

    async def warnings(self, namespace: str, uid: str) -> Sequence[Manifest]:
        return await self._cluster.warnings(namespace, uid)

    async def create(self, manifest: Manifest) -> bool:
        return await self._cluster.create(manifest)

    async def try_create(self, manifest: Manifest) -> None:
        await self._cluster.try_create(manifest)

    async def apply(self, manifest: Manifest) -> Manifest:
        return await self._cluster.apply(manifest)

    async def patch(self, kind: Kind, namespace: str, name: str, operations: Sequence[Operation]) -> Manifest:
        return await self._cluster.patch(kind, namespace, name, operations)

    async def apply_status(self, kind: Kind, namespace: str, name: str, *, status: Manifest, version: str) -> None:
        """Write a status. A conflict is raised, but before that the object is asked for and stored.

        So the next pass sees a change before its watch does.
        """
        try:
            await self._cluster.apply_status(kind, namespace, name, status=status, version=version)
        except ClusterConflict:
            if (found := await self._cluster.look_up(kind, namespace, name)) is not None:
                self._store.put(kind, found)
            raise

    async def set_labels(self, kind: Kind, namespace: str, name: str, *, uid: str, labels: Mapping[str, str | None]) -> None:
        await self._cluster.set_labels(kind, namespace, name, uid=uid, labels=labels)

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        await self._cluster.delete(kind, namespace, name, uid=uid)
