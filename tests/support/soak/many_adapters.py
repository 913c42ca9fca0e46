# SPDX-License-Identifier: Apache-2.0
"""Twenty thousand adapters of one deployment: made, mounted, ready, changed, and there again after the worker was killed.

Real: the API server, the operator's process, and the worker's server process. Not real: the worker's ranks, which are a FakeRankGroup. This
file acts as the scheduler and the kubelet of the one pod, with its mounted folder.
"""

import asyncio
import contextlib
import hashlib
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.names import ADAPTER, CONFIG_MAP, CONTAINER, DEPLOYMENT, POD
from diffusion_operator.render.control_secret import control_token
from support.apiserver.rest_client import RestClient, path_of
from support.operator.fake_cluster import terminated
from support.operator.mounted import mounted_desired, mounted_files
from support.operator.rig import adapter
from support.operator.sole_operator import deployment, running
from support.ports import unused_port
from support.soak.frame import Outcome
from support.soak.operator_process import OperatorProcess
from support.soak.operator_truth import condition
from support.worker.process import DIGITS, DIGITS_MODEL, FAKE_PROGRAM, WorkerProcess

NAMESPACE, NAME, POD_NAME = "many", "d", "d-0-0"
STRIPES = str(DIGITS / "loras" / "stripes")
AT_ONCE = 32
PAGE = 500
LOOK_S = 0.5
IDLE_S = 20.0


async def run_many(folder: Path, kubeconfig: Path, *, seed: int, count: int, limit_s: float) -> Outcome:
    """Make `count` adapters and a deployment, change and remove an adapter, and kill the worker; measure each step. A step over
    `limit_s` raises AssertionError. Complaints in the operator's log are faults."""
    outcome = Outcome(seed, counts="made_s ready_s changed_s removed_s restarted_s idle_passes idle_cpu_s largest_shard_bytes resident_mib")
    port = unused_port()
    with running(folder, kubeconfig, control_port=port) as operator:
        async with RestClient(kubeconfig) as client:
            many = _Many(client, operator, outcome, port, limit_s)
            try:
                await many.run(count)
            finally:
                many.close()
    outcome.wrong += [f"the operator complains: {line[:600]}" for line in operator.complaints()]
    return outcome


class _Many:
    """A deployment of one replica, whose pod is a worker process."""

    def __init__(self, client: RestClient, operator: OperatorProcess, outcome: Outcome, port: int, limit_s: float) -> None:
        self._client = client
        self._operator = operator
        self._outcome = outcome
        self._port = port
        self._limit_s = limit_s
        self._folder = tempfile.TemporaryDirectory(prefix="many-")
        self._worker: WorkerProcess | None = None
        self._restarts = 0

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
        self._folder.cleanup()

    async def run(self, count: int) -> None:
        outcome = self._outcome
        begun = time.monotonic()
        await self._client.make_namespace(NAMESPACE)
        await self._make_all(count)
        outcome.made_s = time.monotonic() - begun
        await self._start(count)
        outcome.ready_s = await self._timed("every adapter is ready", lambda: self._are_ready(count))
        outcome.done = count
        outcome.largest_shard_bytes = max(len(one) for one in (await self._files()).values() if one[:2] == b"\x1f\x8b")
        await self._idle()
        await self._change("x-1", {"priority": 7})
        outcome.changed_s = await self._timed("the worker knows the change", lambda: self._says("x-1", priority=7))
        await self._client.delete(ADAPTER, NAMESPACE, "x-2")
        outcome.removed_s = await self._timed("the worker knows the removal", lambda: self._knows(count - 1))
        await self._kill()
        outcome.restarted_s = await self._timed("every adapter is ready again", lambda: self._are_ready(count - 1))
        outcome.resident_mib = self._operator.resident_bytes() >> 20
        outcome.wrong += [] if self._records()["x-1"]["priority"] == 7 else ["the restarted worker does not know the change"]

    async def _timed(self, what: str, look: Callable[[], Awaitable[bool]]) -> float:
        """Wait until `look` is true, and return the seconds; mounted files reach the worker meanwhile. AssertionError after the limit."""
        begun = time.monotonic()
        while not await self._looked(look):
            if time.monotonic() - begun > self._limit_s:
                _, found = await self._client.send("GET", f"{path_of(DEPLOYMENT, NAMESPACE)}/{NAME}")
                raise AssertionError(f"{what}: not within {self._limit_s:g} s: {found.get('status')}")
            await self._bring_files()
            await asyncio.sleep(LOOK_S)
        return time.monotonic() - begun

    async def _looked(self, look: Callable[[], Awaitable[bool]]) -> bool:
        """Return whether `look` is true; False where a busy API server does not answer."""
        with contextlib.suppress(TimeoutError, OSError):
            return await look()
        return False

    async def _make_all(self, count: int) -> None:
        gate = asyncio.Semaphore(AT_ONCE)

        async def make(number: int) -> None:
            async with gate:
                digest = f"sha256:{hashlib.sha256(str(number).encode()).hexdigest()}"
                document = adapter(f"x-{number}", STRIPES, residency="OnDemand", digest=digest)
                status, found = await self._client.create(ADAPTER, NAMESPACE, document)
                assert status == 201, found

        await asyncio.gather(*(make(number) for number in range(count)))

    # the deployment, its pod and its worker -----------------------------------------------------------------------------

    async def _start(self, count: int) -> None:
        status, made = await self._client.create(DEPLOYMENT, NAMESPACE, deployment(NAME))
        assert status == 201, made
        metadata = msgspec.convert(made, DiffusionDeployment).metadata
        await self._timed("every adapter is mounted and the pod made", lambda: self._is_mounted(count))
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": POD_NAME}, "target": {"kind": "Node", "name": "node"}}
        await self._client.send("POST", f"{path_of(POD, NAMESPACE)}/{POD_NAME}/binding", binding)
        token = control_token(self._operator.key.encode(), metadata)
        options = (f"--desired={self._folder.name}/desired.json", f"--control-port={self._port}")
        self._worker = WorkerProcess(DIGITS_MODEL, program=FAKE_PROGRAM, token=token, options=options)
        await self._begin()

    async def _begin(self) -> None:
        """Start the worker and report the pod as running, as a kubelet does."""
        assert self._worker is not None
        await self._bring_files()
        await asyncio.to_thread(self._worker.start)
        await asyncio.to_thread(self._worker.wait_ready)
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ended = {"terminated": terminated(137) | {"finishedAt": now}} if self._restarts else {}
        state = {"name": CONTAINER, "ready": True, "restartCount": self._restarts, "image": "worker:1", "imageID": ""}
        status = {
            "phase": "Running",
            "podIP": "127.0.0.1",
            "podIPs": [{"ip": "127.0.0.1"}],
            "conditions": [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in ("PodScheduled", "Ready")],
            "containerStatuses": [state | {"lastState": ended, "state": {"running": {"startedAt": now}}}],
        }
        await self._client.patch(POD, NAMESPACE, POD_NAME, {"status": status}, subresource="/status")

    async def _kill(self) -> None:
        assert self._worker is not None
        self._worker.send_signal(signal.SIGKILL)
        await asyncio.to_thread(self._worker.wait_exit)
        self._restarts += 1
        await self._begin()

    async def _files(self) -> dict[str, bytes]:
        maps = {one["metadata"]["name"]: one for one in await self._client.list(CONFIG_MAP, NAMESPACE)}
        return mounted_files(maps.get, NAME)

    async def _bring_files(self) -> None:
        """Write the mounted files as the kubelet does, the main one last."""
        for name, content in sorted((await self._files()).items()):
            place = Path(self._folder.name) / name
            if not place.exists() or place.read_bytes() != content:
                fresh = place.with_suffix(".new")
                fresh.write_bytes(content)
                fresh.rename(place)

    # looking ------------------------------------------------------------------------------------------------------------

    async def _is_mounted(self, count: int) -> bool:
        maps = {one["metadata"]["name"]: one for one in await self._client.list(CONFIG_MAP, NAMESPACE)}
        pods = [one["metadata"]["name"] for one in await self._client.list(POD, NAMESPACE)]
        return len(mounted_desired(maps.get, NAME)["adapters"]) == count and pods == [POD_NAME]

    async def _are_ready(self, count: int) -> bool:
        _, found = await self._client.send("GET", f"{path_of(DEPLOYMENT, NAMESPACE)}/{NAME}")
        status = found.get("status", {})
        if status.get("adapters", {}).get("ready") != count or condition(status, "Ready")["reason"] != "Serving":
            return False
        ready, position = 0, ""
        while True:
            status_code, page = await self._client.send("GET", f"{path_of(ADAPTER, NAMESPACE)}?limit={PAGE}&continue={position}")
            if status_code != 200:
                return False
            ready += sum(condition(one.get("status", {}), "Ready")["status"] == "True" for one in page["items"])
            position = page["metadata"].get("continue", "")
            if not position:
                return ready == count

    def _records(self) -> dict[str, Any]:
        assert self._worker is not None
        return {one["name"]: one for one in self._worker.state()["adapters"]}

    async def _says(self, name: str, **fields: Any) -> bool:
        return fields.items() <= (await asyncio.to_thread(self._records))[name].items()

    async def _knows(self, count: int) -> bool:
        return len(await asyncio.to_thread(self._records)) == count

    async def _change(self, name: str, spec: dict[str, Any]) -> None:
        await self._client.patch(ADAPTER, NAMESPACE, name, {"spec": spec})

    async def _idle(self) -> None:
        """Record the operator's passes and CPU seconds in IDLE_S seconds in which nothing happens."""
        passes, cpu_s = self._operator.passes(), _cpu_s(self._operator.pid)
        await asyncio.sleep(IDLE_S)
        self._outcome.idle_passes = self._operator.passes() - passes
        self._outcome.idle_cpu_s = _cpu_s(self._operator.pid) - cpu_s


def _cpu_s(pid: int) -> float:
    """Return the seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100
