# SPDX-License-Identifier: Apache-2.0
"""A fake of the parts of server-side apply and of JSON patches that the operator relies on.

Real: nothing; test_cluster_on_real_apiserver.py has the real ones. A field is removed by an apply if an earlier apply of the same
manager set it. Lists and selectors are taken whole, also the ports of a Service, which a real server merges by number.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from diffusion_operator.api.names import FIELD_MANAGER
from diffusion_operator.errors import ClusterConflict, ClusterRefused

Manifest = dict[str, Any]
Path = tuple[str, ...]
_SERVERS = ("name", "namespace", "uid", "resourceVersion", "generation", "creationTimestamp", "managedFields", "deletionTimestamp")


def entry(manifest: Manifest, operation: str, *, manager: str = FIELD_MANAGER) -> Manifest:
    """Return an entry of managedFields for all fields in a manifest, but for its status and the metadata that only a server sets."""
    metadata = {name: value for name, value in manifest["metadata"].items() if name not in _SERVERS}
    content = {name: value for name, value in manifest.items() if name not in ("apiVersion", "kind", "status")}
    fields = _fields(content | {"metadata": metadata})
    return {"manager": manager, "operation": operation, "apiVersion": manifest["apiVersion"], "fieldsV1": fields}


def applied(live: Manifest, manifest: Manifest) -> Manifest:
    """Return the object after a forced apply of `manifest`; the given object stays as it is.

    ClusterConflict if `manifest` has another uid or resourceVersion.
    """
    _check_bound(live, manifest["metadata"])
    result, fresh = copy.deepcopy(live), entry(manifest, "Apply")
    entries = result["metadata"].get("managedFields", [])
    earlier = [one for one in entries if (one["manager"], one["operation"]) == (FIELD_MANAGER, "Apply")]
    kept = {path for one in entries if one not in earlier for path in _paths(one["fieldsV1"])} | set(_paths(fresh["fieldsV1"]))
    for path in [path for one in earlier for path in _paths(one["fieldsV1"]) if path not in kept]:
        _remove(result, path)
    _merge(result, manifest)
    result["metadata"]["managedFields"] = [*(one for one in entries if one not in earlier), fresh]
    return result


def patched(live: Manifest, operations: Sequence[Mapping[str, Any]]) -> Manifest:
    """Apply a JSON patch of `test`, `add` and `replace` operations to a copy of the object, and return the copy.

    ClusterRefused if a test fails or a parent is missing; ClusterConflict for another uid or resourceVersion.
    """
    result = copy.deepcopy(live)
    for one in operations:
        *parents, last = [part.replace("~1", "/").replace("~0", "~") for part in one["path"].split("/")[1:]]
        at: Any = result
        for part in parents:
            at = _member(at, part)
        value = copy.deepcopy(one["value"])
        if one["op"] == "test":
            if _member(at, last) != value:
                raise ClusterRefused("the server rejected our request due to an error in our request", status=422, reason="Invalid")
        elif not isinstance(at, dict):
            raise ClusterRefused(f"{one['op']} operation does not apply: doc is missing path: {one['path']}", status=422, reason="Invalid")
        else:
            at[last] = value
    _check_bound(live, result["metadata"])
    return result


def _check_bound(live: Manifest, metadata: Mapping[str, Any]) -> None:
    for name in ("uid", "resourceVersion"):
        if metadata.get(name, live["metadata"][name]) != live["metadata"][name]:
            raise ClusterConflict(f"the {name} in the precondition is not the object's", status=409, reason="Conflict")


def _member(at: Any, part: str) -> Any:
    if isinstance(at, list):
        return at[int(part)] if int(part) < len(at) else None
    return at.get(part) if isinstance(at, dict) else None


def _fields(value: Any, path: Path = ()) -> Manifest:
    if isinstance(value, dict) and path[-1:] != ("selector",):
        return {f"f:{name}": _fields(each, (*path, name)) for name, each in value.items()}
    return {}


def _paths(fields: Mapping[str, Any], path: Path = ()) -> Iterator[Path]:
    for name, below in fields.items():
        yield from _paths(below, (*path, name)) if below else [(*path, name)]


def _remove(manifest: Manifest, path: Path) -> None:
    at: Any = manifest
    for name in path[:-1]:
        at = at.get(name.removeprefix("f:"), {})
    at.pop(path[-1].removeprefix("f:"), None)


def _merge(result: Manifest, manifest: Mapping[str, Any]) -> None:
    for name, value in manifest.items():
        if isinstance(value, dict) and isinstance(result.get(name), dict) and name != "selector":
            _merge(result[name], value)
        else:
            result[name] = copy.deepcopy(value)
