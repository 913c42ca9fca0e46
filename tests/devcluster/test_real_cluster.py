# SPDX-License-Identifier: Apache-2.0
"""The development cluster under the demo and the cluster tests, on this machine's provider."""

import contextlib
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from tools.devcluster import cluster, images
from tools.devcluster.connect import connect

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1800)]

NAMESPACE = "devcluster-test"


def apply(*documents: dict[str, object]) -> None:
    cluster.kubectl("apply", "--filename", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": documents}))


def web_pod(image: str) -> dict[str, object]:
    safe = {"readOnlyRootFilesystem": True, "runAsNonRoot": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container = {
        "name": "web",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python3", "-m", "http.server", "8000"],
        "readinessProbe": {"httpGet": {"path": "/", "port": 8000}, "periodSeconds": 1},
        "securityContext": {**safe, "seccompProfile": {"type": "RuntimeDefault"}},
    }
    labels = {"app": "web"}
    spec = {"containers": [container], "terminationGracePeriodSeconds": 0}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "web", "namespace": NAMESPACE, "labels": labels}, "spec": spec}


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    where = cluster.provider()
    was_running = where.running()
    where.up()
    loaded = where.load_image(images.build("operator"))
    apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    yield loaded
    cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")
    if not was_running:
        where.down(purge=False)


def start_web(image: str) -> None:
    apply(web_pod(image))
    cluster.kubectl("wait", "--for=condition=Ready", "pod/web", "--namespace", NAMESPACE, "--timeout=120s", deadline_s=130)


def eventually_answers(url: str, *, deadline_s: float = 30.0) -> int:
    ends = time.monotonic() + deadline_s
    while time.monotonic() < ends:
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=5) as answer:
            return int(answer.status)
    raise TimeoutError(url)


def test_a_second_up_finds_the_first(image: str) -> None:
    def nodes() -> object:
        listed = json.loads(cluster.kubectl("get", "nodes", "--output=json"))
        return [(node["metadata"]["uid"], node["status"]["nodeInfo"]["bootID"]) for node in listed["items"]]

    before = nodes()
    cluster.provider().up()
    assert nodes() == before
    assert cluster.status()["running"] is True


def test_a_local_address_leads_to_a_service_and_to_its_next_pod(image: str) -> None:
    service = {"selector": {"app": "web"}, "ports": [{"name": "http", "port": 80, "targetPort": 8000}]}
    apply({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "web", "namespace": NAMESPACE}, "spec": service})
    start_web(image)
    with connect(NAMESPACE, "web", "http") as url:
        assert eventually_answers(url) == 200
        cluster.kubectl("delete", "pod", "web", "--namespace", NAMESPACE)
        start_web(image)
        assert eventually_answers(url) == 200


def test_nodes_can_be_given_an_extended_resource(image: str) -> None:
    cluster.patch_node_resource("example.com/toy-gpu", 3)
    (node, *_) = json.loads(cluster.kubectl("get", "nodes", "--output", "json"))["items"]
    assert node["status"]["allocatable"]["example.com/toy-gpu"] == "3"
    cluster.patch_node_resource("example.com/toy-gpu", 0)
