# SPDX-License-Identifier: Apache-2.0
"""Random sequences of edits, scales, deletes, losses of pods and deaths of the operator, against a real API server and a fake kubelet.

Many at once, each in a namespace of its own, under one operator that is killed again and again: at any moment, or before or after
something it does. Then it is left in peace, and everything must come to what was asked for.
"""

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from diffusion_operator.api import names
from diffusion_operator.api.names import ADAPTER, CONFIG_MAP, DEPLOYMENT, POD, SECRET, SERVICE, Kind
from diffusion_operator.api.worker_state import WorkerPhase
from support.operator.fake_kubelet import FakeKubelet
from support.operator.rest_client import RestClient
from support.operator.rig import adapter, deployment
from support.soak.frame import Outcome, those_that_hold
from support.soak.operator_process import OperatorProcess

CHILDREN = (POD, SERVICE, CONFIG_MAP, SECRET)
STATES = {WorkerPhase.READY: "Awake", WorkerPhase.ASLEEP: "Asleep"}
AT_ONCE = 20
LENGTH = (4, 10)
PAUSE_S = 1.0
OPERATOR_LIVES_S = (0.5, 3.0)
LEAST_DEATHS = 3  # of a round
DIE_WITHIN = 600  # places: the first few hundred after a start are applies of children
TRUE_WITHIN_S = 90.0
POLICIES, LEVELS = ("AlwaysAwake", "Asleep"), ("HostMemory", "Discard")
# The steps: a weight, and the thing that is done.
STEPS: dict[str, tuple[int, Callable[["Sequence", Random], Awaitable[Any]]]] = {
    "scale": (4, lambda one, rng: one.edit({"spec": {"replicas": rng.randint(0, 3)}})),
    "scale_by_subresource": (2, lambda one, rng: one.edit({"spec": {"replicas": rng.randint(0, 3)}}, subresource="/scale")),
    "template": (3, lambda one, rng: one.edit({"spec": {"engine": {"maxBatchSize": rng.randint(1, 4)}}})),
    "sleep": (4, lambda one, rng: one.edit({"spec": {"sleep": {"policy": rng.choice(POLICIES), "level": rng.choice(LEVELS)}}})),
    "suspend": (1, lambda one, rng: one.edit({"spec": {"suspend": rng.random() < 0.4}})),
    "restart": (1, lambda one, rng: one.edit({"metadata": {"annotations": {names.ANNOTATION_RESTARTED_AT: f"{rng.random()}"}}})),
    "put_adapter": (3, lambda one, rng: one.put_adapter(rng.choice("abc"))),
    "change_adapter": (2, lambda one, rng: one.change_adapter(rng.choice("abc"))),
    "drop_adapter": (2, lambda one, rng: one.delete(ADAPTER, rng.choice("abc"))),
    "delete_pod": (3, lambda one, rng: one.delete_pod()),
    "kill_pod": (3, lambda one, rng: one.delete_pod(at_once=True)),
    "crash": (2, lambda one, rng: one.crash()),
    # Not the Secret, which nobody watches: it comes back with the next resync.
    "delete_child": (2, lambda one, rng: one.delete(*rng.choice(((SERVICE, "d"), (CONFIG_MAP, "d-desired"))))),
    "redeploy": (1, lambda one, rng: one.redeploy()),
}


async def run_sequences(folder: Path, kubeconfig: Path, *, seed: int, count: int, limit_s: float, at_once: int = AT_ONCE) -> Outcome:
    """Rounds of `at_once` until there were so many, or the time is over.

    Real: the API server and the operator's process. Not real: the kubelet, the workers and the garbage collector, all `FakeKubelet`.
    """
    outcome, rng = Outcome(seed, counts="killed slowest_s", tallies="steps died_at", resident_mib=[]), Random(seed)
    async with RestClient(kubeconfig) as client, FakeKubelet(client, rng) as kubelet:
        operator = OperatorProcess(folder, kubeconfig, control_port=kubelet.port)
        operator.start()
        try:
            for done in outcome.until(count, limit_s):
                numbers = range(done, min(done + at_once, count))
                sequences = [Sequence(client, kubelet, f"sequence-{number}", Random(rng.random()), outcome.steps) for number in numbers]
                await _round(sequences, operator, outcome, rng)
        finally:
            await asyncio.to_thread(operator.stop)
        outcome.wrong += kubelet.wrong
    outcome.wrong += [f"the operator complains: {line[:600]}" for line in operator.complaints() if "ClusterUnavailable" not in line]
    outcome.died_at.update(line.split(" ")[2] for line in operator.log.read_text().splitlines() if line.startswith("dies "))
    return outcome


async def _round(sequences: list["Sequence"], operator: OperatorProcess, outcome: Outcome, rng: Random) -> None:
    playing = asyncio.gather(*(one.play() for one in sequences))
    deaths = 0
    # So often at least that it also dies while it brings about what was asked for last. Mostly it dies by itself, at a place.
    while deaths < LEAST_DEATHS or not playing.done():
        operator.kill()
        operator.start(die_at=rng.randint(1, DIE_WITHIN) if rng.random() < 0.7 else None)
        with contextlib.suppress(AssertionError):  # it died while it was starting
            await asyncio.to_thread(operator.wait_ready)
        await asyncio.sleep(rng.uniform(*OPERATOR_LIVES_S))
        outcome.killed += operator.is_alive()
        deaths += 1
    await playing
    operator.kill()
    operator.start()
    await asyncio.to_thread(operator.wait_ready)
    begun = time.monotonic()
    outcome.wrong += [what for found in await asyncio.gather(*(one.settle() for one in sequences)) for what in found]
    outcome.slowest_s = round(max(outcome.slowest_s, time.monotonic() - begun), 1)
    outcome.resident_mib.append(operator.resident_bytes() // 2**20)
    await asyncio.gather(*(one.end() for one in sequences))
    outcome.done += len(sequences)


class Sequence:
    """One namespace with at most one deployment, `d`, and a few adapters."""

    def __init__(self, client: RestClient, kubelet: FakeKubelet, namespace: str, rng: Random, steps: Counter[str]) -> None:
        self._client, self._kubelet, self._namespace = client, kubelet, namespace
        self._rng, self._steps, self._crashes = rng, steps, 0
        self._trace: list[str] = []

    async def play(self) -> None:
        """The random part."""
        await self._client.make_namespace(self._namespace)
        await self._deploy()
        for name in self._rng.choices([*STEPS], [often for often, _ in STEPS.values()], k=self._rng.randint(*LENGTH)):
            self._trace.append(name)
            self._steps[name] += 1
            await STEPS[name][1](self, self._rng)
            await asyncio.sleep(self._rng.uniform(0, PAUSE_S))

    async def settle(self) -> list[str]:
        """What is still not true when it should be."""
        wrong = await still_found(partial(untrue, self._client, self._kubelet, self._namespace), within_s=TRUE_WITHIN_S, every_s=0.5)
        return [f"{self._namespace} after {self._trace}: {what}" for what in wrong]

    async def end(self) -> None:
        """All is deleted; the fake garbage collector does the rest."""
        for kind in (DEPLOYMENT, ADAPTER):
            for one in await self._client.list(kind, self._namespace):
                await self.delete(kind, one["metadata"]["name"])

    async def edit(self, changes: dict[str, Any], kind: Kind = DEPLOYMENT, name: str = "d", *, subresource: str = "") -> None:
        await self._client.patch(kind, self._namespace, name, changes, subresource=subresource)

    async def delete(self, kind: Kind, name: str, *, at_once: bool = False) -> None:
        await self._client.delete(kind, self._namespace, name, at_once=at_once)

    async def _deploy(self) -> None:
        await self._client.create(DEPLOYMENT, self._namespace, deployment(replicas=self._rng.randint(0, 3)))

    async def redeploy(self) -> None:
        await self.delete(DEPLOYMENT, "d")
        await asyncio.sleep(self._rng.uniform(0, PAUSE_S))
        await self._deploy()

    async def put_adapter(self, name: str) -> None:
        await self._client.create(ADAPTER, self._namespace, adapter(name, f"/loras/{name}"))

    async def change_adapter(self, name: str) -> None:
        scale, source = f"0.{self._rng.randint(1, 9)}", {"path": f"/loras/{self._rng.randint(1, 9)}"}
        await self.edit({"spec": self._rng.choice(({"defaultScale": scale}, {"source": source}))}, ADAPTER, name)

    async def _some_pod(self) -> list[Any]:
        pods = await self._client.list(POD, self._namespace)
        return [self._rng.choice(pods)] if pods else []

    async def delete_pod(self, *, at_once: bool = False) -> None:
        for pod in await self._some_pod():
            await self.delete(POD, pod["metadata"]["name"], at_once=at_once)

    async def crash(self) -> None:
        """At most twice, so that it is no loop of crashes."""
        self._crashes += 1
        for pod in await self._some_pod() if self._crashes <= 2 else ():
            await self._kubelet.crash(pod)


async def untrue(client: RestClient, kubelet: FakeKubelet, namespace: str) -> list[str]:
    """When nothing moves any more what was asked for is there, and every status says what is; list all that is not so."""
    found = {kind: await client.list(kind, namespace) for kind in (DEPLOYMENT, ADAPTER, *CHILDREN)}
    wrong = [f"a finalizer on {_name(one)}" for objects in found.values() for one in objects if one["metadata"].get("finalizers")]
    living = {one["metadata"]["uid"] for one in found[DEPLOYMENT]}
    wrong += [f"an orphan, {_name(one)}" for kind in CHILDREN for one in found[kind] if not owners(one) & living]
    wrong += [what for one in found[DEPLOYMENT] for what in _of_deployment(one, found, kubelet)]
    return wrong + [what for one in found[ADAPTER] for what in _of_adapter(one, found[DEPLOYMENT])]


def _of_deployment(one: Any, found: dict[Any, list[Any]], kubelet: FakeKubelet) -> list[str]:
    spec, status = one["spec"], one.get("status", {})
    observed = status.get("observedGeneration") == one["metadata"]["generation"]
    pods = [pod for pod in found[POD] if one["metadata"]["uid"] in owners(pod)]
    pod_names, wanted = sorted(map(_name, pods)), 0 if spec.get("suspend") else spec["replicas"]
    missing = [kind.kind for kind in CHILDREN[1:] if not found[kind]]
    adapters = {_name(lora) for lora in found[ADAPTER]}
    desired = json.loads(found[CONFIG_MAP][0]["data"]["desired.json"])["adapters"] if found[CONFIG_MAP] else []
    wrong = {
        f"{len(pods)} of {wanted} pods: {pod_names}": len(pods) != wanted,
        "a pod is terminating": any(pod["metadata"].get("deletionTimestamp") for pod in pods),
        f"two pods of one replica: {pod_names}": len({name.split("-")[1] for name in pod_names}) != len(pods),
        f"children are missing: {missing}": missing,
        "the deployment is not observed": not observed,
        "a pod has another revision": observed
        and {pod["metadata"]["labels"][names.LABEL_REVISION] for pod in pods} - {status["updateRevision"]},
        f"workers are to have {desired}, and there are {adapters}": observed and {wish["name"] for wish in desired} != adapters,
    }
    return [*those_that_hold(wrong), *(_of_groups(spec, status, pods, kubelet, adapters=adapters) if observed else ())]


def _of_groups(spec: Any, status: Any, pods: list[Any], kubelet: FakeKubelet, *, adapters: set[str]) -> list[str]:
    """The status says what the workers say, and the workers are as the policy has it."""
    containers = {_name(pod): kubelet.containers.get(pod["metadata"]["uid"]) for pod in pods}
    if not all(containers.values()):
        return ["a pod does not run yet"]
    said = {(group["leaderPod"], group.get("bootId"), group["state"]) for group in status.get("replicaStates", ())}
    true = {(name, one.worker.boot_id, STATES.get(one.worker.phase, "?")) for name, one in containers.items()}
    policy, phases = spec["sleep"]["policy"], [one.worker.phase for one in containers.values()]
    asleep = policy == "Asleep"
    counts = (status.get("replicas"), status.get("awakeReplicas"), status.get("asleepReplicas"))
    expected = (len(pods), 0 if asleep else len(pods), len(pods) if asleep else 0)
    ready = condition(status, "Ready")
    wrong = {
        f"the status says {said}, and there is {true}": said != true,
        f"the policy is {policy}, and workers are {phases}": {*phases} - {WorkerPhase.ASLEEP if asleep else WorkerPhase.READY},
        f"replicas, awake and asleep are said to be {counts}, expected {expected}": counts != expected,
        f"Ready is {ready}": (ready["status"] == "True") != (bool(pods) and not asleep),
    }
    for name, one in containers.items():
        wrong[f"{name} has {sorted(one.worker.adapters)}, expected {sorted(adapters)}"] = {*one.worker.adapters} != adapters
    return those_that_hold(wrong)


def _of_adapter(one: Any, deployments: list[Any]) -> list[str]:
    status, name = one.get("status", {}), _name(one)
    if status.get("observedGeneration") != one["metadata"]["generation"]:
        return [f"the adapter {name} is not observed"]
    accepted, ready = condition(status, "Accepted"), condition(status, "Ready")
    if not deployments:
        return [] if accepted["status"] == "False" else [f"{name} is accepted without a deployment"]
    if status.get("deploymentUID") != deployments[0]["metadata"]["uid"] or accepted["status"] != "True":
        return [f"{name} is not about the deployment that is there: {accepted}"]
    serves = deployments[0].get("status", {}).get("awakeReplicas", 0) > 0
    return [] if (ready["status"] == "True") == serves else [f"{name} is said to be {ready}"]


async def still_found(look: Callable[[], Awaitable[Any]], *, within_s: float, every_s: float) -> Any:
    """Look until nothing is found any more; return what is when the time is over."""
    deadline = time.monotonic() + within_s
    while found := await look():
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(every_s)
    return found


def condition(status: Any, type_: str) -> Any:
    """Return a condition of a status, an empty one where there is none."""
    return next((one for one in status.get("conditions", ()) if one["type"] == type_), {"status": "", "reason": ""})


def owners(one: Any) -> set[str]:
    """Return the uids of an object's owners."""
    return {owner["uid"] for owner in one["metadata"].get("ownerReferences", ())}


def _name(one: Any) -> str:
    return str(one["metadata"]["name"])
