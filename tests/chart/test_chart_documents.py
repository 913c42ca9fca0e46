# SPDX-License-Identifier: Apache-2.0
"""Properties of every rendering of the chart, for each value set in its ci/ folder."""

import kubernetes_validate
import pytest
import yaml

from support.operator.chart_rendering import CHART, KUBERNETES, NAMESPACE, ROOT, VALUE_SETS, Chart, Document, of_kind, pod_specs, the_only

CRD_FILES = sorted((ROOT / "crds").glob("*.yaml"))
ROLE_KINDS = ("Role", "ClusterRole")


@pytest.fixture(params=VALUE_SETS, scope="session")
def documents(request: pytest.FixtureRequest, chart: Chart) -> list[Document]:
    return chart.documents(request.param)


def test_every_document_is_strictly_valid(documents: list[Document]) -> None:
    for document in documents:
        if document["apiVersion"].startswith("monitoring.coreos.com/"):
            continue  # not one of Kubernetes' own kinds
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_no_two_documents_are_the_same_object(documents: list[Document]) -> None:
    names = [(d["apiVersion"], d["kind"], d["metadata"].get("namespace"), d["metadata"]["name"]) for d in documents]
    assert len(names) == len(set(names))


def test_every_namespaced_object_names_its_namespace(documents: list[Document]) -> None:
    cluster_scoped = {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition"}
    assert [d["metadata"]["name"] for d in documents if d["kind"] not in cluster_scoped and "namespace" not in d["metadata"]] == []


def test_every_pod_meets_the_restricted_profile(documents: list[Document]) -> None:
    for name, spec in pod_specs(documents):
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True and security.get("runAsUser") in (65532, None), name
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), name
        assert all(volume.keys() <= {"name", "secret", "emptyDir"} for volume in spec.get("volumes", [])), name
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name


def test_selectors_are_a_subset_of_the_labels_they_select(documents: list[Document]) -> None:
    deployment = the_only(documents, "Deployment")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert set(deployment["spec"]["selector"]["matchLabels"]) == {f"app.kubernetes.io/{key}" for key in ("name", "instance", "component")}
    assert the_only(documents, "Service")["spec"]["selector"].items() <= labels.items()
    for monitor in (one for one in of_kind(documents, "PodMonitor") if not one["metadata"]["name"].endswith("-workers")):
        assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    for policy in of_kind(documents, "NetworkPolicy"):
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()


def test_an_upgrade_makes_a_new_pod_of_the_operator_before_an_old_one_goes(documents: list[Document]) -> None:
    spec = the_only(documents, "Deployment")["spec"]
    assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}


def test_several_pods_of_the_operator_have_a_budget_and_prefer_nodes_of_their_own(documents: list[Document]) -> None:
    deployment = the_only(documents, "Deployment")
    labels = deployment["spec"]["selector"]["matchLabels"]
    (apart,) = deployment["spec"]["template"]["spec"]["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert (apart["podAffinityTerm"]["topologyKey"], apart["podAffinityTerm"]["labelSelector"]["matchLabels"]) == (
        "kubernetes.io/hostname",
        labels,
    )
    budgets = of_kind(documents, "PodDisruptionBudget")
    assert bool(budgets) == (deployment["spec"]["replicas"] > 1)
    assert [one["spec"] for one in budgets] == [{"maxUnavailable": 1, "selector": {"matchLabels": labels}}] * len(budgets)


def test_every_role_writes_its_verbs_out(documents: list[Document]) -> None:
    for kind in ROLE_KINDS:
        for role in of_kind(documents, kind):
            for rule in role["rules"]:
                assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"], role["metadata"]["name"]


def test_no_role_reads_a_secret_or_enters_a_pod(documents: list[Document]) -> None:
    for kind in ROLE_KINDS:
        for role in of_kind(documents, kind):
            for rule in role["rules"]:
                assert not {"pods/exec", "pods/log", "pods/portforward"} & set(rule["resources"])
                if "secrets" in rule["resources"]:
                    assert sorted(rule["verbs"]) == ["create", "patch"]


def test_bindings_bind_roles_of_this_rendering_to_the_operators_account(documents: list[Document]) -> None:
    account = the_only(documents, "Deployment")["spec"]["template"]["spec"]["serviceAccountName"]
    roles = {(d["kind"], d["metadata"].get("namespace"), d["metadata"]["name"]) for kind in ROLE_KINDS for d in of_kind(documents, kind)}
    for binding in of_kind(documents, "RoleBinding") + of_kind(documents, "ClusterRoleBinding"):
        reference = binding["roleRef"]
        assert (reference["kind"], binding["metadata"].get("namespace"), reference["name"]) in roles
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}]


def test_crds_are_those_of_the_top_level_folder(chart: Chart) -> None:
    rendered = {d["metadata"]["name"]: d for d in of_kind(chart.documents(), "CustomResourceDefinition")}
    assert len(rendered) == len(CRD_FILES) == 2
    for path in CRD_FILES:
        source = yaml.safe_load(path.read_text())
        source["metadata"].setdefault("annotations", {})["helm.sh/resource-policy"] = "keep"
        assert rendered[source["metadata"]["name"]] == source


def test_the_package_holds_the_crds_as_files(chart: Chart, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("package")
    chart.run("package", str(CHART), "--destination", str(folder))
    (archive,) = folder.glob("*.tgz")
    assert len(of_kind(list(yaml.safe_load_all(chart.text(chart=archive))), "CustomResourceDefinition")) == 2


def test_helm_lint_finds_nothing(chart: Chart) -> None:
    assert "0 chart(s) failed" in chart.run("lint", "--strict", str(CHART), "--values", str(CHART / "ci" / "default-values.yaml"))
