# SPDX-License-Identifier: Apache-2.0
"""Many workers in one process, each with the real engine and the real control port, over a rank that does nothing.

Lines of JSON come in, one for each worker that is to begin; a line with its UID goes out when it listens. A busy one makes one image after
another, each of a few seconds. P17 is measured with them.
"""

import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from uvicorn.server import ServerState

from benchmarks.stand_ins.rank_group import StandInRanks
from diffusion_worker.config import WorkerConfig
from diffusion_worker.engine.engine import Engine
from diffusion_worker.engine.requests.admission import GenerationParams
from diffusion_worker.engine.state.rank_protocol import TickReport
from diffusion_worker.engine.state.state_document import RankDocument, RankState
from diffusion_worker.errors import RequestError
from diffusion_worker.messages import (
    AdapterIdentity,
    Finished,
    LoadedLoRA,
    MemoryReport,
    MemoryTag,
    RpcReply,
    SleepTask,
    TaskAck,
    TaskStatus,
    Tick,
    TickDone,
    WakeTask,
)
from diffusion_worker.server.app import control_app
from diffusion_worker.server.http.connection import BoundedConnection

PORT = 8001
STEP_S = 3.0
SIDE = 8
MOST_ADAPTERS = 512


class IdleRank(StandInRanks):
    """A rank that sleeps, wakes and holds adapters in name only; a tick with new requests takes `STEP_S` of waiting, and no work."""

    def __init__(self) -> None:
        super().__init__()
        self._ticks: asyncio.Queue[Tick] = asyncio.Queue()
        self._memory = MemoryReport()

    def broadcast_tick(self, tick: Tick, frames: Sequence[bytes | memoryview] = ()) -> None:
        """Queue the tick for `next_report`; frames are ignored."""
        self._ticks.put_nowait(tick)

    async def next_report(self, timeout_s: float, *, phase: str = "a step") -> TickReport:
        """Report the oldest tick, `STEP_S` after its turn if requests joined in it: all of them are finished, each with a black image.

        It waits for a tick without end: `timeout_s` is not kept.
        """
        tick = await self._ticks.get()
        await asyncio.sleep(STEP_S if tick.join else 0)
        finished = [Finished(spec.request_id, number, (SIDE, SIDE, 3)) for number, spec in enumerate(tick.join)]
        frames: list[bytes | memoryview] = [bytes(SIDE * SIDE * 3) for _ in finished]
        return TickReport(TickDone(tick.number, finished, rows=len(frames), calls=1, seconds=STEP_S), frames)

    async def call(
        self, method: str, *, timeout_s: float, output_rank: int | None = None, exec_all_ranks: bool = False, **kwargs: Any
    ) -> list[RpcReply]:
        """Answer sleep, wake, loading and removal of adapters, warm-up and synchronization with success; only the reported memory changes.

        A loaded adapter's digest is made from its folder's name. Other methods go to `StandInRanks`.
        """
        task = kwargs.get("task")
        match method:
            case "handle_sleep_task" if isinstance(task, SleepTask):
                self._memory = MemoryReport(asleep=list(MemoryTag), level=task.level)
                return _reply(TaskAck(task.task_id, TaskStatus.SUCCESS, 0))
            case "handle_wake_task" if isinstance(task, WakeTask):
                self._memory = MemoryReport()
                return _reply(TaskAck(task.task_id, TaskStatus.SUCCESS, 0))
            case "add_lora":
                path = kwargs["request"]["lora_path"] if isinstance(kwargs["request"], dict) else kwargs["request"].lora_path
                name = f"{Path(path).name:0>64}"
                identity = AdapterIdentity(f"v1:{name}")
                return _reply(LoadedLoRA(digest=f"sha256:{name}", rank=4, modules=8, size_bytes=1, identity=identity))
            case "warm_up":
                return _reply({})
            case "synchronize" | "remove_lora":
                return _reply(True)
        return await super().call(method, timeout_s=timeout_s)

    def documents(self) -> list[RankDocument]:
        """Return the document of the only rank, asleep or ready."""
        return [RankDocument(0, 1, RankState.ASLEEP if self._memory.level else RankState.READY, 0.0, self._memory)]


def _reply(result: object) -> list[RpcReply]:
    return [RpcReply(0, 0, msgspec.msgpack.encode(result))]


class Host:
    """The workers of this process. They are never ended: they end with the process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tasks: set[asyncio.Task[None]] = set()
        self._engines: list[Engine] = []

    async def begin(self, ip: str, uid: str, token: str, *, busy: bool) -> None:
        """Start a worker on an address, and return when it serves and its control port listens.

        With `busy` it makes one image after another from then on.
        """
        path = self._folder / uid
        path.write_text(token)
        config = WorkerConfig(model=str(self._folder), served_name="m", warmup_steps=0, max_cached_loras=MOST_ADAPTERS, max_batch_size=8)
        engine = Engine(config, IdleRank(), boot_id=uid.replace("-", ""), pod_uid=uid)
        await engine.start()
        self._engines.append(engine)
        await _listen(control_app(engine, path), ip)
        if busy:
            task = asyncio.create_task(_work(engine))
            self._tasks.add(task)

    async def read(self) -> None:
        """Begin a worker for each line of JSON on standard input, and print its UID when it listens; return at the input's end."""
        reader = asyncio.StreamReader(limit=1 << 20)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            told = json.loads(line)
            await self.begin(told["ip"], told["uid"], told["token"], busy=told["busy"])
            print(told["uid"], flush=True)


async def _listen(app: Any, ip: str) -> None:
    """Serve an app on a worker's control port of this address, from now until the process ends, and return at once.

    It leaves out the check, ten times a second, if the listener should end.
    """
    config = uvicorn.Config(
        app, http=BoundedConnection, log_config=None, access_log=False, lifespan="off", ws="none", timeout_keep_alive=75
    )
    config.load()
    state = ServerState()
    loop = asyncio.get_running_loop()
    await loop.create_server(lambda: BoundedConnection(config, state, app_state={}, _loop=loop), host=ip, port=PORT, backlog=64)


async def _work(engine: Engine) -> None:
    while True:
        with contextlib.suppress(RequestError):
            await engine.generate(GenerationParams(prompt="p", height=SIDE, width=SIDE, steps=1))
        await asyncio.sleep(0.1)


async def main() -> None:
    """Run workers by the lines of standard input, and return when it ends."""
    with tempfile.TemporaryDirectory() as folder:
        await Host(Path(folder)).read()


if __name__ == "__main__":
    asyncio.run(main())
