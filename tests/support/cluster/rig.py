# SPDX-License-Identifier: Apache-2.0
"""Actions and observations of cluster tests: objects by kubectl, images by the Service, processes by exec; and an application that sends
requests.

Real: the cluster, the operator, the workers, and the application's OpenAI SDK. Not real: GPUs, since workers compute on the CPU, and the
application, which always asks for the same image. The older chart is our chart with two changes.
"""

import json
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import openai
import yaml

from tools.demo.cluster import address_of
from tools.demo.errors import DemoFailed
from tools.demo.images import DemoImage, Refusal, Request, ask, ask_and_be_refused, ask_once, client_for, mean_difference
from tools.demo.installation import CHART, RELEASE, Images, helm_install, run_helm
from tools.demo.kubectl import Document, Kubectl, Wanted, condition, wait_for
from tools.demo.weights_memory import read_state
from tools.devcluster import cluster, programs

T = TypeVar("T")

SERVING = Wanted("Ready", "True", ["Serving"])
ROLLED_OUT = Wanted("Progressing", "True", ["RolloutComplete"])
ADAPTER_READY = Wanted("Ready", "True", ["LoadedEverywhere"])
START_S = 480.0
# A user id that no container image knows.
ANY_USER = 1_000_700_000
# A deployment and an adapter that the files of the main path and of faults share.
STEADY, STRIPED = "steady", "striped"
MANY_STEPS = 1000
PROMPT = "a red digit seven"
# Levels of 255, since a batch of another size rounds its sums in another order.
TOLERANCE = 1.0
ANSWER_S = 120.0
# Timeouts of the SDK.
PATIENCE = openai.Timeout(ANSWER_S, connect=5.0)
PAUSE_S = 0.3
HELM_S = 120
# A description in the older chart's CRD, which shows which of the two CRDs is in the cluster.
OLDER_WORDS = "How many replicas it had in version 0.0.9."


class ClusterRig:
    """Commands of a test to a namespace where an operator runs: apply objects, wait for conditions, ask workers and look into pods."""

    def __init__(self, kubectl: Kubectl, worker_image: str) -> None:
        self.kubectl = kubectl
        self.worker_image = worker_image

    def deploy(self, name: str, *, ranks: int = 1, replicas: int = 1, model: str | Document = "/models/digits", **spec: Any) -> None:
        """Apply a DiffusionDeployment on the CPU; `model` is a path or all of `spec.model`, and `spec` overrides other fields."""
        base: Document = {
            "model": model if isinstance(model, dict) else {"source": {"path": model}},
            "replicas": replicas,
            "parallelism": {"ranksPerReplica": ranks},
            "resources": {"gpuResourceName": "none", "requests": {"cpu": "100m", "memory": "512Mi"}, "sharedMemory": "128Mi"},
        }
        self.apply("DiffusionDeployment", name, base | spec)

    def serve_steady(self) -> None:
        """Serve the digits model on two ranks with one adapter, unless an earlier file has left it serving."""
        # So many steps that an image is unfinished when its rank is killed, even on a slow machine.
        self.serve(STEADY, ranks=2, requests={"limits": {"maxSteps": MANY_STEPS}})
        self.adapt(STRIPED, STEADY, "/models/loras/stripes")
        self.wait(f"lora/{STRIPED}", ADAPTER_READY)

    def adapt(self, name: str, deployment: str, path: str) -> None:
        """Apply a LoRAAdapter called `name` for a deployment, with the source `path`."""
        self.apply("LoRAAdapter", name, {"deploymentRef": {"name": deployment}, "source": {"path": path}})

    def apply(self, kind: str, name: str, spec: Document) -> None:
        document = {"apiVersion": "diffusion-operator.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}
        self.kubectl.text("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=json.dumps(document))

    def wait(self, resource: str, wanted: Wanted, *, deadline_s: float = START_S) -> Document:
        return wait_for(self.kubectl, resource, wanted, deadline_s=deadline_s, tell=print)

    def serve(self, name: str, **options: Any) -> Document:
        """Deploy as `deploy` does, wait for the condition SERVING, and return the object as it then is."""
        self.deploy(name, **options)
        return self.wait(f"dd/{name}", SERVING)

    def exists(self, resource: str) -> bool:
        return bool(self.kubectl.text("get", resource, "--ignore-not-found", "--output", "name"))

    def events(self, name: str, reason: str) -> list[str]:
        """List what Events with this reason say about objects called `name`, whatever their kind, in order of creation."""
        items = self.kubectl.get("events.events.k8s.io", "--field-selector", f"reason={reason},regarding.name={name}")["items"]
        return [str(item["note"]) for item in sorted(items, key=lambda item: item["metadata"]["creationTimestamp"])]

    def sleep_policy(self, name: str, policy: str) -> None:
        self.kubectl.patch(f"dd/{name}", {"spec": {"sleep": {"policy": policy}}})

    def condition(self, resource: str, kind: str) -> Document:
        found = condition(self.kubectl.get(resource), kind)
        assert found is not None, f"{resource} has no condition {kind}"
        return found

    def pods(self, deployment: str) -> list[Document]:
        """Return the deployment's pods that are not terminating."""
        items = self.kubectl.get("pods", "-l", f"diffusion-operator.dev/deployment={deployment}")["items"]
        replicas = [item for item in items if "diffusion-operator.dev/replica-index" in item["metadata"]["labels"]]
        return [item for item in replicas if "deletionTimestamp" not in item["metadata"]]

    def pod(self, deployment: str) -> str:
        (pod,) = self.pods(deployment)
        return str(pod["metadata"]["name"])

    def state(self, deployment: str) -> Document:
        """Read what the worker of a deployment with a single pod says of itself. Any other number of pods is a ValueError."""
        return self.state_of(self.pod(deployment))

    def state_of(self, pod: str) -> Document:
        return read_state(self.kubectl, pod)

    def state_if_any(self, deployment: str) -> Document | None:
        """Return the same as `state`, but None if kubectl fails to run the reader in the pod, as during a container's restart."""
        try:
            return self.state(deployment)
        except DemoFailed:
            return None

    def kill_in_pod(self, pod: str, pid: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Signal a process from inside its worker container by `kubectl exec`, with the rights of that user; `pid` is as counted there."""
        self.kubectl.text("exec", pod, "-c", "worker", "--", "python3", "-c", f"import os; os.kill({pid}, {int(number)})")

    @contextmanager
    def client(self, deployment: str) -> Iterator[openai.OpenAI]:
        """Provide a client of the OpenAI SDK for the deployment's Service while the block lasts."""
        with address_of(self.kubectl.namespace, deployment) as url:
            yield client_for(url)

    def image(self, deployment: str, model: str | None = None) -> DemoImage:
        with self.client(deployment) as client:
            return ask(client, Request(PROMPT, 1, model or deployment, steps=8))

    def refusal(self, deployment: str, model: str | None = None) -> Refusal:
        with self.client(deployment) as client:
            return ask_and_be_refused(client, Request(PROMPT, 1, model or deployment, steps=8))

    def eventually(self, what: str, look: Callable[[], T], *, deadline_s: float = 60.0) -> T:
        """Call `look` until it returns something true, and return that; AssertionError with `what` after `deadline_s` seconds."""
        end = time.monotonic() + deadline_s
        while not (found := look()):
            assert time.monotonic() < end, f"not within {deadline_s:g} s: {what}"
            time.sleep(0.6)
        return found


class Clients:
    """An application that asks for images in a thread of its own while the block lasts. It relies on the SDK's retries alone.

    A request is lost if it gets neither the right image in the end nor an error that allows another try (`retryable` in its body).
    `address` is called for every request, because a Service that was made again has another address. `allowed` are codes that are right
    although a retry cannot help, such as those about an adapter that comes and goes. `may_be_unreachable` counts a request as refused if no
    try reached a server: a killed server refuses connections until its kubelet notices.
    """

    def __init__(
        self,
        address: Callable[[], str],
        right: DemoImage,
        request: Request,
        *,
        allowed: frozenset[str] = frozenset(),
        may_be_unreachable: bool = False,
    ) -> None:
        self._address, self._right, self._request, self._allowed = address, right, request, allowed
        self._may_be_unreachable = may_be_unreachable
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_asking, daemon=True)
        self.sent = self.answered = 0
        self.refused: Counter[str] = Counter()
        self.lost: list[str] = []
        self.refused_at: list[tuple[float, float, str]] = []
        """Start and end of each refused request that may be tried again, by time.monotonic(), and its code."""
        self.slowest_s = 0.0
        self.tries = 0
        """The number of all HTTP requests, the SDK's retries included."""

    def __enter__(self) -> "Clients":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(ANSWER_S)

    def told(self) -> str:
        """Format the counts, the slowest answer in seconds and all losses as a line of text."""
        return f"{self.sent} sent, {self.answered} answered, refused {dict(self.refused)}, slowest {self.slowest_s:.1f} s, lost {self.lost}"

    def _keep_asking(self) -> None:
        while not self._ended.is_set():
            began, address = time.monotonic(), self._address()
            self.sent += 1
            http = openai.DefaultHttpxClient(event_hooks={"request": [self._count_try]}, timeout=PATIENCE)
            with openai.OpenAI(base_url=f"{address}/v1", api_key="not-needed", timeout=PATIENCE, http_client=http) as client:
                if wrong := self._ask(client, began):
                    self.lost.append(f"{time.strftime('%H:%M:%S')} {wrong}")
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            self._ended.wait(PAUSE_S)

    def _count_try(self, _: object) -> None:
        self.tries += 1

    def _refused(self, code: str, began: float, *, retryable: bool = True) -> None:
        self.refused[code] += 1
        if retryable:
            self.refused_at.append((began, time.monotonic(), code))

    def _ask(self, client: openai.OpenAI, began: float) -> str:
        """Send a request, and count it as `answered` or, with an error that is allowed, as refused.

        Return an empty string for these two, and else the fault of the image or the error.
        """
        try:
            difference = mean_difference(ask_once(client, self._request), self._right)
        except openai.APIStatusError as error:
            body = error.body if isinstance(error.body, dict) else {}
            code = str(body.get("code"))
            if body.get("retryable") or code in self._allowed:
                self._refused(code, began, retryable=bool(body.get("retryable")))
                return ""
            return f"{error.status_code} {error.body}"
        except openai.APIConnectionError as error:
            if self._may_be_unreachable and isinstance(error.__cause__, httpx2.ConnectError):
                self._refused("no connection", began)
                return ""
            return f"{type(error).__name__}: {error.__cause__ or error}"
        if difference > TOLERANCE:
            return f"an image {difference:.1f} levels away from the right one"
        self.answered += 1
        return ""


class HelmRig:
    """Runner of the real helm program against the tests' cluster.

    The release that it installs, upgrades and removes is the operator's, in `namespace`.
    """

    def __init__(self, namespace: str, images: Images) -> None:
        self.namespace, self.images = namespace, images
        self._program = programs.helm(), cluster.provider().kubeconfig()

    def __call__(self, *words: str) -> str:
        return run_helm(*self._program, *words, "--namespace", self.namespace, deadline_s=HELM_S)

    def upgrade(self, chart: Path = CHART, **settings: str) -> str:
        """Run `helm upgrade --install`, wait for the operator's pod, and return helm's output.

        In the names of settings `_` stands for a dot: `engine_image` is the value `engine.image`.
        """
        own = {name.replace("_", "."): value for name, value in settings.items()}
        return helm_install(*self._program, namespace=self.namespace, images=self.images, deadline_s=HELM_S, settings=own, chart=chart)

    def uninstall(self) -> None:
        self("uninstall", RELEASE, "--wait", "--timeout", f"{HELM_S}s")


def older_chart(folder: Path) -> Path:
    """Write a copy of our chart that looks older into `folder`, and return its path.

    The copy has version 0.0.9, a field of the spec is missing, and a description in the CRD differs.
    """
    chart = folder / "older"
    shutil.copytree(CHART, chart)  # symbolic links become files
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    (chart / "Chart.yaml").write_text(yaml.safe_dump(about | dict.fromkeys(("version", "appVersion"), "0.0.9")))
    file = chart / "files" / "crds" / "diffusiondeployments.yaml"
    crd = yaml.safe_load(file.read_text())
    spec = spec_schema(crd)
    spec["replicas"]["description"] = OLDER_WORDS
    del spec["podDisruptionBudget"]
    file.write_text(yaml.safe_dump(crd))
    return chart


def spec_schema(crd: Document) -> Any:
    """Return a CRD's schemas for fields below `spec`, by name, in its first version.

    They are part of `crd`, so tests can change it through them.
    """
    return crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
