# SPDX-License-Identifier: Apache-2.0
"""The soak of the whole product on a real node: applications ask a deployment through its Service while things break below it.

Faults come one at a time, or with one that touches no replica. After each fault all must serve again within a deadline. Two replicas never
break at once: Kubernetes itself sends requests to a dead pod for a second, and the SDK's retries need a live replica. A refused request
must have overlapped a fault.
"""

import json
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from support.cluster.faults import api_server_stopped, kill_operator, kill_server_in, leader, operator_pods, resident_mib, service_address
from support.cluster.rig import ADAPTER_READY, PROMPT, ROLLED_OUT, SERVING, Clients, ClusterRig
from support.soak.frame import Outcome
from tools.demo.errors import DemoFailed
from tools.demo.images import Request, ask
from tools.demo.kubectl import Document, Kubectl, Wanted, condition
from tools.demo.stage import stage

NAMESPACE, NAME = "diffusion-soak", "digits"
DD = f"dd/{NAME}"
STAYS, COMES = "stripes", "frame"
REPLICAS, OPERATORS = 2, 2
# The kubelet waits up to five minutes before it restarts a container that ended often.
RECOVERY_S = 420.0
CALM_S = (1.0, 6.0)
AFTERMATH_S = 2.0
STANDSTILL_S = (3.0, 15.0)
OUTPUT = Path("bench-output")


def met(when: Sequence[float], windows: Sequence[tuple[float, float]]) -> bool:
    """Return whether a request, from its begin to its end, overlapped one of the windows. Each window counts AFTERMATH_S longer, as the
    kernel may still route to a dead pod's address."""
    began, ended = when
    return any(began <= last + AFTERMATH_S and first <= ended for first, last in windows)


def operators_ready(kubectl: Kubectl) -> bool:
    """Return whether OPERATORS of the operator's pods are ready, and one of them leads; False without a Lease."""
    ready = [pod for pod in operator_pods(kubectl) if (found := condition(pod, "Ready")) and found["status"] == "True"]
    try:
        return len(ready) == OPERATORS and leader(kubectl) in ready
    except (AssertionError, DemoFailed):  # there is no Lease yet
        return False


class NodeSoak:
    """Faults by name on the deployment of one namespace. At random, `operator-killed` comes only together with another fault.

    Real: the development cluster, the operator, its workers, and the causes of the faults. Not real: the applications, which are threads
    here.
    """

    calm_s = CALM_S

    def __init__(self, rig: ClusterRig, seed: int, **spec: Any) -> None:
        """Prepare the faults; `spec` has more fields of the deployment's spec."""
        self.rig, self._spec = rig, spec
        self.rng = random.Random(seed)
        # The operator's memory in MiB, each with the seconds since the start.
        others = {"slowest_recovery_s": {}, "operator_mib": [], "lost": [], "outside": []}
        self.outcome = Outcome(seed, counts="sent tries answered slowest_s calm_s", tallies="faults refused", **others)
        self.windows: list[tuple[float, float]] = []
        """The period of each fault until all served again, by time.monotonic()."""
        self.faults: dict[str, Callable[[], None]] = {
            "rank-killed": partial(self._signal_rank, signal.SIGKILL),
            "rank-stopped": partial(self._signal_rank, signal.SIGSTOP),
            "server-killed": self._kill_server,
            "pod-deleted": self._delete_pod,
            "scaled": self._scale,
            "sent-to-sleep": partial(self._sleep, "Asleep", Wanted("Awake", "False", ["AllAsleep"])),
            # No replica is idle here, so only the policy changes.
            "sleeps-on-idle": partial(self._sleep, "OnIdle", SERVING),
            "adapter": self._adapter,
            "api-server-stopped": self._stop_api_server,
            "operator-killed": partial(kill_operator, rig.kubectl),
        }

    def run(self, limit_s: float, rounds: Sequence[Sequence[str]] = ()) -> Outcome:
        """Apply the objects, then inject faults under traffic until `limit_s` is over or something is wrong. Faults are random, or those
        of `rounds`, after which it ends."""
        for name in (STAYS, COMES):
            self.rig.adapt(name, NAME, f"/models/loras/{name}")
        self.rig.serve(NAME, replicas=REPLICAS, **self._spec)
        for name in (STAYS, COMES):
            self.rig.wait(f"lora/{name}", ADAPTER_READY)
        self._address, self._began = service_address(self.rig.kubectl, NAME), time.monotonic()
        planned = iter(rounds)
        with ExitStack() as stack:
            asking = [stack.enter_context(clients) for clients in self._clients()]
            for _ in self.outcome.until(1, limit_s):
                if (names := next(planned, None) if rounds else self._chosen()) is None:
                    break
                self._one_round(names)
                self._count(asking)
                if self.outcome.wrong:
                    break
        self._count(asking)
        self.outcome.calm_s = time.monotonic() - self._began - sum(ended - began for began, ended in self.windows)
        self.outcome.wrong += [f"{code} outside of faults" for code in self.outcome.outside]
        return self.outcome

    def _clients(self) -> list[Clients]:
        """Return clients of the model, of an adapter that stays, and of one that comes and goes, which may get a 404."""
        allowed = {NAME: (), STAYS: (), COMES: ("model_not_found", "AdapterRemoved")}
        requests = {name: Request(PROMPT, 1, name, steps=8) for name in allowed}
        with self.rig.client(NAME) as client:
            right = {name: ask(client, request) for name, request in requests.items()}
        return [
            Clients(lambda: self._address, right[name], requests[name], allowed=frozenset(codes), may_be_unreachable=True)
            for name, codes in allowed.items()
        ]

    def _chosen(self) -> Sequence[str]:
        names = [self.rng.choice(sorted(self.faults.keys() - {"operator-killed"}))]
        # Not the same fault twice, nor two that exclude each other.
        if names[0] not in ("adapter", "api-server-stopped"):
            names += self.rng.choice((["adapter"], ["operator-killed"], [], []))
        return names

    def _one_round(self, names: Sequence[str]) -> None:
        began, fault = time.monotonic(), "+".join(names)
        self.outcome.faults[fault] += 1
        print(f"{began - self._began:7.1f} s {fault}", flush=True)
        try:
            for name in reversed(names):
                self.faults[name]()
            self.rig.eventually("all serve", self._settled, deadline_s=RECOVERY_S)
            self.outcome.operator_mib.append((round(time.monotonic() - self._began, 1), resident_mib(leader(self.rig.kubectl))))
        except (DemoFailed, AssertionError) as error:
            self.outcome.wrong.append(f"{began - self._began:.0f} s {fault}: {error}")
        self.windows.append((began, time.monotonic()))
        took = round(time.monotonic() - began, 1)
        self.outcome.slowest_recovery_s[fault] = max(took, self.outcome.slowest_recovery_s.get(fault, 0.0))
        time.sleep(self.rng.uniform(*self.calm_s))

    def _settled(self) -> bool:
        """Return whether all is as it should be: each replica exists once, worker and operator report it ready, and so is the adapter that
        stays.

        The rollout must be over too, since all of this holds for a moment between two replicas of a rollout.
        """
        found, pods = self.rig.kubectl.get(DD), self.rig.pods(NAME)
        indexes = [pod["metadata"]["labels"]["diffusion-operator.dev/replica-index"] for pod in pods]
        complete = len(set(indexes)) == len(indexes) == found["spec"]["replicas"]
        said = SERVING.holds(found) and ROLLED_OUT.holds(found) and ADAPTER_READY.holds(self.rig.kubectl.get(f"lora/{STAYS}"))
        return complete and said and operators_ready(self.rig.kubectl) and all(self._state(pod).get("state") == "ready" for pod in pods)

    def _state(self, pod: Document) -> Document:
        """Return the worker's state document; an empty one while the worker does not answer."""
        try:
            return self.rig.state_of(str(pod["metadata"]["name"]))
        except DemoFailed:
            return {}

    def _count(self, asking: list[Clients]) -> None:
        outcome = self.outcome
        for count in ("sent", "tries", "answered"):
            setattr(outcome, count, sum(getattr(one, count) for one in asking))
        outcome.refused = sum((one.refused for one in asking), Counter[str]())
        outcome.slowest_s = round(max(one.slowest_s for one in asking), 1)
        outcome.lost = [lost for one in asking for lost in one.lost]
        refused = [refusal for one in asking for refusal in one.refused_at]
        outcome.outside = [code for *when, code in refused if not met(when, self.windows)]

    def _pod(self) -> Document:
        return self.rng.choice(sorted(self.rig.pods(NAME), key=lambda pod: str(pod["metadata"]["name"])))

    def _end_life(self, pod: Document, kill: Callable[[], None]) -> None:
        """Kill something in a pod, and wait for another boot or generation: until then the state looks unchanged."""

        def life() -> tuple[object, object]:
            state = self._state(pod)
            return state.get("bootId"), state.get("generation")

        before = life()
        kill()
        self.rig.eventually("another life", lambda: life() not in ((None, None), before), deadline_s=RECOVERY_S)

    def _signal_rank(self, number: signal.Signals) -> None:
        pod = self._pod()
        name = str(pod["metadata"]["name"])
        self._end_life(pod, lambda: self.rig.kill_in_pod(name, self.rig.state_of(name)["ranks"][0]["pid"], number))

    def _kill_server(self) -> None:
        pod = self._pod()
        self._end_life(pod, partial(kill_server_in, pod))

    def _delete_pod(self) -> None:
        pod = self._pod()
        self.rig.kubectl.text("delete", "pod", str(pod["metadata"]["name"]), "--wait=false", deadline_s=30)
        uid = pod["metadata"]["uid"]
        self.rig.eventually("it is gone", lambda: uid not in [one["metadata"]["uid"] for one in self.rig.pods(NAME)], deadline_s=30)

    def _scale(self) -> None:
        self.rig.kubectl.text("scale", DD, f"--replicas={self.rng.choice([1, 3])}", deadline_s=30)
        self.rig.wait(DD, SERVING, deadline_s=RECOVERY_S)
        self.rig.kubectl.text("scale", DD, f"--replicas={REPLICAS}", deadline_s=30)

    def _sleep(self, policy: str, wanted: Wanted) -> None:
        """Set a sleep policy, wait for the deployment to reach `wanted` within RECOVERY_S seconds, and return to AlwaysAwake."""
        self.rig.sleep_policy(NAME, policy)
        self.rig.wait(DD, wanted, deadline_s=RECOVERY_S)
        self.rig.sleep_policy(NAME, "AlwaysAwake")

    def _adapter(self) -> None:
        if self.rig.exists(f"lora/{COMES}"):
            self.rig.kubectl.text("delete", f"lora/{COMES}", deadline_s=30)
        else:
            self.rig.adapt(COMES, NAME, f"/models/loras/{COMES}")

    def _stop_api_server(self) -> None:
        with api_server_stopped():
            time.sleep(self.rng.uniform(*STANDSTILL_S))


def run_node(_: Path, *, seed: int, limit_s: float) -> Outcome:
    """Run the soak in a namespace of its own on the development cluster. Write the full outcome to bench-output, and return it in short."""
    with stage(NAMESPACE) as set_up:
        outcome = NodeSoak(ClusterRig(set_up.kubectl, set_up.images.worker), seed).run(limit_s)
    return reported(outcome, "node")


def reported(outcome: Outcome, name: str) -> Outcome:
    """Write the full outcome to bench-output as `NAME-soak.json`, then shorten its memory and its lost requests in place, and return it."""
    OUTPUT.mkdir(exist_ok=True)
    (OUTPUT / f"{name}-soak.json").write_text(json.dumps(outcome.document(), indent=1))
    memory = [mib for _, mib in outcome.operator_mib]
    outcome.operator_mib = {"first": memory[0], "most": max(memory), "last": memory[-1]} if memory else {}
    outcome.lost = len(outcome.lost)
    return outcome
