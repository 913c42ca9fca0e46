# SPDX-License-Identifier: Apache-2.0
"""What is known of the objects we watch: the newest version of each, whichever came first, the watch's event or the answer to a write.

Kept as compressed JSON, a few hundred bytes an object, because ten thousand deployments have fifty thousand of them. The
store keeps only the part of a pod that is about a replica, and only the managers of managedFields.
"""

import sys
import zlib
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import msgspec

from diffusion_operator.api.names import ADAPTER, CONFIG_MAP, DISRUPTION_BUDGET, LABEL_DEPLOYMENT, NETWORK_POLICY, POD, SERVICE, Kind

Manifest = dict[str, Any]
ObjectPlace = tuple[str, str]
"""Namespace and name."""
REMEMBERED_REMOVALS = 1000  # far more than are removed while a write is on its way
_FAST = 1


class _Known(NamedTuple):
    uid: str
    version: int
    deployment: str
    """The one it belongs to, empty for none."""
    content: bytes


class ObjectStore:
    def __init__(self, changed: Callable[[Kind, Manifest], None]) -> None:
        """`changed` is told of every change that did not come from a write of our own."""
        self._changed = changed
        self._known: dict[str, dict[ObjectPlace, _Known]] = {}
        self._names: dict[str, dict[ObjectPlace, tuple[str, ...]]] = {}
        """By kind and by namespace and deployment."""
        self._removed: dict[str, int] = {}
        """Versions by UID: an answer that is late must not bring an object back. One that only lost its labels may come again."""

    def get(self, kind: Kind, namespace: str, name: str) -> Manifest | None:
        known = self._known.get(kind.kind, {}).get((namespace, name))
        return _decode(known) if known is not None else None

    def of_deployment(self, kind: Kind, namespace: str, deployment: str) -> list[Manifest]:
        """By label; of adapters those that name it."""
        names = self._names.get(kind.kind, {}).get((namespace, deployment), ())
        return [_decode(self._known[kind.kind][namespace, name]) for name in names]

    def places(self, kind: Kind, namespace: str) -> dict[ObjectPlace, str]:
        """UIDs by place; of all namespaces with an empty one."""
        return {place: known.uid for place, known in self._known.get(kind.kind, {}).items() if namespace in ("", place[0])}

    def manifests(self, kind: Kind, namespace: str) -> Iterator[Manifest]:
        for place in sorted(self.places(kind, namespace)):
            yield _decode(self._known[kind.kind][place])

    def put(self, kind: Kind, manifest: Manifest) -> bool:
        """As a watch or a listing brings it; gives whether it is news."""
        news = self._take(kind, manifest)
        if news:
            self._changed(kind, manifest)
        return news

    def learn(self, kind: Kind, manifest: Manifest) -> None:
        """As a write of our own was answered. A deletion that meets another one is answered without a version, and tells nothing new."""
        if manifest["metadata"].get("resourceVersion"):
            self._take(kind, manifest)

    def remove(self, kind: Kind, manifest: Manifest) -> None:
        """It is gone; nothing happens where another one of its name is known."""
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
            self._known[kind.kind][place] = self._known[kind.kind][place]._replace(version=0)
        self._removed.clear()

    def keep_only(self, kind: Kind, before: dict[ObjectPlace, str], seen: Collection[str], *, version: str) -> bool:
        """After a whole listing: what was known before it began and is not in it has gone unheard. Gives whether there was any."""
        news = False
        for place, uid in before.items():
            known = self._known.get(kind.kind, {}).get(place)
            if uid not in seen and known is not None and known.uid == uid:
                namespace, name = place
                self.remove(kind, {"metadata": {"namespace": namespace, "name": name, "uid": uid, "resourceVersion": version}})
                news = True
        return news

    def _take(self, kind: Kind, manifest: Manifest) -> bool:
        """Whether it is news."""
        metadata = manifest["metadata"]
        place, uid, version = (metadata["namespace"], metadata["name"]), metadata["uid"], int(metadata["resourceVersion"])
        objects = self._known.setdefault(kind.kind, {})
        known = objects.get(place)
        if version <= self._removed.get(uid, 0) or (known is not None and known.version >= version):
            return False
        deployment = _deployment(kind, manifest)
        if known is not None and deployment != known.deployment:
            self._forget_name(kind, place, known.deployment)
        objects[place] = _Known(uid=uid, version=version, deployment=deployment, content=_encode(kind, manifest))
        if deployment:
            names = self._names.setdefault(kind.kind, {})
            names[place[0], deployment] = tuple(sorted({*names.get((place[0], deployment), ()), place[1]}))
        return True

    def _forget_name(self, kind: Kind, place: ObjectPlace, deployment: str) -> None:
        names, key = self._names.get(kind.kind, {}), (place[0], deployment)
        left = tuple(name for name in names.get(key, ()) if name != place[1])
        if left:
            names[key] = left
        else:
            names.pop(key, None)


def _deployment(kind: Kind, manifest: Manifest) -> str:
    named = manifest["spec"]["deploymentRef"]["name"] if kind == ADAPTER else manifest["metadata"].get("labels", {}).get(LABEL_DEPLOYMENT)
    return sys.intern(named or "")


def _encode(kind: Kind, manifest: Manifest) -> bytes:
    metadata = {name: value for name, value in manifest["metadata"].items() if name != "managedFields"}
    kept = manifest | {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata}
    if kind in (SERVICE, CONFIG_MAP, NETWORK_POLICY, DISRUPTION_BUDGET):
        metadata["managedFields"] = _managers(manifest)
    if kind == POD:
        spec = manifest.get("spec", {})
        containers = [{"name": one["name"], "image": one["image"]} for one in spec.get("containers", ())]
        gates = {"schedulingGates": spec["schedulingGates"]} if spec.get("schedulingGates") else {}
        kept["spec"] = {"nodeName": spec.get("nodeName", ""), "containers": containers, **gates}
    return zlib.compress(msgspec.json.encode(kept), _FAST)


def _managers(manifest: Manifest) -> list[dict[str, str]]:
    """Return the manager, operation and subresource of each entry; the fields are by far most of it."""
    kept = ("manager", "operation", "subresource")
    return [{name: entry[name] for name in kept if name in entry} for entry in manifest["metadata"].get("managedFields", ())]


def _decode(known: _Known) -> Manifest:
    manifest: Manifest = msgspec.json.decode(zlib.decompress(known.content))
    return manifest
