# SPDX-License-Identifier: Apache-2.0
"""The newest known version of each watched object, from the watch's event or the answer to a write, whichever came first.

Kept as compressed JSON, some 150 bytes an object, because ten thousand deployments have fifty thousand of them. The
store keeps only the part of a pod that is about a replica, and only the managers of managedFields. Those of a pod tell whether one that
nobody controls is an orphan.
"""

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from diffusion_operator.api.names import ADAPTER, CONFIG_MAP, DISRUPTION_BUDGET, LABEL_DEPLOYMENT, NETWORK_POLICY, POD, SERVICE, Kind
from diffusion_operator.plan.observed.ownership import controller_of
from diffusion_operator.reconcile.store.packing import Packer, unpack
from diffusion_operator.reconcile.store.parsing import deployment_named

Manifest = dict[str, Any]
ObjectPlace = tuple[str, str]
"""Namespace and name."""
REMEMBERED_REMOVALS = 1000  # far more than are removed while a write is on its way
_NOTHING: Mapping[str, object] = {}


class _Known(NamedTuple):
    uid: str
    version: int
    deployment: str
    """The one it belongs to, empty for none."""
    packed: bytes
    reference: bytes
    """The bytes that `packed` is unpacked with."""


class ObjectStore:
    def __init__(self, changed: Callable[[Kind, Manifest], None]) -> None:
        """Create an empty store that calls `changed` for every change not made by our own write."""
        self._changed = changed
        self._known: dict[str, dict[ObjectPlace, _Known]] = {}
        self._packers: defaultdict[str, Packer] = defaultdict(Packer)
        self._members: dict[tuple[str, str, str], dict[str, _Known]] = {}
        """Objects by kind, namespace and deployment, and by name."""
        self._versions: dict[tuple[str, str, str], Mapping[str, object]] = {}
        """Copies of members that somebody asked for, until one changes."""
        self._removed: dict[str, int] = {}
        """Versions by UID: an answer that is late must not bring an object back. An object that only lost its labels may return."""

    def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        known = self._known.get(kind.kind, {}).get((namespace, name))
        return _decode(known) if known is not None else None

    def of_deployment(self, kind: Kind, namespace: str, deployment: str) -> list[Manifest]:
        """Return a deployment's objects by label; adapters by the deployment they name."""
        members = self._members.get((kind.kind, namespace, deployment), {})
        return [_decode(members[name]) for name in sorted(members)]

    def versions(self, kind: Kind, namespace: str, deployment: str) -> Mapping[str, object]:
        """Return the objects of `of_deployment` by name and unread. The mapping is the same object while nothing changes."""
        key = (kind.kind, namespace, deployment)
        members = self._members.get(key)
        if members is None:
            return _NOTHING
        if key not in self._versions:
            self._versions[key] = dict(members)
        return self._versions[key]

    def places(self, kind: Kind, namespace: str) -> dict[ObjectPlace, str]:
        """Return the UIDs of the known objects by namespace and name; an empty `namespace` stands for all of them."""
        return {place: known.uid for place, known in self._known.get(kind.kind, {}).items() if namespace in ("", place[0])}

    def manifests(self, kind: Kind, namespace: str) -> Iterator[Manifest]:
        for place in sorted(self.places(kind, namespace)):
            yield _decode(self._known[kind.kind][place])

    def put(self, kind: Kind, manifest: Manifest) -> bool:
        """Store an object from a watch or a listing. Return whether its version is new, and if so call `changed` first."""
        news = self._take(kind, manifest)
        if news:
            self._changed(kind, manifest)
        return news

    def learn(self, kind: Kind, manifest: Manifest) -> None:
        """Store the answer to our own write, without a call of `changed`.

        A deletion that meets another one is answered without a version, and tells nothing new.
        """
        if manifest["metadata"].get("resourceVersion"):
            self._take(kind, manifest)

    def remove(self, kind: Kind, manifest: Manifest) -> None:
        """Remove an object and call `changed` with it; do nothing if it is not known, or if another of its name is.

        A late answer with this version or an earlier one does not bring it back.
        """
        metadata = manifest["metadata"]
        place, uid = (metadata["namespace"], metadata["name"]), metadata["uid"]
        self._removed[uid] = int(metadata["resourceVersion"])
        if len(self._removed) > REMEMBERED_REMOVALS:
            del self._removed[next(iter(self._removed))]
        known = self._known.get(kind.kind, {}).get(place)
        if known is not None and known.uid == uid:
            self._forget_name(kind, place, known.deployment)
            del self._known[kind.kind][place]
            self._changed(kind, _decode(known))

    def newest(self, kind: Kind, namespace: str) -> int:
        """Return the highest version that is known; 0 where nothing is."""
        return max((self._known[kind.kind][place].version for place in self.places(kind, namespace)), default=0)

    def rewind(self, kind: Kind, namespace: str) -> None:
        """Take any version for news from now on: the versions of an API server go back when its store is restored from a backup."""
        for place in self.places(kind, namespace):
            known = self._known[kind.kind][place] = self._known[kind.kind][place]._replace(version=0)
            if known.deployment:
                self._members[kind.kind, place[0], known.deployment][place[1]] = known
        self._removed.clear()

    def keep_only(self, kind: Kind, before: dict[ObjectPlace, str], seen: Collection[str], *, version: str) -> bool:
        """Remove the objects that a whole listing did not have (`seen`), of those known before it began (`before`).

        They have gone unheard. Return whether any was removed.
        """
        news = False
        for place, uid in before.items():
            known = self._known.get(kind.kind, {}).get(place)
            if uid not in seen and known is not None and known.uid == uid:
                namespace, name = place
                self.remove(kind, {"metadata": {"namespace": namespace, "name": name, "uid": uid, "resourceVersion": version}})
                news = True
        return news

    def _take(self, kind: Kind, manifest: Manifest) -> bool:
        """Store an object unless this version or a later one is known or was removed; return whether it was stored."""
        metadata = manifest["metadata"]
        place = sys.intern(metadata["namespace"]), metadata["name"]
        uid, version = metadata["uid"], int(metadata["resourceVersion"])
        objects = self._known.setdefault(kind.kind, {})
        known = objects.get(place)
        if version <= self._removed.get(uid, 0) or (known is not None and known.version >= version):
            return False
        deployment = _deployment(kind, manifest)
        if known is not None and deployment != known.deployment:
            self._forget_name(kind, place, known.deployment)
        packed, reference = self._packers[kind.kind].pack(_encode(kind, manifest))
        objects[place] = _Known(uid=uid, version=version, deployment=deployment, packed=packed, reference=reference)
        if deployment:
            key = (kind.kind, place[0], deployment)
            self._members.setdefault(key, {})[place[1]] = objects[place]
            self._versions.pop(key, None)
        return True

    def _forget_name(self, kind: Kind, place: ObjectPlace, deployment: str) -> None:
        key = (kind.kind, place[0], deployment)
        members = self._members.get(key, {})
        members.pop(place[1], None)
        self._versions.pop(key, None)
        if not members:
            self._members.pop(key, None)


def _deployment(kind: Kind, manifest: Manifest) -> str:
    named = deployment_named(manifest) if kind == ADAPTER else manifest["metadata"].get("labels", {}).get(LABEL_DEPLOYMENT)
    return sys.intern(named or "")


def _encode(kind: Kind, manifest: Manifest) -> bytes:
    metadata = {name: value for name, value in manifest["metadata"].items() if name != "managedFields"}
    kept = manifest | {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata}
    if kind in (SERVICE, CONFIG_MAP, NETWORK_POLICY, DISRUPTION_BUDGET) or (kind == POD and _may_be_orphan(manifest)):
        metadata["managedFields"] = _managers(manifest)
    if kind == POD:
        spec = manifest.get("spec", {})
        containers = [{"name": one["name"], "image": one["image"]} for one in spec.get("containers", ())]
        gates = {"schedulingGates": spec["schedulingGates"]} if spec.get("schedulingGates") else {}
        kept["spec"] = {"nodeName": spec.get("nodeName", ""), "containers": containers, **gates}
    return msgspec.json.encode(kept)


def _may_be_orphan(pod: Manifest) -> bool:
    return controller_of(pod) is None and "managedFields" in pod["metadata"]


def _managers(manifest: Manifest) -> list[dict[str, str]]:
    """Return the manager, operation and subresource of each entry; the fields are by far most of it."""
    kept = ("manager", "operation", "subresource")
    return [{name: entry[name] for name in kept if name in entry} for entry in manifest["metadata"].get("managedFields", ())]


def _decode(known: _Known) -> Manifest:
    manifest: Manifest = msgspec.json.decode(unpack(known.packed, known.reference))
    return manifest
