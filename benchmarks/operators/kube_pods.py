# SPDX-License-Identifier: Apache-2.0
"""The stand-in for a scheduler and a kubelet: workers of pods run in a few host processes, on loopback addresses."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from benchmarks.operators.children import KEY
from benchmarks.operators.kube_session import session_of
from benchmarks.operators.run import ROOT
from diffusion_operator.api.meta import ObjectMeta
from diffusion_operator.api.names import CONTAINER, POD
from diffusion_operator.render.control_secret import control_token

NET = 77  # in 127.0.0.0/8, all of which is this machine's own
START_S = 60.0


class WorkerHosts:
    """Processes that run many workers each, started when the block begins and killed at its end."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._begun = 0
        self._locks: list[asyncio.Lock] = []
        self._processes: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> Self:
        command = (sys.executable, "-m", "benchmarks.stand_ins.worker_host")
        pipe, none, env = subprocess.PIPE, subprocess.DEVNULL, os.environ | {"PYTHONPATH": "."}
        for _ in range(self._count):
            started = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, stderr=none)
            self._processes.append(started)
            self._locks.append(asyncio.Lock())
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def begin(self, uid: str, token: str, *, busy: bool) -> str:
        """Begin a worker in one of the processes, by turns, and return its own loopback address when it listens there.

        Raises:
            RuntimeError: the process reported something else, or ended.
            TimeoutError: it does not listen within a minute.
        """
        number, self._begun = self._begun, self._begun + 1
        ip = f"127.{NET}.{number // 250}.{number % 250 + 1}"
        process, lock = self._processes[number % self._count], self._locks[number % self._count]
        assert process.stdin is not None
        assert process.stdout is not None
        async with lock:
            process.stdin.write(json.dumps({"ip": ip, "uid": uid, "token": token, "busy": busy}).encode() + b"\n")
            async with asyncio.timeout(START_S):
                if (await process.stdout.readline()).decode().strip() != uid:
                    raise RuntimeError(f"the worker of {uid} did not begin; its process ended with {process.returncode}")
        return ip


class Pods:
    """The stand-in for scheduler and kubelet of one namespace: `run` binds each pod and begins its worker.

    It also patches objects as users do. To be used as an async context manager.
    """

    def __init__(self, kubeconfig: Path, namespace: str, hosts: WorkerHosts, *, busy: Callable[[str], bool]) -> None:
        """Take `busy`, which says by a deployment's name if its workers make images all the time."""
        self._kubeconfig = kubeconfig
        self._path = f"/api/v1/namespaces/{namespace}/{POD.plural}"
        self._namespace = namespace
        self._hosts = hosts
        self._busy = busy
        self.addresses: dict[str, str] = {}
        """Keys are names of deployments."""
        self._seen: set[str] = set()

    async def __aenter__(self) -> Self:
        self._session = await session_of(self._kubeconfig)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def run(self, count: int, *, within_s: float) -> None:
        """Begin a worker for each pod that appears and report it as running, until `count` pods have run in all.

        Raises:
            TimeoutError: there are fewer after `within_s`.
        """
        async with asyncio.timeout(within_s):
            while len(self._seen) < count:
                async with self._session.get(self._path) as answer:
                    found = (await answer.json())["items"]
                fresh = [pod for pod in found if pod["metadata"]["uid"] not in self._seen]
                for start in range(0, len(fresh), 8):
                    await asyncio.gather(*(self._start(pod) for pod in fresh[start : start + 8]))
                await asyncio.sleep(0.2)

    async def _start(self, pod: dict[str, Any]) -> None:
        metadata = pod["metadata"]
        owner = metadata["ownerReferences"][0]
        known = ObjectMeta(
            name=owner["name"], namespace=self._namespace, uid=owner["uid"], creation_timestamp=datetime.now(UTC), generation=1
        )
        ip = await self._hosts.begin(metadata["uid"], control_token(KEY, known), busy=self._busy(owner["name"]))
        path = f"{self._path}/{metadata['name']}"
        binding = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": metadata["name"]},
            "target": {"kind": "Node", "name": "node"},
        }
        await self._send("POST", f"{path}/binding", binding)
        await self._send("PATCH", f"{path}/status", {"status": _running(ip)})
        self.addresses[owner["name"]] = ip
        self._seen.add(metadata["uid"])

    async def patch(self, plural: str, name: str, changes: dict[str, Any]) -> None:
        """Merge changes into an object of one of our kinds, as a user does. Raises RuntimeError if the API server refuses it."""
        await self._send("PATCH", f"/apis/diffusion-operator.dev/v1alpha1/namespaces/{self._namespace}/{plural}/{name}", changes)

    async def label(self, pod: str, value: str) -> None:
        """Set the label `example.com/touched` of a pod, which the operator does not read, to a value."""
        await self._send("PATCH", f"{self._path}/{pod}", {"metadata": {"labels": {"example.com/touched": value}}})

    async def _send(self, method: str, path: str, body: dict[str, Any]) -> None:
        kind = "application/json" if method == "POST" else "application/merge-patch+json"
        async with self._session.request(method, path, data=json.dumps(body), headers={"Content-Type": kind}) as answer:
            if answer.status >= 300:
                raise RuntimeError(f"{method} {path}: {answer.status} {(await answer.text())[:300]}")


@contextlib.asynccontextmanager
async def pods(kubeconfig: Path, namespace: str, *, hosts: int, busy: Callable[[str], bool]) -> AsyncIterator[Pods]:
    """Start so many processes for workers, and yield the `Pods` of the namespace that run in them; end them with the block."""
    async with WorkerHosts(hosts) as running, Pods(kubeconfig, namespace, running, busy=busy) as made:
        yield made


def _running(ip: str) -> dict[str, Any]:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    container = {
        "name": CONTAINER,
        "ready": True,
        "restartCount": 0,
        "image": "worker:1",
        "imageID": "",
        "state": {"running": {"startedAt": now}},
    }
    conditions = [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in ("PodScheduled", "Ready", "ContainersReady")]
    return {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "conditions": conditions, "containerStatuses": [container]}
