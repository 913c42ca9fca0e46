# SPDX-License-Identifier: Apache-2.0
"""A Cluster in memory that behaves: UIDs, versions, label selectors, preconditions, managed fields, owner references, and a kubelet by
hand. Assert on what is in it, not on what was called.

Real: nothing. An API server's rules are as far in it as the operator relies on them; no scheduler, kubelet or controller runs.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from diffusion_operator.api.names import ADAPTER, CONTAINER, KINDS, POD, Kind
from diffusion_operator.errors import ClusterConflict, ClusterError, ClusterRefused
from support.operator.fake_apply import applied, entry, patched

Manifest = dict[str, Any]
EPOCH = datetime(2026, 1, 1, tzinfo=UTC)


class FakeCluster:
    def __init__(self, clock: Callable[[], datetime] = lambda: EPOCH) -> None:
        self._stamp = lambda: clock().strftime("%Y-%m-%dT%H:%M:%SZ")
        self._objects: dict[tuple[str, str, str], Manifest] = {}
        self._numbers = itertools.count(1)
        self.on_change: Callable[[str, Manifest], None] = lambda change, manifest: None
        """Called with ADDED, MODIFIED or DELETED, as a watch would."""
        self.refuse: Callable[[str, Manifest], ClusterError | None] = lambda verb, manifest: None
        """Asked before a create, its dry run, an apply or a patch, as an admission policy is; a patch shows the object before it."""
        self.broken: ClusterError | None = None
        """Every call raises it, as with the API server down."""
        self.dry_runs: list[str] = []
        """Names of the pods that were tried."""
        self.graceful = False
        """A deleted pod stays, on its way out, until `ended` says that its containers have ended."""
        self.status_writes = 0

    # the port ---------------------------------------------------------------------------------------------------------

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        self._check()
        return copy.deepcopy(self._objects.get((kind.kind, namespace, name)))

    async def list(self, kind: Kind, namespace: str, *, labels: Mapping[str, str] | None = None) -> list[Manifest]:
        self._check()
        wanted = (labels or {}).items()
        there = [manifest for key, manifest in sorted(self._objects.items()) if key[:2] == (kind.kind, namespace)]
        return [copy.deepcopy(one) for one in there if wanted <= one["metadata"].get("labels", {}).items()]

    async def adapter_versions(self, namespace: str, deployment: str) -> Mapping[str, object]:
        found = await self.list(ADAPTER, namespace)
        return {
            one["metadata"]["name"]: (one["metadata"]["uid"], one["metadata"]["resourceVersion"])
            for one in found
            if one["spec"]["deploymentRef"]["name"] == deployment
        }

    async def look_up(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        return await self.get(kind, namespace, name)

    async def create(self, manifest: Manifest) -> bool:
        self._check()
        self._admit("create", manifest)
        if self._key(manifest) in self._objects:
            return False
        fields = {} if manifest["kind"] == "Event" else {"managedFields": [entry(manifest, "Update")]}
        self._store(manifest | {"metadata": manifest["metadata"] | fields})
        return True

    async def try_create(self, manifest: Manifest) -> None:
        self._check()
        self.dry_runs.append(manifest["metadata"]["name"])
        self._admit("create", manifest)

    async def apply(self, manifest: Manifest) -> Manifest:
        self._check()
        self._admit("apply", manifest)
        existing = self._objects.get(self._key(manifest))
        if existing is None and "uid" in manifest["metadata"]:
            raise ClusterConflict("there is no object of this uid", status=409, reason="Conflict")
        if existing is None:
            return copy.deepcopy(self._store(manifest | {"metadata": manifest["metadata"] | {"managedFields": [entry(manifest, "Apply")]}}))
        return copy.deepcopy(self._replace(existing, applied(existing, manifest)))

    async def patch(self, kind: Kind, namespace: str, name: str, operations: Sequence[Manifest]) -> Manifest:
        self._check()
        if (existing := self.find(kind, name, namespace=namespace)) is None:
            raise ClusterRefused(f"{kind.plural} {name} not found", status=404, reason="NotFound")
        self._admit("patch", existing)
        return copy.deepcopy(self._replace(existing, patched(existing, operations)))

    async def apply_status(self, kind: Kind, namespace: str, name: str, *, status: Manifest, version: str) -> None:
        self._check()
        if (manifest := self.find(kind, name, namespace=namespace)) is not None:
            self._admit("apply_status", manifest)
            if version != manifest["metadata"]["resourceVersion"]:
                raise ClusterConflict("the object has been modified", status=409, reason="Conflict")
            self.status_writes += 1
            self._changed(manifest, status=copy.deepcopy(status))

    async def set_labels(self, kind: Kind, namespace: str, name: str, *, uid: str, labels: Mapping[str, str | None]) -> None:
        self._check()
        if (manifest := self.find(kind, name, namespace=namespace, uid=uid)) is not None:
            merged = manifest["metadata"]["labels"] | labels
            manifest["metadata"]["labels"] = {key: value for key, value in merged.items() if value is not None}
            manifest["metadata"]["resourceVersion"] = str(next(self._numbers))

    async def delete(self, kind: Kind, namespace: str, name: str, *, uid: str) -> None:
        self._check()
        if self.find(kind, name, namespace=namespace, uid=uid) is None:
            return
        if kind == POD and self.graceful:
            self.tell_to_go(name)
        else:
            self.remove(kind, name, namespace=namespace)

    # by hand ----------------------------------------------------------------------------------------------------------

    def put(self, manifest: Manifest) -> Manifest:
        """Make or change an object as a user would; a changed spec raises the generation."""
        existing = self._objects.get(self._key(manifest))
        if existing is None:
            return self._store(manifest)
        if existing["spec"] != manifest["spec"]:
            existing["metadata"]["generation"] += 1
            self._changed(existing, spec=copy.deepcopy(manifest["spec"]))
        return existing

    def change(self, kind: Kind, name: str, changed: Callable[[Manifest], object]) -> None:
        """Change an object's spec in place."""
        manifest = copy.deepcopy(self._objects[kind.kind, "default", name])
        changed(manifest["spec"])
        self.put(manifest)

    def remove(self, kind: Kind, name: str, *, namespace: str = "default") -> None:
        """Deleted and collected at once, with what it owns."""
        manifest = self._objects.pop((kind.kind, namespace, name))
        self.on_change("DELETED", manifest)
        for (child, its_namespace, its_name), found in list(self._objects.items()):
            if manifest["metadata"]["uid"] in [owner["uid"] for owner in found["metadata"].get("ownerReferences", ())]:
                self.remove(KINDS[child], its_name, namespace=its_namespace)

    def remove_alone(self, kind: Kind, name: str) -> None:
        """Deleted as with `--cascade=orphan`: what it owns stays, and nobody owns it."""
        manifest = self._objects.pop((kind.kind, "default", name))
        self.on_change("DELETED", manifest)
        for found in list(self._objects.values()):
            owners = found["metadata"].get("ownerReferences", [])
            left = [owner for owner in owners if owner["uid"] != manifest["metadata"]["uid"]]
            if len(left) < len(owners):
                found["metadata"] = {name: value for name, value in found["metadata"].items() if name != "ownerReferences"}
                self._changed(found, metadata=found["metadata"] | ({"ownerReferences": left} if left else {}))

    def find(self, kind: Kind, name: str, *, namespace: str = "default", uid: str | None = None) -> Manifest | None:
        found = self._objects.get((kind.kind, namespace, name))
        return found if found is None or uid in (None, found["metadata"]["uid"]) else None

    def names(self, kind: Kind) -> list[str]:
        return sorted(name for found, _, name in self._objects if found == kind.kind)

    def events(self) -> list[str]:
        """Reasons, in the order of writing."""
        return [manifest["reason"] for manifest in self._objects.values() if manifest["kind"] == "Event"]

    def notes(self, reason: str) -> list[str]:
        """Return the messages of the Events with a reason."""
        return [manifest["message"] for manifest in self._objects.values() if manifest["kind"] == "Event" and manifest["reason"] == reason]

    # the kubelet, by hand ---------------------------------------------------------------------------------------------

    def pod_status(self, name: str, **changes: Any) -> None:
        """Merge into a pod's status."""
        pod = self._objects[POD.kind, "default", name]
        pod["status"] = pod.get("status", {}) | changes
        self.on_change("MODIFIED", pod)

    def unschedulable(self, name: str, message: str) -> None:
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        self.pod_status(name, phase="Pending", conditions=[condition])

    def waiting(self, name: str, reason: str, message: str = "") -> None:
        """Scheduled, and the container waits."""
        self._objects[POD.kind, "default", name]["spec"]["nodeName"] = "node"
        self.pod_status(name, phase="Pending", containerStatuses=[_container({"waiting": {"reason": reason, "message": message}})])

    def running(self, name: str, ip: str, *, ready: bool = False, restarts: int = 0, last: Manifest | None = None) -> None:
        self._objects[POD.kind, "default", name]["spec"]["nodeName"] = "node"
        status = [_container({"running": {}}, restartCount=restarts, lastState={"terminated": last} if last else {})]
        self.pod_status(name, phase="Running", podIP=ip, conditions=[{"type": "Ready", "status": str(ready)}], containerStatuses=status)

    def tell_to_go(self, name: str, *, evicted: bool = False) -> None:
        """Ask a pod to leave, as a deletion does, or an eviction through the API."""
        manifest = self._objects[POD.kind, "default", name]
        manifest["metadata"].setdefault("deletionTimestamp", self._stamp())
        if evicted:
            target = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "Eviction API: evicting"}
            self.pod_status(name, conditions=[*manifest["status"].get("conditions", ()), target])
        else:
            self.on_change("MODIFIED", manifest)

    def ended(self, name: str, *, code: int = 143) -> None:
        """The containers of a pod that is on its way out have ended, and the kubelet says so before it is gone."""
        conditions = [one for one in self._objects[POD.kind, "default", name]["status"]["conditions"] if one["type"] == "DisruptionTarget"]
        conditions.append({"type": "Ready", "status": "False"})
        status = [_container({"terminated": terminated(code)})]
        self.pod_status(name, phase="Failed" if code else "Succeeded", conditions=conditions, containerStatuses=status)

    def crashed(self, name: str, *, code: int, message: str, restarts: int = 1) -> None:
        """In CrashLoopBackOff after the container ended."""
        waiting = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
        status = [_container(waiting, restartCount=restarts, lastState={"terminated": terminated(code, message)})]
        self.pod_status(name, conditions=[{"type": "Ready", "status": "False"}], containerStatuses=status)

    def _store(self, manifest: Manifest) -> Manifest:
        stored, number = copy.deepcopy(manifest), next(self._numbers)
        made = {"uid": f"uid-{number}", "resourceVersion": str(number), "creationTimestamp": self._stamp(), "generation": 1}
        stored["metadata"] = made | stored["metadata"]
        self._objects[self._key(manifest)] = stored
        self.on_change("ADDED", stored)
        return stored

    def _replace(self, existing: Manifest, updated: Manifest) -> Manifest:
        """Return the object after an update; one that changes nothing is none."""
        if updated == existing:
            return existing
        self._objects[self._key(updated)] = updated
        return self._changed(updated)

    def _changed(self, manifest: Manifest, **fields: Any) -> Manifest:
        manifest.update(fields)
        manifest["metadata"]["resourceVersion"] = str(next(self._numbers))
        self.on_change("MODIFIED", manifest)
        return manifest

    def _admit(self, verb: str, manifest: Manifest) -> None:
        if (refusal := self.refuse(verb, manifest)) is not None:
            raise refusal

    def _check(self) -> None:
        if self.broken is not None:
            raise self.broken

    @staticmethod
    def _key(manifest: Manifest) -> tuple[str, str, str]:
        return manifest["kind"], manifest["metadata"]["namespace"], manifest["metadata"]["name"]


def _container(state: Manifest, **more: Any) -> Manifest:
    return {"name": CONTAINER, "state": state, "restartCount": 0, **more}


def terminated(code: int, message: str = "") -> Manifest:
    """Say of a container that it ended, as a kubelet does."""
    return {"exitCode": code, "reason": "Error" if code else "Completed", "message": message, "finishedAt": "2026-01-01T00:00:00Z"}
