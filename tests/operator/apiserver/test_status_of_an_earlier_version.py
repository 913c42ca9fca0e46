# SPDX-License-Identifier: Apache-2.0
"""A status that the version before stored, under the names that it had for replicas, on a real API server with today's kinds."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from diffusion_operator.api.names import ADAPTER, DEPLOYMENT, Kind
from diffusion_operator.cluster import KubernetesCluster, connect
from support.apiserver.real_apiserver import CRDS, kubectl
from tools.devcluster.apiserver import apiserver

pytestmark = pytest.mark.apiserver
NAMESPACE = "upgraded"
# Status properties by their name today, with their name in commit 3e8db6b.
EARLIER = {
    "replicaStates": "groups",
    "replicaStatesTruncated": "groupsTruncated",
    "replicaInstances": "instances",
    "desiredReplicas": "desiredGroups",
    "loadedReplicas": "loadedGroups",
    "failedReplicas": "failedGroups",
    "deferredReplicas": "deferredGroups",
}
SPECS = {
    DEPLOYMENT: {"model": {"source": {"path": "/m"}}},
    ADAPTER: {"deploymentRef": {"name": "x"}, "source": {"path": "/a"}},
}
STORED: dict[Kind, dict[str, Any]] = {
    DEPLOYMENT: {"groups": [{"index": 0, "state": "Awake"}, {"index": 1, "state": "Failed"}], "groupsTruncated": True, "replicas": 2},
    ADAPTER: {"instances": [{"group": 0, "state": "Loaded"}, {"group": 1, "state": "Failed"}], "desiredGroups": 2, "loadedGroups": 1},
}
WRITTEN: dict[Kind, list[dict[str, Any]]] = {
    DEPLOYMENT: [{"replicaStates": [{"index": 0, "state": "Awake"}], "replicas": 1}, {"replicas": 0}],
    ADAPTER: [{"replicaInstances": [{"replica": 1, "state": "Loaded"}], "desiredReplicas": 1}, {"desiredReplicas": 0}],
}


def earlier(crd: dict[str, Any]) -> dict[str, Any]:
    """Rename a CRD's status fields in place to the names of the earlier version, and return the CRD."""
    kind = crd["spec"]["names"]["kind"]
    for version in crd["spec"]["versions"]:
        status = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
        for now in [name for name in EARLIER if name in status and not (kind == DEPLOYMENT.kind and name == "failedReplicas")]:
            status[EARLIER[now]] = status.pop(now)
        if "instances" in status:
            instances = status["instances"]
            instances["x-kubernetes-list-map-keys"] = ["group"]
            instances["items"]["required"] = ["group", "state"]
            instances["items"]["properties"]["group"] = instances["items"]["properties"].pop("replica")
    return crd


@pytest.fixture
def kubeconfig() -> Iterator[Path]:
    """Start an API server of its own, since the kinds change."""
    with apiserver() as path:
        kubectl(path, "create", "namespace", NAMESPACE)
        yield path


def define(kubeconfig: Path, *crds: str) -> None:
    for crd in crds:
        kubectl(kubeconfig, "apply", "--server-side", "-f", "-", stdin=crd)
    kubectl(kubeconfig, "wait", "--for=condition=Established", "--timeout=30s", "crd", "--all")


async def test_a_status_with_the_earlier_names_of_replicas_is_replaced_and_nothing_of_it_stays(
    kubeconfig: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
    today = [path.read_text() for path in CRDS]
    define(kubeconfig, *(yaml.safe_dump(earlier(yaml.safe_load(text))) for text in today))
    async with await connect() as cluster:
        for kind, spec in SPECS.items():
            metadata = {"name": "x", "namespace": NAMESPACE}
            await cluster.create({"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata, "spec": spec})
            await _write(cluster, kind, STORED[kind])
            assert await _status(cluster, kind) == STORED[kind], "the earlier kinds keep the earlier names"
    define(kubeconfig, *today)
    async with await connect() as cluster:
        for kind, statuses in WRITTEN.items():
            for status in statuses:
                await _write(cluster, kind, status)
                assert await _status(cluster, kind) == status


async def _write(cluster: KubernetesCluster, kind: Kind, status: Any) -> None:
    found = await cluster.get(kind, NAMESPACE, "x")
    assert found is not None
    await cluster.apply_status(kind, NAMESPACE, "x", status=status, version=found["metadata"]["resourceVersion"])


async def _status(cluster: KubernetesCluster, kind: Kind) -> Any:
    found = await cluster.get(kind, NAMESPACE, "x")
    assert found is not None
    return found["status"]
