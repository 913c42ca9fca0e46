# SPDX-License-Identifier: Apache-2.0
"""A node that refuses a replica's pods, as when its device has failed.

Real: the kubelet and its refusal. It refuses a pod here because the pod does not select its node. A scheduler would never place the pod
there, so the test binds it itself.
"""

import json
from functools import partial

import pytest

from support.cluster.rig import SERVING, ClusterRig
from tools.demo.kubectl import Document

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

NAME, PLACE = "refused", "example.com/place"


def test_a_node_that_refuses_pods_is_told_and_avoided_and_the_replica_has_not_failed(rig: ClusterRig) -> None:
    (node, *_) = rig.kubectl.get("nodes")["items"]
    where = node["metadata"]["name"]
    scheduling = {"schedulerName": "test", "nodeSelector": {PLACE: "here"}}
    rig.deploy(NAME, scheduling=scheduling, replicaRecovery={"backoffSeconds": 1, "failureThreshold": 1})
    try:
        for faults in (1, 2):
            bind(rig, waiting(rig), where)
            avoided = rig.eventually(f"fault {faults} is told", partial(avoided_nodes, rig, faults), deadline_s=60)
            assert [one["name"] for one in avoided] == [where]
        (replica,) = rig.kubectl.get(f"dd/{NAME}")["status"]["replicaStates"]
        assert "failures" not in replica
        assert replica["lastFailure"]["message"].startswith("NodeAffinity")
        pod = waiting(rig)
        (preferred,) = pod["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        assert preferred["preference"]["matchFields"] == [{"key": "metadata.name", "operator": "NotIn", "values": [where]}]
        rig.kubectl.text("label", "node", where, f"{PLACE}=here")
        bind(rig, pod, where)
        rig.wait(f"dd/{NAME}", SERVING)
    finally:
        rig.kubectl.text("delete", f"dd/{NAME}", "--ignore-not-found")
        rig.kubectl.text("label", "node", where, f"{PLACE}-")


def waiting(rig: ClusterRig) -> Document:
    """Wait until the deployment has a pod without `nodeName`, and return its manifest."""
    found: Document = rig.eventually("a pod waits", lambda: next((pod for pod in rig.pods(NAME) if "nodeName" not in pod["spec"]), None))
    return found


def bind(rig: ClusterRig, pod: Document, node: str) -> None:
    name = pod["metadata"]["name"]
    target = {"apiVersion": "v1", "kind": "Node", "name": node}
    binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
    rig.kubectl.text(
        "create", "--raw", f"/api/v1/namespaces/{rig.kubectl.namespace}/pods/{name}/binding", "-f", "-", stdin=json.dumps(binding)
    )


def avoided_nodes(rig: ClusterRig, faults: int) -> list[Document]:
    """Return the status's avoided nodes once any of them has exactly `faults` faults; an empty list until then."""
    found: list[Document] = rig.kubectl.get(f"dd/{NAME}")["status"].get("avoidedNodes", [])
    return found if any(one["faults"] == faults for one in found) else []
