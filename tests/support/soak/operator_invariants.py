# SPDX-License-Identifier: Apache-2.0
"""What must be true of a namespace when nothing moves any more: what was asked for is there, and every status says what is."""

import json
from typing import Any

from diffusion_operator.api.names import ADAPTER, CONFIG_MAP, DEPLOYMENT, KINDS, LABEL_REVISION, POD, SECRET, SERVICE
from diffusion_operator.api.worker_state import WorkerPhase
from support.operator.fake_kubelet import Container, FakeKubelet
from support.operator.rest_client import RestClient

STATES = {WorkerPhase.READY: "Awake", WorkerPhase.ASLEEP: "Asleep"}


async def untrue(client: RestClient, kubelet: FakeKubelet, namespace: str) -> list[str]:
    """All that is not as it should be."""
    found = {kind: await client.list(kind, namespace) for kind in (DEPLOYMENT, ADAPTER, POD, SERVICE, CONFIG_MAP, SECRET)}
    wrong = [f"a finalizer on {_name(one)}" for objects in found.values() for one in objects if one["metadata"].get("finalizers")]
    living = {one["metadata"]["uid"] for one in found[DEPLOYMENT]}
    for kind in (POD, SERVICE, CONFIG_MAP, SECRET):
        wrong += [f"an orphan, {_name(one)}" for one in found[kind] if not _owner(one) & living and kind.kind in KINDS]
    for one in found[DEPLOYMENT]:
        wrong += _of_deployment(one, found, kubelet)
    wrong += [what for one in found[ADAPTER] for what in _of_adapter(one, found[DEPLOYMENT])]
    return wrong


def _of_deployment(one: Any, found: dict[Any, list[Any]], kubelet: FakeKubelet) -> list[str]:
    spec, status = one["spec"], one.get("status", {})
    pods = [pod for pod in found[POD] if one["metadata"]["uid"] in _owner(pod)]
    wanted = 0 if spec.get("suspend") else spec["replicas"]
    wrong = [] if len(pods) == wanted else [f"{len(pods)} of {wanted} pods: {sorted(map(_name, pods))}"]
    if any(pod["metadata"].get("deletionTimestamp") for pod in pods):
        wrong.append("a pod is terminating")
    if len({pod["metadata"]["name"].split("-")[1] for pod in pods}) != len(pods):
        wrong.append(f"two pods of one replica: {sorted(map(_name, pods))}")
    if not all(found[kind] for kind in (SERVICE, CONFIG_MAP, SECRET)):
        wrong.append(f"children are missing: {[kind.kind for kind in (SERVICE, CONFIG_MAP, SECRET) if not found[kind]]}")
    if status.get("observedGeneration") != one["metadata"]["generation"]:
        return [*wrong, "the deployment is not observed"]
    if {pod["metadata"]["labels"][LABEL_REVISION] for pod in pods} - {status["updateRevision"]}:
        wrong.append("a pod has another revision")
    adapters = {lora["metadata"]["name"] for lora in found[ADAPTER]}
    told = json.loads(found[CONFIG_MAP][0]["data"]["desired.json"])["adapters"] if found[CONFIG_MAP] else []
    if {wish["name"] for wish in told} != adapters:
        wrong.append(f"workers are told of {told}, and there are {adapters}")
    return [*wrong, *_of_groups(spec, status, pods, kubelet, adapters=adapters)]


def _of_groups(spec: Any, status: Any, pods: list[Any], kubelet: FakeKubelet, *, adapters: set[str]) -> list[str]:
    """The status says what the workers say, and the workers are as the policy has it."""
    said = {(group["leaderPod"], group.get("bootId"), group["state"]) for group in status.get("replicaStates", ())}
    running = {pod["metadata"]["name"]: kubelet.containers.get(pod["metadata"]["uid"]) for pod in pods}
    if not all(running.values()):
        return ["a pod does not run yet"]
    containers: dict[str, Container] = {name: one for name, one in running.items() if one is not None}
    true = {(name, one.worker.boot_id, STATES.get(one.worker.phase, "?")) for name, one in containers.items()}
    wrong = [] if said == true else [f"the status says {said}, and there is {true}"]
    asleep = spec["sleep"]["policy"] == "Asleep"
    if any(one.worker.phase is not (WorkerPhase.ASLEEP if asleep else WorkerPhase.READY) for one in containers.values()):
        wrong.append(f"the policy is {spec['sleep']['policy']}, and workers are {[one.worker.phase for one in containers.values()]}")
    for name, one in containers.items():
        if set(one.worker.adapters) != adapters:
            wrong.append(f"{name} has {sorted(one.worker.adapters)}, expected {sorted(adapters)}")
    counts = (status.get("replicas"), status.get("awakeReplicas"), status.get("asleepReplicas"))
    expected = (len(pods), 0 if asleep else len(pods), len(pods) if asleep else 0)
    if counts != expected:
        wrong.append(f"replicas, awake and asleep are said to be {counts}, expected {expected}")
    ready = _condition(status, "Ready")
    if (ready["status"] == "True") != (bool(pods) and not asleep):
        wrong.append(f"Ready is {ready}")
    return wrong


def _of_adapter(one: Any, deployments: list[Any]) -> list[str]:
    status = one.get("status", {})
    if status.get("observedGeneration") != one["metadata"]["generation"]:
        return [f"the adapter {_name(one)} is not observed"]
    accepted, ready = _condition(status, "Accepted"), _condition(status, "Ready")
    if not deployments:
        return [] if accepted["status"] == "False" else [f"{_name(one)} is accepted without a deployment"]
    if status.get("deploymentUID") != deployments[0]["metadata"]["uid"] or accepted["status"] != "True":
        return [f"{_name(one)} is not about the deployment that is there: {accepted}"]
    serves = deployments[0].get("status", {}).get("awakeReplicas", 0) > 0
    return [] if (ready["status"] == "True") == serves else [f"{_name(one)} is said to be {ready}"]


def _condition(status: Any, type_: str) -> Any:
    return next((one for one in status.get("conditions", ()) if one["type"] == type_), {"status": "", "reason": ""})


def _owner(one: Any) -> set[str]:
    return {owner["uid"] for owner in one["metadata"].get("ownerReferences", ())}


def _name(one: Any) -> str:
    return str(one["metadata"]["name"])
