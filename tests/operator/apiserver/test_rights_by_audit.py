# SPDX-License-Identifier: Apache-2.0
"""Calls of the operator's account on a real API server, compared with the chart's rights: nothing is refused, and nothing is granted
unused.

The operator is the real program under the chart's own account, in a namespace that enforces the restricted profile. A pod has a real
worker, started by hand because there is no kubelet.
"""

import copy
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.render.control_secret import control_token
from support.apiserver.audited_apiserver import AuditedApiserver, audited_apiserver
from support.apiserver.real_apiserver import kubectl
from support.cluster.audit import BY_ADMISSION, SECURITY_PAGE, Right, documented, granted
from support.operator.chart_rendering import NAMESPACE, Chart, Document, of_kind, pod_specs, role_of_objects, the_only
from support.worker.process import DIGITS, DIGITS_MODEL, FAKE_PROGRAM, WorkerProcess
from tools.devcluster import programs

pytestmark = pytest.mark.apiserver

TEAM, SECOND, GPUS = "team", "second", "gpus"
NOW = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
OLD, NEW = "o" * 32, "n" * 32
WORKER_IP = "127.31.0.1"  # an address of the pod's own, so that the control port can be the usual one
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
ADAPTER: Document = {
    "apiVersion": API,
    "kind": "LoRAAdapter",
    "metadata": {"name": "x", "namespace": TEAM},
    "spec": {"deploymentRef": {"name": "d"}, "source": {"path": str(DIGITS / "loras" / "frame")}},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[AuditedApiserver]:
    with audited_apiserver(Chart(programs.helm())) as running:
        for name in (NAMESPACE, TEAM):
            running.namespace(name)
        yield running


# Changes by another client; the operator undoes each.
EDITS: tuple[tuple[str, str, Document], ...] = (("networkpolicy", "d-control", {"ingress": []}), ("pdb", "d", {"maxUnavailable": 3}))


class Team:
    """The namespace of a team of users, with helpers that run kubectl in it and report its pods as running."""

    def __init__(self, cluster: AuditedApiserver, namespace: str = TEAM) -> None:
        self._cluster, self._namespace = cluster, namespace

    def kubectl(self, *words: str) -> str:
        return self._cluster.kubectl("--namespace", self._namespace, *words)

    def get(self, kind: str, name: str) -> Any:
        text = self.kubectl("get", kind, name, "--output=json", "--ignore-not-found")
        return json.loads(text) if text else None

    def names(self, kind: str) -> list[str]:
        return [line.partition("/")[2] for line in self.kubectl("get", kind, "--output=name").split()]

    def patch(self, **spec: Any) -> None:
        self.kubectl("patch", "dd", "d", "--type=merge", "--patch", json.dumps({"spec": spec}))

    def reason(self, kind: str, name: str, condition: str = "Ready") -> str:
        conditions = (self.get(kind, name) or {}).get("status", {}).get("conditions", [])
        return next((one["reason"] for one in conditions if one["type"] == condition), "")

    def message(self, kind: str, name: str, condition: str = "Ready") -> str:
        conditions = (self.get(kind, name) or {}).get("status", {}).get("conditions", [])
        return next((one["message"] for one in conditions if one["type"] == condition), "")

    def warn(self, pod: str, reason: str, message: str) -> None:
        """Write a Warning about a pod, as a kubelet does."""
        about = {"kind": "Pod", "namespace": self._namespace, "name": pod, "uid": self.get("pod", pod)["metadata"]["uid"]}
        event = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": f"{pod}.1", "namespace": self._namespace}, "type": "Warning"}
        self._cluster.apply(event | {"reason": reason, "message": message, "lastTimestamp": NOW, "involvedObject": about})

    def run_pod(self, name: str) -> None:
        """Write the status of a running pod, as a scheduler and a kubelet do."""
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": {"kind": "Node", "name": "node"}}
        path = f"/api/v1/namespaces/{self._namespace}/pods/{name}/binding"
        self._cluster.kubectl("create", "--raw", path, "-f", "-", stdin=json.dumps(binding))
        status = {
            "phase": "Running",
            "podIP": WORKER_IP,
            "podIPs": [{"ip": WORKER_IP}],
            "conditions": [{"type": kind, "status": "True"} for kind in ("PodScheduled", "Ready")],
            "containerStatuses": [
                {"name": "worker", "ready": True, "restartCount": 0, "image": "i", "imageID": "i", "state": {"running": {}}},
            ],
        }  # fmt: skip
        self.kubectl("patch", "pod", name, "--subresource=status", "--type=merge", "--patch", json.dumps({"status": status}))

    def token(self, key: str) -> str:
        metadata = msgspec.convert(self.get("dd", "d"), DiffusionDeployment).metadata
        return control_token(key.encode(), metadata)


def live(cluster: AuditedApiserver, team: Team, documents: list[Document]) -> None:
    """Take a deployment through its life: adapters, scaling, sleep, options, repairs, a rotated key and its deletion. Each step is
    awaited."""
    options = (f"--host={WORKER_IP}", "--control-port=8001")
    with cluster.operator(documents, [OLD]) as operator:
        cluster.apply(DEPLOYMENT, ADAPTER)
        operator.eventually(lambda: "d-0-0" in team.names("pods"))
        team.warn("d-0-0", "FailedMount", "configmap authority not found")
        operator.eventually(lambda: "replica 0: FailedMount: configmap authority not found" in team.message("dd", "d"), within_s=120.0)
        print(team.kubectl("describe", "dd", "d"))
        own = {"DIFFUSION_POD_UID": team.get("pod", "d-0-0")["metadata"]["uid"]}
        with WorkerProcess(DIGITS_MODEL, program=FAKE_PROGRAM, token=team.token(OLD), options=options, env=own) as worker:
            worker.control_url = f"http://{WORKER_IP}:8001"
            team.run_pod("d-0-0")
            operator.eventually(lambda: team.reason("dd", "d") == "Serving")
            operator.eventually(lambda: team.reason("lora", "x") == "LoadedEverywhere")
            team.kubectl("scale", "dd", "d", "--replicas=2")
            operator.eventually(lambda: "d-1-0" in team.names("pods"))
            team.kubectl("scale", "dd", "d", "--replicas=1")
            operator.eventually(lambda: team.names("pods") == ["d-0-0"])
            team.patch(sleep={"policy": "OnIdle"}, control={"networkPolicy": "None"}, podDisruptionBudget="None")
            operator.eventually(lambda: team.names("networkpolicies") == team.names("poddisruptionbudgets") == [])
            team.patch(control={"networkPolicy": "Managed"}, podDisruptionBudget="Auto")
            operator.eventually(lambda: team.names("networkpolicies") and team.names("poddisruptionbudgets"))
            assert team.reason("dd", "d", "ControlSecured") == "TokenAndPolicy"
            team.patch(service={"port": 8080})
            operator.eventually(lambda: team.get("service", "d")["spec"]["ports"][0]["port"] == 8080)
            for kind, name, change in EDITS:
                team.kubectl("patch", kind, name, "--type=merge", "--patch", json.dumps({"spec": change}))
                operator.eventually(lambda kind=kind, name=name, change=change: not change.items() <= team.get(kind, name)["spec"].items())
            rotate(cluster, team, documents, worker)


def rotate(cluster: AuditedApiserver, team: Team, documents: list[Document], worker: WorkerProcess) -> None:
    """Start an operator with a new key, wait until the token has changed, and delete the adapter and the deployment."""
    before = team.get("secret", "d-control")["data"]
    with cluster.operator(documents, [NEW, OLD]) as operator:
        operator.eventually(lambda: team.get("secret", "d-control")["data"] != before)
        worker.write_token(team.token(NEW))
        team.kubectl("delete", "lora", "x")
        operator.eventually(lambda: not worker.control("GET", "/v1/state", token=team.token(NEW)).json()["adapters"])
        team.kubectl("delete", "dd", "d")
        operator.eventually(lambda: not team.get("dd", "d"))


def test_every_right_of_the_role_is_used_and_nothing_else_is_asked_for(cluster: AuditedApiserver) -> None:
    documents = cluster.rendered(watchNamespaces=[TEAM])
    cluster.give_rights(documents)
    live(cluster, Team(cluster), documents)
    account = the_only(documents, "ServiceAccount")["metadata"]["name"]
    rights, usage = set[Right]().union(*map(granted, of_kind(documents, "Role"))), cluster.usage(account)
    print(usage.table(rights))
    assert usage.refused == []
    used = set(usage.used)
    assert used - rights == set(), "allowed by something else than the chart's role"
    # No request needs this right by itself; the next test shows the check that does.
    assert rights - used == {BY_ADMISSION}
    assert documented() == rights, "the table of docs/security.md"


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
    with cluster.operator(documents, [OLD]) as operator:
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
    with cluster.operator(documents, [OLD]) as operator:
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


def test_a_replica_without_a_gpu_names_the_deployment_that_sleeps_with_one(cluster: AuditedApiserver) -> None:
    """Let a deployment sleep with the only GPU, by a worker that is real but for its model, and another one wait for it."""
    documents = cluster.rendered(fullnameOverride="gpus", watchNamespaces=[GPUS])
    cluster.namespace(GPUS)
    cluster.give_rights(documents)
    team = Team(cluster, GPUS)
    with cluster.operator(documents, [OLD]) as operator:
        sleeper = DEPLOYMENT | {"metadata": {"name": "d", "namespace": GPUS}, "spec": {"model": DEPLOYMENT["spec"]["model"]}}
        cluster.apply(sleeper)
        operator.eventually(lambda: "d-0-0" in team.names("pods"))
        options = (f"--host={WORKER_IP}", "--control-port=8001")
        own = {"DIFFUSION_POD_UID": team.get("pod", "d-0-0")["metadata"]["uid"]}
        with WorkerProcess(DIGITS_MODEL, program=FAKE_PROGRAM, token=team.token(OLD), options=options, env=own) as worker:
            worker.control_url = f"http://{WORKER_IP}:8001"
            team.run_pod("d-0-0")
            operator.eventually(lambda: team.reason("dd", "d") == "Serving")
            team.patch(sleep={"policy": "Asleep"})
            operator.eventually(lambda: team.reason("dd", "d", "Awake") == "AllAsleep")
            cluster.apply(sleeper | {"metadata": {"name": "second", "namespace": GPUS}})
            operator.eventually(lambda: "second-0-0" in team.names("pods"))
            waits = {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": "0/1 nodes: 1 Insufficient nvidia.com/gpu.",
            }
            change = json.dumps({"status": {"conditions": [waits]}})
            team.kubectl("patch", "pod", "second-0-0", "--subresource=status", "--type=merge", "--patch", change)
            operator.eventually(lambda: "in this namespace d (1)" in team.message("dd", "second"))
            assert "no pod is behind the Service" in team.message("dd", "second")
            assert "in this namespace d (1)" in team.message("dd", "second", "Scheduled")
            print(team.kubectl("describe", "dd", "second"))
            team.kubectl("delete", "dd", "d", "second", "--wait=false")


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
