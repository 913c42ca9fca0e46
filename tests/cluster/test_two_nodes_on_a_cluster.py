# SPDX-License-Identifier: Apache-2.0
"""The loss and return of a node with a replica on it, on two nodes of a real cluster, and then a rollout of both replicas. Also a minute of
the soak that `make soak SOAK="--part operators"` runs for longer.

Tests run in their order.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from support.cluster.faults import service_address
from support.cluster.rig import PROMPT, ROLLED_OUT, SERVING, START_S, Clients, ClusterRig
from support.soak.node import NAME as SOAKED
from support.soak.operators import OperatorsSoak
from tools.demo.images import DemoImage, Request
from tools.demo.kubectl import Document, condition
from tools.devcluster import cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

NAME = "spread"
DD = f"dd/{NAME}"
REPLICAS = 2
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
    """Start a second node and provide its name. Afterwards end the node."""
    with cluster.provider().own_nodes().second_node() as name:
        yield name


@pytest.fixture(scope="module")
def spread(rig: ClusterRig, second: str) -> ClusterRig:
    """Serve on both nodes. The last test that uses it deletes the deployment."""
    rig.serve(NAME, replicas=REPLICAS, scheduling=SCHEDULING, rollout={"maxSurge": 1, "maxUnavailable": 0})
    return rig


@pytest.fixture(scope="module")
def right(spread: ClusterRig) -> DemoImage:
    """Return the image that every later request of this module must get."""
    return spread.image(NAME)


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


def test_a_lost_node_takes_its_replica_out_of_service_and_another_takes_its_place_once(
    spread: ClusterRig, second: str, right: DemoImage
) -> None:
    rig, lost = spread, on_node(spread, second)
    with cluster.provider().own_nodes().unplugged():
        rig.eventually("the node is NotReady", lambda: not node_ready(rig, second), deadline_s=SILENCE_S)
        rig.eventually("unrouted", lambda: not routable(rig, lost), deadline_s=60)
        with clients(rig, right) as asking:
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


@dataclass
class Course:
    """Counts of pods over a rollout, updated at each look."""

    fewest: int = REPLICAS
    """The fewest pods in service at a time."""
    most: int = 0
    """The most pods at a time, terminating ones left out."""
    uids: set[str] = field(default_factory=set)

    def look(self, rig: ClusterRig) -> Document:
        """Count the pods, and return the deployment as it was just afterwards."""
        present = all_pods(rig)
        staying = [pod for pod in present if "deletionTimestamp" not in pod["metadata"]]
        self.fewest = min(self.fewest, len([pod for pod in staying if in_service(pod)]))
        self.most = max(self.most, len(staying))
        self.uids |= uids(present)
        return rig.kubectl.get(DD)


def all_pods(rig: ClusterRig) -> list[Document]:
    """Return the deployment's pods, also terminating ones whose processes still run."""
    items: list[Document] = rig.kubectl.get("pods", "-l", f"diffusion-operator.dev/deployment={NAME}")["items"]
    replicas = [item for item in items if "diffusion-operator.dev/replica-index" in item["metadata"]["labels"]]  # no check pods
    return [item for item in replicas if item["status"].get("phase") in ("Pending", "Running")]


def in_service(pod: Document) -> bool:
    ready = condition(pod, "Ready")
    return pod["metadata"]["labels"].get("diffusion-operator.dev/routable") == "true" and ready is not None and ready["status"] == "True"


def uids(pods: list[Document]) -> set[str]:
    return {pod["metadata"]["uid"] for pod in pods}


def clients(rig: ClusterRig, right: DemoImage) -> Clients:
    address = service_address(rig.kubectl, NAME)
    return Clients(lambda: address, right, REQUEST)


def test_a_changed_template_is_rolled_out_under_running_requests(spread: ClusterRig, right: DemoImage) -> None:
    """Replace both replicas, and delete the deployment in the end."""
    rig, course, old = spread, Course(), uids(spread.pods(NAME))
    told = len(rig.events(NAME, "RolloutComplete"))
    with clients(rig, right) as asking:
        rig.kubectl.patch(DD, {"spec": {"engine": {"maxBatchSize": 4}}})
        rig.eventually("rolled out", lambda: ROLLED_OUT.holds(course.look(rig)), deadline_s=START_S)
        rig.wait(DD, SERVING)
        answered = asking.answered
        rig.eventually("the new ones answer", lambda: asking.answered > answered + 2)
    assert not asking.lost and not asking.refused, asking.told()
    assert (course.fewest, course.most) == (REPLICAS, REPLICAS + 1)
    assert not uids(rig.pods(NAME)) & old
    assert len(course.uids | old) == 2 * REPLICAS, "each was replaced once"
    rig.eventually("an Event of it", lambda: len(rig.events(NAME, "RolloutComplete")) == told + 1)
    rig.kubectl.text("delete", DD, deadline_s=60)
    rig.eventually("the pods are gone", lambda: not rig.kubectl.get("pods", "-l", f"diffusion-operator.dev/deployment={NAME}")["items"])


@pytest.fixture
def soak(rig: ClusterRig, second: str) -> Iterator[OperatorsSoak]:
    yield OperatorsSoak(rig, seed=1, nodes=[cluster.provider().own_nodes().first, second])
    rig.kubectl.text("delete", f"dd/{SOAKED}", "--ignore-not-found", deadline_s=60)
    rig.kubectl.text("delete", "lora", "--all", deadline_s=60)


def test_a_leader_killed_in_a_rollout_and_a_drained_node_cost_no_request(soak: OperatorsSoak) -> None:
    # The last fault of a round comes first.
    outcome = soak.run(1500, rounds=[["leader-killed", "rolled-out"], ["node-drained"]])
    assert outcome.wrong == []
    assert outcome.lost == []
    assert outcome.answered > 10
    assert outcome.lead_changes > 1
