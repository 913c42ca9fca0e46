# SPDX-License-Identifier: Apache-2.0
"""The liveness probe fails only where a new process helps. Real: the process's probe. Not real: the tasks, of which one ends."""

import asyncio

import pytest
from kubernetes.aio.client import Configuration

from diffusion_operator.cluster import KubernetesCluster
from diffusion_operator.connected import Connected
from diffusion_operator.errors import WatchStale
from diffusion_operator.handlers import Process
from diffusion_operator.settings import Settings


async def test_a_listing_that_ended_by_an_error_fails_the_probe_by_its_name() -> None:
    async def broken() -> None:
        raise KeyError("an event that nobody foresaw")

    settings = Settings(engine_image="i", operator_key=b"k" * 32)
    process = Process(settings)
    assert await process.probe() == {}
    process.connected = Connected(settings, KubernetesCluster(Configuration()))
    process.connected._tasks = [asyncio.create_task(broken(), name="listing pods in n")]
    await asyncio.wait(process.connected._tasks)
    with pytest.raises(WatchStale, match="a task that must not end has ended: listing pods in n"):
        await process.probe()
    await process.connected.close()
