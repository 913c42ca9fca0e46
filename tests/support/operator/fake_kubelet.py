# SPDX-License-Identifier: Apache-2.0
"""A fake of everything that a lone API server lacks: a scheduler, a kubelet, and two controllers. It looks at all namespaces several times
a second. The containers are scripted workers that answer over HTTP on addresses of 127.0.0.0/8.

Real: the API server that it writes to, and the HTTP of the operator's calls. Not real: the containers.
"""

import asyncio
import itertools
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.test_utils import TestServer

from diffusion_operator.api import names
from diffusion_operator.api.names import CONFIG_MAP, POD
from diffusion_operator.api.worker_state import WorkerState
from diffusion_operator.errors import ControlRefused, ControlUnreachable
from diffusion_operator.plan.observed.pods import NODE_FAULTS
from diffusion_operator.plan.results.actions import DrainWorker, PutAdapter, RemoveAdapter, SleepWorker, WakeWorker
from diffusion_operator.worker_client import EPOCH_HEADER, bearer
from support.apiserver.rest_client import RestClient, path_of
from support.operator.fake_cluster import terminated
from support.operator.mounted import mounted_desired
from support.operator.scripted_workers import DIGITS, Revisions, ScriptedWorker, ScriptedWorkers
from support.ports import unused_port
from support.soak.fake_controllers import FakeControllers

TICK_S = 0.15
LOOK_S = 0.05
# Fields of calls that have another name on the wire.
WIRE = {"operationId": "operation_id", "deadlineSeconds": "deadline_s", "ifIdleSince": "if_idle_since_s", "drainSeconds": "drain_s"}
# Calls by path, or by method for an adapter's: the action that the call means, and the worker's method for it.
CALLS = {
    "/v1/sleep": (SleepWorker, ScriptedWorkers.sleep),
    "/v1/wake": (WakeWorker, ScriptedWorkers.wake),
    "/v1/drain": (DrainWorker, ScriptedWorkers.drain),
    "PUT": (PutAdapter, ScriptedWorkers.put_adapter),
    "DELETE": (RemoveAdapter, ScriptedWorkers.remove_adapter),
}


@dataclass
class Container:
    """The stand-in for a started container: a scripted worker and the HTTP server that answers for it."""

    worker: ScriptedWorker
    ip: str
    server: TestServer
    restarts: int = 0
    token: str = ""
    """The token that bearers of callers are made with; empty: any caller is accepted."""
    epoch: int = 0
    """The highest epoch of a leader that called it, as a worker's server keeps it."""
    cut_off: bool = False
    """True: it accepts connections and answers nothing, as when packets are dropped."""
    revisions: Revisions = field(default_factory=Revisions)

    def state(self) -> WorkerState:
        """Return the state document with its revision, a new one after each change other than of ages."""
        return self.revisions.revised(msgspec.structs.replace(self.worker.state(), operator_epoch=self.epoch))

    async def state_after(self, revision: str, wait_s: float) -> WorkerState:
        """Return the state document once its revision differs, or the same one after the time."""
        ends = time.monotonic() + wait_s
        while (state := self.state()).revision == revision and time.monotonic() < ends:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        return state


class FakeKubelet:
    """A scheduler, a kubelet and two controllers while the block lasts; an async context manager.

    Each pod with the worker's container gets a scripted worker, which answers over HTTP. In namespaces of `rejecting` the node refuses it.
    """

    def __init__(self, client: RestClient, rng: random.Random) -> None:
        self._client = client
        self.controllers = FakeControllers(client)
        self._rng = rng
        self._numbers = itertools.count(1)
        # A separate part of 127.0.0.0/8, because several of these may run on a machine.
        self._net = f"127.{rng.randrange(16, 250)}"
        self.port = unused_port()
        self._workers = ScriptedWorkers()
        self.containers: dict[str, Container] = {}
        """Containers by UID of the pod."""
        self.wrong: list[str] = []
        self.pods_made: Counter[str] = Counter()
        """Counts of pods by the deployment's UID and the pod's name; above one only if a pod was deleted before it was seen."""
        self.refused = 0
        """The number of calls with another token than the container's."""
        self.stale: list[str] = []
        """Calls by leaders that had been replaced."""
        self.rejecting: set[str] = set()
        """Namespaces whose new pods the node rejects."""
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
                    await self.controllers.step()
            except (OSError, TimeoutError) as error:  # the API server is busy
                print(f"fake kubelet: {type(error).__name__}: {error}", flush=True)
            except Exception as error:
                self.wrong.append(f"the fake kubelet failed: {error!r}")
                raise
            await asyncio.sleep(TICK_S)

    # the kubelet ------------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        found = (await self._client.send("GET", "/api/v1/pods"))[1]["items"]
        # Pods are recognised by their container, since any client may change labels.
        pods = [pod for pod in found if names.CONTAINER in [one["name"] for one in pod["spec"]["containers"]]]
        there = {pod["metadata"]["uid"]: pod for pod in pods}
        for uid in self.containers.keys() - there.keys():
            await self._end(uid)  # deleted by force
        made = [pod["metadata"] for uid, pod in there.items() if uid not in self._seen]
        self.pods_made.update(f"{one['ownerReferences'][0]['uid']} {one['name']}" for one in made if "ownerReferences" in one)
        self._seen |= there.keys()
        self._watch_for_twins([pod["metadata"] for pod in pods if not pod["metadata"].get("deletionTimestamp")])
        await asyncio.gather(*(self._tend(pod) for pod in pods))

    def _watch_for_twins(self, living: list[Any]) -> None:
        """Record as wrong any replica with two of these pods at once; without surge there must be none.

        `living` are the pods that are not terminating. Pods with a drained worker and those without an owner do not count.
        """
        drain = {uid for uid, container in self.containers.items() if container.worker.drains}
        indexed = [one for one in living if names.LABEL_REPLICA_INDEX in one.get("labels", {})]  # a check pod is no replica
        owned = [one for one in indexed if "ownerReferences" in one and one["uid"] not in drain]  # an orphan has no owner
        replicas = Counter((one["ownerReferences"][0]["uid"], one["name"].split("-")[1]) for one in owned)
        self.wrong += [f"{count} pods of replica {index} of {uid} at once" for (uid, index), count in replicas.items() if count > 1]

    async def _tend(self, pod: Any) -> None:
        metadata = pod["metadata"]
        if metadata.get("deletionTimestamp"):
            await self._end(metadata["uid"])
            await self._client.delete(POD, metadata["namespace"], metadata["name"], at_once=True, uid=metadata["uid"])
        elif pod["spec"]["restartPolicy"] == "Never":
            await self._check(pod)
        elif metadata["uid"] not in self.containers and pod.get("status", {}).get("phase") != "Failed":
            await (self._reject if metadata["namespace"] in self.rejecting else self._start)(pod)

    async def _bind(self, pod: Any) -> None:
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        if not pod["spec"].get("nodeName"):
            binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": {"kind": "Node", "name": "node"}}
            await self._client.send("POST", f"{path_of(POD, namespace)}/{name}/binding", binding)

    async def _reject(self, pod: Any) -> None:
        """Bind a pod to the node, and have the node refuse it."""
        await self._bind(pod)
        status = {"phase": "Failed", "reason": self._rng.choice((*NODE_FAULTS, "OutOfmemory")), "message": "the node rejects all pods"}
        await self._client.patch(POD, pod["metadata"]["namespace"], pod["metadata"]["name"], {"status": status}, subresource="/status")

    async def _check(self, pod: Any) -> None:
        """End a check pod as one whose options are accepted."""
        if pod.get("status", {}).get("phase") == "Pending":
            await self._bind(pod)
            ended = {
                "name": names.CONTAINER,
                "ready": False,
                "restartCount": 0,
                "image": "",
                "imageID": "",
                "state": {"terminated": terminated(0)},
            }
            status = {"phase": "Succeeded", "containerStatuses": [ended]}
            await self._client.patch(POD, pod["metadata"]["namespace"], pod["metadata"]["name"], {"status": status}, subresource="/status")

    async def _start(self, pod: Any) -> None:
        await self._bind(pod)
        number = next(self._numbers)
        ip = f"{self._net}.{number // 250 % 250}.{number % 250 + 1}"
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._answer)
        container = Container(self._worker(ip), ip, TestServer(application, host=ip, port=self.port))
        self.containers[pod["metadata"]["uid"]] = container
        await container.server.start_server(shutdown_timeout=0.1, access_log=None)
        await self._begin(pod, container)

    def _worker(self, ip: str) -> ScriptedWorker:
        model = msgspec.structs.replace(DIGITS, digest="sha256:digits")
        return self._workers.add(ip, ScriptedWorker(boot_id=f"boot-{next(self._numbers)}", clock=lambda: datetime.now(UTC), model=model))

    async def crash(self, pod: Any) -> None:
        """End a pod's container and restart it in place, with a new worker; do nothing for a pod without a container."""
        container = self.containers.get(pod["metadata"]["uid"])
        if container is not None:
            container.worker, container.restarts = self._worker(container.ip), container.restarts + 1
            await self._begin(pod, container)

    async def _begin(self, pod: Any, container: Container) -> None:
        """Load the mounted adapters into a container's worker, and report the pod as running."""
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        maps = {one["metadata"]["name"]: one for one in await self._client.list(CONFIG_MAP, namespace)}
        container.worker.load_mounted(mounted_desired(maps.get, name.rsplit("-", 2)[0])["adapters"])
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

    # the control ports of workers -------------------------------------------------------------------------------------

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        ip = request.transport.get_extra_info("sockname")[0]
        uid, container = next(((uid, one) for uid, one in self.containers.items() if one.ip == ip), ("", None))
        if container is None:
            raise web.HTTPServiceUnavailable
        if container.cut_off:
            await asyncio.Event().wait()
        if container.token and request.headers.get("Authorization") != f"Bearer {bearer(container.token, uid)}":
            self.refused += 1
            raise web.HTTPUnauthorized
        epoch = int(request.headers.get(EPOCH_HEADER, "0"))
        if 0 < epoch < container.epoch and request.method != "GET":
            self.stale.append(f"{request.method} {request.path}")
            return web.json_response({"code": "StaleEpoch", "message": "another operator leads", "retryable": False}, status=409)
        container.epoch = max(container.epoch, epoch)
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
            after, wait_s = request.query.get("after", ""), float(request.query.get("wait", "0"))
            return await container.state_after(after, wait_s)
        told = await request.json() if request.can_read_body else dict(request.query)
        fields = {WIRE.get(name, name): value for name, value in told.items()}
        fields["worker"] = {"pod_uid": "", "ip": container.ip, "boot_id": told.get("bootId", "")}
        fields |= {"attempt": 1, "key": {"adapter_uid": "", "generation": 1, "boot_id": ""}}
        fields |= {"name": request.path.rpartition("/")[2], "load": told}
        action, take = CALLS.get(request.path) or CALLS[request.method]
        await take(self._workers, msgspec.convert(fields, action, strict=request.can_read_body), token="")
        return {}
