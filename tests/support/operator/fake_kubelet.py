# SPDX-License-Identifier: Apache-2.0
"""A fake of what a real API server alone has not: a scheduler and a kubelet whose containers are scripted workers that answer over
HTTP on addresses of 127.0.0.0/8, and a garbage collector. It watches by looking, several times a second, at all namespaces.

Real: the API server that it writes to, and the HTTP of the operator's calls. Not real: the containers.
"""

import asyncio
import itertools
import json
import random
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from diffusion_operator.api import names
from diffusion_operator.api.names import ADAPTER, CONFIG_MAP, DEPLOYMENT, EVENT, KINDS, POD, Kind
from diffusion_operator.errors import ControlRefused, ControlUnreachable
from diffusion_operator.plan.results.actions import PutAdapter, RemoveAdapter, SleepWorker, WakeWorker
from support.operator.fake_cluster import terminated
from support.operator.rest_client import RestClient, path_of
from support.operator.scripted_workers import ScriptedWorker, ScriptedWorkers

TICK_S = 0.15
OURS = f"?labelSelector={names.LABEL_MANAGED_BY}%3D{names.FIELD_MANAGER}"
# Fields of calls that have another name on the wire.
WIRE = {"operationId": "operation_id", "deadlineSeconds": "deadline_s", "ifIdleSince": "if_idle_since_s", "drainSeconds": "drain_s"}
# Each call by its path, those about an adapter by their method: the action that it means, and the method that takes it.
CALLS = {
    "/v1/sleep": (SleepWorker, ScriptedWorkers.sleep),
    "/v1/wake": (WakeWorker, ScriptedWorkers.wake),
    "PUT": (PutAdapter, ScriptedWorkers.put_adapter),
    "DELETE": (RemoveAdapter, ScriptedWorkers.remove_adapter),
}


@dataclass
class Container:
    """What runs in a pod."""

    worker: ScriptedWorker
    ip: str
    server: TestServer
    restarts: int = 0
    token: str = ""
    """That it asks callers for; empty: it takes any."""


class FakeKubelet:
    """An async context manager: while it lasts, pods run."""

    def __init__(self, client: RestClient, rng: random.Random) -> None:
        self._client = client
        self._numbers = itertools.count(1)
        # Of 127.0.0.0/8 an own part, because several of these may run on a machine.
        self._net = f"127.{rng.randrange(16, 250)}"
        self.port = unused_port()
        self._workers = ScriptedWorkers()
        self.containers: dict[str, Container] = {}
        """By UID of the pod."""
        self.wrong: list[str] = []
        self.pods_made: Counter[str] = Counter()
        """By the deployment's UID and the pod's name; more than one only where somebody deleted a pod that nobody had seen."""
        self.refused = 0
        """Calls with another token than the container's."""
        self._task: asyncio.Task[None] | None = None
        self._seen: set[str] = set()

    async def __aenter__(self) -> "FakeKubelet":
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        for uid in list(self.containers):
            await self._end(uid)

    async def _run(self) -> None:
        for number in itertools.count():
            try:
                await self._look()
                if number % 5 == 0:
                    await self._collect()
            except (OSError, TimeoutError) as error:  # the API server is busy
                print(f"fake kubelet: {type(error).__name__}: {error}", flush=True)
            await asyncio.sleep(TICK_S)

    # the kubelet ------------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        pods = (await self._client.send("GET", f"/api/v1/pods{OURS}"))[1]["items"]
        there = {pod["metadata"]["uid"]: pod for pod in pods}
        for uid in self.containers.keys() - there.keys():
            await self._end(uid)  # deleted by force
        made = [pod["metadata"] for uid, pod in there.items() if uid not in self._seen]
        self.pods_made.update(f"{one['ownerReferences'][0]['uid']} {one['name']}" for one in made)
        self._seen |= there.keys()
        self._watch_for_twins([pod["metadata"] for pod in pods if not pod["metadata"].get("deletionTimestamp")])
        await asyncio.gather(*(self._tend(pod) for pod in pods))

    def _watch_for_twins(self, living: list[Any]) -> None:
        """Without surge no replica ever has two pods, one of them terminating perhaps; and no name is made twice."""
        replicas = Counter((one["ownerReferences"][0]["uid"], one["name"].split("-")[1]) for one in living)
        self.wrong += [f"{count} pods of replica {index} of {uid} at once" for (uid, index), count in replicas.items() if count > 1]

    async def _tend(self, pod: Any) -> None:
        metadata = pod["metadata"]
        if metadata.get("deletionTimestamp"):
            await self._end(metadata["uid"])
            await self._client.delete(POD, metadata["namespace"], metadata["name"], at_once=True)
        elif metadata["uid"] not in self.containers:
            await self._start(pod)

    async def _start(self, pod: Any) -> None:
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        if not pod["spec"].get("nodeName"):
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": {"kind": "Node", "name": "node"}}
            await self._client.send("POST", f"{path_of(POD, namespace)}/{name}/binding", binding)
        number = next(self._numbers)
        ip = f"{self._net}.{number // 250 % 250}.{number % 250 + 1}"
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._answer)
        container = Container(self._worker(ip), ip, TestServer(application, host=ip, port=self.port))
        self.containers[pod["metadata"]["uid"]] = container
        await container.server.start_server(shutdown_timeout=0.1, access_log=None)
        await self._begin(pod, container)

    def _worker(self, ip: str) -> ScriptedWorker:
        return self._workers.add(ip, ScriptedWorker(boot_id=f"boot-{next(self._numbers)}", clock=lambda: datetime.now(UTC)))

    async def crash(self, pod: Any) -> None:
        """Its container ends and is started again in place."""
        container = self.containers.get(pod["metadata"]["uid"])
        if container is not None:
            container.worker, container.restarts = self._worker(container.ip), container.restarts + 1
            await self._begin(pod, container)

    async def _begin(self, pod: Any, container: Container) -> None:
        """It tries the mounted adapters, and runs."""
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        mounted = names.desired_config_name(pod["metadata"]["labels"][names.LABEL_DEPLOYMENT])
        status, found = await self._client.send("GET", f"{path_of(CONFIG_MAP, namespace)}/{mounted}")
        container.worker.load_mounted(json.loads(found["data"]["desired.json"])["adapters"] if status == 200 else ())
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ended = {"terminated": terminated(137) | {"finishedAt": now}} if container.restarts else {}
        state = {"name": names.CONTAINER, "ready": True, "restartCount": container.restarts, "image": "worker:1", "imageID": ""}
        status = {
            "phase": "Running",
            "podIP": container.ip,
            "podIPs": [{"ip": container.ip}],
            "conditions": [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in ("PodScheduled", "Ready")],
            "containerStatuses": [state | {"lastState": ended, "state": {"running": {"startedAt": now}}}],
        }
        await self._client.patch(POD, namespace, name, {"status": status}, subresource="/status")

    async def _end(self, uid: str) -> None:
        container = self.containers.pop(uid, None)
        if container is not None:
            await container.server.close()

    # the garbage collector --------------------------------------------------------------------------------------------

    async def _collect(self) -> None:
        """What is owned by an object that is gone. Owners are listed last, so that none is younger than the list."""
        owned = [one for kind in KINDS.values() if kind not in (DEPLOYMENT, ADAPTER, EVENT) for one in await self._all(kind, OURS)]
        living = {one["metadata"]["uid"] for one in await self._all(DEPLOYMENT)}
        for one in owned:
            owners = {owner["uid"] for owner in one["metadata"].get("ownerReferences", ())}
            if owners and not owners & living:
                await self._client.delete(KINDS[one["kind"]], one["metadata"]["namespace"], one["metadata"]["name"])

    async def _all(self, kind: Kind, query: str = "") -> list[Any]:
        status, answer = await self._client.send("GET", path_of(kind) + query)
        return [one | {"kind": kind.kind} for one in answer["items"]] if status == 200 else []

    # the control ports of workers -------------------------------------------------------------------------------------

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        ip = request.transport.get_extra_info("sockname")[0]
        container = next((one for one in self.containers.values() if one.ip == ip), None)
        if container is None:
            raise web.HTTPServiceUnavailable
        if container.token and request.headers.get("Authorization") != f"Bearer {container.token}":
            self.refused += 1
            raise web.HTTPUnauthorized
        try:
            return web.json_response(body=msgspec.json.encode(await self._do(request, container)))
        except ControlRefused as error:
            body = {"code": error.code, "message": str(error), "retryable": error.retryable}
            return web.json_response(body, status=error.status)
        except ControlUnreachable:
            request.transport.close()
            raise

    async def _do(self, request: web.Request, container: Container) -> Any:
        if request.path == "/v1/state":
            return container.worker.state()
        told = await request.json() if request.can_read_body else dict(request.query)
        fields = {WIRE.get(name, name): value for name, value in told.items()}
        fields["worker"] = {"pod_uid": "", "ip": container.ip, "boot_id": told.get("bootId", "")}
        fields |= {"attempt": 1, "key": {"adapter_uid": "", "generation": 1, "boot_id": ""}}
        fields |= {"name": request.path.rpartition("/")[2], "load": told}
        action, take = CALLS.get(request.path) or CALLS[request.method]
        await take(self._workers, msgspec.convert(fields, action, strict=request.can_read_body), token="")
        return {}
