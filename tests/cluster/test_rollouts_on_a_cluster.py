# SPDX-License-Identifier: Apache-2.0
"""Replacing, giving up and ending replicas, on a real cluster: the effect on requests, and what the status reports.

Two deployments start at once: one that serves, and one that never will. Tests run in their order, and each leaves the first one serving.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from support.cluster.faults import service_address
from support.cluster.rig import PROMPT, ROLLED_OUT, SERVING, START_S, Clients, ClusterRig
from tools.demo.images import DemoImage, Request
from tools.demo.kubectl import Document, Wanted, condition

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

NAME, TIGHT, ALONE = "rolled", "tight", "alone"
DD = f"dd/{NAME}"
REPLICAS = 2
REQUEST = Request(PROMPT, 1, NAME, steps=8)
DEADLINE_S = 60  # the shortest that the API allows
# Memory limits: the smaller one lets Python start, but not the worker's server.
TOO_LITTLE, ENOUGH = "24Mi", "2Gi"


@pytest.fixture(scope="module", autouse=True)
def tight(rig: ClusterRig) -> Iterator[None]:
    """Deploy a worker with so little memory that it is killed at every start, and delete it after the module.

    It starts before the tests that need it, because the kubelet's pauses add up to a minute and a half.
    """
    requests = {"cpu": "50m", "memory": TOO_LITTLE}
    resources = {"gpuResourceName": "none", "requests": requests, "limits": {"memory": TOO_LITTLE}, "sharedMemory": "8Mi"}
    rig.deploy(TIGHT, resources=resources, replicaRecovery={"backoffSeconds": 1, "failureThreshold": 4})
    yield
    rig.kubectl.text("delete", f"dd/{TIGHT}", "--ignore-not-found", deadline_s=60)


@pytest.fixture(scope="module")
def rolled(rig: ClusterRig) -> Iterator[ClusterRig]:
    rig.serve(NAME, replicas=REPLICAS, rollout={"maxSurge": 1, "maxUnavailable": 0})
    yield rig
    rig.kubectl.text("delete", DD, "--ignore-not-found", deadline_s=60)
    rig.eventually("the pods are gone", lambda: not all_pods(rig))


@pytest.fixture(scope="module")
def right(rolled: ClusterRig) -> DemoImage:
    """Return the image that every later request of this module must get."""
    return rolled.image(NAME)


@dataclass
class Course:
    """Counts of pods over a rollout, updated at each look."""

    fewest: int = REPLICAS
    """The fewest pods in service at a time."""
    most: int = 0
    """The most pods at a time, terminating ones left out."""
    templates: int = 0
    """The most revisions at a time, terminating pods included."""
    uids: set[str] = field(default_factory=set)

    def look(self, rig: ClusterRig) -> Document:
        """Count the pods, and return the deployment as it was just afterwards."""
        present = all_pods(rig)
        staying = [pod for pod in present if "deletionTimestamp" not in pod["metadata"]]
        self.fewest = min(self.fewest, len([pod for pod in staying if in_service(pod)]))
        self.most = max(self.most, len(staying))
        self.templates = max(self.templates, len({pod["metadata"]["labels"]["diffusion-operator.dev/revision"] for pod in present}))
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


def roll_out(rig: ClusterRig, **spec: object) -> Course:
    course, old = Course(), uids(rig.pods(NAME))
    course.uids = set(old)
    rig.kubectl.patch(DD, {"spec": spec})
    rig.eventually("rolled out", lambda: ROLLED_OUT.holds(course.look(rig)), deadline_s=START_S)
    rig.wait(DD, SERVING)
    assert not uids(rig.pods(NAME)) & old
    return course


def test_a_changed_template_is_rolled_out_under_running_requests(rolled: ClusterRig, right: DemoImage) -> None:
    rig = rolled
    told = len(rig.events(NAME, "RolloutComplete"))
    with clients(rig, right) as asking:
        course = roll_out(rig, engine={"maxBatchSize": 4})
        answered = asking.answered
        rig.eventually("the new ones answer", lambda: asking.answered > answered + 2)
    assert not asking.lost and not asking.refused, asking.told()
    assert (course.fewest, course.most) == (REPLICAS, REPLICAS + 1)
    assert len(course.uids) == 2 * REPLICAS, "each was replaced once"
    rig.eventually("an Event of it", lambda: len(rig.events(NAME, "RolloutComplete")) == told + 1)


def test_recreate_ends_all_before_it_makes_one(rolled: ClusterRig, right: DemoImage) -> None:
    rig = rolled
    rig.kubectl.patch(DD, {"spec": {"rollout": {"type": "Recreate", "maxSurge": None, "maxUnavailable": None}}})
    course = roll_out(rig, engine={"maxBatchSize": 2})
    assert (course.templates, len(course.uids), course.fewest) == (1, 2 * REPLICAS, 0)
    assert rig.image(NAME).png == right.png


def test_a_template_that_cannot_start_stops_at_its_deadline_and_is_gone_with_the_old_one_back(rolled: ClusterRig, right: DemoImage) -> None:
    rig, old = rolled, uids(rolled.pods(NAME))
    rolling = {"type": "RollingUpdate", "maxSurge": 1, "maxUnavailable": 0, "progressDeadlineSeconds": DEADLINE_S}
    with clients(rig, right) as asking:
        rig.kubectl.patch(DD, {"spec": {"rollout": rolling, "engine": {"image": "registry.invalid/none:1"}}})
        rig.eventually("told", lambda: rig.condition(DD, "Progressing")["reason"] == "DeadlineExceeded", deadline_s=2 * DEADLINE_S)
        assert (rig.condition(DD, "Progressing")["status"], rig.condition(DD, "Ready")["status"]) == ("False", "True")
        assert "registry.invalid/none:1" in rig.condition(DD, "Progressing")["message"]
        assert uids([pod for pod in rig.pods(NAME) if in_service(pod)]) == old and len(rig.pods(NAME)) == REPLICAS + 1
        rig.eventually("an Event of it", lambda: len(rig.events(NAME, "DeadlineExceeded")) == 1)
        rig.kubectl.patch(DD, {"spec": {"engine": {"image": None}}})
        rig.eventually("whole again", lambda: ROLLED_OUT.holds(rig.kubectl.get(DD)) and uids(rig.pods(NAME)) == old)
        rig.wait(DD, SERVING, deadline_s=30)
    assert asking.answered > 5 and not asking.lost and not asking.refused, asking.told()
    assert rig.condition(DD, "Degraded")["status"] == "False"


def test_a_worker_that_dies_at_every_start_gets_another_pod_and_then_the_verdict_and_what_was_wrong_is_kept(rig: ClusterRig) -> None:
    resource = f"dd/{TIGHT}"
    rig.wait(resource, Wanted("Ready", "False", ["CrashLooping"]), deadline_s=200)
    rig.eventually("the verdict", lambda: "every ten minutes at most" in rig.condition(resource, "Ready")["message"], deadline_s=200)
    told, status = rig.condition(resource, "Ready"), rig.kubectl.get(resource)["status"]
    assert (told["status"], told["reason"], rig.condition(resource, "Degraded")["reason"]) == ("False", "CrashLooping", "CrashLooping")
    assert f"ran out of host memory: it used more than its limit of {TOO_LITTLE}" in told["message"]
    (group,) = status["replicaStates"]
    assert (group["incarnation"], group["lastFailure"]["code"]) == (1, "OOMKilled") and group["failures"] >= 4
    rig.kubectl.patch(resource, {"spec": {"resources": {"limits": {"memory": ENOUGH}}}})
    (healed,) = rig.wait(resource, SERVING)["status"]["replicaStates"]
    assert "failures" not in healed
    assert healed["lastFailure"]["code"] == "OOMKilled", "it survives the pod"


# Each part of engine, and the words with which a check pod fails for it.
BROKEN = [
    ({"image": "registry.invalid/typo:1"}, "registry.invalid/typo:1"),
    ({"image": None, "env": [{"name": "DIFFUSION_WORKER_CORS_ORIGIN", "value": "nonsense"}]}, "Error: --cors-origin"),
]


def test_the_only_replica_stays_where_a_check_pod_fails_and_goes_where_it_passes(rig: ClusterRig) -> None:
    resource = f"dd/{ALONE}"
    rig.serve(ALONE)
    old = uids(rig.pods(ALONE))
    for engine, words in BROKEN:
        rig.kubectl.patch(resource, {"spec": {"engine": engine}})
        rig.eventually(words, lambda words=words: words in rig.condition(resource, "Progressing")["message"], deadline_s=150)
        assert rig.condition(resource, "Progressing")["reason"] == "TemplateInvalid"
        assert uids(rig.pods(ALONE)) == old and rig.condition(resource, "Ready")["status"] == "True"
    rig.kubectl.patch(resource, {"spec": {"engine": {"env": None, "maxBatchSize": 4}}})
    rig.eventually("replaced", lambda: not uids(rig.pods(ALONE)) & old and ROLLED_OUT.holds(rig.kubectl.get(resource)), deadline_s=START_S)
    assert len(rig.events(ALONE, "TemplateChecked")) == 1
    rig.kubectl.text("delete", resource, deadline_s=10)


def test_a_suspended_deployment_ends_its_pods_comes_back_and_can_be_deleted_at_once(rolled: ClusterRig, right: DemoImage) -> None:
    rig = rolled
    suspend(rig)
    rig.eventually("no pods", lambda: not all_pods(rig))
    assert rig.exists(f"service/{NAME}") and rig.exists(f"configmap/{NAME}-desired")
    rig.kubectl.patch(DD, {"spec": {"suspend": False}})
    rig.wait(DD, SERVING)
    assert rig.image(NAME).png == right.png
    suspend(rig)
    rig.kubectl.text("delete", DD, deadline_s=60)
    assert not rig.exists(DD)
    rig.eventually("nothing that it owned", lambda: not owned(rig))


def suspend(rig: ClusterRig) -> None:
    rig.kubectl.patch(DD, {"spec": {"suspend": True}})
    rig.wait(DD, Wanted("Ready", "False", ["Suspended"]), deadline_s=30)


def owned(rig: ClusterRig) -> list[Document]:
    kinds = "pods,services,configmaps,secrets,networkpolicies,poddisruptionbudgets"
    items: list[Document] = rig.kubectl.get(kinds, "-l", f"diffusion-operator.dev/deployment={NAME}")["items"]
    return items
