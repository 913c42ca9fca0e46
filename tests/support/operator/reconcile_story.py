# SPDX-License-Identifier: Apache-2.0
"""The operator's real reconciles with a real worker server as the pod of a deployment's only replica.

Real: the reconciles, the worker's process and its HTTP. Not real: the cluster, whose time is virtual, fifty times as fast as the
worker's. The desired file is brought to the worker as a kubelet would, a moment after its ConfigMap changed.
"""

import asyncio
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.names import CONFIG_MAP, DEPLOYMENT, POD
from diffusion_operator.render.control_secret import control_token
from diffusion_operator.worker_client import HttpWorkerClient
from support.apiserver.kind_api import merged
from support.operator.fake_cluster import terminated
from support.operator.mounted import mounted_files
from support.operator.rig import Rig, deployment
from support.worker.process import DIGITS_MODEL, FAKE_PROGRAM, WorkerProcess

DEADLINE_S = 60.0
REAL_PROGRAM = ("-m", "diffusion_worker.cli")
POD_NAME = "d-0-0"


class Story:
    """A test over a fake API server with the deployment `d`. The deployment's single pod stands for a real worker process, which a test
    may kill and restart."""

    def __init__(self, rig: Rig, worker: WorkerProcess, desired: Path, closing: AsyncExitStack) -> None:
        self.rig = rig
        self.worker = worker
        self._desired = desired
        self._closing = closing
        self._restarts = 0

    def adopt_worker(self) -> None:
        """Mark the pod as running and ready at 127.0.0.1, and point the operator at the control port of the worker. After a kill the
        status reports exit code 137."""
        client = HttpWorkerClient(poll_timeout_s=5, call_timeout_s=10, port=int(self.worker.control_url.rpartition(":")[2]))
        self._closing.push_async_callback(client.close)
        self.rig.workers = self.rig.runtime.workers = client  # also for an operator that is restarted
        ended = terminated(137) if self._restarts else None
        self.rig.cluster.running(POD_NAME, "127.0.0.1", ready=True, restarts=self._restarts, last=ended)

    def kill_worker(self) -> None:
        """Kill the server and start the same container again, as the kubelet does."""
        self.worker.send_signal(signal.SIGKILL)
        self.worker.wait_exit()
        self.worker.start()
        self._restarts += 1
        self.adopt_worker()

    async def until(self, type_: str, *expected: str, name: str) -> str:
        """Step the operator until the condition `type_` of the adapter `name` is `expected`, a status and a reason.

        Return the condition's message, or fail with the adapter's status at the deadline.
        """
        await self.wait(lambda: self.rig.adapter_condition(type_, name) == expected, lambda: self.rig.adapter_status(name))
        return self.rig.adapter_message(type_, name)

    async def until_deployment(self, type_: str, *expected: str) -> str:
        """Step the operator until the deployment's condition `type_` is `expected`, a status and a reason. Return its message, or fail
        with the status at the deadline."""
        await self.wait(lambda: self.rig.condition(type_) == expected, self.rig.status)
        return self.rig.message(type_)

    async def wait(self, check: Callable[[], Any], about: Callable[[], object]) -> None:
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not check():
                    await self.step()
        except TimeoutError:
            raise AssertionError(f"{about()}\n{self.worker.output[-2000:]}") from None

    async def step(self) -> None:
        """Run a second of the operator's time, then the kubelet's part."""
        await self.rig.run(1.0)
        write_desired(self.rig, self._desired)
        await asyncio.sleep(0.02)

    def change(self, **spec: Any) -> None:
        """Change fields of the deployment's spec; a field that is an object is merged."""
        self.rig.cluster.change(DEPLOYMENT, "d", lambda found: found.update(merged(found, spec)))

    def records(self) -> dict[str, tuple[str, str]]:
        """Return the state and residency of the worker's adapters, by name."""
        return {one["name"]: (one["state"], one["residency"]) for one in self.worker.state()["adapters"]}


def write_desired(rig: Rig, path: Path) -> None:
    """Replace the files of the mounted folder as the kubelet does, only where they changed; the main file is the last."""
    files = mounted_files(lambda name: rig.cluster.find(CONFIG_MAP, name), "d")
    assert path.name in files
    for name in sorted(files):
        place = path.with_name(name)
        if not place.exists() or place.read_bytes() != files[name]:
            fresh = place.with_suffix(".new")
            fresh.write_bytes(files[name])
            fresh.rename(place)


@asynccontextmanager
async def story(
    *options: str, program: tuple[str, ...] = FAKE_PROGRAM, env: Mapping[str, str] | None = None, **spec: Any
) -> AsyncIterator[Story]:
    """Provide a deployment `d` from `spec`, and a ready worker that serves from the desired file which the operator made for it.
    `options` and `env` go to the worker."""
    rig = Rig()
    rig.cluster.put(deployment(**spec))
    await rig.run()
    metadata = msgspec.convert(rig.cluster.find(DEPLOYMENT, "d"), DiffusionDeployment).metadata
    token = control_token(rig.runtime.settings.operator_key, metadata)
    async with AsyncExitStack() as closing:
        folder = closing.enter_context(tempfile.TemporaryDirectory(prefix="story-"))
        desired = Path(folder) / "desired.json"
        write_desired(rig, desired)
        mounted = (f"--desired={desired}", f"--state-dir={folder}", *options)
        pod = rig.cluster.find(POD, POD_NAME)
        assert pod is not None
        own = {"DIFFUSION_POD_UID": pod["metadata"]["uid"], **(env or {})}
        worker = closing.enter_context(WorkerProcess(DIGITS_MODEL, program=program, token=token, options=mounted, env=own))
        worker.wait_ready()
        told = Story(rig, worker, desired, closing)
        told.adopt_worker()
        yield told
