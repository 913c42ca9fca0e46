# SPDX-License-Identifier: Apache-2.0
"""A kubelet whose containers are programs: each pod's image names one, which gets the pod's own arguments, variables and volumes.

Real: the API server that it writes to, and the workers' server processes on addresses of 127.0.0.0/8. Not real: the scheduler, the kubelet
and the garbage collector, which are FakeKubelet's. Containers are processes of this machine, and the ranks are fake.
"""

import asyncio
import base64
import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2

from diffusion_operator.api.names import CONFIG_MAP, CONTAINER, POD, SECRET, Kind
from support.apiserver.rest_client import RestClient, path_of
from support.operator.fake_kubelet import FakeKubelet
from support.ports import unused_port
from tools.devcluster.paths import REPOSITORY

STOP_S = 30.0


@dataclass(frozen=True)
class Image:
    """A program that stands for a container image."""

    module: str
    sources: Sequence[Path]
    """Folders that come before this environment's on the path."""


@dataclass
class Server:
    """The server process of a container."""

    ip: str
    folder: Path
    """The container's root: every mount is below it."""
    process: subprocess.Popen[bytes]
    ready: bool | None = None
    stopping: bool = False
    mounted: dict[str, bytes] = field(default_factory=dict)

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text(errors="replace")


class ProcessKubelet(FakeKubelet):
    """A kubelet that runs each pod's container as a process while the block lasts; an async context manager.

    `images` has the program of each image. At the end all processes are killed.
    """

    def __init__(self, client: RestClient, folder: Path, images: Mapping[str, Image]) -> None:
        super().__init__(client, random.Random())
        self.client = client
        self._folder, self._images = folder, images
        self.data_port = unused_port()
        self.servers: dict[str, Server] = {}
        """Servers by UID of the pod."""

    async def __aexit__(self, *given: object) -> None:
        await super().__aexit__(*given)
        for server in self.servers.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.process.pid, signal.SIGKILL)
            await asyncio.to_thread(server.process.wait, STOP_S)

    async def _tend(self, pod: Any) -> None:
        metadata = pod["metadata"]
        server = self.servers.get(metadata["uid"])
        if pod["spec"]["restartPolicy"] == "Never":
            await super()._tend(pod)
        elif server is None:
            await self._start(pod)
        elif metadata.get("deletionTimestamp"):
            await self._stop(pod, server)
        else:
            await self._mount(pod, server.folder, server.mounted)
            await self._look_at(pod, server)

    async def _start(self, pod: Any) -> None:
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": {"kind": "Node", "name": "node"}}
        await self.client.send("POST", f"{path_of(POD, namespace)}/{name}/binding", binding)
        ip, folder = f"{self._net}.0.{next(self._numbers)}", self._folder / pod["metadata"]["uid"]
        mounted: dict[str, bytes] = {}
        await self._mount(pod, folder, mounted)
        self.servers[pod["metadata"]["uid"]] = Server(ip, folder, self._run_container(pod, ip, folder), mounted=mounted)

    def _run_container(self, pod: Any, ip: str, folder: Path) -> subprocess.Popen[bytes]:
        (container,) = pod["spec"]["containers"]
        image = self._images[container["image"]]
        own = {"--host": ip, "--port": str(self.data_port), "--control-port": str(self.port)}
        arguments = [self._argument(one, own, container["volumeMounts"], folder) for one in container["args"]]
        said = {one["name"]: one.get("value", pod["metadata"]["uid"]) for one in container["env"]}  # the only field referred to
        environment = os.environ | said | {"PYTHONPATH": os.pathsep.join(map(str, image.sources)), "HOME": str(folder)}
        command = [sys.executable, "-m", image.module, *arguments]
        with (folder / "output").open("ab") as output:
            return subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd=folder, start_new_session=True)

    def _argument(self, argument: str, own: Mapping[str, str], mounts: Sequence[Any], folder: Path) -> str:
        """Return an argument of the pod for the process: with the pod's own address and ports, and folders below the container's root."""
        name, equals, value = argument.partition("=")
        if name in own:
            return f"{name}={own[name]}"
        # The repository's files are the image's own, also where the repository lies below a path that the pod mounts, such as /tmp.
        mounted = value.startswith("/") and not Path(value).is_relative_to(REPOSITORY)
        inside = mounted and any(Path(value).is_relative_to(mount["mountPath"]) for mount in mounts)
        return f"{name}{equals}{folder}{value}" if inside else argument

    async def _mount(self, pod: Any, folder: Path, mounted: dict[str, bytes]) -> None:
        """Write the files that changed, each atomically, as a kubelet's links do."""
        places = {one["name"]: one["mountPath"] for one in pod["spec"]["containers"][0]["volumeMounts"]}
        for volume in pod["spec"]["volumes"]:
            place = folder / places[volume["name"]].lstrip("/")
            place.mkdir(parents=True, exist_ok=True)
            for name, content in (await self._content(pod["metadata"]["namespace"], volume)).items():
                if mounted.get(f"{place}/{name}") != content:
                    mounted[f"{place}/{name}"] = content
                    (place / f"{name}.new").write_bytes(content)
                    (place / f"{name}.new").rename(place / name)

    async def _content(self, namespace: str, volume: Any) -> dict[str, bytes]:
        """Return the files of a volume; a claim or an emptyDir has none."""
        found: dict[str, bytes] = {}
        for source in (volume, *volume.get("projected", {}).get("sources", ())):
            for kind, field_name in ((SECRET, "secret"), (CONFIG_MAP, "configMap")):
                if (asked := source.get(field_name)) is not None:
                    files = await self._files(namespace, kind, asked.get("secretName") or asked["name"])
                    paths = {one["key"]: one["path"] for one in asked.get("items", ())} or {name: name for name in files}
                    found |= {paths[name]: content for name, content in files.items() if name in paths}
        return found

    async def _files(self, namespace: str, kind: Kind, name: str) -> dict[str, bytes]:
        status, found = await self.client.send("GET", f"{path_of(kind, namespace)}/{name}")
        if status != 200:
            return {}
        encoded = found.get("data" if kind == SECRET else "binaryData") or {}
        plain = {} if kind == SECRET else found.get("data") or {}
        return {key: base64.b64decode(value) for key, value in encoded.items()} | {key: value.encode() for key, value in plain.items()}

    async def _look_at(self, pod: Any, server: Server) -> None:
        """Probe a server, and report a change of its readiness; a server that has ended is recorded as wrong."""
        if server.process.poll() is not None:
            self.wrong.append(f"{pod['metadata']['name']} ended with {server.process.returncode}: {server.output[-2000:]}")
            return
        ready = False
        async with httpx2.AsyncClient(timeout=2) as http:
            with contextlib.suppress(httpx2.TransportError):
                ready = (await http.get(f"http://{server.ip}:{self.data_port}/readyz")).status_code == 200
        if ready is server.ready:
            return
        server.ready, now = ready, datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        said = {"PodScheduled": "True", "Ready": str(ready), "ContainersReady": str(ready)}
        state = {"name": CONTAINER, "ready": ready, "restartCount": 0, "image": "", "imageID": "", "state": {"running": {"startedAt": now}}}
        status = {
            "phase": "Running",
            "podIP": server.ip,
            "podIPs": [{"ip": server.ip}],
            "conditions": [{"type": kind, "status": value, "lastTransitionTime": now} for kind, value in said.items()],
            "containerStatuses": [state],
        }
        metadata = pod["metadata"]
        await self.client.patch(POD, metadata["namespace"], metadata["name"], {"status": status}, subresource="/status")

    async def _stop(self, pod: Any, server: Server) -> None:
        """Send SIGTERM at the first call; a later call deletes the pod if the process has ended."""
        if not server.stopping:
            server.stopping = True
            server.process.send_signal(signal.SIGTERM)  # does nothing where it has ended already
        elif server.process.poll() is not None:
            metadata = pod["metadata"]
            await self.client.delete(POD, metadata["namespace"], metadata["name"], at_once=True)
