# SPDX-License-Identifier: Apache-2.0
"""A cluster in memory that behaves like one: UIDs, versions, label selectors, preconditions, managed fields, owner references. The test
acts as the kubelet. Assert on the objects in it, not on the calls.

Real: nothing. It has the rules of an API server on which the operator relies; no scheduler, kubelet or controller runs.
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
        """The listener to changes: called with ADDED, MODIFIED or DELETED, as by a watch."""
        self.refuse: Callable[[str, Manifest], ClusterError | None] = lambda verb, manifest: None
        """An admission policy, called before a create, its dry run, an apply or a patch; it gets the unpatched object."""
        self.broken: ClusterError | None = None
        """An error that every call raises, as if the API server were down."""
        self.dry_runs: list[str] = []
        """Names of the pods that were tried by a dry run."""
        self.asked_for_warnings: list[str] = []
        """UIDs of the objects whose Events were read."""
        self.graceful = False
        """True: a deleted pod stays, terminating, until `ended` is called for it."""
        self.status_writes = 0
        self.check_ends: tuple[int, str] | None = (0, "")
        """The exit code and last words with which each check pod ends at once; None leaves it to the test."""

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

    async def warnings(self, namespace: str, uid: str) -> Sequence[Manifest]:
        self._check()
        self.asked_for_warnings.append(uid)
        found = [one for key, one in self._objects.items() if key[:2] == ("Event", namespace)]
        return [copy.deepcopy(one) for one in found if (one["involvedObject"]["uid"], one["type"]) == (uid, "Warning")]

    async def create(self, manifest: Manifest) -> bool:
        self._check()
        self._admit("create", manifest)
        if self._key(manifest) in self._objects:
            return False
        fields = {} if manifest["kind"] == "Event" else {"managedFields": [entry(manifest, "Update")]}
        self._store(manifest | {"metadata": manifest["metadata"] | fields})
        if manifest.get("spec", {}).get("restartPolicy") == "Never" and self.check_ends is not None:
            self.check_ended(manifest["metadata"]["name"], *self.check_ends)
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

    # the test's own changes -------------------------------------------------------------------------------------------

    def put(self, manifest: Manifest) -> Manifest:
        """Store a new manifest, as a user would create it, and return the stored object itself.

        If the object exists, only its spec is replaced, and a spec that differs raises the generation.
        """
        existing = self._objects.get(self._key(manifest))
        if existing is None:
            return self._store(manifest)
        if existing["spec"] != manifest["spec"]:
            existing["metadata"]["generation"] += 1
            self._changed(existing, spec=copy.deepcopy(manifest["spec"]))
        return existing

    def change(self, kind: Kind, name: str, changed: Callable[[Manifest], object]) -> None:
        """Let `changed` modify a copy of an object's spec, and store the result as `put` does.

        The object is in namespace `default`; KeyError if it does not exist.
        """
        manifest = copy.deepcopy(self._objects[kind.kind, "default", name])
        changed(manifest["spec"])
        self.put(manifest)

    def remove(self, kind: Kind, name: str, *, namespace: str = "default") -> None:
        """Delete an object and, in turn, each one that names it as an owner, even beside other owners; KeyError if there is none."""
        manifest = self._objects.pop((kind.kind, namespace, name))
        self.on_change("DELETED", manifest)
        for (child, its_namespace, its_name), found in list(self._objects.items()):
            if manifest["metadata"]["uid"] in [owner["uid"] for owner in found["metadata"].get("ownerReferences", ())]:
                self.remove(KINDS[child], its_name, namespace=its_namespace)

    def remove_alone(self, kind: Kind, name: str) -> None:
        """Delete an object in `default` as with `--cascade=orphan`: objects that it owned stay, without this owner."""
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
        """Return the reason of every Event in the cluster, in the order in which the Events were created."""
        return [manifest["reason"] for manifest in self._objects.values() if manifest["kind"] == "Event"]

    def notes(self, reason: str) -> list[str]:
        """Return the messages of the Events with a reason."""
        return [manifest["message"] for manifest in self._objects.values() if manifest["kind"] == "Event" and manifest["reason"] == reason]

    # the kubelet's part -----------------------------------------------------------------------------------------------

    def pod_status(self, name: str, **changes: Any) -> None:
        """Overwrite fields of the status of a pod in the namespace `default`, keep the others, and report the change to the watchers."""
        pod = self._objects[POD.kind, "default", name]
        pod["status"] = pod.get("status", {}) | changes
        self.on_change("MODIFIED", pod)

    def unschedulable(self, name: str, message: str) -> None:
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        self.pod_status(name, phase="Pending", conditions=[condition])

    def waiting(self, name: str, reason: str, message: str = "") -> None:
        """Report a pod as scheduled, with its container waiting."""
        self._objects[POD.kind, "default", name]["spec"]["nodeName"] = "node"
        self.pod_status(name, phase="Pending", containerStatuses=[_container({"waiting": {"reason": reason, "message": message}})])

    def running(self, name: str, ip: str, *, ready: bool = False, restarts: int = 0, last: Manifest | None = None) -> None:
        self._objects[POD.kind, "default", name]["spec"]["nodeName"] = "node"
        status = [_container({"running": {}}, restartCount=restarts, lastState={"terminated": last} if last else {})]
        self.pod_status(name, phase="Running", podIP=ip, conditions=[{"type": "Ready", "status": str(ready)}], containerStatuses=status)

    def tell_to_go(self, name: str, *, evicted: bool = False) -> None:
        """Mark a pod as terminating, as a deletion does, or as an eviction through the API does."""
        manifest = self._objects[POD.kind, "default", name]
        manifest["metadata"].setdefault("deletionTimestamp", self._stamp())
        if evicted:
            target = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "Eviction API: evicting"}
            self.pod_status(name, conditions=[*manifest["status"].get("conditions", ()), target])
        else:
            self.on_change("MODIFIED", manifest)

    def ended(self, name: str, *, code: int = 143) -> None:
        """Report that the containers of a terminating pod have ended, while the pod still exists."""
        conditions = [one for one in self._objects[POD.kind, "default", name]["status"]["conditions"] if one["type"] == "DisruptionTarget"]
        conditions.append({"type": "Ready", "status": "False"})
        status = [_container({"terminated": terminated(code)})]
        self.pod_status(name, phase="Failed" if code else "Succeeded", conditions=conditions, containerStatuses=status)

    def check_ended(self, name: str, code: int, words: str) -> None:
        """Report the end of a check pod."""
        status = [_container({"terminated": terminated(code, words)})]
        self.pod_status(name, phase="Failed" if code else "Succeeded", containerStatuses=status)

    def crashed(self, name: str, *, code: int, message: str, restarts: int = 1) -> None:
        """Report a pod in CrashLoopBackOff after its container ended."""
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
        """Store an updated object and return it; an update without a change does nothing."""
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
    """Return the terminated state of a container, as a kubelet reports it."""
    return {"exitCode": code, "reason": "Error" if code else "Completed", "message": message, "finishedAt": "2026-01-01T00:00:00Z"}
