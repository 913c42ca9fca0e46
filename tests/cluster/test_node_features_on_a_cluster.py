# SPDX-License-Identifier: Apache-2.0
"""The features of a cluster's nodes that models in container images and shared GPUs need: image volumes, and claims of devices.

Real: the claim, the scheduler that gives it the device, the kubelet's driver, and the container runtime that puts it into containers.
Not real: the device, which is an environment variable.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from support.cluster.rig import ClusterRig
from tools.demo.kubectl import Document
from tools.devcluster import cluster, programs

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

DRIVER = "device.test.diffusion-operator.dev"
DEVICE = "test-device"
CLAIM = "shared-device"
RESOURCES = "resource.k8s.io/v1"
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}


@pytest.fixture
def applied(rig: ClusterRig) -> Iterator[Any]:
    """Provide a function that applies an object and deletes it after the test."""
    names: list[str] = []

    def apply(document: Document) -> None:
        rig.kubectl.text("apply", "-f", "-", stdin=json.dumps(document))
        names.append(f"{document['kind']}/{document['metadata']['name']}")

    yield apply
    for name in reversed(names):
        rig.kubectl.text("delete", name, "--ignore-not-found", "--grace-period=1", deadline_s=60)


@pytest.fixture
def device_driver() -> Iterator[None]:
    """Run the driver of the first node's device. A test names this fixture before `applied`: pods with the device end only while the driver
    runs."""
    nodes = cluster.provider().own_nodes()
    options = [f"--kubeconfig={nodes.kubeconfig}", f"--node={nodes.first}", f"--kubelet={nodes.kubelet}", f"--cdi={nodes.cdi}"]
    with nodes.running(programs.device_driver(), *options):
        yield


def pod(name: str, image: str, script: str, *, container: Document | None = None, **spec: Any) -> Document:
    """Return the manifest of a pod that runs `script` with python3 and never restarts.

    `container` overrides fields of its only container, and `spec` those of the pod.
    """
    one = {"name": "main", "image": image, "command": ["python3", "-c", script], "securityContext": RESTRICTED} | (container or {})
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {"restartPolicy": "Never", "containers": [one]} | spec,
    }


def test_a_pod_reads_the_files_of_an_image_that_is_its_volume(rig: ClusterRig, applied: Any) -> None:
    files = "import os; print(*sorted(os.listdir('/volume/models/digits')))"
    mount = {"volumeMounts": [{"name": "model", "mountPath": "/volume"}]}
    volume = {"name": "model", "image": {"reference": rig.worker_image, "pullPolicy": "IfNotPresent"}}
    applied(pod("reads-an-image", rig.worker_image, files, container=mount, volumes=[volume]))
    rig.eventually("the pod ended", lambda: phase(rig, "reads-an-image") == "Succeeded")
    found = rig.kubectl.text("logs", "reads-an-image").split()
    assert {"model_index.json", "transformer", "vae"} <= set(found)


@pytest.mark.usefixtures("device_driver")
def test_two_pods_share_the_one_device_of_a_claim(rig: ClusterRig, applied: Any) -> None:
    of_driver = [{"cel": {"expression": f"device.driver == '{DRIVER}'"}}]
    applied({"apiVersion": RESOURCES, "kind": "DeviceClass", "metadata": {"name": CLAIM}, "spec": {"selectors": of_driver}})
    requests = [{"name": "device", "exactly": {"deviceClassName": CLAIM}}]
    applied({"apiVersion": RESOURCES, "kind": "ResourceClaim", "metadata": {"name": CLAIM}, "spec": {"devices": {"requests": requests}}})
    says = "import os, time; print(os.environ['TEST_DEVICE'], flush=True); time.sleep(600)"
    claims = {"resources": {"claims": [{"name": "shared"}]}}
    pods = ["shares-a-device-0", "shares-a-device-1"]
    for name in pods:
        applied(pod(name, rig.worker_image, says, container=claims, resourceClaims=[{"name": "shared", "resourceClaimName": CLAIM}]))
    rig.eventually("both pods run", lambda: [phase(rig, name) for name in pods] == ["Running", "Running"])
    told = [rig.eventually("it says its device", lambda name=name: rig.kubectl.text("logs", name)) for name in pods]
    assert told == [f"{DEVICE}\n"] * 2
    status = rig.kubectl.get(f"resourceclaim/{CLAIM}")["status"]
    assert sorted(user["name"] for user in status["reservedFor"]) == pods
    assert [(given["driver"], given["device"]) for given in status["allocation"]["devices"]["results"]] == [(DRIVER, DEVICE)]
    # The kubelet returns the device to its driver, which must still run.
    for name in pods:
        rig.kubectl.text("delete", f"pod/{name}", "--grace-period=1")
    rig.eventually("the device is free", lambda: "allocation" not in rig.kubectl.get(f"resourceclaim/{CLAIM}").get("status", {}))


def phase(rig: ClusterRig, name: str) -> str:
    return str(rig.kubectl.get(f"pod/{name}")["status"].get("phase"))
