# SPDX-License-Identifier: Apache-2.0
"""Delivery of a pass's calls to a worker: side by side, removals first, and none begun after the time limit of a call."""

import asyncio
import gc
import logging
from datetime import timedelta

import pytest

from diffusion_operator.api.names import ADAPTER
from diffusion_operator.errors import NotLeading
from diffusion_operator.plan.results.actions import PutAdapter, RemoveAdapter
from support.operator.rig import Rig, adapter, serving
from support.operator.scripted_workers import ScriptedWorkers


class SlowWorkers(ScriptedWorkers):
    """Workers whose puts take time, on the rig's clock and off it; they count how many run at once."""

    def __init__(self, rig: Rig, *, put_s: float = 0.0) -> None:
        super().__init__()
        self.__dict__ |= rig.workers.__dict__
        self._rig = rig
        self._put_s = put_s
        self._running = 0
        self.most = 0
        self.order: list[str] = []

    async def put_adapter(self, call: PutAdapter, *, token: str) -> None:
        self.order.append(f"put {call.name}")
        self._running += 1
        self.most = max(self.most, self._running)
        for _ in range(3):
            await asyncio.sleep(0)
        self._rig.now += timedelta(seconds=self._put_s)
        self._running -= 1
        await super().put_adapter(call, token=token)

    async def remove_adapter(self, call: RemoveAdapter, *, token: str) -> None:
        await asyncio.sleep(0)
        self.order.append(f"remove {call.name}")
        await super().remove_adapter(call, token=token)


class IdleWorkers(ScriptedWorkers):
    """Workers that accept a removal and remove nothing."""

    def __init__(self, rig: Rig) -> None:
        super().__init__()
        self.__dict__ |= rig.workers.__dict__
        self.removals = 0

    async def remove_adapter(self, call: RemoveAdapter, *, token: str) -> None:
        self.removals += 1


async def test_many_adapters_are_put_side_by_side_and_what_leaves_goes_first() -> None:
    rig = await serving()
    rig.cluster.put(adapter("old", "/loras/old"))
    await rig.run()
    rig.runtime.workers = workers = SlowWorkers(rig)
    rig.cluster.remove(ADAPTER, "old")
    for number in range(20):
        rig.cluster.put(adapter(f"a{number}", f"/loras/{number}"))
    await rig.run()
    assert workers.most == 8
    assert workers.order[0] == "remove old"
    assert len(workers.order) == 21
    assert rig.condition("AdaptersReady") == ("True", "AllReady")


async def test_calls_end_without_a_word_when_another_process_leads(caplog: pytest.LogCaptureFixture) -> None:
    rig = await serving()

    async def held_back(call: PutAdapter, *, token: str) -> None:
        raise NotLeading

    rig.workers.put_adapter = held_back  # type: ignore[method-assign]
    rig.cluster.put(adapter("a", "/loras/a"))
    await rig.run()
    await rig.runtime.calls.settled()  # type: ignore[attr-defined]
    gc.collect()
    assert rig.runtime.calls.calling == frozenset()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_no_call_is_begun_when_the_time_of_one_is_over() -> None:
    """Check that a pass begins no call after the time of one call. The next pass looks again first, so passes stay short."""
    rig = await serving()
    rig.runtime.workers = workers = SlowWorkers(rig, put_s=3.0)
    for number in range(20):
        rig.cluster.put(adapter(f"a{number}", f"/loras/{number}"))
    before = rig.now
    await rig.run(0.1)
    assert len(workers.order) < 20
    await rig.run(120)
    assert rig.condition("AdaptersReady") == ("True", "AllReady")
    assert rig.now - before < timedelta(seconds=200)


async def test_a_worker_that_takes_a_call_and_does_nothing_is_called_twice_a_second() -> None:
    rig = await serving()
    rig.cluster.put(adapter("old", "/loras/old"))
    await rig.run()
    rig.runtime.workers = workers = IdleWorkers(rig)
    rig.cluster.remove(ADAPTER, "old")
    await rig.run(10)
    assert 2 <= workers.removals <= 22
