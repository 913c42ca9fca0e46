# SPDX-License-Identifier: Apache-2.0
"""The soak of the whole product on a real node: applications ask a deployment through its Service while things break under it.

Faults come one at a time, or with one that touches no replica, and after each all must serve again within a deadline. Two replicas
never break at once: Kubernetes itself sends requests to a dead pod for a second, and the SDK's retries need somebody to reach.
"""

import json
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.cluster.clients import Clients
from support.cluster.faults import api_server_stopped, kill_operator, kill_server_in, operator_pods, resident_mib, service_address
from support.cluster.rig import ADAPTER_READY, PROMPT, SERVING, ClusterRig
from tools.demo.errors import DemoFailed
from tools.demo.images import Request, ask
from tools.demo.kubectl import Document, Wanted
from tools.demo.stage import stage

NAMESPACE, NAME = "diffusion-soak", "digits"
DD = f"dd/{NAME}"
STAYS, COMES = "stripes", "frame"
REPLICAS = 2
# The kubelet waits up to five minutes before it starts a container again that ended often.
RECOVERY_S = 420.0
CALM_S = (1.0, 6.0)
STANDSTILL_S = (3.0, 15.0)
OUTPUT = Path("bench-output") / "node-soak.json"


@dataclass
class NodeOutcome:
    """What one run came to. Memory is the operator's, in MiB by the seconds since the start."""

    seed: int
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    sent: int = 0
    answered: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    slowest_recovery_s: dict[str, float] = field(default_factory=dict)
    operator_mib: list[tuple[float, float]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        memory = [mib for _, mib in self.operator_mib]
        short = {"lost": len(self.lost), "operator_mib": {"first": memory[0], "most": max(memory), "last": memory[-1]} if memory else {}}
        return self.__dict__ | {"seconds": round(self.seconds, 1)} | short

    def line(self) -> str:
        """All of it but the course of the memory, as one line of JSON."""
        return json.dumps(self.document())

    def save(self) -> None:
        OUTPUT.parent.mkdir(exist_ok=True)
        OUTPUT.write_text(json.dumps(self.__dict__, indent=1))


class NodeSoak:
    """Faults on the deployment of one namespace."""

    def __init__(self, rig: ClusterRig, seed: int) -> None:
        self.rig = rig
        self.rng = random.Random(seed)
        self.outcome = NodeOutcome(seed)
        self._address = ""
        self._began = time.monotonic()
        on_replicas: dict[str, Callable[[], None]] = {
            "rank-killed": lambda: self._signal_rank(signal.SIGKILL),
            "rank-stopped": lambda: self._signal_rank(signal.SIGSTOP),
            "server-killed": self._kill_server,
            "pod-deleted": self._delete_pod,
            "scaled": self._scale,
            "sent-to-sleep": self._sleep,
            "sleeps-on-idle": self._on_idle,
        }
        self.faults: dict[str, Callable[[], None]] = on_replicas | {"adapter": self._adapter, "api-server-stopped": self._stop_api_server}
        self.company: dict[str, Callable[[], None]] = {"operator-killed": self._kill_operator, "adapter": self._adapter}

    def run(self, limit_s: float) -> NodeOutcome:
        rig = self.rig
        rig.adapt(STAYS, NAME, f"/models/loras/{STAYS}")
        rig.serve(NAME, replicas=REPLICAS)
        rig.wait(f"lora/{STAYS}", ADAPTER_READY)
        self._address, self._began = service_address(rig.kubectl, NAME), time.monotonic()
        with ExitStack() as stack:
            asking = [stack.enter_context(clients) for clients in self._clients()]
            while time.monotonic() - self._began < limit_s and not self.outcome.wrong:
                self._one_round()
                self._count(asking)
        self._count(asking)
        self.outcome.seconds = time.monotonic() - self._began
        return self.outcome

    def _clients(self) -> list[Clients]:
        """Of the model, of an adapter that stays, and of one that comes and goes, about which a 404 may be right."""
        right = {}
        self._put(COMES)
        self.rig.wait(f"lora/{COMES}", ADAPTER_READY)
        with self.rig.client(NAME) as client:
            for name in (NAME, STAYS, COMES):
                right[name] = ask(client, Request(PROMPT, 1, name, steps=8))
        allowed = {COMES: frozenset({"NotFound", "AdapterRemoved"})}
        return [
            Clients(lambda: self._address, right[name], Request(PROMPT, 1, name, steps=8), allowed=allowed.get(name, frozenset()))
            for name in right
        ]

    def _one_round(self) -> None:
        name, other = self.rng.choice(sorted(self.faults)), self.rng.choice([*sorted(self.company), "", ""])
        if name in ("adapter", "api-server-stopped"):
            other = ""  # the same twice, or a thing that nobody could do
        began = time.monotonic()
        told = "+".join(filter(None, (name, other)))
        self.outcome.faults[told] += 1
        print(f"{began - self._began:7.1f} s {told}", flush=True)
        try:
            if other:
                self.company[other]()
            self.faults[name]()
            self.rig.eventually("all serve", self._settled, deadline_s=RECOVERY_S)
        except (DemoFailed, AssertionError) as error:
            self.outcome.wrong.append(f"{began - self._began:.0f} s {told}: {error}")
        took = round(time.monotonic() - began, 1)
        self.outcome.slowest_recovery_s[told] = max(took, self.outcome.slowest_recovery_s.get(told, 0.0))
        self._look_at_operator()
        time.sleep(self.rng.uniform(*CALM_S))

    def _settled(self) -> bool:
        """Every replica is there once and says itself that it is ready; the operator says so too, also of the adapter that stays."""
        found, pods = self.rig.kubectl.get(DD), self.rig.pods(NAME)
        indexes = [pod["metadata"]["labels"]["diffusion-operator.dev/replica-index"] for pod in pods]
        complete = len(set(indexes)) == len(indexes) == found["spec"]["replicas"]
        told = SERVING.holds(found) and ADAPTER_READY.holds(self.rig.kubectl.get(f"lora/{STAYS}"))
        return complete and told and all((self._state(pod) or {}).get("state") == "ready" for pod in pods)

    def _state(self, pod: Document) -> Document | None:
        """What the worker says of itself; None while it cannot be asked."""
        try:
            return self.rig.state_of(str(pod["metadata"]["name"]))
        except DemoFailed:
            return None

    def _life(self, pod: Document) -> tuple[str, int] | None:
        state = self._state(pod)
        return (state["bootId"], state["generation"]) if state else None

    def _wait_for_another_life(self, pod: Document, before: tuple[str, int] | None) -> None:
        """Until then all looks as if nothing had happened."""
        self.rig.eventually("another life", lambda: self._life(pod) not in (None, before), deadline_s=RECOVERY_S)

    def _look_at_operator(self) -> None:
        pods = operator_pods(self.rig.kubectl)
        if len(pods) != 1:
            self.outcome.wrong.append(f"{len(pods)} operators")
        else:
            self.outcome.operator_mib.append((round(time.monotonic() - self._began, 1), resident_mib(pods[0])))

    def _count(self, asking: list[Clients]) -> None:
        outcome = self.outcome
        outcome.sent, outcome.answered = sum(one.sent for one in asking), sum(one.answered for one in asking)
        outcome.refused = sum((one.refused for one in asking), Counter[str]())
        outcome.slowest_s = round(max(one.slowest_s for one in asking), 1)
        outcome.lost = [lost for one in asking for lost in one.lost]

    # --- faults ---------------------------------------------------------------------------------------------------------

    def _kubectl(self, *words: str) -> None:
        self.rig.kubectl.text(*words, deadline_s=30)

    def _pod(self) -> Document:
        return self.rng.choice(sorted(self.rig.pods(NAME), key=lambda pod: str(pod["metadata"]["name"])))

    def _signal_rank(self, number: signal.Signals) -> None:
        pod = self._pod()
        before, name = self._life(pod), str(pod["metadata"]["name"])
        self.rig.kill_in_pod(name, self.rig.state_of(name)["ranks"][0]["pid"], number)
        self._wait_for_another_life(pod, before)

    def _kill_server(self) -> None:
        pod = self._pod()
        before = self._life(pod)
        kill_server_in(pod)
        self._wait_for_another_life(pod, before)

    def _delete_pod(self) -> None:
        pod = self._pod()
        self._kubectl("delete", "pod", str(pod["metadata"]["name"]), "--wait=false")
        uid = pod["metadata"]["uid"]
        self.rig.eventually("it is gone", lambda: uid not in [one["metadata"]["uid"] for one in self.rig.pods(NAME)], deadline_s=30)

    def _scale(self) -> None:
        count = self.rng.choice([1, 3])
        self._kubectl("scale", DD, f"--replicas={count}")
        self.rig.wait(DD, SERVING, deadline_s=RECOVERY_S)
        self._kubectl("scale", DD, f"--replicas={REPLICAS}")

    def _sleep(self) -> None:
        self.rig.sleep_policy(NAME, "Asleep")
        self.rig.wait(DD, Wanted("Awake", "False", ["AllAsleep"]), deadline_s=RECOVERY_S)
        self.rig.sleep_policy(NAME, "AlwaysAwake")

    def _on_idle(self) -> None:
        """Nobody is idle here, so that only the policy changes, and back."""
        self.rig.sleep_policy(NAME, "OnIdle")
        self.rig.wait(DD, SERVING, deadline_s=RECOVERY_S)
        self.rig.sleep_policy(NAME, "AlwaysAwake")

    def _adapter(self) -> None:
        if self.rig.exists(f"lora/{COMES}"):
            self._kubectl("delete", f"lora/{COMES}")
        else:
            self._put(COMES)

    def _put(self, name: str) -> None:
        self.rig.adapt(name, NAME, f"/models/loras/{name}")

    def _kill_operator(self) -> None:
        kill_operator(self.rig.kubectl)

    def _stop_api_server(self) -> None:
        with api_server_stopped():
            time.sleep(self.rng.uniform(*STANDSTILL_S))


def run_node(*, seed: int, limit_s: float) -> NodeOutcome:
    """The soak, in a namespace of its own on the development cluster; what it came to is in bench-output too."""
    with stage(NAMESPACE) as set_up:
        outcome = NodeSoak(ClusterRig(set_up.kubectl, set_up.images.worker), seed).run(limit_s)
    outcome.save()
    return outcome
