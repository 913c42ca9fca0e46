# SPDX-License-Identifier: Apache-2.0
"""The cluster tests' reading of the API server's audit log at their end."""

from itertools import count
from typing import Any

from support.cluster.audit import Right, usage
from tools.demo.kubectl import Document

OPERATOR = "system:serviceaccount:team:diffusion-operator"
HELM = "kubernetes-admin"
NAMESPACES = "system:serviceaccount:kube-system:namespace-controller"
BINDING = "diffusion-operator-team"
REFUSED = {"code": 403, "message": "cannot"}
_seconds = count(10)


def entry(verb: str, resource: str, *, by: str = OPERATOR, answer: Document | None = None, **about: Any) -> Document:
    """Make an audit event about an object in the namespace `team`, a second after the previous event.

    `about` adds to the object's reference or replaces parts of it.
    """
    second = next(_seconds)
    return {
        "auditID": str(second),
        "requestReceivedTimestamp": f"2026-01-01T00:{second // 60:02}:{second % 60:02}.000000Z",
        "user": {"username": by},
        "verb": verb,
        "objectRef": {"resource": resource, "namespace": "team"} | about,
        "responseStatus": answer or {"code": 200},
    }


def test_each_right_is_counted_and_an_apply_that_makes_something_takes_two() -> None:
    made = entry("patch", "services", answer={"code": 201})
    watched = entry("watch", "pods")
    asked = [made, entry("patch", "services"), watched, watched | {"stage": "ResponseComplete"}, entry("list", "secrets", by=HELM)]
    found = usage(asked)
    assert found.used == {Right("", "services", "patch"): 2, Right("", "services", "create"): 1, Right("", "pods", "watch"): 1}
    assert found.refused == []
    assert "       0 delete pods" in found.table({Right("", "pods", "delete")})


def test_a_refusal_counts_for_as_long_as_the_account_has_its_rights() -> None:
    refusals = [entry("get", "secrets", answer=REFUSED)]
    taken = entry("delete", "rolebindings", by=HELM, name=BINDING)
    late = entry("patch", "pods", answer=REFUSED)
    given = entry("create", "rolebindings", by=HELM, name=BINDING)
    refusals.append(entry("get", "nodes", answer=REFUSED))
    ended = entry("deletecollection", "rolebindings", by=NAMESPACES)
    last = entry("list", "pods", answer=REFUSED)
    elsewhere = entry("list", "services", answer=REFUSED, namespace="other")
    found = usage([last, elsewhere, ended, given, late, taken, *refusals])
    assert [line.split()[:1] + line.split("'")[3:4] for line in found.refused] == [
        ["get", "secrets"],
        ["get", "nodes"],
        ["list", "services"],
    ]


def test_a_namespace_that_ends_may_refuse_and_a_binding_of_somebody_else_means_nothing() -> None:
    ends = {"code": 403, "details": {"causes": [{"reason": "NamespaceTerminating"}]}}
    others = entry("delete", "rolebindings", by=HELM, name="another")
    assert usage([entry("create", "pods", answer=ends)]).refused == []
    assert len(usage([others, entry("create", "pods", answer=REFUSED)]).refused) == 1
