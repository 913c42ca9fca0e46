# SPDX-License-Identifier: Apache-2.0
"""The judge of a namespace: what statuses claim while there are obstacles, and that all is as the specs say once there are none.

Real: the objects as the API server has them. Not real: the workers that a status describes, which are FakeKubelet's.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from diffusion_operator.api import names
from diffusion_operator.api.names import ADAPTER, CONFIG_MAP, DEPLOYMENT, POD, SECRET, SERVICE, Kind
from diffusion_operator.api.worker_state import WorkerPhase
from support.apiserver.rest_client import RestClient
from support.operator.fake_kubelet import FakeKubelet
from support.operator.mounted import mounted_desired
from support.soak.frame import those_that_hold
from support.soak.operator_obstacles import MARK, WATCHED_CHILDREN, child_names

CHILDREN = (POD, SERVICE, CONFIG_MAP, SECRET)
STATES = {WorkerPhase.READY: "Awake", WorkerPhase.ASLEEP: "Asleep"}

Found = dict[Kind, list[Any]]


async def untrue(client: RestClient, kubelet: FakeKubelet, namespace: str) -> list[str]:
    """List the finalizers, the orphans, and all that contradicts the specs or the statuses now. It is empty only when nothing is under
    way."""
    found = {kind: await client.list(kind, namespace) for kind in (DEPLOYMENT, ADAPTER, *CHILDREN)}
    wrong = [f"a finalizer on {_name(one)}" for objects in found.values() for one in objects if one["metadata"].get("finalizers")]
    living = {one["metadata"]["uid"] for one in found[DEPLOYMENT]}
    wrong += [f"an orphan, {_name(one)}" for kind in CHILDREN for one in found[kind] if not owners(one) & living]
    wrong += [what for one in found[DEPLOYMENT] for what in _of_deployment(one, found, kubelet)]
    return wrong + [what for one in found[ADAPTER] for what in _of_adapter(one, found[DEPLOYMENT])]


def _of_deployment(one: Any, found: dict[Any, list[Any]], kubelet: FakeKubelet) -> list[str]:
    spec, status = one["spec"], one.get("status", {})
    observed = status.get("observedGeneration") == one["metadata"]["generation"]
    pods = [pod for pod in found[POD] if owns(one, pod)]
    pod_names, wanted = sorted(map(_name, pods)), 0 if spec.get("suspend") else spec["replicas"]
    missing = [kind.kind for kind in CHILDREN[1:] if not found[kind]]
    adapters = {_name(lora) for lora in found[ADAPTER]}
    maps = {_name(config): config for config in found[CONFIG_MAP]}
    desired = mounted_desired(maps.get, _name(one))["adapters"]
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
    """List the differences of a status from its workers, and of the workers from the policy and `adapters`. If a pod does not run yet,
    list only that."""
    containers = {_name(pod): kubelet.containers.get(pod["metadata"]["uid"]) for pod in pods}
    if not all(containers.values()):
        return ["a pod does not run yet"]
    said = {(group.get("leaderPod"), group.get("bootId"), group["state"]) for group in status.get("replicaStates", ())}
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


async def overclaimed(client: RestClient, kubelet: FakeKubelet, namespace: str, strangers: Collection[tuple[Kind, str]]) -> list[str]:
    """List the false claims of the deployments' statuses, and the missing or strange children that they do not name. Obstacles excuse
    neither."""
    found: Found = {kind: await client.list(kind, namespace) for kind in (DEPLOYMENT, POD, *WATCHED_CHILDREN)}
    return [wrong for one in found[DEPLOYMENT] for wrong in _overclaimed(one, found, kubelet, strangers)]


def _overclaimed(one: Any, found: Found, kubelet: FakeKubelet, strangers: Collection[tuple[Kind, str]]) -> list[str]:
    spec, status = one["spec"], one.get("status", {})
    if status.get("observedGeneration") != one["metadata"]["generation"]:
        return ["the deployment is not observed"]
    pods = [pod for pod in found[POD] if (owns(one, pod) or _is_left(one, pod)) and not pod["metadata"].get("deletionTimestamp")]
    running = [pod for pod in pods if pod["metadata"]["uid"] in kubelet.containers]
    ready, children = condition(status, "Ready"), condition(status, "ChildrenReady")
    wanted = 0 if spec.get("suspend") else spec["replicas"]
    no_service = not any(owns(one, service) for service in found[SERVICE])
    served = {group.get("leaderPod") for group in status.get("replicaStates", ()) if group["state"] in ("Awake", "Asleep")}
    wrong: dict[str, Any] = {
        f"status.replicas is {status.get('replicas')}, and there are {len(pods)} pods": status.get("replicas") != len(pods),
        f"Ready is {ready['reason']} with {len(pods)} of {wanted} pods": ready["reason"] == "Serving" and len(pods) != wanted,
        f"Ready is {ready['reason']}, and no pod runs": ready["status"] == "True" and not running,
        f"Ready is {ready['reason']} without a Service of its own": ready["status"] == "True" and no_service,
        f"{served} are said to serve": served - {pod["metadata"]["name"] for pod in running},
    }
    for kind, child in told_children(one, found, strangers):
        said = children["status"] in ("False", "Unknown") and f"{kind.kind} {child}" in children["message"]
        wrong[f"ChildrenReady does not tell of {kind.kind} {child}: {children}"] = not said
    return those_that_hold(wrong)


def _is_left(one: Any, pod: Any) -> bool:
    """Return whether an earlier object of the same name left the pod. It counts as a replica until another may take its place."""
    return not owners(pod) and pod["metadata"].get("labels", {}).get(names.LABEL_DEPLOYMENT) == one["metadata"]["name"]


def told_children(one: Any, found: Found, strangers: Collection[tuple[Kind, str]]) -> list[tuple[Kind, str]]:
    """List the children that a status must name: missing ones and those of another owner. The operator must not read Secrets."""
    own = {kind for kind in WATCHED_CHILDREN if any(owns(one, child) for child in found[kind])}
    named = child_names(one["metadata"]["name"])
    stolen = (SECRET, named[SECRET]) in strangers
    return [(kind, named[kind]) for kind in WATCHED_CHILDREN if kind not in own] + [(SECRET, named[SECRET])] * stolen


async def unsound(client: RestClient, namespace: str) -> list[str]:
    """List the watched children that are missing, and the children and pods that keep changes of another client. ChildrenReady must be
    True too, so it applies only without obstacles."""
    found: Found = {kind: await client.list(kind, namespace) for kind in (DEPLOYMENT, POD, *WATCHED_CHILDREN)}
    wrong = []
    for one in found[DEPLOYMENT]:
        children = condition(one.get("status", {}), "ChildrenReady")
        wrong += [f"ChildrenReady is {children}"] if children["status"] != "True" else []
        for kind, name in child_names(one["metadata"]["name"]).items():
            own = [child for child in found.get(kind, ()) if owns(one, child) and child["metadata"]["name"] == name]
            wrong += [f"{kind.kind} {name} is missing"] if kind != SECRET and not own else []
            wrong += [f"{kind.kind} {name} stays changed" for child in own if is_changed(child)]
        wrong += [f"pod {pod['metadata']['name']} stays changed" for pod in found[POD] if owns(one, pod) and is_changed(pod)]
    return wrong


def is_changed(child: Any) -> bool:
    """Return whether an object has a mark that DRIFTS leave, or lost the label that it is managed by the operator."""
    labels, content = child["metadata"].get("labels", {}), {part: child.get(part) for part in ("spec", "data")}
    ours = labels.get(names.LABEL_MANAGED_BY) == names.FIELD_MANAGER
    return not ours or MARK in json.dumps([labels, content])


async def still_found(look: Callable[[], Awaitable[Any]], *, within_s: float, every_s: float) -> Any:
    """Call `look` until it finds nothing, and return that empty result; return its last findings if the time is over first."""
    deadline = time.monotonic() + within_s
    while found := await look():
        if time.monotonic() > deadline:
            break
        await asyncio.sleep(every_s)
    return found


def condition(status: Any, type_: str) -> Any:
    """Return the condition of this type in a status; without one, a condition whose status, reason and message are empty."""
    empty = {"status": "", "reason": "", "message": ""}
    return next((one for one in status.get("conditions", ()) if one["type"] == type_), empty)


def owns(owner: Any, child: Any) -> bool:
    """Return whether this very object is among the owners of the child."""
    return owner["metadata"]["uid"] in owners(child)


def owners(one: Any) -> set[str]:
    """Return the uids of an object's owners."""
    return {owner["uid"] for owner in one["metadata"].get("ownerReferences", ())}


def _name(one: Any) -> str:
    return str(one["metadata"]["name"])
