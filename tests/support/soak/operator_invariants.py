# SPDX-License-Identifier: Apache-2.0
"""What must be true of a namespace when nothing moves any more: what was asked for is there, and every status says what is."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from diffusion_operator.api.names import ADAPTER, CONFIG_MAP, DEPLOYMENT, LABEL_REVISION, POD, SECRET, SERVICE
from diffusion_operator.api.worker_state import WorkerPhase
from support.operator.fake_kubelet import FakeKubelet
from support.operator.rest_client import RestClient
from support.soak.frame import those_that_hold

CHILDREN = (POD, SERVICE, CONFIG_MAP, SECRET)
STATES = {WorkerPhase.READY: "Awake", WorkerPhase.ASLEEP: "Asleep"}


async def untrue(client: RestClient, kubelet: FakeKubelet, namespace: str) -> list[str]:
    """All that is not as it should be."""
    found = {kind: await client.list(kind, namespace) for kind in (DEPLOYMENT, ADAPTER, *CHILDREN)}
    wrong = [f"a finalizer on {_name(one)}" for objects in found.values() for one in objects if one["metadata"].get("finalizers")]
    living = {one["metadata"]["uid"] for one in found[DEPLOYMENT]}
    for kind in CHILDREN:
        wrong += [f"an orphan, {_name(one)}" for one in found[kind] if not owners(one) & living]
    for one in found[DEPLOYMENT]:
        wrong += _of_deployment(one, found, kubelet)
    wrong += [what for one in found[ADAPTER] for what in _of_adapter(one, found[DEPLOYMENT])]
    return wrong


def _of_deployment(one: Any, found: dict[Any, list[Any]], kubelet: FakeKubelet) -> list[str]:
    spec, status = one["spec"], one.get("status", {})
    observed = status.get("observedGeneration") == one["metadata"]["generation"]
    pods = [pod for pod in found[POD] if one["metadata"]["uid"] in owners(pod)]
    names, wanted = sorted(map(_name, pods)), 0 if spec.get("suspend") else spec["replicas"]
    missing = [kind.kind for kind in CHILDREN[1:] if not found[kind]]
    adapters = {_name(lora) for lora in found[ADAPTER]}
    desired = json.loads(found[CONFIG_MAP][0]["data"]["desired.json"])["adapters"] if found[CONFIG_MAP] else []
    wrong = {
        f"{len(pods)} of {wanted} pods: {names}": len(pods) != wanted,
        "a pod is terminating": any(pod["metadata"].get("deletionTimestamp") for pod in pods),
        f"two pods of one replica: {names}": len({name.split("-")[1] for name in names}) != len(pods),
        f"children are missing: {missing}": missing,
        "the deployment is not observed": not observed,
        "a pod has another revision": observed and {pod["metadata"]["labels"][LABEL_REVISION] for pod in pods} - {status["updateRevision"]},
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
