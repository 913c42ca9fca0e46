# SPDX-License-Identifier: Apache-2.0
"""Fakes of two controllers that a real API server alone lacks: the garbage collector, and the one that empties a terminating namespace.

Real: the API server, its finalizers and its refusals in such a namespace. Not real: both controllers. They list at each step the objects
that they need, of all namespaces at once.
"""

from typing import Any

from diffusion_operator.api.names import ADAPTER, DEPLOYMENT, EVENT, KINDS, Kind
from support.apiserver.admission import QUOTA
from support.apiserver.rest_client import RestClient, path_of


class FakeControllers:
    """The garbage collector and the namespace controller, which act only when `step` is called."""

    def __init__(self, client: RestClient) -> None:
        self._client = client

    async def step(self) -> None:
        """Collect orphans once, and empty terminating namespaces. Owners are listed last, so that no owner is newer than the list."""
        owned = [one for kind in KINDS.values() if kind not in (DEPLOYMENT, ADAPTER, EVENT) for one in await self._all(kind)]
        await self._collect(owned, {one["metadata"]["uid"] for one in await self._all(DEPLOYMENT)})
        await self._empty_namespaces()

    async def delete_alone(self, namespace: str, name: str) -> None:
        """Delete a deployment as `kubectl delete --cascade=orphan` and the garbage collector do together: its children stay. All objects
        of the namespace lose their owners, except adapters and Events."""
        path = f"{path_of(DEPLOYMENT, namespace)}/{name}"
        await self._client.send("DELETE", path, {"propagationPolicy": "Orphan"})
        for kind in (one for one in KINDS.values() if one not in (DEPLOYMENT, ADAPTER, EVENT)):
            for child in await self._client.list(kind, namespace):
                if "ownerReferences" in child["metadata"]:
                    await self._client.patch(kind, namespace, child["metadata"]["name"], {"metadata": {"ownerReferences": None}})
        await self._client.patch(DEPLOYMENT, namespace, name, {"metadata": {"finalizers": None}})

    async def _collect(self, owned: list[Any], living: set[str]) -> None:
        """Delete the objects of `owned` that name owners, none of which is in `living`. Objects without owners stay."""
        for one in owned:
            uids = {owner["uid"] for owner in one["metadata"].get("ownerReferences", ())}
            if uids and not uids & living:
                metadata = one["metadata"]
                await self._client.delete(KINDS[one["kind"]], metadata["namespace"], metadata["name"], uid=metadata["uid"])

    async def _empty_namespaces(self) -> None:
        """Delete all objects in terminating namespaces, children first; finalize a namespace in which nothing but Events was found."""
        for namespace in (await self._client.send("GET", "/api/v1/namespaces"))[1]["items"]:
            if namespace["status"]["phase"] == "Terminating":
                await self._empty(namespace)

    async def _empty(self, namespace: Any) -> None:
        name, left = namespace["metadata"]["name"], 0
        for kind in (QUOTA, *reversed(KINDS.values())):
            for one in await self._client.list(kind, name):
                await self._client.delete(kind, name, one["metadata"]["name"])
                left += kind != EVENT
        if not left:
            await self._client.send("PUT", f"/api/v1/namespaces/{name}/finalize", namespace | {"spec": {}})

    async def _all(self, kind: Kind) -> list[Any]:
        status, answer = await self._client.send("GET", path_of(kind))
        return [one | {"kind": kind.kind} for one in answer["items"]] if status == 200 else []
