# SPDX-License-Identifier: Apache-2.0
"""An engine over fake ranks, called without HTTP, mostly on a clock that advances by itself.

Real: the engine, and the calls of `Fetcher` and how they end. Not real: its ranks, which are a `FakeRankGroup`, and the files that its
`FakeFetcher` fetches, which do not exist.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from diffusion_worker.config import WorkerConfig
from diffusion_worker.engine.engine import Engine
from diffusion_worker.engine.requests.admission import GenerationParams
from diffusion_worker.engine.state.request_events import Generation
from diffusion_worker.engine.state.state_document import AdapterCall, EngineState, OperationResult, SleepCall, StateDocument, WakeCall
from diffusion_worker.errors import RequestError
from diffusion_worker.messages import MemoryTag
from diffusion_worker.sources.fetching import Fetched, Fetcher, Report
from diffusion_worker.sources.in_place import FileStamp
from diffusion_worker.sources.source import Source
from support.worker.fake_rank_group import FakeRankGroup, fake_digest
from support.worker.mounted_folder import write_adapters

REMOTE_BYTES = 4096
KILLED = "rank 1 (pid 7) was ended by SIGKILL"


def write_desired(folder: Path, policy: str, **fields: Any) -> str:
    """Write a mounted file with a sleep policy, replaced atomically as the kubelet does; return its path.

    With `adapters` their file is written, too.
    """
    if "adapters" in fields:
        write_adapters(folder, fields.pop("adapters"))
    path = folder / "desired.json"
    replacement = path.with_suffix(".new")
    replacement.write_text(json.dumps({"sleep": {"policy": policy, **fields.pop("sleep", {})}, **fields}))
    replacement.rename(path)
    return str(path)


class FakeFetcher(Fetcher):
    """A fetcher that reads nothing: a path is its own result, and a Hugging Face repository arrives when the test sets `arriving`, half
    reported before. `errors` maps either to an error to raise."""

    def __init__(self, config: WorkerConfig) -> None:
        super().__init__(config)
        self.arriving = asyncio.Event()
        self.arriving.set()
        self.errors: dict[str, RequestError] = {}
        # Errors of adapters by path, as far as they can be found without the ranks.
        self.unread_errors: dict[str, RequestError] = {}
        self.fetches: list[str] = []
        # The modification times of files, by path.
        self.stamps: dict[str, int] = {}
        self.public_only: dict[str, bool] = {}
        self.cancelled: list[str] = []
        self.released: list[str] = []

    async def fetch_adapter(
        self, source: Source, *, digest: str | None, deadline_s: float, report: Report, name: str, public_only: bool = False
    ) -> Fetched:
        remote = source.hugging_face.repo if source.hugging_face else None
        place = remote or str(source.path)
        self.fetches.append(place)
        self.public_only[place] = public_only
        if place in self.errors:
            raise self.errors[place]
        if remote is None:
            return Fetched(place, stamps=(FileStamp(place, 1, 1, 1, self.stamps.get(place, 0), 0),))
        report(REMOTE_BYTES // 2, REMOTE_BYTES)
        try:
            async with asyncio.timeout(deadline_s):
                await self.arriving.wait()
        except asyncio.CancelledError:
            self.cancelled.append(place)
            raise
        report(REMOTE_BYTES, REMOTE_BYTES)
        path = f"/cache/{place}"
        return Fetched(path, fake_digest(path), revision="c0ffee", size_bytes=REMOTE_BYTES)

    async def check_adapter(self, fetched: Fetched, *, digest: str | None, deadline_s: float, name: str) -> Fetched:
        if fetched.path in self.unread_errors:
            raise self.unread_errors[fetched.path]
        return fetched

    def release(self, fetched: Fetched) -> None:
        self.released.append(fetched.path)


class SleepRig:
    """An engine over fake ranks and a fake fetcher, which a test calls directly in its event loop."""

    def __init__(self, group: FakeRankGroup, *, pod_uid: str = "", **settings: Any) -> None:
        self.config = WorkerConfig(**{"model": "/models/digits", "served_name": "digits", **settings})
        self.ranks = group
        group.max_cached = self.config.max_cached_loras
        self.fetcher = FakeFetcher(self.config)
        self.engine = Engine(self.config, group, boot_id="boot-1", fetcher=self.fetcher, pod_uid=pod_uid)
        self._ids = itertools.count(1)

    @asynccontextmanager
    async def serving(self, deadline_s: float) -> AsyncIterator[None]:
        """Start the engine. After the block, open all gates of the ranks and end the engine within the deadline."""
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
        return self.engine.state_document()

    @property
    def asleep(self) -> list[list[MemoryTag]]:
        return [rank.memory.asleep for rank in self.ranks.documents()]

    async def until(self, state: EngineState | str) -> None:
        while self.engine.state != state:
            await self.engine.life.wait_for_change()

    def begin_sleep(self, **fields: Any) -> str:
        """Begin a sleep, and return the operation's id."""
        return self._begin(SleepCall, self.engine.sleep, fields)

    def begin_wake(self, **fields: Any) -> str:
        return self._begin(WakeCall, self.engine.wake, fields)

    def _begin(self, kind: type[Any], begin: Callable[[Any], object], fields: dict[str, Any]) -> str:
        call = kind(**{"operation_id": f"op-{next(self._ids)}", **fields})
        begin(call)
        return str(call.operation_id)

    async def over(self, operation_id: str) -> OperationResult:
        """Await the end of an operation and return its result, which must exist: an operation that did nothing, or is forgotten, fails
        the test."""
        result = await self.engine.operation_over(operation_id)
        assert result is not None
        return result

    async def sleep(self, **fields: Any) -> OperationResult:
        return await self.over(self.begin_sleep(**fields))

    async def wake(self, **fields: Any) -> OperationResult:
        return await self.over(self.begin_wake(**fields))

    async def image(self, seed: int = 0, **fields: Any) -> Generation:
        return await self.engine.generate(GenerationParams(prompt="p kumquatfen", seed=seed, **fields))

    async def running(self, seed: int = 0, **fields: Any) -> "asyncio.Task[Generation]":
        """Start a request whose first step lasts until the test sets `stepping`, and check that it is in flight. Return the task of it."""
        self.ranks.stepping.clear()
        task = asyncio.create_task(self.image(seed, **fields))
        for _ in range(100):  # turns of the loop, as the clock may stand still
            await asyncio.sleep(0)
        assert self.document.in_flight
        return task

    async def put(self, name: str) -> None:
        await self.engine.put_adapter(name, AdapterCall(operation_id=f"put-{name}", source=Source(path=f"/loras/{name}")))

    def adapters(self) -> dict[str, str]:
        """Map each adapter in the state document to its state, such as `Loaded`."""
        return {adapter.name: adapter.state.value for adapter in self.document.adapters}


@asynccontextmanager
async def sleep_rig(ranks: int = 2, *, group: FakeRankGroup | None = None, **settings: Any) -> AsyncIterator[SleepRig]:
    """Start a rig's engine, and end it afterwards."""
    rig = SleepRig(group or FakeRankGroup(ranks), ranks=ranks, **settings)
    async with rig.serving(60):
        yield rig
