# SPDX-License-Identifier: Apache-2.0
"""The hands and eyes of cluster tests: objects by kubectl, images by the Service, processes by exec.

Real: the cluster, the operator and the workers. Not real: GPUs, for workers compute on the CPU.
"""

import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import openai

from tools.demo.cluster import address_of
from tools.demo.errors import DemoFailed
from tools.demo.images import DemoImage, Refusal, Request, ask, ask_and_be_refused, client_for
from tools.demo.kubectl import Document, Kubectl, Wanted, condition, wait_for
from tools.demo.weights_memory import read_state

T = TypeVar("T")

SERVING = Wanted("Ready", "True", ["Serving"])
ADAPTER_READY = Wanted("Ready", "True", ["LoadedEverywhere"])
START_S = 240.0
PROMPT = "a red digit seven"


class ClusterRig:
    """One namespace with the operator in it."""

    def __init__(self, kubectl: Kubectl, worker_image: str) -> None:
        self.kubectl = kubectl
        self.worker_image = worker_image

    def deploy(self, name: str, *, ranks: int = 1, replicas: int = 1, model: str | Document = "/models/digits", **spec: Any) -> None:
        """Apply a DiffusionDeployment on the CPU; `model` is a path or all of `spec.model`, and `spec` goes on top."""
        base: Document = {
            "model": model if isinstance(model, dict) else {"source": {"path": model}},
            "replicas": replicas,
            "parallelism": {"ranksPerReplica": ranks},
            "resources": {"gpuResourceName": "none", "requests": {"cpu": "100m", "memory": "512Mi"}, "sharedMemory": "128Mi"},
        }
        self.apply("DiffusionDeployment", name, base | spec)

    def adapt(self, name: str, deployment: str, path: str) -> None:
        """Apply a LoRAAdapter."""
        self.apply("LoRAAdapter", name, {"deploymentRef": {"name": deployment}, "source": {"path": path}})

    def apply(self, kind: str, name: str, spec: Document) -> None:
        document = {"apiVersion": "diffusion-operator.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}
        self.kubectl.text("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(document))

    def wait(self, resource: str, wanted: Wanted, *, deadline_s: float = START_S) -> Document:
        return wait_for(self.kubectl, resource, wanted, deadline_s=deadline_s, tell=print)

    def serve(self, name: str, **options: Any) -> Document:
        """Deploy and wait until it serves."""
        self.deploy(name, **options)
        return self.wait(f"dd/{name}", SERVING)

    def exists(self, resource: str) -> bool:
        return bool(self.kubectl.text("get", resource, "--ignore-not-found", "--output", "name"))

    def events(self, name: str, reason: str) -> list[str]:
        """The notes of an object's Events, oldest first."""
        items = self.kubectl.get("events.events.k8s.io", "--field-selector", f"reason={reason},regarding.name={name}")["items"]
        return [str(item["note"]) for item in sorted(items, key=lambda item: item["metadata"]["creationTimestamp"])]

    def sleep_policy(self, name: str, policy: str) -> None:
        self.kubectl.patch(f"dd/{name}", {"spec": {"sleep": {"policy": policy}}})

    def condition(self, resource: str, kind: str) -> Document:
        found = condition(self.kubectl.get(resource), kind)
        assert found is not None, f"{resource} has no condition {kind}"
        return found

    def pods(self, deployment: str) -> list[Document]:
        """The deployment's pods that are not on their way out."""
        items = self.kubectl.get("pods", "-l", f"diffusion-operator.dev/deployment={deployment}")["items"]
        return [item for item in items if "deletionTimestamp" not in item["metadata"]]

    def pod(self, deployment: str) -> str:
        (pod,) = self.pods(deployment)
        return str(pod["metadata"]["name"])

    def state(self, deployment: str) -> Document:
        """The worker's own state document."""
        return self.state_of(self.pod(deployment))

    def state_of(self, pod: str) -> Document:
        return read_state(self.kubectl, pod)

    def state_if_any(self, deployment: str) -> Document | None:
        """The same, or None while the worker or its container does not answer."""
        try:
            return self.state(deployment)
        except DemoFailed:
            return None

    def kill_in_pod(self, pod: str, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
        """A signal, by the container's own user."""
        self.kubectl.text("exec", pod, "-c", "worker", "--", "python3", "-c", f"import os; os.kill({pid}, {int(number)})")

    @contextmanager
    def client(self, deployment: str) -> Iterator[openai.OpenAI]:
        """The OpenAI SDK on the deployment's Service."""
        with address_of(self.kubectl.namespace, deployment) as url:
            yield client_for(url)

    def image(self, deployment: str, model: str | None = None) -> DemoImage:
        with self.client(deployment) as client:
            return ask(client, Request(PROMPT, 1, model or deployment, steps=8))

    def refusal(self, deployment: str, model: str | None = None) -> Refusal:
        with self.client(deployment) as client:
            return ask_and_be_refused(client, Request(PROMPT, 1, model or deployment, steps=8))

    def eventually(self, what: str, look: Callable[[], T], *, deadline_s: float = 60.0) -> T:
        """What `look` returns once it is true."""
        end = time.monotonic() + deadline_s
        while not (found := look()):
            assert time.monotonic() < end, f"not within {deadline_s:g} s: {what}"
            time.sleep(0.3)
        return found
