# SPDX-License-Identifier: Apache-2.0
"""The operator's real reconciles and real worker servers over a real hub, with fake ranks. A second replica starts after the branch moved,
and replicas go on after the hub lost the model."""

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from diffusion_operator.api.deployment import DiffusionDeployment
from diffusion_operator.api.names import DEPLOYMENT, POD
from diffusion_operator.api.worker_state import WorkerState
from diffusion_operator.render.control_secret import control_token
from diffusion_operator.worker_client import HttpWorkerClient
from diffusion_worker.engine.startup.model_digest import digest_of
from support.operator.reconcile_story import write_desired
from support.operator.rig import Rig, deployment
from support.sources.servers import SourceServer
from support.worker.process import DIGITS_MODEL, FAKE_PROGRAM, WorkerProcess

pytestmark = pytest.mark.slow
FIRST = {str(path.relative_to(DIGITS_MODEL)): path.read_bytes() for path in DIGITS_MODEL.rglob("*") if path.is_file()}
SECOND = {**FIRST, "scheduler/scheduler_config.json": FIRST["scheduler/scheduler_config.json"] + b"\n"}


class Pods:
    """A rig's worker client that reaches real worker processes, each in the place of a pod and with a cache of its own.

    All follow one `desired.json`, as pods of a deployment do.
    """

    def __init__(self, rig: Rig, hub: SourceServer, folder: Path, stack: ExitStack) -> None:
        self.rig, self._hub, self._folder, self._stack = rig, hub, folder, stack
        self._clients: dict[str, HttpWorkerClient] = {}
        rig.workers = rig.runtime.workers = self  # type: ignore[assignment]

    async def state(self, ip: str, **more: Any) -> WorkerState:
        return await self._clients[ip].state("127.0.0.1", **more)

    def run(self, name: str) -> WorkerProcess:
        """Start the process of a pod, as a kubelet does, and wait until it listens."""
        write_desired(self.rig, self._folder / "desired.json")
        cache = self._folder / name
        cache.mkdir()
        pod = self.rig.cluster.find(POD, name)
        assert pod is not None
        [model] = [one.partition("=")[2] for one in pod["spec"]["containers"][0]["args"] if one.startswith("--model=")]
        owner = msgspec.convert(self.rig.cluster.find(DEPLOYMENT, "d"), DiffusionDeployment).metadata
        options = (f"--desired={self._folder / 'desired.json'}", f"--cache-dir={cache}", "--allow-http-sources")
        worker = WorkerProcess(
            model,  # type: ignore[arg-type]
            program=FAKE_PROGRAM,
            token=control_token(self.rig.runtime.settings.operator_key, owner),
            options=options,
            env={"HF_ENDPOINT": self._hub.url, "DIFFUSION_POD_UID": pod["metadata"]["uid"]},
        )
        return self._stack.enter_context(worker)

    async def adopt(self, name: str, worker: WorkerProcess, **facts: Any) -> None:
        """Wait until a worker is ready, report the pod `name` as ready at that worker, and let the operator reconcile for a while."""
        worker.wait_ready()
        client = HttpWorkerClient(poll_timeout_s=5, call_timeout_s=10, port=int(worker.control_url.rpartition(":")[2]))
        self._clients[ip := f"10.0.0.{len(self._clients)}"] = client
        self.rig.cluster.running(name, ip, ready=True, **facts)
        await self.rig.run(15)

    async def close(self) -> None:
        for client in self._clients.values():
            await client.close()


@pytest.fixture
def hub() -> Iterator[SourceServer]:
    with SourceServer().running() as server:
        yield server


async def test_a_second_replica_serves_the_commit_of_the_first_and_a_restart_needs_no_hub(hub: SourceServer, tmp_path: Path) -> None:
    commit = hub.push("org/digits", FIRST)
    rig = Rig()
    rig.cluster.put(deployment(model={"source": {"huggingFace": {"repo": "org/digits"}}}))
    await rig.run()
    with ExitStack() as stack:
        pods = Pods(rig, hub, tmp_path, stack)
        first = pods.run("d-0-0")
        await pods.adopt("d-0-0", first)
        assert rig.condition("ModelResolved") == ("True", "Resolved")
        first.wait_for(lambda: first.state()["model"]["digest"], what="known by its digest")
        await rig.run(60)
        model = rig.status()["model"]
        assert (model["revision"], model["digest"]) == (commit, digest_of(DIGITS_MODEL, threading.Event()))

        moved = hub.push("org/digits", SECOND)
        rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(replicas=2))
        await rig.run()
        second = pods.run("d-1-0")
        await pods.adopt("d-1-0", second)
        assert second.state()["model"]["revision"] == commit != moved
        assert rig.condition("ModelResolved") == ("True", "Resolved")
        assert rig.cluster.names(POD) == ["d-0-0", "d-1-0"], "nobody raced"

        hub.delete("org/digits")
        first.send_signal(signal.SIGKILL)
        first.wait_exit()
        first.start()
        ended = {"exitCode": 137, "reason": "Error", "finishedAt": "2026-01-01T00:00:00Z"}
        await pods.adopt("d-0-0", first, restarts=1, last=ended)
        assert (first.state()["model"]["revision"], rig.condition("Ready")) == (commit, ("True", "Serving"))

        rig.cluster.change(DEPLOYMENT, "d", lambda spec: spec.update(replicas=3))
        await rig.run()
        third = pods.run("d-2-0")
        code, words = third.wait_exit(), third.termination_log.read_text()
        rig.cluster.waiting("d-2-0", "ContainerCreating")
        rig.cluster.crashed("d-2-0", code=code, message=words)
        await rig.run()
        assert rig.condition("ModelResolved") == ("False", "SourceNotFound")
        assert f"org/digits@{commit}" in rig.message("ModelResolved")
        assert rig.condition("Ready") == ("True", "ServingDegraded")
        assert rig.status()["availableReplicas"] == 2
        await pods.close()
    assert json.loads((tmp_path / "desired.json").read_text())["model"]["revision"] == commit
    assert rig.errors == []
