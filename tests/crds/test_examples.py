# SPDX-License-Identifier: Apache-2.0
"""The examples: a real API server takes each as it stands. Each says what it is for, and is in the index."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from diffusion_operator.api.source import AdapterSource
from support.apiserver.real_apiserver import ROOT, kubectl
from support.operator.chart_rendering import CHART, KUBERNETES, NAMESPACE, Chart

EXAMPLES = ROOT / "examples"
GATEWAY_API = "v1.5.1"
VALUES = sorted(EXAMPLES.glob("*/values.yaml"))
MANIFESTS = sorted(set(EXAMPLES.glob("*/*.yaml")) - set(VALUES))
CLUSTER_WIDE = {"ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition", "Namespace"}


def documents(file: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(file.read_text()) if document]


@pytest.fixture(scope="module")
def with_gateways(kubeconfig_of_apiserver: Path) -> Path:
    """Give the API server the kinds of the Gateway API."""
    from tools.devcluster import programs

    kinds = programs.module_sources("sigs.k8s.io/gateway-api", GATEWAY_API) / "config" / "crd" / "standard"
    for name in ("gateways", "httproutes"):
        kubectl(kubeconfig_of_apiserver, "apply", "--server-side", "-f", str(kinds / f"gateway.networking.k8s.io_{name}.yaml"))
    kubectl(kubeconfig_of_apiserver, "wait", "--for=condition=Established", "crd", "--all", "--timeout=60s")
    return kubeconfig_of_apiserver


@pytest.mark.apiserver
@pytest.mark.parametrize("file", MANIFESTS, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_manifest_is_accepted(with_gateways: Path, file: Path) -> None:
    arguments = ("create", "--dry-run=server", "--validate=strict", "--namespace=default", "-o=name", "-f", str(file))
    created = kubectl(with_gateways, *arguments).split()
    assert [name.partition("/")[2] for name in created] == [document["metadata"]["name"] for document in documents(file)]


@pytest.mark.parametrize("file", [*MANIFESTS, *VALUES], ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_every_example_says_what_it_is_for_and_is_in_the_index(file: Path) -> None:
    assert file.read_text().startswith("# ")
    assert f"({file.relative_to(EXAMPLES)})" in (EXAMPLES / "README.md").read_text()


@pytest.mark.parametrize("file", VALUES, ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_values_without_rights_in_the_cluster_make_nothing_that_needs_some(file: Path) -> None:
    from tools.devcluster import programs

    options = ("--namespace", NAMESPACE, "--kube-version", KUBERNETES, "--values", str(file))
    text = Chart(programs.helm()).run("template", "example", str(CHART), *options)
    kinds = [document["kind"] for document in yaml.safe_load_all(text) if document]
    assert "Deployment" in kinds and kinds.count("RoleBinding") == 3
    assert not CLUSTER_WIDE & set(kinds)


def test_there_is_an_example_of_every_kind_of_source() -> None:
    specs = [one["spec"] for file in MANIFESTS if file.parent.name == "adapters" for one in documents(file)]
    kinds = {kind for spec in specs if "deploymentRef" in spec for kind in spec["source"]}
    assert kinds == {field.encode_name for field in msgspec.structs.fields(AdapterSource)}


def test_the_autoscaler_scales_by_a_metric_that_workers_show() -> None:
    deployment, autoscaler = documents(EXAMPLES / "serving" / "autoscaling.yaml")
    target = autoscaler["spec"]["scaleTargetRef"]
    assert (target["apiVersion"], target["kind"], target["name"]) == (
        deployment["apiVersion"], deployment["kind"], deployment["metadata"]["name"],
    )  # fmt: skip
    (metric,) = autoscaler["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"].removeprefix("diffusion_worker_")
    assert f"| `{name}` | gauge |" in (ROOT / "docs" / "metrics.md").read_text()
    assert "replicas" not in deployment["spec"]
