# SPDX-License-Identifier: Apache-2.0
"""An engine over fake ranks, called without HTTP, mostly by a clock that turns by itself.

Real: the engine. Not real: its ranks, which are a `FakeRankGroup`, and its `FakeFetcher`.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from diffusion_worker.config import WorkerConfig
from diffusion_worker.engine.engine import Engine
from diffusion_worker.engine.requests.admission import GenerationParams
from diffusion_worker.engine.state.request_events import Generation
from diffusion_worker.engine.state.state_document import AdapterCall, EngineState, OperationResult, SleepCall, StateDocument, WakeCall
from diffusion_worker.messages import MemoryTag
from diffusion_worker.sources.source import Source
from support.worker.fake_fetcher import FakeFetcher
from support.worker.fake_rank_group import FakeRankGroup

KILLED = "rank 1 (pid 7) was ended by SIGKILL"


def write_desired(folder: Path, policy: str, **fields: Any) -> str:
    """A mounted file with a sleep policy; replaced as a whole, as the kubelet does it."""
    path = folder / "desired.json"
    replacement = path.with_suffix(".new")
    replacement.write_text(json.dumps({"sleep": {"policy": policy, **fields.pop("sleep", {})}, **fields}))
    replacement.rename(path)
    return str(path)


class SleepRig:
    """One engine and its ranks."""

    def __init__(self, group: FakeRankGroup, **settings: Any) -> None:
        self.config = WorkerConfig(**{"model": "/models/digits", "served_name": "digits", **settings})
        self.ranks = group
        group.max_cached = self.config.max_cached_loras
        self.fetcher = FakeFetcher(self.config)
        self.engine = Engine(self.config, group, boot_id="boot-1", fetcher=self.fetcher)
        self._ids = itertools.count(1)

    @asynccontextmanager
    async def serving(self, deadline_s: float) -> AsyncIterator[None]:
        """Start the engine and end it afterwards, the latter within the deadline."""
        await self.engine.start()
        try:
            yield
        finally:
            for event in (self.ranks.stepping, self.ranks.calling, self.ranks.loading):
                event.set()
            async with asyncio.timeout(deadline_s):
                await self.engine.terminate()

    @property
    def document(self) -> StateDocument:
        """Of now."""
        return self.engine.state_document()

    @property
    def asleep(self) -> list[list[MemoryTag]]:
        """What each rank lacks."""
        return [rank.memory.asleep for rank in self.ranks.documents()]

    async def until(self, state: EngineState | str) -> None:
        """Returns when a state is shown."""
        while self.engine.state != state:
            await self.engine.life.wait_for_change()

    def begin_sleep(self, **fields: Any) -> str:
        """Begin an operation; returns its id."""
        call = SleepCall(**{"operation_id": f"op-{next(self._ids)}", **fields})
        self.engine.sleep(call)
        return call.operation_id

    def begin_wake(self, **fields: Any) -> str:
        """Begin an operation; returns its id."""
        call = WakeCall(**{"operation_id": f"op-{next(self._ids)}", **fields})
        self.engine.wake(call)
        return call.operation_id

    async def over(self, operation_id: str) -> OperationResult:
        """How an operation ended."""
        result = await self.engine.operation_over(operation_id)
        assert result is not None
        return result

    async def sleep(self, **fields: Any) -> OperationResult:
        """A whole sleep."""
        return await self.over(self.begin_sleep(**fields))

    async def wake(self, **fields: Any) -> OperationResult:
        """A whole wake."""
        return await self.over(self.begin_wake(**fields))

    async def image(self, seed: int = 0, **fields: Any) -> Generation:
        """A request."""
        return await self.engine.generate(GenerationParams(prompt="p", seed=seed, **fields))

    async def running(self, seed: int = 0, **fields: Any) -> "asyncio.Task[Generation]":
        """A request whose first step runs until `stepping` is set."""
        self.ranks.stepping.clear()
        task = asyncio.create_task(self.image(seed, **fields))
        for _ in range(100):  # turns of the loop, as the clock may stand still
            await asyncio.sleep(0)
        assert self.document.in_flight
        return task

    async def put(self, name: str) -> None:
        """Load an adapter."""
        await self.engine.put_adapter(name, AdapterCall(operation_id=f"put-{name}", source=Source(path=f"/loras/{name}")))

    def adapters(self) -> dict[str, str]:
        """The states of the adapters by name."""
        return {adapter.name: adapter.state.value for adapter in self.document.adapters}


@asynccontextmanager
async def sleep_rig(ranks: int = 2, *, group: FakeRankGroup | None = None, **settings: Any) -> AsyncIterator[SleepRig]:
    """A rig whose engine has started and is ended afterwards."""
    rig = SleepRig(group or FakeRankGroup(ranks), ranks=ranks, **settings)
    async with rig.serving(60):
        yield rig
