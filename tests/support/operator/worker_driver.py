# SPDX-License-Identifier: Apache-2.0
"""The operator's own client on a real worker server, with calls named as tests say them; and the worker's own parser.

Real: the client, its HTTP and the server. Not real: the pod, the reconciles, and with FAKE_PROGRAM the ranks.
"""

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from typing import Any

import click
import pytest

from diffusion_operator.api.adapter_load import AdapterLoad
from diffusion_operator.api.deployment_spec import DrainMode, SleepLevel, SleepPolicy
from diffusion_operator.api.source import AdapterSource
from diffusion_operator.api.worker_state import WorkerPhase, WorkerState
from diffusion_operator.errors import ControlRefused
from diffusion_operator.plan.observed.observed import AttemptKey
from diffusion_operator.plan.results.actions import PutAdapter, RemoveAdapter, SleepWorker, WakeWorker, WorkerAddress
from diffusion_operator.worker_client import HttpWorkerClient
from diffusion_worker import cli
from diffusion_worker.config import WorkerConfig
from diffusion_worker.options import config_of
from support.worker.process import DIGITS, POD_UID, WorkerProcess

IP = "127.0.0.1"
TOKEN = "the-control-token"
DEADLINE_S = 120.0
POLL_S = 0.02


class Driver:
    """A client of one worker. Close its `client` afterwards."""

    def __init__(self, worker: WorkerProcess, *, token: str = TOKEN, boot_id: str | None = None) -> None:
        port = int(worker.control_url.rpartition(":")[2])
        self.client = HttpWorkerClient(poll_timeout_s=5, call_timeout_s=30, port=port)
        self.address = WorkerAddress(pod_uid=POD_UID, ip=IP, boot_id=boot_id or worker.boot_id)
        self.token = token
        self._folder = worker.folder / "loras"
        self._calls = 0

    async def state(self, **asked: Any) -> WorkerState:
        return await self.client.state(IP, token=self.token, pod_uid=POD_UID, **asked)

    async def sleep(self, mode: DrainMode = DrainMode.WAIT, operation_id: str | None = None, **said: Any) -> None:
        said = {"level": SleepLevel.HOST_MEMORY, "policy": SleepPolicy.ASLEEP, "attempt": 1, "deadline_s": 30} | said
        call = SleepWorker(worker=self.address, operation_id=operation_id or self._id(), mode=mode, **said)
        await self.client.sleep(call, token=self.token)

    async def wake(self, operation_id: str | None = None, *, policy: SleepPolicy = SleepPolicy.ALWAYS_AWAKE) -> None:
        call = WakeWorker(worker=self.address, operation_id=operation_id or self._id(), attempt=1, deadline_s=30, policy=policy)
        await self.client.wake(call, token=self.token)

    def lora(self, name: str) -> str:
        """Copy the frame adapter to a folder called `name`, over any that exists, and return its path. Fake ranks look at the path
        alone, not at the files."""
        return str(shutil.copytree(DIGITS / "loras" / "frame", self._folder / name, dirs_exist_ok=True))

    async def put(self, name: str, path: str, *, deadline_s: int = 30, **said: Any) -> None:
        key = AttemptKey(adapter_uid="u", generation=1, boot_id=self.address.boot_id)
        load = AdapterLoad(source=AdapterSource(path=path), **said)
        call = PutAdapter(worker=self.address, key=key, operation_id=self._id(), name=name, load=load, deadline_s=deadline_s)
        await self.client.put_adapter(call, token=self.token)

    async def remove(self, name: str, drain_s: int = 5) -> None:
        call = RemoveAdapter(worker=self.address, operation_id=self._id(), name=name, drain_s=drain_s)
        await self.client.remove_adapter(call, token=self.token)

    async def wait_for(self, phase: WorkerPhase) -> WorkerState:
        """Wait until the worker has this state and no operation runs; return the state document."""
        return await self.until(lambda state: state.state is phase and state.operation is None)

    async def until(self, holds: Callable[[WorkerState], object]) -> WorkerState:
        """Poll the worker until `holds` is true for a state document, and return that; TimeoutError after 20 s."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                if holds(state := await self.state()):
                    return state
                await asyncio.sleep(POLL_S)

    async def clear(self) -> None:
        """Wake the worker unless it is ready and always awake, wait until it is ready, and ask it to remove each adapter."""
        state = await self.state()
        if state.state is not WorkerPhase.READY or state.policy is not SleepPolicy.ALWAYS_AWAKE:
            await self.wake()
            state = await self.wait_for(WorkerPhase.READY)
        for adapter in state.adapters:
            await self.remove(adapter.name)

    def _id(self) -> str:
        self._calls += 1
        return f"contract-{self._calls}-{time.monotonic_ns()}"


async def refusal(call: Awaitable[object]) -> ControlRefused:
    """Await a call that the worker must refuse, and return the refusal; the test fails if there is none."""
    with pytest.raises(ControlRefused) as info:
        await call
    return info.value


def config_of_arguments(arguments: list[str]) -> WorkerConfig:
    """Parse a command line, its first word the subcommand, into settings as the CLI does, less what only `serve` takes. The parser's errors
    are raised unchanged."""
    command = cli.cli.get_command(click.Context(cli.cli), arguments[0])
    assert command is not None
    context = command.make_context("serve", arguments[1:])
    others = ("host", "port", "control_port", "check_only")
    return config_of({name: value for name, value in context.params.items() if name not in others})
