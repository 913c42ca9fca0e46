# SPDX-License-Identifier: Apache-2.0
"""The liveness probe fails only where a new process helps. Real: the process's probe. Not real: the tasks, of which one ends."""

import asyncio

import pytest

from diffusion_operator.errors import WatchStale
from diffusion_operator.handlers import Process
from diffusion_operator.settings import Settings


async def test_a_listing_that_ended_by_an_error_fails_the_probe_by_its_name() -> None:
    async def broken() -> None:
        raise KeyError("an event that nobody foresaw")

    process = Process(Settings(engine_image="i", operator_key=b"k" * 32))
    assert await process.probe() == {}
    process._tasks = [asyncio.create_task(broken(), name="listing pods in n")]
    await asyncio.wait(process._tasks)
    with pytest.raises(WatchStale, match="a task that must not end has ended: listing pods in n"):
        await process.probe()
