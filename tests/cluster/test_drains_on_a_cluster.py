# SPDX-License-Identifier: Apache-2.0
"""Ends of busy replicas and orphaned pods, on a real cluster: kubelet, garbage collector, and requests that take long."""

import concurrent.futures
import json
from collections.abc import Iterator

import pytest

from support.cluster.faults import service_address
from support.cluster.rig import PROMPT, SERVING, ClusterRig
from tools.demo.images import DemoImage, Request, ask, ask_once, client_for
from tools.demo.kubectl import Document

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
NAME = "drained"
DD = f"dd/{NAME}"
LONG = Request(PROMPT, 1, NAME, size="256x256", steps=150)


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


def test_a_request_that_runs_is_answered_when_its_replica_is_scaled_away(
    served: ClusterRig, asking: "concurrent.futures.Future[DemoImage]"
) -> None:
    rig, pod = served, served.pod(NAME)
    rig.kubectl.patch(DD, {"spec": {"replicas": 0}})
    state: Document = rig.eventually("the worker drains before its pod is deleted", lambda: _draining(rig))
    assert state["state"] == "terminating"
    assert rig.pod(NAME) == pod
    assert asking.result(120).png
    rig.eventually("the pod is gone", lambda: not rig.exists(f"pod/{pod}"))
    rig.kubectl.patch(DD, {"spec": {"replicas": 1}})
    rig.wait(DD, SERVING)


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


def test_a_pod_that_was_left_behind_is_adopted_by_a_new_object_and_serves_on(served: ClusterRig) -> None:
    rig, before = served, served.pods(NAME)[0]["metadata"]
    image = rig.image(NAME)
    rig.eventually("the worker knows its model's digest", lambda: rig.state(NAME)["model"]["digest"])
    rig.kubectl.text("delete", DD, "--cascade=orphan", deadline_s=30)
    (left,) = rig.pods(NAME)
    assert (left["metadata"]["uid"], left["metadata"].get("ownerReferences")) == (before["uid"], None)
    assert rig.image(NAME).png == image.png, "it serves without an owner"
    document = rig.serve(NAME)
    (pod,) = rig.pods(NAME)
    assert pod["metadata"]["uid"] == before["uid"]
    assert [one["uid"] for one in pod["metadata"]["ownerReferences"]] == [document["metadata"]["uid"]]
    assert len(rig.events(NAME, "PodAdopted")) == 1
    assert rig.image(NAME).png == image.png


def _draining(rig: ClusterRig) -> Document | None:
    state = rig.state_if_any(NAME)
    return state if state is not None and state["draining"] else None
