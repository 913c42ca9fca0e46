# SPDX-License-Identifier: Apache-2.0
"""Giving up, replacing and ending replicas, on a real cluster: the effect on requests, and what the status reports.

Two deployments start at once: one that never will serve, and one with a single replica. Tests of that one run in their order; the last one
leaves it without a replica.
"""

import concurrent.futures
import json
from collections.abc import Iterator

import pytest

from support.cluster.faults import service_address
from support.cluster.rig import PROMPT, ROLLED_OUT, SERVING, START_S, ClusterRig
from tools.demo.images import DemoImage, Request, ask, ask_once, client_for
from tools.demo.kubectl import Document, Wanted

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

NAME, TIGHT = "alone", "tight"
DD = f"dd/{NAME}"
LONG = Request(PROMPT, 1, NAME, size="256x256", steps=75)
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
def served(rig: ClusterRig) -> Iterator[ClusterRig]:
    rig.serve(NAME)
    yield rig
    rig.kubectl.text("delete", DD, "--ignore-not-found", deadline_s=60)


@pytest.fixture
def asking(served: ClusterRig) -> "Iterator[concurrent.futures.Future[DemoImage]]":
    """Send a request that takes seconds, and provide its future once it runs."""
    with concurrent.futures.ThreadPoolExecutor(1) as threads, client_for(service_address(served.kubectl, NAME)) as client:
        ask(client, Request(PROMPT, 1, NAME, steps=8))  # which waits for kube-proxy: it follows a Service a moment later
        answer = threads.submit(ask_once, client, LONG)
        served.eventually("the request runs", lambda: served.state(NAME)["inFlight"])
        yield answer


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


def test_the_only_replica_stays_where_a_check_pod_fails_and_goes_where_it_passes(served: ClusterRig) -> None:
    rig, old = served, uids(served)
    for engine, words in BROKEN:
        rig.kubectl.patch(DD, {"spec": {"engine": engine}})
        rig.eventually(words, lambda words=words: words in rig.condition(DD, "Progressing")["message"], deadline_s=150)
        assert rig.condition(DD, "Progressing")["reason"] == "TemplateInvalid"
        assert uids(rig) == old and rig.condition(DD, "Ready")["status"] == "True"
    rig.kubectl.patch(DD, {"spec": {"engine": {"env": None, "maxBatchSize": 4}}})
    rig.eventually("replaced", lambda: not uids(rig) & old and ROLLED_OUT.holds(rig.kubectl.get(DD)), deadline_s=START_S)
    assert len(rig.events(NAME, "TemplateChecked")) == 1


def uids(rig: ClusterRig) -> set[str]:
    return {pod["metadata"]["uid"] for pod in rig.pods(NAME)}


def test_a_pod_that_was_left_behind_is_adopted_by_a_new_object_and_serves_on(served: ClusterRig) -> None:
    rig, before = served, served.pods(NAME)[0]["metadata"]
    image = rig.image(NAME)
    rig.eventually("the worker knows its model's digest", lambda: rig.state(NAME)["model"]["digest"])
    rig.kubectl.text("delete", DD, "--cascade=orphan", deadline_s=30)
    (left,) = rig.pods(NAME)
    assert (left["metadata"]["uid"], left["metadata"].get("ownerReferences")) == (before["uid"], None)
    assert rig.image(NAME).png == image.png, "it serves without an owner"
    document = rig.serve(NAME, engine={"maxBatchSize": 4})
    (pod,) = rig.pods(NAME)
    assert pod["metadata"]["uid"] == before["uid"]
    assert [one["uid"] for one in pod["metadata"]["ownerReferences"]] == [document["metadata"]["uid"]]
    assert len(rig.events(NAME, "PodAdopted")) == 1
    assert rig.image(NAME).png == image.png


def test_a_request_that_runs_is_answered_when_its_pod_is_evicted(
    served: ClusterRig, asking: "concurrent.futures.Future[DemoImage]"
) -> None:
    rig, pod = served, served.pod(NAME)
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": rig.kubectl.namespace}}
    path = f"/api/v1/namespaces/{rig.kubectl.namespace}/pods/{pod}/eviction"
    rig.kubectl.text("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))
    assert asking.result(120).png
    rig.eventually("another pod", lambda: [one["metadata"]["name"] for one in rig.pods(NAME)] not in ([], [pod]))
    rig.wait(DD, SERVING)


def test_a_request_that_runs_is_answered_when_its_replica_is_scaled_away(
    served: ClusterRig, asking: "concurrent.futures.Future[DemoImage]"
) -> None:
    rig, pod = served, served.pod(NAME)
    rig.kubectl.patch(DD, {"spec": {"replicas": 0}})
    state: Document = rig.eventually("the worker drains before its pod is deleted", lambda: draining(rig))
    assert state["state"] == "terminating"
    assert rig.pod(NAME) == pod
    assert asking.result(120).png
    rig.eventually("the pod is gone", lambda: not rig.exists(f"pod/{pod}"))
    rig.wait(DD, Wanted("Ready", "False", ["NoReplicas"]), deadline_s=60)
    rig.eventually("no ready replicas", lambda: rig.kubectl.get(DD)["status"]["readyReplicas"] == 0)


def draining(rig: ClusterRig) -> Document | None:
    state = rig.state_if_any(NAME)
    return state if state is not None and state["draining"] else None
