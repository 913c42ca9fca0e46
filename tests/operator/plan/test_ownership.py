# SPDX-License-Identifier: Apache-2.0
"""The owner of an object that has the name of a child: it decides every write, and the patches that follow."""

from datetime import UTC, datetime
from typing import Any

import pytest

from diffusion_operator.api.meta import ObjectMeta
from diffusion_operator.api.names import DEPLOYMENT, LABEL_DEPLOYMENT, LABEL_MANAGED_BY
from diffusion_operator.plan.observed.ownership import Ownership, as_if_applied, ownership, replace_whole, was_posted

OWNER = ObjectMeta(name="d", namespace="default", uid="now", creation_timestamp=datetime(2026, 1, 1, tzinfo=UTC))
LABELS = {LABEL_MANAGED_BY: "diffusion-operator", LABEL_DEPLOYMENT: "d"}


def reference(**changes: Any) -> dict[str, Any]:
    return {"apiVersion": DEPLOYMENT.api_version, "kind": DEPLOYMENT.kind, "name": "d", "uid": "now", "controller": True} | changes


def live(*owners: dict[str, Any], labels: dict[str, str] | None = LABELS, manager: str = "diffusion-operator") -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": "d", "uid": "1", "resourceVersion": "5", "managedFields": [{"manager": manager}]}
    return {"kind": "Service", "metadata": metadata | ({"labels": labels} if labels else {}) | {"ownerReferences": list(owners)}}


CASES: list[tuple[str, dict[str, Any], Ownership]] = [
    ("our object controls it", live(reference()), Ownership.OURS),
    ("without our labels", live(reference(), labels=None), Ownership.OURS),
    ("written by somebody else", live(reference(), manager="kubectl"), Ownership.OURS),
    ("ours is the second owner, and the controller", live(reference(uid="x", controller=False), reference()), Ownership.OURS),
    ("an earlier object controls it", live(reference(uid="then")), Ownership.LEAVING),
    ("an earlier object under an earlier version of the API", live(reference(uid="then", apiVersion="diffusion-operator.dev/v1")),
     Ownership.LEAVING),
    ("an object of another name", live(reference(uid="then", name="e")), Ownership.STRANGER),
    ("another kind of this name", live(reference(uid="then", kind="Deployment")), Ownership.STRANGER),
    ("the same kind of another group", live(reference(uid="then", apiVersion="other/v1")), Ownership.STRANGER),
    ("our object is an owner and somebody else the controller", live(reference(controller=False), reference(uid="x", name="x")),
     Ownership.STRANGER),
    ("nobody controls it", live(), Ownership.ORPHAN),
    ("our object is an owner and no controller", live(reference(controller=False)), Ownership.ORPHAN),
    ("another release made it", live(manager="diffusion-operator-canary"), Ownership.ORPHAN),
    ("nobody controls it, and kubectl made it", live(manager="kubectl"), Ownership.STRANGER),
    ("nobody controls it, without a label of ours", live(labels={LABEL_DEPLOYMENT: "d"}), Ownership.STRANGER),
    ("nobody controls it, with another deployment's label", live(labels={**LABELS, LABEL_DEPLOYMENT: "e"}), Ownership.STRANGER),
    ("nothing is known of it", {"metadata": {"name": "d"}}, Ownership.STRANGER),
]  # fmt: skip


@pytest.mark.parametrize(("found", "expected"), [row[1:] for row in CASES], ids=[row[0] for row in CASES])
def test_the_controller_decides_and_where_there_is_none_our_labels_and_manager_do(found: dict[str, Any], expected: Ownership) -> None:
    assert ownership(found, OWNER) is expected


def test_entries_of_creates_and_applies_become_one_of_applies_and_others_stay() -> None:
    ours = {"manager": "diffusion-operator", "apiVersion": "v1"}
    found = live(reference())
    found["metadata"]["managedFields"] = [
        ours | {"operation": "Update", "fieldsV1": {"f:spec": {"f:type": {}, "f:ports": {"k:80": {"f:name": {}}}}}},
        ours | {"operation": "Apply", "fieldsV1": {"f:spec": {"f:ports": {"k:80": {"f:port": {}}}}}},
        ours | {"operation": "Update", "subresource": "status", "fieldsV1": {"f:status": {}}},
        {"manager": "kubectl", "operation": "Update", "fieldsV1": {"f:metadata": {}}},
    ]
    assert was_posted(found)
    *bound, change = as_if_applied(found)
    assert [one["value"] for one in bound] == ["1", "5"]
    status, kubectl, merged = change["value"]
    assert (status["subresource"], kubectl["manager"]) == ("status", "kubectl")
    assert merged["operation"] == "Apply"
    assert merged["fieldsV1"] == {"f:spec": {"f:type": {}, "f:ports": {"k:80": {"f:name": {}, "f:port": {}}}}}
    found["metadata"]["managedFields"] = change["value"]
    assert not was_posted(found)


def test_lists_are_replaced_whole_and_what_others_added_beside_ours_stays() -> None:
    found = live(reference()) | {"spec": {"ports": [{"name": "http", "port": 8080, "nodePort": 30001}], "clusterIP": "10.0.0.1"}}
    wanted = {
        "kind": "Service",
        "metadata": {"name": "d", "labels": LABELS, "annotations": {"a/b": "1"}},
        "spec": {"ports": [{"name": "http", "port": 80}], "selector": {"x": "y"}},
    }
    operations = {one["path"]: one["value"] for one in replace_whole(found, wanted)}
    assert operations["/spec/ports"] == [{"name": "http", "port": 80, "nodePort": 30001}], "a node's port is an address, too"
    assert operations["/spec/selector"] == {"x": "y"}
    assert operations["/metadata/annotations"] == {"a/b": "1"}, "there are none yet"
    assert operations[f"/metadata/labels/{LABEL_DEPLOYMENT.replace('/', '~1')}"] == "d"
    assert "/spec" not in operations
    assert operations["/metadata/uid"] == "1"
    assert operations["/metadata/resourceVersion"] == "5"
