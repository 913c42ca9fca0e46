# SPDX-License-Identifier: Apache-2.0
"""Faults under a serving deployment on a real cluster: in its processes, the API server, and the network between them.

All tests share a deployment, with the file of the main path. Each test leaves it serving, so none depends on another. A container may have
restarted.
"""

import signal
import threading
from collections.abc import Iterator

import pytest

from support.cluster.faults import api_server_stopped, control_port_cut_off, kill_server_in, operator_pods, service_address
from support.cluster.rig import ADAPTER_READY, PROMPT, SERVING, START_S, STEADY, STRIPED, Clients, ClusterRig
from tools.demo.images import DemoImage, Request, mean_difference
from tools.demo.kubectl import Document

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

NAME = STEADY
DD, LORA = f"dd/{NAME}", f"lora/{STRIPED}"
REQUEST = Request(PROMPT, 1, NAME, steps=8)
# A node needs some seconds to notice a fault, and the operator polls a replica every few.
NOTICE_S = 30.0
# Longer than the operators' Lease lasts. Shorter than the fifty seconds after which Kubernetes takes a silent node for lost.
STANDSTILL_S = 40.0


@pytest.fixture(scope="module")
def steady(rig: ClusterRig) -> Iterator[ClusterRig]:
    rig.serve_steady()
    yield rig
    rig.kubectl.text("delete", DD, LORA, "--ignore-not-found", deadline_s=60)
    rig.eventually("the pods are gone", lambda: not rig.pods(NAME))


@pytest.fixture(scope="module")
def right(steady: ClusterRig) -> DemoImage:
    """Return the image that every later request of this module must get."""
    return steady.image(NAME)


def clients(rig: ClusterRig, right: DemoImage) -> Clients:
    return Clients(lambda: service_address(rig.kubectl, NAME), right, REQUEST)


def lives(rig: ClusterRig) -> list[tuple[str, int]]:
    """Return the UID of each pod and the number of its container's restarts."""
    return sorted((pod["metadata"]["uid"], restarts(pod)) for pod in rig.pods(NAME))


def restarts(pod: Document) -> int:
    return sum(container["restartCount"] for container in pod["status"].get("containerStatuses", []))


def routable(rig: ClusterRig) -> list[str]:
    return [pod["metadata"]["name"] for pod in rig.pods(NAME) if pod["metadata"]["labels"].get("diffusion-operator.dev/routable") == "true"]


def test_a_killed_server_comes_back_in_the_same_pod(steady: ClusterRig, right: DemoImage) -> None:
    rig, before, (life,) = steady, steady.state(NAME), lives(steady)
    kill_server_in(rig.pods(NAME)[0])
    rig.eventually("another life", lambda: (found := rig.state_if_any(NAME)) and found["bootId"] != before["bootId"], deadline_s=START_S)
    rig.wait(DD, SERVING)
    assert lives(rig) == [(life[0], life[1] + 1)]
    note = rig.eventually("an Event of it", lambda: rig.events(NAME, "ReplicaRestarted"))[-1]
    assert "137" in note, note
    assert rig.image(NAME).png == right.png


def test_a_rank_that_stops_is_told_and_its_replica_serves_again_in_the_same_container(steady: ClusterRig, right: DemoImage) -> None:
    rig, before, same = steady, steady.state(NAME), lives(steady)
    told = len(rig.events(NAME, "RankLost"))
    rig.kill_in_pod(rig.pod(NAME), before["ranks"][1]["pid"], signal.SIGSTOP)
    # The ranks may be back before the operator polls, so the condition may never show the loss. The Event always does.
    note = rig.eventually("an Event of it", lambda: rig.events(NAME, "RankLost")[told:], deadline_s=NOTICE_S)[-1]
    rig.wait(DD, SERVING, deadline_s=START_S)
    after = rig.state(NAME)
    assert (after["bootId"], after["generation"], lives(rig)) == (before["bootId"], before["generation"] + 1, same)
    assert "stopped" in note
    assert rig.image(NAME).png == right.png


def test_requests_are_answered_while_the_api_server_stands_still_and_nothing_restarts_for_it(steady: ClusterRig, right: DemoImage) -> None:
    rig, same, operators = steady, lives(steady), operator_lives(steady)
    address = service_address(rig.kubectl, NAME)
    with api_server_stopped(), Clients(lambda: address, right, REQUEST) as asking:
        threading.Event().wait(STANDSTILL_S)
    assert asking.answered > 10 and not asking.lost and not asking.refused, asking.told()
    rig.adapt("late", NAME, "/models/loras/stripes")
    rig.wait("lora/late", ADAPTER_READY, deadline_s=60)
    rig.wait(DD, SERVING, deadline_s=60)
    assert rig.image(NAME).png == right.png
    assert lives(rig) == same
    assert operator_lives(rig) == operators
    rig.kubectl.text("delete", "lora/late", deadline_s=60)


def test_a_control_port_that_cannot_be_reached_takes_no_replica_out_of_service(steady: ClusterRig, right: DemoImage) -> None:
    rig, same = steady, lives(steady)
    (pod,) = rig.pods(NAME)
    with clients(rig, right) as asking:
        with control_port_cut_off(pod):
            rig.eventually("told", lambda: degraded(rig)["reason"] == "ControlUnreachable", deadline_s=90)
            assert routable(rig) == [pod["metadata"]["name"]]
            rig.image(NAME)
        rig.wait(DD, SERVING, deadline_s=NOTICE_S)
    assert asking.answered > 5 and not asking.lost and not asking.refused, asking.told()
    assert lives(rig) == same and degraded(rig)["status"] == "False"


def degraded(rig: ClusterRig) -> Document:
    return rig.condition(DD, "Degraded")


def test_children_that_somebody_edits_or_deletes_are_repaired_under_running_requests(steady: ClusterRig, right: DemoImage) -> None:
    rig, same = steady, lives(steady)
    wanted = rig.kubectl.get(f"service/{NAME}")["spec"]["selector"]
    desired = rig.kubectl.get(f"configmap/{NAME}-desired")["data"]
    with clients(rig, right) as asking:
        rig.kubectl.patch(f"service/{NAME}", {"spec": {"selector": {"diffusion-operator.dev/deployment": "another"}}})
        rig.eventually("its selector again", lambda: rig.kubectl.get(f"service/{NAME}")["spec"]["selector"] == wanted, deadline_s=60)
        rig.kubectl.patch(f"configmap/{NAME}-desired", {"data": {"desired.json": "{}"}})
        rig.eventually("its text again", lambda: rig.kubectl.get(f"configmap/{NAME}-desired")["data"] == desired, deadline_s=60)
        rig.kubectl.text("delete", f"configmap/{NAME}-desired", deadline_s=60)
        rig.eventually("a ConfigMap again", lambda: rig.exists(f"configmap/{NAME}-desired"), deadline_s=60)
        answered = asking.answered
        rig.eventually("requests are answered", lambda: asking.answered > answered + 2)
    assert not asking.lost and not asking.refused, asking.told()
    rig.kubectl.text("delete", f"service/{NAME}", deadline_s=60)
    rig.eventually("a Service again", lambda: rig.exists(f"service/{NAME}"), deadline_s=60)
    assert rig.image(NAME).png == right.png
    assert lives(rig) == same
    assert rig.eventually("Events of it", lambda: rig.events(NAME, "Repaired"))


def test_what_a_deployment_can_do_without_goes_and_comes_and_its_pod_stays(steady: ClusterRig) -> None:
    rig, same = steady, lives(steady)
    rig.kubectl.patch(DD, {"spec": {"control": {"networkPolicy": "None"}, "podDisruptionBudget": "None"}})
    rig.eventually("neither of them", lambda: not optional_children(rig), deadline_s=60)
    rig.kubectl.patch(DD, {"spec": {"control": {"networkPolicy": "Managed"}, "podDisruptionBudget": "Auto"}})
    rig.eventually("both of them", lambda: optional_children(rig) == {"NetworkPolicy", "PodDisruptionBudget"}, deadline_s=60)
    for what, change in ((f"networkpolicy/{NAME}-control", {"ingress": []}), (f"pdb/{NAME}", {"maxUnavailable": 3})):
        wanted = rig.kubectl.get(what)["spec"]
        rig.kubectl.patch(what, {"spec": change})
        rig.eventually("what it was", lambda what=what, wanted=wanted: rig.kubectl.get(what)["spec"] == wanted, deadline_s=60)
    assert lives(rig) == same


def optional_children(rig: ClusterRig) -> set[str]:
    found = rig.kubectl.get("networkpolicies,poddisruptionbudgets", "-l", f"diffusion-operator.dev/deployment={NAME}")
    return {item["kind"] for item in found["items"]}


def test_a_deleted_pod_is_replaced_with_its_adapter_though_the_token_is_deleted_too(steady: ClusterRig, right: DemoImage) -> None:
    """Delete the Secret with the control token, and then the pod. The operator never reads the Secret, so it notices the loss when a pod
    waits for it, or after ten minutes."""
    rig = steady
    rig.kubectl.text("delete", f"secret/{NAME}-control", deadline_s=60)
    assert rig.image(NAME).png == right.png
    rig.wait(DD, SERVING, deadline_s=60)
    (old,) = lives(rig)
    rig.kubectl.text("delete", "pod", rig.pod(NAME), "--wait=false")
    rig.eventually("another pod", lambda: (found := lives(rig)) and found[0][0] != old[0], deadline_s=60)
    rig.wait(DD, SERVING)
    rig.wait(LORA, ADAPTER_READY, deadline_s=60)
    assert rig.image(NAME).png == right.png
    assert mean_difference(rig.image(NAME, STRIPED), right) > 5


def operator_lives(rig: ClusterRig) -> dict[str, int]:
    """Return the restarts of each of the operator's pods, by UID."""
    return {pod["metadata"]["uid"]: restarts(pod) for pod in operator_pods(rig.kubectl)}
