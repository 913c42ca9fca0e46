# SPDX-License-Identifier: Apache-2.0
"""How the calls of one pass reach a worker: side by side, what makes room first, and none begun when the time of one call is over."""

import asyncio
from datetime import timedelta

from diffusion_operator.api.names import ADAPTER
from diffusion_operator.plan.results.actions import PutAdapter, RemoveAdapter
from support.operator.rig import Rig, adapter, serving
from support.operator.scripted_workers import ScriptedWorkers


class SlowWorkers(ScriptedWorkers):
    """A put takes its time, on the rig's clock and off it; how many run at once is counted."""

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


async def test_no_call_is_begun_when_the_time_of_one_is_over() -> None:
    """The next pass looks again first: a pass never takes much longer than its slowest call."""
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
