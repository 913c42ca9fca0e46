# SPDX-License-Identifier: Apache-2.0
"""P11: how long after a request at the Service of a sleeping deployment its first denoise step is made, beyond the wake itself.

On the development cluster, with the deployment of examples/sleep/on-idle.yaml. The request is made in the cluster, by name and through the
Service, without an open connection. It is timed there until the event of its first step. The worker reports the time of the wake. The same
from an awake deployment is measured beside it, for the record.
"""

import json
import statistics
from datetime import datetime

from benchmarks.result import Measured
from tools.demo.errors import DemoFailed
from tools.demo.installation import ROOT
from tools.demo.kubectl import Document, Kubectl, Wanted, wait_for
from tools.demo.stage import stage
from tools.demo.weights_memory import CONTAINER, read_state
from tools.devcluster.errors import DevclusterError

NAMESPACE, NAME = "diffusion-bench", "digits"
DEPLOYMENT = f"dd/{NAME}"
MANIFEST = ROOT / "examples" / "sleep" / "on-idle.yaml"
REQUEST = ROOT / "benchmarks" / "request_in_the_cluster.py"
ROUNDS, TINY_ROUNDS = 10, 1
START_S, SLEEP_S = 300.0, 60.0
BODY = {"prompt": "a red digit seven", "size": "64x64", "seed": 1, "num_inference_steps": 8}


def measure(*, tiny: bool = False) -> Measured:
    """Measure on the development cluster how long a sleeping deployment takes to the first step of a request, beyond the wake.

    Figures are medians over the rounds, except for the longest such time and the cold start of the deployment.

    Raises:
        RuntimeError: no cluster is running, the deployment does not get ready or asleep in time, or a request fails or wakes nothing.
    """
    try:
        with stage(NAMESPACE) as set_up:
            return measure_on(set_up.kubectl, rounds=TINY_ROUNDS if tiny else ROUNDS)
    except (DemoFailed, DevclusterError) as error:
        raise RuntimeError(str(error)) from error


def measure_on(kubectl: Kubectl, *, rounds: int) -> Measured:
    """Apply the deployment in a namespace that has an operator, measure there, and leave it there.

    Raises:
        DemoFailed: the deployment does not get ready or asleep in time.
        RuntimeError: a request was not served, or did not wake the model.
    """
    kubectl.apply(MANIFEST)
    wait_for(kubectl, DEPLOYMENT, Wanted("Ready", "True", ["Serving"]), deadline_s=START_S)
    cold_start_s = _cold_start_s(kubectl)
    samples = [_round(kubectl) for _ in range(rounds)]
    beyond = [sample["first_step_minus_wake_ms"] for sample in samples]
    return Measured(
        figures={
            "first_step_minus_wake_ms": round(statistics.median(beyond), 1),
            "worst_first_step_minus_wake_ms": round(max(beyond), 1),
            "wake_ms": round(statistics.median(sample["wake_ms"] for sample in samples), 1),
            "awake_first_step_ms": round(statistics.median(sample["awake_first_step_ms"] for sample in samples), 1),
            "cold_start_s": cold_start_s,
        },
        targets={"first_step_minus_wake_ms": "<= 250"},
        samples=samples,
    )


def _round(kubectl: Kubectl) -> dict[str, float]:
    """Put the deployment to sleep, send it a request, and then another while it is awake; return milliseconds of both.

    Raises:
        RuntimeError: the first request did not wake the model.
    """
    pod = _asleep(kubectl)
    before = read_state(kubectl, pod)["lastOperation"]
    cold = _ask(kubectl, pod)
    wake = read_state(kubectl, pod)["lastOperation"]
    if wake["kind"] != "wake" or wake["error"] or wake["operationId"] == before["operationId"]:
        raise RuntimeError(f"expected the request to wake the model, found {wake} as its last operation")
    wake_ms = wake["seconds"] * 1000
    return {
        "first_step_ms": cold["progress"] * 1000,
        "wake_ms": wake_ms,
        "first_step_minus_wake_ms": cold["progress"] * 1000 - wake_ms,
        "answer_ms": cold["seconds"] * 1000,
        "awake_first_step_ms": _ask(kubectl, pod)["progress"] * 1000,
    }


def _asleep(kubectl: Kubectl) -> str:
    """Put the model to sleep by the spec, then set the policy by which a request wakes it; return the only pod's name.

    Raises:
        RuntimeError: the worker reports another policy, or is not asleep.
    """
    for policy, wanted in (("Asleep", Wanted("Awake", "False", ["AllAsleep"])), ("OnIdle", Wanted("Ready", "True", ["AsleepWakeable"]))):
        kubectl.patch(DEPLOYMENT, {"spec": {"sleep": {"policy": policy}}})
        wait_for(kubectl, DEPLOYMENT, wanted, deadline_s=SLEEP_S)
    (pod,) = _pods(kubectl)
    name = str(pod["metadata"]["name"])
    if (state := read_state(kubectl, name))["policy"] != "OnIdle" or state["state"] != "asleep":
        raise RuntimeError(f"expected {name} to be asleep with the policy OnIdle, found {state['state']} with {state['policy']}")
    return name


def _ask(kubectl: Kubectl, pod: str) -> dict[str, float]:
    script = ("python3", "-c", REQUEST.read_text(), f"http://{NAME}", json.dumps(BODY))
    told: dict[str, float] = json.loads(kubectl.text("exec", pod, "--container", CONTAINER, "--", *script))
    if "completed" not in told:
        raise RuntimeError(f"expected an image, found {told}")
    return told


def _cold_start_s(kubectl: Kubectl) -> float:
    """Return the seconds from the pod's creation until it was last found ready; Kubernetes counts whole ones."""
    (pod,) = _pods(kubectl)
    ready = next(one for one in pod["status"]["conditions"] if one["type"] == "Ready")
    return (
        datetime.fromisoformat(ready["lastTransitionTime"]) - datetime.fromisoformat(pod["metadata"]["creationTimestamp"])
    ).total_seconds()


def _pods(kubectl: Kubectl) -> list[Document]:
    items: list[Document] = kubectl.get("pods", "--selector", f"diffusion-operator.dev/deployment={NAME}")["items"]
    return items
