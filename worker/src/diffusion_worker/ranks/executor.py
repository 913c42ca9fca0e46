# SPDX-License-Identifier: Apache-2.0
"""Starts the rank processes, watches them, and carries messages: the engine's `RankGroup` with real processes.

Nothing can free a rank that is stuck in a collective with a dead one, so a group that lost a rank, or missed a deadline,
is killed as a whole.
"""

import asyncio
import contextlib
import itertools
import logging
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Coroutine
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from diffusion_worker.config import WorkerConfig, read_model_index
from diffusion_worker.engine.documents import RankDocument, RankState
from diffusion_worker.engine.rank_group import TickReport
from diffusion_worker.errors import ConfigError, ErrorCode, GroupFailed, RequestError
from diffusion_worker.messages import (
    Fatal,
    LoadProgress,
    MemoryReport,
    ModelInfo,
    Ready,
    Rpc,
    RpcReply,
    Shutdown,
    Tick,
    TickDone,
    ToServer,
    pack,
)
from diffusion_worker.ranks.broadcast import ServerEnd

log = logging.getLogger(__name__)

T = TypeVar("T")

STOP_GRACE_S = 5.0
# The last words of a dying rank travel on another socket than the news of its death.
LAST_WORDS_S = 0.2


class _Rank:
    """What the server knows of one rank process."""

    def __init__(self, process: ForkServerProcess) -> None:
        assert process.pid is not None
        self.process = process
        self.pid = process.pid
        self.pidfd = os.pidfd_open(self.pid)
        self.state = RankState.STARTING
        self.memory = MemoryReport()
        self.loaded: tuple[int, int] = (0, 0)
        self.model: ModelInfo | None = None
        self.last_words: Fatal | None = None
        self.heard_at = time.monotonic()
        self.gone = asyncio.Event()

    def kill(self) -> None:
        """SIGKILL by pidfd: the pid may already be somebody else's."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)


class RankExecutor:
    """The ranks of one generation. Make and use it on the event loop of the server."""

    def __init__(self, config: WorkerConfig, *, generation: int = 1) -> None:
        self._config = config
        self._generation = generation
        self._wire: ServerEnd | None = None
        self._ranks: list[_Rank] = []
        self._reports: asyncio.Queue[TickReport] = asyncio.Queue()
        self._calls: dict[int, asyncio.Queue[RpcReply]] = {}
        self._call_ids = itertools.count(1)
        self._ready = asyncio.Event()
        self._failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._pump: asyncio.Task[None] | None = None
        self._stopping = False

    async def start(self) -> ModelInfo:
        """Start the processes and wait until all have loaded; raises ConfigError or GroupFailed."""
        self._wire = ServerEnd()
        self._pump = asyncio.create_task(self._read_answers(self._wire))
        try:
            async with asyncio.timeout(self._config.startup_timeout_s):
                await asyncio.to_thread(self._start_processes)
                for number, rank in enumerate(self._ranks):
                    asyncio.get_running_loop().add_reader(rank.pidfd, self._on_death, number)
                await self._or_failure(self._wire.wait_for_ranks(len(self._ranks)))
                await self._or_failure(self._ready.wait())
        except TimeoutError:
            self._fail(f"the ranks did not load the model within {self._config.startup_timeout_s:g} s")
            raise GroupFailed(self._failure.result()) from None
        except GroupFailed:
            words = next((rank.last_words for rank in self._ranks if rank.last_words and rank.last_words.config), None)
            if words is not None:
                raise ConfigError(words.message) from None
            raise
        model = self._ranks[0].model
        assert model is not None
        return model

    def broadcast_tick(self, tick: Tick) -> None:
        """Queue one tick for every rank."""
        self._send(tick)

    async def next_report(self, timeout_s: float) -> TickReport:
        """The next tick's outcome; a missed deadline loses the group."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._or_failure(self._reports.get())
        except TimeoutError:
            self._fail(f"a step was not finished within {timeout_s:g} s")
            raise GroupFailed(self._failure.result()) from None

    async def call(self, method: str, *, timeout_s: float, **kwargs: object) -> list[RpcReply]:
        """Run a method on every rank; one reply a rank, in rank order."""
        call_id = next(self._call_ids)
        replies: asyncio.Queue[RpcReply] = asyncio.Queue()
        self._calls[call_id] = replies
        self._send(Rpc(call_id, method, pack(**kwargs)))
        answered: dict[int, RpcReply] = {}
        try:
            async with asyncio.timeout(timeout_s):
                while len(answered) < len(self._ranks):
                    reply = await self._or_failure(replies.get())
                    answered[reply.rank] = reply
        except TimeoutError:
            silent = sorted(set(range(len(self._ranks))) - set(answered))
            raise RequestError(ErrorCode.TIMEOUT, f"{method}: no answer of rank {silent} within {timeout_s:g} s") from None
        finally:
            del self._calls[call_id]
        return [answered[rank] for rank in sorted(answered)]

    async def failed(self) -> str:
        """Returns the reason when the group is lost."""
        return await asyncio.shield(self._failure)

    def documents(self) -> list[RankDocument]:
        """The ranks for the state document."""
        now = time.monotonic()
        known = [
            RankDocument(number, rank.pid, rank.state, round(now - rank.heard_at, 3), rank.memory)
            for number, rank in enumerate(self._ranks)
        ]
        unknown = [RankDocument(n, None, RankState.STARTING, None, MemoryReport()) for n in range(len(known), self._config.ranks)]
        return known + unknown

    def load_progress(self) -> tuple[int, int]:
        """Bytes loaded and in all, summed over the ranks."""
        return sum(rank.loaded[0] for rank in self._ranks), sum(rank.loaded[1] for rank in self._ranks)

    async def stop(self) -> None:
        """Ask the ranks to leave, then end those that have not."""
        self._stopping = True
        if self._wire is None:
            return
        if not self._failure.done():
            self._wire.send(Shutdown())
            await self._wait_for_exits(STOP_GRACE_S)
        self._kill_all()
        await self._wait_for_exits(STOP_GRACE_S)
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.gather(self._pump, return_exceptions=True)
        self._wire.close()
        self._wire = None

    def _start_processes(self) -> None:
        """Runs in a thread: the first start waits for the fork server's imports, some seconds."""
        assert self._wire is not None
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["diffusion_worker.ranks.preload"])
        _set_environment(self._config)
        listener = socket.create_server(("127.0.0.1", 0))
        host, port = listener.getsockname()
        for number in range(self._config.ranks):
            arguments = _arguments(self._config, number, self._wire, host=host, port=port, generation=self._generation)
            process = context.Process(
                target=_worker_main, args=(arguments, listener if number == 0 else None), name=f"rank-{number}", daemon=True
            )
            process.start()
            self._ranks.append(_Rank(process))
        listener.close()

    async def _read_answers(self, wire: ServerEnd) -> None:
        try:
            while True:
                message, frames = await wire.receive()
                self._on_message(message, frames)
        except Exception as error:
            # Without answers everybody would wait for their deadlines.
            log.exception("the answers of the ranks cannot be read")
            self._fail(f"an answer of the ranks cannot be read: {error}")

    def _on_message(self, message: ToServer, frames: list[bytes | memoryview]) -> None:
        if isinstance(message, TickDone):
            self._ranks[0].heard_at = time.monotonic()
            self._reports.put_nowait(TickReport(message, frames))
            return
        rank = self._ranks[message.rank]
        rank.heard_at = time.monotonic()
        if isinstance(message, LoadProgress):
            rank.loaded = (message.bytes_done, message.bytes_total)
        elif isinstance(message, Ready):
            rank.model, rank.memory, rank.state = message.model, message.memory, RankState.READY
            if all(other.state is RankState.READY for other in self._ranks):
                self._ready.set()
        elif isinstance(message, Fatal):
            rank.last_words = message
        else:
            self._on_reply(rank, message)

    def _on_reply(self, rank: _Rank, reply: RpcReply) -> None:
        if reply.memory is not None:
            rank.memory = reply.memory
            rank.state = RankState.ASLEEP if reply.memory.weights_resident_bytes == 0 else RankState.READY
        waiting = self._calls.get(reply.call_id)
        if waiting is not None:  # else its caller gave up
            waiting.put_nowait(reply)

    def _on_death(self, number: int) -> None:
        rank = self._ranks[number]
        asyncio.get_running_loop().remove_reader(rank.pidfd)
        rank.state = RankState.DEAD
        rank.gone.set()
        if not self._stopping:
            asyncio.get_running_loop().call_later(LAST_WORDS_S, self._explain_death, number)

    def _explain_death(self, number: int) -> None:
        rank = self._ranks[number]
        rank.process.join(timeout=0)
        words = f": {rank.last_words.message}" if rank.last_words else ""
        self._fail(f"rank {number} (pid {rank.pid}) {_exit_text(rank.process.exitcode)}{words}")

    def _fail(self, reason: str) -> None:
        if not self._failure.done():
            log.error("rank group lost: %s", reason)
            self._failure.set_result(reason)
        self._kill_all()

    def _kill_all(self) -> None:
        for rank in self._ranks:
            if rank.state is not RankState.DEAD:
                rank.kill()

    async def _wait_for_exits(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for rank in self._ranks:
                    await rank.gone.wait()

    def _send(self, message: Tick | Rpc) -> None:
        if self._failure.done() or self._wire is None:
            raise GroupFailed(self._failure.result() if self._failure.done() else "the ranks are not running")
        self._wire.send(message)

    async def _or_failure(self, wanted: Coroutine[Any, Any, T]) -> T:
        """The result of an awaitable, or GroupFailed as soon as the group is lost."""
        task = asyncio.create_task(wanted)
        waited: set[asyncio.Future[Any]] = {task, self._failure}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise GroupFailed(self._failure.result())
            return task.result()
        finally:
            task.cancel()


def _worker_main(arguments: bytes, listener: socket.socket | None) -> None:
    """The process entry; torch is imported here and not above, on the rank's side of the fork."""
    from diffusion_worker.ranks.worker_proc import WorkerProc

    WorkerProc.worker_main(arguments, listener)


def _arguments(config: WorkerConfig, rank: int, wire: ServerEnd, *, host: str, port: int, generation: int) -> bytes:
    rendezvous = {"host": host, "port": port, "generation": generation}
    return msgspec.msgpack.encode({"config": config, "rank": rank, "endpoints": wire.endpoints, "rendezvous": rendezvous})


def _set_environment(config: WorkerConfig) -> None:
    """What the fork server and its children inherit; it is frozen when the fork server starts."""
    index = read_model_index(config.model)
    classes = [f"diffusers:{index['_class_name']}"]
    classes += [f"{value[0]}:{value[1]}" for value in index.values() if isinstance(value, list) and len(value) == 2 and value[0]]
    os.environ["DIFFUSION_INTERNAL_PRELOAD"] = ",".join(classes)
    # OpenMP threads spin at barriers by default: with more threads than idle cores a step took twenty times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if Path("/sys/class/net/lo").exists():
        # The ranks of a pod share a host; without this gloo binds to whatever the host name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _exit_text(code: int | None) -> str:
    if code is None:
        return "died"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"exited with code {code}"
