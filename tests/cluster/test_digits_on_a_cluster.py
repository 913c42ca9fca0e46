# SPDX-License-Identifier: Apache-2.0
"""The main path on a real API server and kubelet, with our container images, our chart and the real model: the demo's steps, and faults."""

import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import yaml
from PIL import Image

from support.cluster.prometheus import Prometheus, prometheus
from support.cluster.rig import ADAPTER_READY, MANY_STEPS, PROMPT, SERVING, START_S, STEADY, STRIPED, ClusterRig
from support.runner import digit_judge
from tools.demo.images import DemoImage, Request, ask_and_be_refused
from tools.demo.installation import CHART
from tools.demo.kubectl import Wanted

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

ALERTS = CHART / "files" / "alerts.yaml"
DASHBOARD = ALERTS.with_name("dashboard.json")
NAME = STEADY
DD, LORA, STYLE = f"dd/{NAME}", f"lora/{STRIPED}", "stripes"
ASLEEP = Wanted("Awake", "False", ["AllAsleep"])


@pytest.fixture(scope="module")
def metrics(rig: ClusterRig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Run a Prometheus for the module. The fixture that deploys the model asks for it first, so that its series cover the start-up."""
    with prometheus(rig, tmp_path_factory.mktemp("prometheus")) as found:
        yield found


@pytest.fixture(scope="module")
def rig_with_digits(rig: ClusterRig, metrics: Prometheus) -> ClusterRig:
    """Serve the digits model with its adapter. Each test leaves it serving, and the file of faults goes on with it."""
    rig.serve_steady()
    return rig


def opened(image: DemoImage) -> Image.Image:
    return Image.open(io.BytesIO(image.png)).convert("RGB")


def test_a_declared_model_draws_what_it_is_asked_for(rig_with_digits: ClusterRig) -> None:
    seen = digit_judge.judge(opened(rig_with_digits.image(NAME)))
    assert (seen.digit, seen.colour) == (7, "red")


def test_the_adapter_is_served_under_its_name_and_changes_the_image(rig_with_digits: ClusterRig) -> None:
    assert digit_judge.has_style(opened(rig_with_digits.image(NAME, STRIPED)), STYLE)
    assert not digit_judge.has_style(opened(rig_with_digits.image(NAME)), STYLE)


def test_an_adapter_nobody_declared_is_not_found_and_never_the_base(rig_with_digits: ClusterRig) -> None:
    refused = rig_with_digits.refusal(NAME, "no-such-style")
    assert (refused.status, refused.code) == (404, "model_not_found")


READ_FILE = """
import gzip, json
print(*[one["name"] for one in json.loads(gzip.open("/etc/diffusion/desired/adapters.json.gz").read())["adapters"]])
"""


def test_the_kubelet_brings_the_file_with_an_adapter_that_is_younger_than_its_pod(rig_with_digits: ClusterRig) -> None:
    rig = rig_with_digits

    def names() -> list[str]:
        return rig.kubectl.text("exec", rig.pod(NAME), "-c", "worker", "--", "python3", "-c", READ_FILE).split()

    # The kubelet looks at a pod's volumes once a minute, and at once where the pod itself changes.
    rig.kubectl.text("annotate", "pod", rig.pod(NAME), "diffusion-tests/look-again=now")
    rig.eventually("the list with the adapter", lambda: names() == [STRIPED], deadline_s=180)


def test_kubectl_shows_the_model_and_its_adapter_with_their_columns(rig_with_digits: ClusterRig) -> None:
    header, row = rig_with_digits.kubectl.text("get", DD).splitlines()
    assert header.split()[:4] == ["NAME", "READY", "DESIRED", "AWAKE"]
    assert row.split()[:4] == [NAME, "1", "1", "1"]
    assert "LoadedEverywhere" in rig_with_digits.kubectl.text("get", LORA)


def test_an_adapter_that_is_no_lora_says_so_and_the_base_serves_on(rig_with_digits: ClusterRig) -> None:
    rig = rig_with_digits
    rig.adapt("broken", NAME, "/models/digits")
    rig.wait("lora/broken", Wanted("Ready", "False", ["SourceError", "Failed"]), deadline_s=60)
    found = rig.kubectl.text("describe", "lora/broken")
    assert "InvalidAdapter" in found
    assert "expected a *.safetensors file in the folder, found none" in found
    assert rig.condition(DD, "Ready")["status"] == "True"
    assert rig.condition(DD, "AdaptersReady")["reason"] == "SomeFailed"
    refused = rig.refusal(NAME, "broken")
    assert refused.code in ("AdapterNotLoaded", "model_not_found")
    rig.image(NAME)
    rig.kubectl.text("delete", "lora/broken", deadline_s=60)
    rig.eventually("the base alone with its style", lambda: rig.condition(DD, "AdaptersReady")["reason"] == "AllReady")


def test_a_deleted_adapter_is_unknown_and_one_applied_again_is_served_again(rig_with_digits: ClusterRig) -> None:
    rig = rig_with_digits
    rig.kubectl.text("delete", LORA, deadline_s=60)
    rig.eventually("the adapter is unloaded", lambda: not rig.state(NAME)["adapters"])
    assert rig.refusal(NAME, STRIPED).status == 404
    rig.adapt(STRIPED, NAME, f"/models/loras/{STYLE}")
    rig.wait(LORA, ADAPTER_READY, deadline_s=60)
    assert digit_judge.has_style(opened(rig.image(NAME, STRIPED)), STYLE)


def test_nothing_of_ours_carries_a_finalizer_or_an_annotation_of_kopf(rig_with_digits: ClusterRig) -> None:
    for resource in (DD, LORA, "pods"):
        text = rig_with_digits.kubectl.text("get", resource, "-o", "yaml")
        assert "kopf.zalando.org" not in text
        assert "finalizers" not in text


def test_every_expression_of_the_dashboard_has_data(rig_with_digits: ClusterRig, metrics: Prometheus) -> None:
    rig = rig_with_digits
    rig.eventually("the worker's metrics are read", lambda: rig.pod(NAME) in metrics.up())
    rig.image(NAME)
    rig.image(NAME, STRIPED)
    assert rig.refusal(NAME, "no-such-style").code == "model_not_found"
    rig.sleep_policy(NAME, "Asleep")
    rig.wait(DD, ASLEEP, deadline_s=60)
    rig.sleep_policy(NAME, "AlwaysAwake")
    rig.wait(DD, SERVING, deadline_s=60)

    def chosen(expression: str) -> str:
        """Put values in place of the dashboard's variables; an interval of 20 s is for metrics that are read every two seconds."""
        for place, value in (("$__rate_interval", "20s"), ("$namespace", rig.kubectl.namespace), ("$model", NAME)):
            expression = expression.replace(place, value)
        return expression

    def without_data() -> list[str]:
        lines = [line["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for line in panel.get("targets", [])]
        return [line for line in map(chosen, lines) if not metrics.ever(line)]

    rig.eventually("data for each", lambda: not without_data(), deadline_s=30)


def test_killed_ranks_are_replaced_inside_the_pod_with_their_adapter_and_alerts_fire(
    rig_with_digits: ClusterRig, metrics: Prometheus
) -> None:
    """Cause faults, and check that the rules of four alerts match. They are tried without their `for`, which promtool tests."""
    rig = rig_with_digits
    rules = {rule["alert"]: rule["expr"] for group in yaml.safe_load(ALERTS.read_text()) for rule in group["rules"]}
    alerts = ("DiffusionRanksLost", "DiffusionRequestsFailing", "DiffusionAdaptersFailing", "DiffusionDeploymentsNotReady")
    before = rig.image(NAME, STRIPED)
    state, restarts = rig.state(NAME), replica(rig)["restarts"]
    try:
        assert metrics.now(rules["DiffusionRanksLost"]) == metrics.now(rules["DiffusionRequestsFailing"]) == []
        rig.deploy("too-much", resources={"gpuResourceName": "example.com/none"})
        rig.adapt("broken", NAME, "/models/digits")
        with ThreadPoolExecutor(1) as thread, rig.client(NAME) as client:
            asked = thread.submit(ask_and_be_refused, client, Request(PROMPT, 1, NAME, steps=MANY_STEPS))
            # The second loss comes while the request runs alone, so it counts as its cause and is refused.
            for _ in range(2):
                rig.eventually("the image is being made", lambda: asked.done() or rig.state(NAME)["inFlight"], deadline_s=START_S)
                assert not asked.done(), f"ended before its last loss: {asked.exception() or asked.result()}"
                kill_a_rank(rig)
            assert asked.result(START_S).code == "RequestFailed"
        rig.eventually("the ranks are back", lambda: rig.state(NAME)["state"] == "ready", deadline_s=START_S)
        kill_a_rank(rig)
        for alert in alerts:
            fired = rig.eventually(f"{alert} fires", partial(metrics.now, rules[alert]), deadline_s=60)
            print(alert, [one["metric"] | {"value": one["value"][1]} for one in fired])
    finally:
        rig.kubectl.text("delete", "dd/too-much", "lora/broken", "--ignore-not-found")
    rig.eventually("the loss is told", lambda: "SIGKILL" in (replica(rig).get("lastRankLoss") or ""), deadline_s=60)
    rig.wait(DD, SERVING)
    assert rig.condition(DD, "Degraded")["status"] == "False"
    assert (rig.state(NAME)["bootId"], replica(rig)["restarts"]) == (state["bootId"], restarts)
    assert rig.state(NAME)["generation"] == state["generation"] + 3
    assert rig.events(NAME, "RankLost")
    rig.wait(LORA, ADAPTER_READY, deadline_s=60)
    assert rig.image(NAME, STRIPED).png == before.png


def kill_a_rank(rig: ClusterRig) -> None:
    """Kill a rank, and return once another generation of ranks has started."""
    before = rig.state(NAME)
    rig.kill_in_pod(rig.pod(NAME), before["ranks"][1]["pid"])
    rig.eventually("another generation", lambda: rig.state(NAME)["generation"] > before["generation"], deadline_s=START_S)


def replica(rig: ClusterRig) -> dict[str, Any]:
    """Read the first entry of `replicaStates` in the deployment's status."""
    return dict(rig.kubectl.get(DD)["status"]["replicaStates"][0])
