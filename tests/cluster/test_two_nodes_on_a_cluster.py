# SPDX-License-Identifier: Apache-2.0
"""The loss and return of a node with a replica on it, on two nodes of a real cluster. Also a minute of the soak that `make soak
SOAK="--part operators"` runs for longer."""

from collections.abc import Iterator

import pytest

from support.cluster.faults import service_address
from support.cluster.rig import PROMPT, SERVING, START_S, Clients, ClusterRig
from support.soak.node import NAME as SOAKED
from support.soak.operators import OperatorsSoak
from tools.demo.images import Request
from tools.demo.kubectl import Document, condition
from tools.devcluster import cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

NAME = "spread"
DD = f"dd/{NAME}"
REQUEST = Request(PROMPT, 1, NAME, steps=8)
# Kubernetes marks a silent node NotReady after fifty seconds, and then its pods may stay for this long.
SILENCE_S = 90.0
TOLERATED_S = 5
SCHEDULING = {
    "topologySpread": [{"topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway"}],
    "tolerations": [
        {"key": f"node.kubernetes.io/{what}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": TOLERATED_S}
        for what in ("unreachable", "not-ready")
    ],
}


@pytest.fixture(scope="module")
def second(rig: ClusterRig) -> Iterator[str]:
    """Start a second node and provide its name. Afterwards delete the deployment, wait for its pods to go, and end the node."""
    with cluster.provider().own_nodes().second_node() as name:
        yield name
        rig.kubectl.text("delete", DD, "--ignore-not-found", deadline_s=60)
        rig.eventually("the pods are gone", lambda: not rig.kubectl.get("pods", "-l", f"diffusion-operator.dev/deployment={NAME}")["items"])


def on_node(rig: ClusterRig, node: str) -> Document:
    """Return the only pod of the deployment on a node; ValueError if there is none or more than one."""
    (pod,) = [pod for pod in rig.pods(NAME) if pod["spec"].get("nodeName") == node]
    return pod


def node_ready(rig: ClusterRig, node: str) -> bool:
    found = condition(rig.kubectl.get(f"node/{node}"), "Ready")
    return found is not None and found["status"] == "True"


def routable(rig: ClusterRig, pod: Document) -> bool:
    found = rig.kubectl.get(f"pod/{pod['metadata']['name']}")
    return bool(found["metadata"]["labels"].get("diffusion-operator.dev/routable") == "true")


def test_a_lost_node_takes_its_replica_out_of_service_and_another_takes_its_place_once(rig: ClusterRig, second: str) -> None:
    rig.serve(NAME, replicas=2, scheduling=SCHEDULING)
    lost = on_node(rig, second)
    right = rig.image(NAME)
    with cluster.provider().own_nodes().unplugged():
        rig.eventually("the node is NotReady", lambda: not node_ready(rig, second), deadline_s=SILENCE_S)
        rig.eventually("unrouted", lambda: not routable(rig, lost), deadline_s=60)
        with Clients(lambda: service_address(rig.kubectl, NAME), right, REQUEST) as asking:
            rig.eventually("a replacement, and all serve", lambda: replaced(rig, lost), deadline_s=START_S)
        assert asking.answered > 5 and not asking.lost and not asking.refused, asking.told()
        stuck = rig.kubectl.get(f"pod/{lost['metadata']['name']}")
        assert stuck["metadata"]["uid"] == lost["metadata"]["uid"], "nobody but its kubelet may say that it ended"
    rig.eventually("the node is back", lambda: node_ready(rig, second), deadline_s=60)
    rig.eventually("the late pod ends", lambda: not rig.exists(f"pod/{lost['metadata']['name']}"), deadline_s=90)
    rig.wait(DD, SERVING)
    assert indexes(rig) == ["0", "1"]


def replaced(rig: ClusterRig, lost: Document) -> bool:
    """Return whether two replicas other than the lost one serve."""
    uids = {pod["metadata"]["uid"] for pod in rig.pods(NAME)}
    return lost["metadata"]["uid"] not in uids and indexes(rig) == ["0", "1"] and SERVING.holds(rig.kubectl.get(DD))


def indexes(rig: ClusterRig) -> list[str]:
    return sorted(pod["metadata"]["labels"]["diffusion-operator.dev/replica-index"] for pod in rig.pods(NAME))


@pytest.fixture
def soak(rig: ClusterRig, second: str) -> Iterator[OperatorsSoak]:
    yield OperatorsSoak(rig, seed=1, nodes=[cluster.provider().own_nodes().first, second])
    rig.kubectl.text("delete", f"dd/{SOAKED}", "--ignore-not-found", deadline_s=60)
    rig.kubectl.text("delete", "lora", "--all", deadline_s=60)


def test_a_dead_leader_a_drained_node_and_a_rollout_cost_no_request(soak: OperatorsSoak) -> None:
    outcome = soak.run(1500, rounds=[["leader-killed"], ["node-drained"], ["rolled-out"]])
    assert outcome.wrong == []
    assert outcome.lost == []
    assert outcome.answered > 10
    assert outcome.lead_changes > 1
