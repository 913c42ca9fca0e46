# SPDX-License-Identifier: Apache-2.0
"""The owner of an object that has the name of one of our children, which decides every write to it.

Names of children are not random, so an object of a team, or of an earlier deployment of the same name, may have one.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

from diffusion_operator.api.meta import ObjectMeta
from diffusion_operator.api.names import DEPLOYMENT, FIELD_MANAGER, LABEL_DEPLOYMENT, LABEL_MANAGED_BY

Operation = dict[str, Any]
"""An operation of a JSON patch (RFC 6902)."""

UPDATE, APPLY = "Update", "Apply"


class Ownership(StrEnum):
    OURS = "Ours"
    """Our object is its controller."""
    LEAVING = "Leaving"
    """An earlier object of our name is its controller; the garbage collector will remove it."""
    ORPHAN = "Orphan"
    """The operator made it for an object of this name, and nobody controls it."""
    STRANGER = "Stranger"
    """Anything else. It is never written, deleted, or read into a status."""


def ownership(live: Mapping[str, Any], owner: ObjectMeta) -> Ownership:
    """Return whose a live object is that has the name of a child of `owner`. Without its managedFields an orphan counts as a stranger's."""
    metadata = live["metadata"]
    controller = controller_of(live)
    if controller is None:
        orphan = has_our_labels(metadata, owner.name) and any(_is_our_manager(entry) for entry in metadata.get("managedFields", ()))
        return Ownership.ORPHAN if orphan else Ownership.STRANGER
    if controller.get("uid") == owner.uid:
        return Ownership.OURS
    group = str(controller.get("apiVersion", "")).rpartition("/")[0]
    earlier = (group, controller.get("kind"), controller.get("name")) == (DEPLOYMENT.group_and_version[0], DEPLOYMENT.kind, owner.name)
    return Ownership.LEAVING if earlier else Ownership.STRANGER


def controller_of(live: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the owner reference that controls an object, which has one at most; None without one."""
    return next((one for one in live["metadata"].get("ownerReferences", ()) if one.get("controller")), None)


def is_controlled_by(live: Mapping[str, Any], uid: str) -> bool:
    """Return whether the object with this UID controls the live object."""
    controller = controller_of(live)
    return controller is not None and controller.get("uid") == uid


def has_our_labels(metadata: Mapping[str, Any], deployment: str) -> bool:
    """Return whether an object is labelled as managed by the operator and as belonging to `deployment`."""
    labels = metadata.get("labels", {})
    return all(labels.get(name) == value for name, value in _our_labels(deployment).items())


def was_posted(live: Mapping[str, Any]) -> bool:
    """Return whether managedFields show a create or patch by the operator, whose fields server-side apply would never remove."""
    return any(_is_our_update(entry) for entry in live["metadata"].get("managedFields", ()))


def as_if_applied(live: Mapping[str, Any]) -> list[Operation]:
    """Build a patch of managedFields that turns the fields we created or patched into applied ones, as client-go's `csaupgrade` does.

    Otherwise no later apply could remove them: server-side apply removes only fields that the same manager applied before. All our entries
    become one. Call it only if `was_posted`. The patch fails on any other version of the object.
    """
    entries: Sequence[Mapping[str, Any]] = live["metadata"].get("managedFields", ())
    ours = [entry for entry in entries if _is_our_update(entry) or _is_our_apply(entry)]
    others = [entry for entry in entries if entry not in ours]
    fields: dict[str, Any] = {}
    for entry in ours:
        _unite(fields, entry.get("fieldsV1", {}))
    merged = {**ours[0], "manager": FIELD_MANAGER, "operation": APPLY, "fieldsV1": fields}
    return [*_of_this_version(live), {"op": "replace", "path": "/metadata/managedFields", "value": [*others, merged]}]


def replace_whole(live: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[Operation]:
    """Build a patch that sets each rendered field of a live child as a whole, so that lists and maps are replaced, not merged.

    Server-side apply merges lists by key, and the result may contradict itself. Fields that we do not render are kept, as are labels and
    annotations of others and the node ports of a Service. The patch fails on any other version of the object.
    """
    operations = _of_this_version(live)
    for section, content in wanted["metadata"].items():
        if section in ("labels", "annotations"):
            operations += _members(live["metadata"], "/metadata", section, content)
        elif section == "ownerReferences":
            operations.append({"op": "add", "path": "/metadata/ownerReferences", "value": content})
    for section, content in wanted.items():
        if section in ("apiVersion", "kind", "metadata", "type"):
            continue
        operations += _members(live, "", section, _with_node_ports(live, content) if section == "spec" else content)
    return operations


def secret_is_ours(owner: ObjectMeta) -> list[Operation]:
    """Return a patch that changes nothing and fails where our object is not the Secret's first owner: a look without the right to read."""
    return [{"op": "test", "path": "/metadata/ownerReferences/0/uid", "value": owner.uid}]


def secret_is_leaving(owner: ObjectMeta) -> list[Operation]:
    """Return a patch that changes nothing and fails where the Secret's first owner is not a deployment of our name.

    It does not tell an earlier object of that name from ours.
    """
    first = "/metadata/ownerReferences/0"
    return [
        {"op": "test", "path": f"{first}/kind", "value": DEPLOYMENT.kind},
        {"op": "test", "path": f"{first}/name", "value": owner.name},
    ]


def adopt_secret(owner: ObjectMeta, references: Sequence[Mapping[str, Any]]) -> list[Operation]:
    """Return the patch that adopts a Secret, and fails where it has an owner or lacks one of our labels."""
    labels = [
        {"op": "test", "path": f"/metadata/labels/{_escape(name)}", "value": value} for name, value in _our_labels(owner.name).items()
    ]
    free = {"op": "test", "path": "/metadata/ownerReferences", "value": None}
    return [free, *labels, {"op": "add", "path": "/metadata/ownerReferences", "value": list(references)}]


def adopt(live: Mapping[str, Any], reference: Mapping[str, Any]) -> list[Operation]:
    """Return the patch that adds our object as the controller of an orphan. It holds for this version of the object only."""
    others = [dict(one) for one in live["metadata"].get("ownerReferences", ())]
    return [*_of_this_version(live), {"op": "add", "path": "/metadata/ownerReferences", "value": [*others, dict(reference)]}]


def _of_this_version(live: Mapping[str, Any]) -> list[Operation]:
    """Return the operations that bind a patch to the UID and resourceVersion of `live`.

    The API server answers a patch of a replaced or changed object with 409.
    """
    metadata = live["metadata"]
    return [{"op": "replace", "path": f"/metadata/{name}", "value": metadata[name]} for name in ("uid", "resourceVersion")]


def _members(live: Mapping[str, Any], parent: str, section: str, content: Any) -> Iterator[Operation]:
    """Yield operations that set a map member by member, because others may own some.

    A list, and a map where there is none yet, is set whole.
    """
    if not isinstance(content, Mapping) or not live.get(section):
        yield {"op": "add", "path": f"{parent}/{section}", "value": content}
        return
    for name, value in content.items():
        yield {"op": "add", "path": f"{parent}/{section}/{_escape(name)}", "value": value}


def _with_node_ports(live: Mapping[str, Any], spec: Any) -> Any:
    """Return the spec of a Service with the node ports of the live one, by the ports' names; clients may know only those.

    Any other spec is returned unchanged.
    """
    if live.get("kind") != "Service" or "ports" not in spec:
        return spec
    known = {port.get("name"): port["nodePort"] for port in live.get("spec", {}).get("ports", ()) if "nodePort" in port}
    ports = [port | ({"nodePort": known[port["name"]]} if port["name"] in known else {}) for port in spec["ports"]]
    return spec | {"ports": ports}


def _unite(fields: dict[str, Any], more: Mapping[str, Any]) -> None:
    for name, value in more.items():
        _unite(fields.setdefault(name, {}), value)


def _our_labels(deployment: str) -> dict[str, str]:
    return {LABEL_MANAGED_BY: FIELD_MANAGER, LABEL_DEPLOYMENT: deployment}


def _is_our_manager(entry: Mapping[str, Any]) -> bool:
    """Return whether the manager's name begins with ours."""
    return str(entry.get("manager", "")).startswith(FIELD_MANAGER)


def _is_our_update(entry: Mapping[str, Any]) -> bool:
    return entry.get("manager") == FIELD_MANAGER and entry.get("operation") == UPDATE and not entry.get("subresource")


def _is_our_apply(entry: Mapping[str, Any]) -> bool:
    return entry.get("manager") == FIELD_MANAGER and entry.get("operation") == APPLY and not entry.get("subresource")


def _escape(name: str) -> str:
    """Escape a member's name for a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")
