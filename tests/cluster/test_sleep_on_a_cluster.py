# SPDX-License-Identifier: Apache-2.0
"""An idle deployment that sleeps, on a real cluster: by itself, woken by a request at its Service, and through faults.

It is the one of examples/sleep/on-idle.yaml. Tests run in their order, and each says in which state it leaves the model.
"""

import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from support.cluster.faults import kill_server_in
from support.cluster.rig import ADAPTER_READY, SERVING, START_S, ClusterRig
from support.runner import digit_judge
from tools.demo.images import DemoImage
from tools.demo.kubectl import Document, Wanted, condition
from tools.demo.weights_memory import RankMemory, check_given_back, read_weights_memory, total_resident

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

MANIFEST = Path(__file__).resolve().parents[2] / "examples" / "sleep" / "on-idle.yaml"
NAME, STYLE = "digits", "stripes"
DD, LORA = f"dd/{NAME}", f"lora/{STYLE}"
IDLE_S = 10
# Long enough that it sleeps only when a test says so: on a busy machine a test may take longer than ten seconds.
LONG_S = 600
# The time on a busy machine from a replica's permission to sleep until its deployment reports it asleep.
NOTICE_S = 20.0
WAKEABLE = Wanted("Ready", "True", ["AsleepWakeable"])
ALL_ASLEEP = Wanted("Awake", "False", ["AllAsleep"])


@pytest.fixture(scope="module")
def rig_on_idle(rig: ClusterRig) -> Iterator[ClusterRig]:
    rig.kubectl.apply(MANIFEST)
    set_sleep(rig, idleSeconds=LONG_S)
    rig.wait(DD, SERVING)
    yield rig
    rig.kubectl.text("delete", DD, LORA, "--ignore-not-found", deadline_s=60)
    rig.eventually("the pods are gone", lambda: not rig.pods(NAME))


@pytest.fixture(scope="module")
def awake_memory(rig_on_idle: ClusterRig) -> list[RankMemory]:
    """Return the ranks' memory before their first sleep."""
    return read_weights_memory(rig_on_idle.kubectl, rig_on_idle.pod(NAME))


def opened(image: DemoImage) -> Image.Image:
    return Image.open(io.BytesIO(image.png)).convert("RGB")


def assert_right(image: DemoImage) -> None:
    seen = digit_judge.judge(opened(image))
    assert (seen.digit, seen.colour) == (7, "red")


def events(rig: ClusterRig, reason: str) -> list[str]:
    """List what the deployment's Events with this reason say, in order of creation."""
    items = rig.kubectl.get("events.events.k8s.io", "--field-selector", f"reason={reason},regarding.name={NAME}")["items"]
    return [str(item["note"]) for item in sorted(items, key=lambda item: item["metadata"]["creationTimestamp"])]


def send_to_sleep(rig: ClusterRig) -> Document:
    """Force sleep with the policy `Asleep`, then go back to `OnIdle`, under which a request wakes the worker.

    Return the state document in which the worker first has that policy again.
    """
    rig.sleep_policy(NAME, "Asleep")
    rig.wait(DD, ALL_ASLEEP, deadline_s=60)
    rig.sleep_policy(NAME, "OnIdle")
    rig.wait(DD, WAKEABLE, deadline_s=30)
    return rig.eventually("the worker knows its policy", lambda: found if (found := rig.state(NAME))["policy"] == "OnIdle" else None)


def set_sleep(rig: ClusterRig, **fields: object) -> None:
    """Merge `fields` into the sleep settings in the deployment's spec, whose others stay; return without waiting for an effect."""
    rig.kubectl.patch(DD, {"spec": {"sleep": fields}})


def routable(rig: ClusterRig) -> list[str]:
    return sorted(
        pod["metadata"]["name"] for pod in rig.pods(NAME) if pod["metadata"]["labels"].get("diffusion-operator.dev/routable") == "true"
    )


def test_a_model_that_nobody_uses_falls_asleep_and_gives_its_memory_back(rig_on_idle: ClusterRig, awake_memory: list[RankMemory]) -> None:
    rig = rig_on_idle
    rig.eventually("when it may sleep is told", lambda: rig.kubectl.get(DD)["status"].get("sleepEligibleTime"), deadline_s=30)
    assert_right(rig.image(NAME))
    set_sleep(rig, idleSeconds=IDLE_S)
    # It is wakeable already on its way to sleep.
    found = rig.wait(DD, ALL_ASLEEP, deadline_s=IDLE_S + NOTICE_S)
    set_sleep(rig, idleSeconds=LONG_S)
    assert (found["status"]["awakeReplicas"], found["status"]["asleepReplicas"]) == (0, 1)
    ready = condition(found, "Ready")
    assert ready is not None and (ready["status"], ready["reason"]) == ("True", "AsleepWakeable")
    print(check_given_back(awake_memory, read_weights_memory(rig.kubectl, rig.pod(NAME))))
    operation = rig.state(NAME)["lastOperation"]
    assert (operation["kind"], operation["error"], operation["level"]) == ("sleep", None, "HostMemory")
    assert operation["freedBytes"] >= 0.98 * sum(rank.weights for rank in awake_memory)
    note = rig.eventually("the sleep is told", lambda: events(rig, "Slept"))[-1]
    assert re.search(r"\d ?s", note) and re.search(r"\d ?([kMG]i?)?B", note), note
    assert routable(rig) == [rig.pod(NAME)]
    assert rig.kubectl.text("get", DD).splitlines()[1].split()[:4] == [NAME, "1", "1", "0"]


def test_a_request_at_the_service_wakes_it_and_is_served(rig_on_idle: ClusterRig, awake_memory: list[RankMemory]) -> None:
    """Send a request to the sleeping worker's Service, and leave the worker awake."""
    rig = rig_on_idle
    assert_right(rig.image(NAME))
    operation = rig.state(NAME)["lastOperation"]
    assert (operation["kind"], operation["error"]) == ("wake", None)
    rig.wait(DD, SERVING, deadline_s=NOTICE_S)
    note = rig.eventually("the wake is told", lambda: events(rig, "Woke"))[-1]
    assert re.search(r"\d ?s", note), note
    assert total_resident(read_weights_memory(rig.kubectl, rig.pod(NAME))) >= sum(rank.weights for rank in awake_memory)


def test_an_adapter_that_came_while_it_slept_is_there_at_the_first_request(rig_on_idle: ClusterRig) -> None:
    """Create an adapter for a sleeping worker, which reports it as Deferred and sleeps on.

    The first request then wakes the worker and is drawn in this style.
    """
    rig = rig_on_idle
    send_to_sleep(rig)
    rig.adapt(STYLE, NAME, f"/models/loras/{STYLE}")
    rig.eventually("the sleeping worker knows it", lambda: [one["state"] for one in rig.state(NAME)["adapters"]] == ["Deferred"])
    assert rig.state(NAME)["state"] == "asleep"
    assert digit_judge.has_style(opened(rig.image(NAME, STYLE)), STYLE)
    rig.wait(LORA, ADAPTER_READY, deadline_s=30)


def test_a_rank_that_is_killed_asleep_comes_back_asleep(rig_on_idle: ClusterRig, awake_memory: list[RankMemory]) -> None:
    """Kill rank 1 while its worker sleeps.

    The same server process starts the next generation of ranks, and these take no memory for weights.
    """
    rig = rig_on_idle
    before = send_to_sleep(rig)
    rig.kill_in_pod(rig.pod(NAME), before["ranks"][1]["pid"])
    after = rig.eventually("asleep again", lambda: asleep_in_another_life(rig, before), deadline_s=START_S)
    assert (after["bootId"], after["generation"]) == (before["bootId"], before["generation"] + 1)
    check_given_back(awake_memory, read_weights_memory(rig.kubectl, rig.pod(NAME)))


def test_a_server_that_is_killed_asleep_comes_back_asleep_and_wakes_on_a_request(
    rig_on_idle: ClusterRig, awake_memory: list[RankMemory]
) -> None:
    """Kill the server process of a sleeping worker. Leave the worker awake, after a restart of its container."""
    rig = rig_on_idle
    before, pod = rig.state(NAME), rig.pod(NAME)
    kill_server_in(rig.pods(NAME)[0])
    after = rig.eventually("asleep again", lambda: asleep_in_another_life(rig, before), deadline_s=START_S)
    assert rig.pod(NAME) == pod and after["bootId"] != before["bootId"]
    check_given_back(awake_memory, read_weights_memory(rig.kubectl, pod))
    rig.wait(DD, WAKEABLE, deadline_s=30)
    assert digit_judge.has_style(opened(rig.image(NAME, STYLE)), STYLE)


def asleep_in_another_life(rig: ClusterRig, before: Document) -> Document | None:
    """Return the worker's state document once it is asleep after a restart of its ranks or its container; None until then.

    AssertionError if it is awake in between.
    """
    found = rig.state_if_any(NAME)
    if found is None or (found["bootId"], found["generation"]) == (before["bootId"], before["generation"]):
        return None
    assert found["state"] in ("starting", "restarting", "asleep"), "it must not be awake in between"
    return found if found["state"] == "asleep" else None


def test_a_model_that_somebody_sent_to_sleep_refuses_and_a_deep_sleep_ends_with_the_same_image(rig_on_idle: ClusterRig) -> None:
    """Send the worker to a deep sleep, and compare the images before and after. Leave it asleep under OnIdle."""
    rig = rig_on_idle
    before = [rig.image(NAME).png, rig.image(NAME, STYLE).png]
    set_sleep(rig, policy="Asleep", level="Discard")
    rig.wait(DD, Wanted("Ready", "False", ["SleepRequested"]), deadline_s=60)
    rig.wait(DD, ALL_ASLEEP, deadline_s=60)
    for model in (NAME, STYLE):
        refused = rig.refusal(NAME, model)
        assert (refused.status, refused.code) == (422, "Asleep")
    assert rig.state(NAME)["lastOperation"]["level"] == "Discard"
    set_sleep(rig, policy="OnIdle", level="HostMemory")
    rig.wait(DD, WAKEABLE, deadline_s=30)
    assert [rig.image(NAME).png, rig.image(NAME, STYLE).png] == before
    send_to_sleep(rig)


def test_a_sleeping_deployment_is_deleted_without_waking_and_without_waiting(rig_on_idle: ClusterRig) -> None:
    rig = rig_on_idle
    rig.kubectl.text("delete", DD, deadline_s=60)
    rig.eventually(
        "not a pod is left, nor one on its way out",
        lambda: not rig.kubectl.get("pods", "-l", f"diffusion-operator.dev/deployment={NAME}")["items"],
        deadline_s=30,
    )
