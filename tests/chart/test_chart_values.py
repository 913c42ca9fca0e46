# SPDX-License-Identifier: Apache-2.0
"""The values of the chart: each has the effect that values.yaml documents, and the schema refuses everything else."""

import base64
import hashlib
import json
from typing import Any

import pytest
import yaml

from support.operator.chart_rendering import (
    CHART,
    KUBERNETES,
    NAMESPACE,
    Chart,
    Document,
    RenderError,
    leaves,
    of_kind,
    pod_specs,
    role_of_objects,
    the_only,
)

LEASE = f"diffusion-operator-{hashlib.sha256(NAMESPACE.encode()).hexdigest()[:10]}"
NO_NAMESPACE_RIGHTS = {"Role", "RoleBinding"}


def operator_pod(documents: list[Document]) -> dict[str, Any]:
    spec: dict[str, Any] = the_only(documents, "Deployment")["spec"]["template"]["spec"]
    return spec


def operator_container(documents: list[Document]) -> dict[str, Any]:
    (container,) = operator_pod(documents)["containers"]
    assert isinstance(container, dict)
    return container


def operator_arguments(documents: list[Document]) -> list[str]:
    arguments: list[str] = operator_container(documents)["args"]
    return arguments


def test_the_operator_is_started_with_the_release_namespace_by_default(chart: Chart) -> None:
    documents = chart.documents()
    assert operator_arguments(documents) == [
        *("run", "--engine-image", "registry.example/diffusion-worker:0.1.0", "--operator-key-file", "/etc/diffusion-operator/key/key"),
        *("--operator-key-secret", "demo-diffusion-operator-key"),
        *("--lease-namespace", NAMESPACE, "--lease-name", LEASE, "--identity", "$(POD_NAME)_$(POD_UID)"),
        *("--operator-service-account", "demo-diffusion-operator"),
        *("--operator-namespace", NAMESPACE, "--operator-label", "app.kubernetes.io/component=operator"),
        *("--operator-label", "app.kubernetes.io/instance=demo", "--operator-label", "app.kubernetes.io/name=diffusion-operator"),
        *("--namespace", NAMESPACE, "--liveness-port", "8080", "--metrics-port", "9090", "--log-format", "plain"),
    ]
    assert role_of_objects(documents)["metadata"]["namespace"] == NAMESPACE


def test_access_to_nodes_is_allowed_by_a_value_only(chart: Chart) -> None:
    assert "--allow-host-access" not in operator_arguments(chart.documents())
    assert "--allow-host-access" in operator_arguments(chart.documents(overrides={"workers.allowHostAccess": True}))


def test_the_operator_is_told_which_labels_its_own_pods_have(chart: Chart) -> None:
    for values in ("default-values.yaml", "namespaces-values.yaml", "cluster-wide-values.yaml"):
        documents = chart.documents(values)
        arguments = operator_arguments(documents)
        told = dict(arguments[at + 1].split("=") for at, one in enumerate(arguments) if one == "--operator-label")
        assert told == the_only(documents, "Deployment")["spec"]["selector"]["matchLabels"]


def test_named_namespaces_get_a_role_each_and_nothing_else(chart: Chart) -> None:
    documents = chart.documents("namespaces-values.yaml")
    assert operator_arguments(documents).count("--namespace") == 2
    for kind in NO_NAMESPACE_RIGHTS:
        assert [d["metadata"]["namespace"] for d in of_kind(documents, kind)] == [NAMESPACE, "team-a", "team-b"]
    assert of_kind(documents, "ClusterRoleBinding") == [], "no right beyond its namespaces"
    bound = {binding["roleRef"]["name"] for binding in of_kind(documents, "RoleBinding")}
    assert not bound & {role["metadata"]["name"] for role in of_kind(documents, "ClusterRole")}, "those are for people"


def test_a_star_watches_everything_by_a_cluster_role(chart: Chart) -> None:
    documents = chart.documents("cluster-wide-values.yaml")
    assert "--all-namespaces" in operator_arguments(documents) and "--namespace" not in operator_arguments(documents)
    assert {d["metadata"]["name"] for d in documents if d["kind"] in NO_NAMESPACE_RIGHTS} == {"demo-diffusion-operator-leases"}
    bound = the_only(documents, "ClusterRoleBinding")["roleRef"]["name"]
    (cluster_role,) = (d for d in of_kind(documents, "ClusterRole") if d["metadata"]["name"] == bound)
    assert cluster_role["rules"] == role_of_objects(chart.documents())["rules"]


def test_the_image_is_named_by_tag_or_digest(chart: Chart) -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert operator_container(chart.documents())["image"] == f"registry.example/diffusion-operator:{version}"
    assert operator_container(chart.documents("namespaces-values.yaml"))["image"] == "registry.example/diffusion-operator:1.2.3"
    assert operator_container(chart.documents("cluster-wide-values.yaml"))["image"].startswith(
        "registry.example/diffusion-operator@sha256:0123"
    )


@pytest.mark.parametrize(
    ("key", "message"), [("image.repository", "name the operator's container image"), ("engine.image", "name the worker's container image")]
)
def test_an_image_that_is_not_named_is_asked_for(chart: Chart, key: str, message: str) -> None:
    with pytest.raises(RenderError, match=message):
        chart.text(overrides={key: ""})


def test_crds_can_be_left_out_or_let_go(chart: Chart) -> None:
    assert of_kind(chart.documents(overrides={"crds.enabled": False}), "CustomResourceDefinition") == []
    for crd in of_kind(chart.documents(overrides={"crds.keep": False}), "CustomResourceDefinition"):
        assert "helm.sh/resource-policy" not in crd["metadata"].get("annotations", {})


def test_the_key_is_random_long_and_kept_at_uninstall(chart: Chart) -> None:
    first, second = (the_only(chart.documents(), "Secret") for _ in range(2))
    assert first["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert len(base64.b64decode(first["data"]["key"])) == 64
    assert first["data"] != second["data"]
    (volume,) = (v for v in operator_pod(chart.documents())["volumes"] if v["name"] == "key")
    assert volume["secret"]["secretName"] == first["metadata"]["name"]


def test_a_key_of_ones_own_is_mounted_and_none_is_made(chart: Chart) -> None:
    documents = chart.documents("cluster-wide-values.yaml")
    assert of_kind(documents, "Secret") == []
    (volume,) = (v for v in operator_pod(documents)["volumes"] if v["name"] == "key")
    assert volume["secret"]["secretName"] == "our-key"
    assert volume["secret"]["items"] == [{"key": "token-key", "path": "token-key"}]
    assert "/etc/diffusion-operator/key/token-key" in operator_arguments(documents)


def test_optional_keys_of_the_pod_arrive(chart: Chart) -> None:
    values = yaml.safe_load((CHART / "ci" / "namespaces-values.yaml").read_text())
    documents = chart.documents("namespaces-values.yaml")
    pod = operator_pod(documents)
    for key in ("nodeSelector", "tolerations", "priorityClassName", "imagePullSecrets"):
        assert pod[key] == values[key], key
    assert pod["affinity"].items() > values["affinity"].items()
    assert operator_container(documents)["resources"] == values["resources"]
    assert operator_container(documents)["imagePullPolicy"] == "Always"
    assert values["podAnnotations"].items() <= the_only(documents, "Deployment")["spec"]["template"]["metadata"]["annotations"].items()
    assert operator_container(documents)["env"][2:] == values["env"]
    assert the_only(documents, "Deployment")["spec"]["template"]["metadata"]["labels"].items() > values["podLabels"].items()
    assert the_only(documents, "ServiceAccount")["metadata"]["annotations"] == values["serviceAccount"]["annotations"]
    assert the_only(documents, "ServiceAccount")["metadata"]["name"] == pod["serviceAccountName"] == "images-operator"
    assert the_only(documents, "Pod")["spec"]["containers"][0]["image"] == "registry.example/python:3.13"


def test_calls_of_workers_pass_no_mesh_unless_the_values_say_so(chart: Chart) -> None:
    direct = {"traffic.sidecar.istio.io/excludeOutboundPorts": "8001", "config.linkerd.io/skip-outbound-ports": "8001"}

    def annotations(**overrides: Any) -> dict[str, str]:
        pod: dict[str, str] = the_only(chart.documents(overrides=overrides), "Deployment")["spec"]["template"]["metadata"]["annotations"]
        return pod

    assert annotations() == direct
    own = {"config.linkerd.io/skip-outbound-ports": "8001,9000"}
    assert annotations(podAnnotations=own) == direct | own


def test_the_operators_user_is_that_of_its_image_unless_it_is_left_to_the_platform(chart: Chart) -> None:
    restricted = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    own = {"runAsUser": 65532, "runAsGroup": 65532, "fsGroup": 65532}
    assert operator_pod(chart.documents())["securityContext"] == restricted | own
    documents = chart.documents("namespaces-values.yaml")
    assert operator_pod(documents)["securityContext"] == the_only(documents, "Pod")["spec"]["securityContext"] == restricted
    assert operator_pod(chart.documents(overrides={"podSecurityContext.runAsUser": 7}))["securityContext"]["runAsUser"] == 7


def lease_of(chart: Chart, *watched: str, **fields: str) -> str:
    """Return the name of the Lease of a release that watches these namespaces; `fields` are further values."""
    arguments = operator_arguments(chart.documents(overrides={"watchNamespaces": list(watched), **fields}))
    return arguments[arguments.index("--lease-name") + 1]


def test_releases_that_watch_the_same_namespaces_have_one_lease_and_others_have_another(chart: Chart) -> None:
    assert lease_of(chart) == lease_of(chart, NAMESPACE) == lease_of(chart, fullnameOverride="renamed") == LEASE
    assert lease_of(chart, "a", "b") == lease_of(chart, "b", "a", fullnameOverride="renamed")
    assert lease_of(chart, "*") == lease_of(chart, "*", fullnameOverride="renamed")
    assert len({lease_of(chart), lease_of(chart, "a"), lease_of(chart, "a", "b"), lease_of(chart, "*")}) == 4


def test_the_pods_of_the_operator_elect_one_by_a_lease_of_the_watched_namespaces(chart: Chart) -> None:
    documents = chart.documents()
    (lease,) = (one for one in of_kind(documents, "Role") if one["metadata"]["name"].endswith("-leases"))
    assert lease["metadata"]["namespace"] == NAMESPACE
    assert [(rule["verbs"], rule.get("resourceNames")) for rule in lease["rules"]] == [
        (["create"], None),
        (["get", "patch"], [LEASE]),
        (["create"], None),
    ]
    assert lease["rules"][-1]["resources"] == ["events"]
    variables = {one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"] for one in operator_container(documents)["env"]}
    assert variables == {"POD_NAME": "metadata.name", "POD_UID": "metadata.uid"}
    with pytest.raises(RenderError, match="env: remove the variable POD_UID, which the chart sets itself"):
        chart.text(overrides={"env": [{"name": "POD_UID", "value": "mine"}]})


def test_there_are_two_pods_of_the_operator_unless_another_number_is_asked_for(chart: Chart) -> None:
    assert the_only(chart.documents(), "Deployment")["spec"]["replicas"] == 2
    single = chart.documents(overrides={"replicas": 1})
    assert (the_only(single, "Deployment")["spec"]["replicas"], of_kind(single, "PodDisruptionBudget")) == (1, [])


def test_anti_affinity_of_the_values_goes_before_that_of_the_chart(chart: Chart) -> None:
    mine = {"preferredDuringSchedulingIgnoredDuringExecution": []}
    assert operator_pod(chart.documents(overrides={"affinity": {"podAntiAffinity": mine}}))["affinity"]["podAntiAffinity"] == mine


def test_a_label_of_the_charts_own_is_refused_by_its_name(chart: Chart) -> None:
    with pytest.raises(RenderError, match=r"podLabels: remove the label app\.kubernetes\.io/name, which the chart sets itself"):
        chart.text(overrides={"podLabels": {"app.kubernetes.io/name": "mine"}})


def test_metrics_have_a_port_and_a_monitor_when_asked(chart: Chart) -> None:
    documents = chart.documents("namespaces-values.yaml")
    assert {port["name"]: port["containerPort"] for port in operator_container(documents)["ports"]} == {"liveness": 8080, "metrics": 9090}
    own, _ = sorted(of_kind(documents, "PodMonitor"), key=lambda one: str(one["metadata"]["name"]))
    assert own["spec"]["podMetricsEndpoints"] == [{"port": "metrics"}]
    assert operator_arguments(documents)[-2:] == ["--log-format", "json"]
    silent = chart.documents("bare-values.yaml")
    assert "--metrics-port" not in operator_arguments(silent) and len(operator_container(silent)["ports"]) == 1
    with pytest.raises(RenderError, match=r"set metrics\.enabled to true as well"):
        chart.text("bare-values.yaml", overrides={"metrics.podMonitor": True})


def test_names_follow_their_overrides(chart: Chart) -> None:
    assert the_only(chart.documents(), "Deployment")["metadata"]["name"] == "demo-diffusion-operator"
    assert the_only(chart.documents(overrides={"nameOverride": "images"}), "Deployment")["metadata"]["name"] == "demo-images"
    assert the_only(chart.documents("namespaces-values.yaml"), "Deployment")["metadata"]["name"] == "images"


def test_what_is_switched_off_is_not_there(chart: Chart) -> None:
    documents = chart.documents("bare-values.yaml")
    assert {d["kind"] for d in documents} == {"Deployment", "PodDisruptionBudget", "Secret", "Service", "Pod"}
    assert {spec["serviceAccountName"] for _, spec in pod_specs(documents)} == {"made-elsewhere"}
    assert "resources" not in operator_container(documents)


def test_rights_for_people_go_where_they_are_said_to_go(chart: Chart) -> None:
    roles = {
        d["metadata"]["name"].removeprefix(f"demo-diffusion-operator-{NAMESPACE}-"): d for d in of_kind(chart.documents(), "ClusterRole")
    }
    assert roles.keys() == {"view", "edit", "edit-adapters"}
    aggregated = {name: {k.rpartition("-")[2] for k in role["metadata"]["labels"] if "aggregate-to" in k} for name, role in roles.items()}
    assert aggregated == {"view": {"view", "edit", "admin"}, "edit": {"edit", "admin"}, "edit-adapters": set()}
    assert {verb for rule in roles["view"]["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}


def test_the_network_policy_closes_the_operator_and_egress_only_when_asked(chart: Chart) -> None:
    assert the_only(chart.documents(), "NetworkPolicy")["spec"]["policyTypes"] == ["Ingress"]
    spec = the_only(chart.documents("cluster-wide-values.yaml"), "NetworkPolicy")["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"]
    assert [[port["port"] for port in rule["ports"]] for rule in spec["egress"]] == [[53, 53], [6443, 16443], [8001]]


def test_the_test_pod_asks_the_probe_by_its_own_service(chart: Chart) -> None:
    documents = chart.documents()
    service, pod = the_only(documents, "Service"), the_only(documents, "Pod")
    assert pod["spec"]["containers"][0]["args"][1] == f"http://{service['metadata']['name']}.{NAMESPACE}.svc:8080/healthz"
    compile(pod["spec"]["containers"][0]["args"][0], "test_operator.py", "exec")
    assert all(d["metadata"]["annotations"]["helm.sh/hook"] == "test" for d in (service, pod))


def test_every_value_is_described_in_the_schema_and_every_map_is_closed() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    open_maps = {"nodeAffinity", "podAffinity", "podAntiAffinity", "global"}

    def closed(node: object, name: str) -> None:
        if isinstance(node, dict):
            if node.get("type") == "object" and name not in open_maps:
                assert node.get("additionalProperties") is not None, name
            for key, inner in node.items():
                closed(inner, key)
        elif isinstance(node, list):
            for inner in node:
                closed(inner, name)

    closed(schema, "root")
    for leaf in leaves(yaml.safe_load((CHART / "values.yaml").read_text())):
        node = schema
        for part in leaf.split("."):
            assert part in node["properties"], leaf
            node = node["properties"][part]
            node = schema["definitions"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node


def test_the_readme_names_every_value() -> None:
    table = (CHART / "README.md").read_text()
    for leaf in leaves(yaml.safe_load((CHART / "values.yaml").read_text())):
        top, _, last = leaf.rpartition(".")
        assert f"`{leaf}`" in table or (f"`.{last}`" in table and f"`{top}." in table) or leaf.startswith("resources."), leaf


def test_a_parent_chart_may_hand_down_its_globals(chart: Chart) -> None:
    assert chart.documents(overrides={"global": {"imageRegistry": "registry.example"}})


@pytest.mark.parametrize(
    "bad",
    [
        {"replicas": "2"},
        {"replicas": -1},
        {"image.repositry": "x"},
        {"image.pullPolicy": "Sometimes"},
        {"image.digest": "sha256:1234"},
        {"image.tag": "with space"},
        {"engine.tag": "1"},
        {"engine.image": "two words"},
        {"watchNamespaces": "default"},
        {"watchNamespaces": ["*", "default"]},
        {"watchNamespaces": ["Default"]},
        {"watchNamespaces": ["a", "a"]},
        {"crds.enabled": "yes"},
        {"crds.install": True},
        {"operatorKey.value": "secret"},
        {"operatorKey.secretKey": "../key"},
        {"serviceAccount.automount": True},
        {"rbac.clusterWide": True},
        {"workers.allowHostAccess": "yes"},
        {"workers.hostNetwork": True},
        {"resources.limits": {"memory": "lots"}},
        {"resources.claims": []},
        {"podAnnotations": {"a": 1}},
        {"podLabels": {"a": 1}},
        {"env": [{"value": "nameless"}]},
        {"podSecurityContext.runAsUser": 0},
        {"podSecurityContext.privileged": True},
        {"nodeSelector": {"gpu": True}},
        {"tolerations": [{"key": "a", "effekt": "NoSchedule"}]},
        {"affinity": {"nodeAffinities": {}}},
        {"imagePullSecrets": ["registry"]},
        {"networkPolicy.enabled": "on"},
        {"logFormat": "xml"},
        {"metrics.port": 1},
        {"metrics.alerts": "yes"},
        {"metrics.labels": {"release": 1}},
        {"networkPolicy.apiServerPorts": [0]},
        {"networkPolicy.apiServerPorts": []},
        {"tests.enabled": False},
        {"fullnameOverride": "With-Capitals"},
    ],
    ids=json.dumps,
)
def test_bad_values_are_refused_by_the_schema(chart: Chart, bad: dict[str, object]) -> None:
    with pytest.raises(RenderError, match="values don't meet the specifications of the schema"):
        chart.text(overrides=bad)


def test_it_renders_for_the_oldest_and_the_newest_supported_kubernetes_and_refuses_older_ones(chart: Chart) -> None:
    oldest = str(yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"]).removeprefix(">=").removesuffix("-0")
    named = {"operatorKey.existingSecret": "key"}  # without it each rendering makes a random one
    texts = [chart.text(kubernetes=version, overrides=named) for version in (oldest, KUBERNETES)]
    assert texts[0] == texts[1]
    major, minor, _ = oldest.split(".")
    with pytest.raises(RenderError, match="incompatible with Kubernetes"):
        chart.text(kubernetes=f"{major}.{int(minor) - 1}.99")


def test_without_roles_of_its_own_the_chart_has_no_right_at_all(chart: Chart) -> None:
    documents = chart.documents(overrides={"rbac.create": False, "rbac.aggregateRoles": False})
    assert not {one["kind"] for one in documents} & {"Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding"}


def test_a_test_pod_that_was_left_is_replaced_by_the_next_test(chart: Chart) -> None:
    """Check that helm may delete each hook's old object first, because it refuses a hook whose object exists.

    Check too that a test pod is not one of the operator's.
    """
    hooks = [one["metadata"] for one in chart.documents() if "helm.sh/hook" in one["metadata"].get("annotations", {})]
    assert len(hooks) == 2
    assert all("before-hook-creation" in one["annotations"]["helm.sh/hook-delete-policy"].split(",") for one in hooks)
    (pod,) = of_kind(chart.documents(), "Pod")
    selector = the_only(chart.documents(), "Deployment")["spec"]["selector"]["matchLabels"]
    assert not selector.items() <= pod["metadata"]["labels"].items(), "one that is left is no pod of the operator"


def test_every_value_of_the_chart_is_required_so_that_reused_values_of_an_earlier_chart_are_refused(chart: Chart) -> None:
    """Leave one value out, as `helm upgrade --reuse-values` does with a new one; what a pod's spec has by the same name may be left out."""
    of_a_pod = {"imagePullSecrets", "resources", "podAnnotations", "podLabels", "env", "podSecurityContext", "nodeSelector", "tolerations"}
    of_a_pod |= {"affinity", "priorityClassName"}
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(schema["required"]) == values.keys() - of_a_pod
    for name in schema["required"]:
        if isinstance(values[name], dict):
            assert set(schema["properties"][name]["required"]) == values[name].keys(), name
    for lacking in ("dashboards", "metrics.enabled"):
        with pytest.raises(RenderError, match=f"missing property '{lacking.rpartition('.')[2]}'"):
            chart.documents(overrides={lacking: None})
