# SPDX-License-Identifier: Apache-2.0
"""Calls of the operator's account on a real API server, compared with the chart's rights.

The operator is the real program under the chart's own account, in a namespace that enforces the restricted profile. That each right is
used, and nothing is refused, is seen at the end of the tests on a cluster.
"""

import copy
import json
from collections.abc import Callable, Iterator

import pytest

from support.apiserver.audited_apiserver import AuditedApiserver, audited_apiserver
from support.apiserver.real_apiserver import kubectl
from support.cluster.audit import BY_ADMISSION, SECURITY_PAGE, Right, documented, granted
from support.operator.chart_rendering import NAMESPACE, Chart, Document, of_kind, pod_specs, role_of_objects
from tools.devcluster import programs

pytestmark = pytest.mark.apiserver

TEAM, SECOND = "team", "second"
KEY = "k" * 32
API = "diffusion-operator.dev/v1alpha1"
DEPLOYMENT: Document = {
    "apiVersion": API,
    "kind": "DiffusionDeployment",
    "metadata": {"name": "d", "namespace": TEAM},
    "spec": {
        "model": {"source": {"path": "/models/digits"}},
        "engine": {"pullSecrets": [{"name": "registry"}]},
        "resources": {"gpuResourceName": "none"},
        "podMetadata": {"labels": {"team": "images"}, "annotations": {"example.com/scrape": "yes"}},
        "service": {"apiKeySecret": {"name": "edge"}, "annotations": {"example.com/class": "internal"}},
        "scheduling": {
            "nodeSelector": {"pool": "gpu"},
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
            "topologySpread": [{"topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}],
            "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "host"}]}},
        },
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[AuditedApiserver]:
    with audited_apiserver(Chart(programs.helm())) as running:
        for name in (NAMESPACE, TEAM):
            running.namespace(name)
        yield running


class Team:
    """The namespace of a team of users, with helpers that run kubectl in it."""

    def __init__(self, cluster: AuditedApiserver, namespace: str = TEAM) -> None:
        self._cluster, self._namespace = cluster, namespace

    def kubectl(self, *words: str) -> str:
        return self._cluster.kubectl("--namespace", self._namespace, *words)

    def names(self, kind: str) -> list[str]:
        return [line.partition("/")[2] for line in self.kubectl("get", kind, "--output=name").split()]


def test_the_documented_rights_are_those_of_the_chart_and_say_what_a_patch_of_secrets_means(cluster: AuditedApiserver) -> None:
    rights = set[Right]().union(*map(granted, of_kind(cluster.rendered(), "Role")))
    assert documented() == rights
    secrets = {right.verb for right in rights if right.resource == "secrets"}
    assert secrets == {"create", "patch"}
    assert "a right to patch Secrets is a right to read those whose names are known" in SECURITY_PAGE.read_text()


def test_where_owner_references_are_checked_a_child_takes_the_right_to_its_owners_finalizers(cluster: AuditedApiserver) -> None:
    """Check that a child is refused without the right to its owner's finalizers. This API server checks owner references, as OpenShift
    does."""
    documents = copy.deepcopy(cluster.rendered(fullnameOverride="poor", watchNamespaces=[TEAM]))
    role = role_of_objects(documents)
    role["rules"] = [rule for rule in role["rules"] if BY_ADMISSION.resource not in rule["resources"]]
    cluster.give_rights(documents)
    owner = {"apiVersion": API, "kind": "DiffusionDeployment", "name": "d", "uid": "u", "controller": True, "blockOwnerDeletion": True}
    metadata = {"name": "owned", "namespace": TEAM, "ownerReferences": [owner]}
    child = json.dumps({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})
    with pytest.raises(AssertionError, match="cannot set blockOwnerDeletion"):
        kubectl(cluster.kubeconfig_of("poor"), "create", "-f", "-", stdin=child)


def test_in_every_namespace_it_asks_for_no_more_than_its_cluster_role_gives(cluster: AuditedApiserver) -> None:
    documents = cluster.rendered(fullnameOverride="wide", watchNamespaces=["*"])
    cluster.give_rights(documents)
    team = Team(cluster)
    with cluster.operator(documents, [KEY]) as operator:
        cluster.apply(DEPLOYMENT | {"metadata": {"name": "e", "namespace": TEAM}})
        operator.eventually(lambda: "e-0-0" in team.names("pods"))
        team.kubectl("delete", "dd", "e", "--wait=false")
    (role,) = (one for one in of_kind(documents, "ClusterRole") if one["metadata"]["name"] == f"wide-{NAMESPACE}")
    usage = cluster.usage("wide")
    assert usage.refused == []
    assert Right("", "pods", "create") in usage.used
    leases = {right for right in usage.used if right.resource == "leases"}
    assert set(usage.used) - leases <= granted(role) == granted(role_of_objects(cluster.rendered()))


def test_a_namespace_that_took_the_rights_with_it_is_set_aside_and_taken_up_when_they_are_back(cluster: AuditedApiserver) -> None:
    """Remove and restore the binding, as happens when a namespace is deleted and made again; this server cannot empty a namespace.

    The other namespace must be served meanwhile.
    """
    documents = cluster.rendered(fullnameOverride="two", watchNamespaces=[TEAM, SECOND])
    cluster.namespace(SECOND)
    cluster.give_rights(documents)
    cluster.kubectl("delete", "rolebinding", f"two-{NAMESPACE}", "--namespace", SECOND)
    team, second = Team(cluster), Team(cluster, SECOND)
    with cluster.operator(documents, [KEY]) as operator:
        for place in (TEAM, SECOND):
            cluster.apply(DEPLOYMENT | {"metadata": {"name": "f", "namespace": place}})
        operator.eventually(lambda: "f-0-0" in team.names("pods"))
        refused = {key for key, value in operator.metrics().items() if key.startswith("diffusion_operator_watch_refused") and value}
        assert refused
        assert all(f'object_namespace="{SECOND}"' in one for one in refused)
        assert second.names("pods") == []
        operator.eventually(lambda: "the operator cannot list objects in namespace second" in notes_of(cluster, "NamespaceRefused"))
        cluster.give_rights(documents)
        operator.eventually(lambda: "f-0-0" in second.names("pods"))
        for place in (team, second):
            place.kubectl("delete", "dd", "f", "--wait=false")


def notes_of(cluster: AuditedApiserver, reason: str) -> str:
    """Return the Events with this reason in the operator's own namespace, as YAML."""
    return cluster.kubectl("--namespace", NAMESPACE, "get", "events", "--field-selector", f"reason={reason}", "--output=yaml")


PEOPLE = [
    # role, verb, resource, may
    ("view", "list", "diffusiondeployments", True),
    ("view", "watch", "loraadapters", True),
    ("view", "create", "loraadapters", False),
    ("view", "patch", "diffusiondeployments/scale", False),
    ("edit", "create", "diffusiondeployments", True),
    ("edit", "deletecollection", "loraadapters", True),
    ("edit", "patch", "diffusiondeployments/scale", True),
    ("edit", "patch", "diffusiondeployments/status", False),
    ("edit-adapters", "create", "loraadapters", True),
    ("edit-adapters", "delete", "loraadapters", True),
    ("edit-adapters", "get", "diffusiondeployments", True),
    ("edit-adapters", "patch", "diffusiondeployments", False),
    ("edit-adapters", "patch", "diffusiondeployments/scale", False),
    ("edit-adapters", "patch", "loraadapters/status", False),
]


@pytest.fixture(scope="module")
def people(cluster: AuditedApiserver) -> Callable[[str], str]:
    """Give a user each of the chart's roles for people, in the team's namespace. Provide a function from the role to its user's name."""
    documents = cluster.rendered(fullnameOverride="people")
    cluster.give_rights([one for one in documents if one["kind"] == "ClusterRole"])
    group = "rbac.authorization.k8s.io"
    for role in {row[0] for row in PEOPLE}:
        cluster.apply(
            {
                "apiVersion": f"{group}/v1",
                "kind": "RoleBinding",
                "metadata": {"name": f"of-{role}", "namespace": TEAM},
                "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": f"people-{NAMESPACE}-{role}"},
                "subjects": [{"apiGroup": group, "kind": "User", "name": f"of-{role}"}],
            }
        )
    return lambda role: f"of-{role}"


@pytest.mark.parametrize(("role", "verb", "resource", "may"), PEOPLE, ids=str)
def test_people_may_do_what_their_role_is_named_after(
    cluster: AuditedApiserver, people: Callable[[str], str], role: str, verb: str, resource: str, may: bool
) -> None:
    assert cluster.may(people(role), verb, resource, namespace=TEAM) is may
    assert not cluster.may(people(role), verb, resource, namespace=NAMESPACE), "bound in another namespace"


def test_the_charts_own_pods_are_let_into_a_namespace_that_enforces_the_restricted_profile(cluster: AuditedApiserver) -> None:
    documents = cluster.rendered()
    for name, spec in pod_specs(documents):
        cluster.try_pod({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec})
    spec = copy.deepcopy(dict(pod_specs(documents))["demo-diffusion-operator"])
    spec["containers"][0]["securityContext"]["allowPrivilegeEscalation"] = True
    with pytest.raises(AssertionError, match="violates PodSecurity"):
        cluster.try_pod({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "other", "namespace": NAMESPACE}, "spec": spec})
