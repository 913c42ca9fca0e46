# SPDX-License-Identifier: Apache-2.0
"""A fake of what a real API server alone has not: a scheduler and a kubelet whose containers are scripted workers that answer over
HTTP on addresses of 127.0.0.0/8, and a garbage collector. It watches by looking, several times a second, at all namespaces.
"""

import asyncio
import contextlib
import itertools
import json
import random
import socket
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
from aiohttp import web

from diffusion_operator.api.adapter_load import AdapterLoad
from diffusion_operator.api.deployment_spec import DrainMode, SleepLevel, SleepPolicy
from diffusion_operator.api.names import (
    ADAPTER,
    CONFIG_MAP,
    CONTAINER,
    DEPLOYMENT,
    EVENT,
    FIELD_MANAGER,
    KINDS,
    LABEL_DEPLOYMENT,
    LABEL_MANAGED_BY,
    POD,
    desired_config_name,
)
from diffusion_operator.errors import ControlRefused, ControlUnreachable, OperatorError
from diffusion_operator.plan.results.actions import SleepWorker, WakeWorker, WorkerAddress
from support.operator.rest_client import RestClient, path_of
from support.operator.scripted_workers import ScriptedWorker

TICK_S = 0.15
OURS = f"?labelSelector={LABEL_MANAGED_BY}%3D{FIELD_MANAGER}"


@dataclass
class Container:
    """What runs in a pod."""

    worker: ScriptedWorker
    ip: str
    runner: web.AppRunner
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
        self.port = _free_port()
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
        self.pods_made.update(_identity(pod) for uid, pod in there.items() if uid not in self._seen)
        self._seen |= there.keys()
        self._watch_for_twins(pods)
        await asyncio.gather(*(self._tend(pod) for pod in pods))

    def _watch_for_twins(self, pods: list[Any]) -> None:
        """Without surge no replica ever has two pods, one of them terminating perhaps; and no name is made twice."""
        living = Counter(
            (pod["metadata"]["ownerReferences"][0]["uid"], pod["metadata"]["name"].split("-")[1])
            for pod in pods
            if not pod["metadata"].get("deletionTimestamp")
        )
        self.wrong += [f"{count} pods of replica {index} of {uid} at once" for (uid, index), count in living.items() if count > 1]

    async def _tend(self, pod: Any) -> None:
        metadata = pod["metadata"]
        uid = metadata["uid"]
        if metadata.get("deletionTimestamp"):
            await self._end(uid)
            await self._client.delete(POD, metadata["namespace"], metadata["name"], at_once=True)
        elif uid not in self.containers:
            await self._start(pod)

    async def _start(self, pod: Any) -> None:
        metadata = pod["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        if not pod["spec"].get("nodeName"):
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": {"kind": "Node", "name": "node"}}
            await self._client.send("POST", f"{path_of(POD, namespace)}/{name}/binding", binding)
        number = next(self._numbers)
        ip = f"{self._net}.{number // 250 % 250}.{number % 250 + 1}"
        container = Container(worker=self._worker(), ip=ip, runner=_runner(self))
        self.containers[metadata["uid"]] = container
        await container.runner.setup()
        await web.TCPSite(container.runner, ip, self.port).start()
        await self._load_mounted(container, namespace, metadata["labels"][LABEL_DEPLOYMENT])
        await self._say(namespace, name, container)

    def _worker(self) -> ScriptedWorker:
        return ScriptedWorker(boot_id=f"boot-{next(self._numbers)}", clock=lambda: datetime.now(UTC))

    async def crash(self, pod: Any) -> None:
        """Its container ends and is started again in place."""
        container = self.containers.get(pod["metadata"]["uid"])
        if container is None:
            return
        container.worker, container.restarts = self._worker(), container.restarts + 1
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        await self._load_mounted(container, namespace, pod["metadata"]["labels"][LABEL_DEPLOYMENT])
        await self._say(namespace, name, container)

    async def _load_mounted(self, container: Container, namespace: str, deployment: str) -> None:
        path = f"{path_of(CONFIG_MAP, namespace)}/{desired_config_name(deployment)}"
        status, found = await self._client.send("GET", path)
        for wanted in json.loads(found["data"]["desired.json"])["adapters"] if status == 200 else ():
            with contextlib.suppress(OperatorError):
                container.worker.load_adapter(wanted["name"], msgspec.convert(wanted, AdapterLoad))

    async def _say(self, namespace: str, name: str, container: Container) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ended = {"terminated": {"exitCode": 137, "reason": "Error", "finishedAt": now}} if container.restarts else {}
        state = {
            "name": CONTAINER,
            "ready": True,
            "restartCount": container.restarts,
            "image": "worker:1",
            "imageID": "",
            "lastState": ended,
        }
        status = {
            "phase": "Running",
            "podIP": container.ip,
            "podIPs": [{"ip": container.ip}],
            "conditions": [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in ("PodScheduled", "Ready")],
            "containerStatuses": [state | {"state": {"running": {"startedAt": now}}}],
        }
        await self._client.patch(POD, namespace, name, {"status": status}, subresource="/status")

    async def _end(self, uid: str) -> None:
        container = self.containers.pop(uid, None)
        if container is not None:
            await container.runner.cleanup()

    def at(self, ip: str) -> Container | None:
        """What answers there."""
        return next((one for one in self.containers.values() if one.ip == ip), None)

    # the garbage collector --------------------------------------------------------------------------------------------

    async def _collect(self) -> None:
        """What is owned by an object that is gone. Owners are listed last, so that none is younger than the list."""
        owned = [one for kind in KINDS.values() if kind not in (DEPLOYMENT, ADAPTER, EVENT) for one in await self._all(kind.kind, OURS)]
        living = {one["metadata"]["uid"] for one in await self._all(DEPLOYMENT.kind)}
        for one in owned:
            owners = {owner["uid"] for owner in one["metadata"].get("ownerReferences", ())}
            if owners and not owners & living:
                await self._client.delete(KINDS[one["kind"]], one["metadata"]["namespace"], one["metadata"]["name"])

    async def _all(self, kind: str, query: str = "") -> list[Any]:
        found = KINDS[kind]
        prefix = "apis" if "/" in found.api_version else "api"
        status, answer = await self._client.send("GET", f"/{prefix}/{found.api_version}/{found.plural}{query}")
        return [one | {"kind": kind} for one in answer["items"]] if status == 200 else []


def _runner(kubelet: FakeKubelet) -> web.AppRunner:
    """The control port of a worker."""

    async def answer(request: web.Request) -> web.StreamResponse:
        transport = request.transport
        container = kubelet.at(transport.get_extra_info("sockname")[0]) if transport is not None else None
        if container is None:
            raise web.HTTPServiceUnavailable
        if container.token and request.headers.get("Authorization") != f"Bearer {container.token}":
            kubelet.refused += 1
            raise web.HTTPUnauthorized
        try:
            return web.json_response(body=msgspec.json.encode(await _do(request, container)))
        except ControlRefused as error:
            body = {"code": error.code, "message": str(error), "retryable": error.retryable}
            return web.json_response(body, status=error.status)
        except ControlUnreachable:
            assert transport is not None
            transport.close()
            raise

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    return web.AppRunner(application, shutdown_timeout=0.1, access_log=None)


async def _do(request: web.Request, container: Container) -> Any:
    worker, path = container.worker, request.path
    told = await request.json() if request.can_read_body else dict(request.query)
    if path == "/v1/state":
        return worker.state()
    if told.get("bootId") != worker.boot_id:
        raise ControlRefused(_error("WrongBoot"), status=409)
    address = WorkerAddress(pod_uid="", ip=container.ip, boot_id=worker.boot_id)
    if path == "/v1/sleep":
        modes = {"mode": DrainMode(told["mode"]), "level": SleepLevel(told["level"]), "policy": SleepPolicy(told["policy"])}
        since = told.get("ifIdleSince")
        worker.sleep(SleepWorker(address, told["operationId"], 1, deadline_s=told["deadlineSeconds"], if_idle_since_s=since, **modes))
    elif path == "/v1/wake":
        worker.wake(WakeWorker(address, told["operationId"], 1, told["deadlineSeconds"], SleepPolicy(told["policy"])))
    elif request.method == "PUT":
        worker.load_adapter(path.rpartition("/")[2], msgspec.convert(told, AdapterLoad))
    else:
        worker.remove(path.rpartition("/")[2])
    return {}


def _identity(pod: Any) -> str:
    return f"{pod['metadata']['ownerReferences'][0]['uid']} {pod['metadata']['name']}"


def _error(code: str) -> Any:
    from diffusion_operator.api.worker_state import WireError

    return WireError(code=code, message=code, retryable=False)


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
