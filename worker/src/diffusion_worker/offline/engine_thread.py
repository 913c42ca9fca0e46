# SPDX-License-Identifier: Apache-2.0
"""An engine on an event loop in a thread of its own, for callers that have no loop, or another one.

A waiting caller wakes ten times a second: to draw a progress bar, and to check that the thread is alive. So Ctrl-C takes
effect at once, and no call hangs.
"""

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import uuid
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from diffusion_worker.config import WorkerConfig
from diffusion_worker.engine.engine import Engine
from diffusion_worker.engine.state.rank_protocol import RankGroup
from diffusion_worker.errors import ErrorCode, GroupFailed, RequestError

LOOK_S = 0.1
# The same as the server's: ranks have 5 s to leave before they are killed.
STOP_TIMEOUT_S = 12.0
# A start that was interrupted may wait for the fork server's imports.
FORK_SERVER_S = 30.0

T = TypeVar("T")
Work = Callable[[], Coroutine[Any, Any, T]]


class EngineThread:
    """An engine with its ranks, and the thread of its event loop. The thread starts at once, engine and ranks with `start`.

    Call its methods from any thread but its own, and `close` from any thread.
    """

    def __init__(self, config: WorkerConfig, make_ranks: Callable[[], RankGroup]) -> None:
        self._config = config
        self._make_ranks = make_ranks
        self._engine: Engine | None = None
        self._ranks: RankGroup | None = None
        self._starting: asyncio.Task[None] | None = None
        self._ending: concurrent.futures.Future[None] | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._turn, name="diffusion-engine", daemon=True)
        self._thread.start()

    @property
    def engine(self) -> Engine:
        """The engine. RequestError (Terminating) is raised before `start` has made it, and after `close`."""
        if self._ending is not None or self._engine is None:
            raise RequestError(ErrorCode.TERMINATING, "the engine is closed")
        return self._engine

    def start(self, *, meanwhile: Callable[[], None]) -> None:
        """Start engine and ranks, and return once the model with its adapters is loaded. `meanwhile` is called as by `run`.

        Raises:
            ConfigError: an option is wrong, or the model cannot be used. GroupFailed: ranks died, or were not ready in time.
        """
        self.run(self._start, meanwhile=meanwhile)

    def load_progress(self) -> tuple[int, int]:
        """Return the bytes of weights loaded so far, and in all; both are 0 while that is unknown."""
        return self._ranks.load_progress() if self._ranks is not None else (0, 0)

    def run(self, work: Work[T], *, meanwhile: Callable[[], None]) -> T:
        """Start `work` on the loop, wait, and return its result or raise its error.

        Every `LOOK_S` seconds the waiting thread calls `meanwhile`. Whatever interrupts the wait, for instance Ctrl-C, also cancels the
        work.

        Raises:
            GroupFailed: the engine's thread has ended.
        """
        future = asyncio.run_coroutine_threadsafe(work(), self._loop)
        try:
            while not concurrent.futures.wait([future], LOOK_S).done:
                meanwhile()
                if not self._thread.is_alive():
                    raise GroupFailed("the engine's thread ended")
        except BaseException:
            future.cancel()
            raise
        return future.result()

    def close(self) -> None:
        """End the ranks and the thread; return when they are gone, or after a time limit. A second call changes nothing.

        Do nothing in a child of this process. On the engine's own thread, return without waiting.
        """
        if os.getpid() != self._owner:
            return
        with self._lock:
            if self._ending is None:
                self._ending = asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        if threading.current_thread() is self._thread:
            return  # called by the garbage collector on the loop's thread, which cannot wait for itself
        concurrent.futures.wait([self._ending], self._config.drain_timeout_s + STOP_TIMEOUT_S + FORK_SERVER_S)
        self._thread.join(STOP_TIMEOUT_S)

    def _turn(self) -> None:
        """Serve as the target of the engine's thread: run the event loop, and close it after `_end` has called for a stop."""
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _start(self) -> None:
        self._ranks = self._make_ranks()
        self._engine = Engine(self._config, self._ranks, boot_id=uuid.uuid4().hex)
        self._starting = asyncio.create_task(self._engine.start())
        await self._starting

    async def _end(self) -> None:
        try:
            if self._starting is not None:
                self._starting.cancel()
                await asyncio.gather(self._starting, return_exceptions=True)
            if self._engine is not None:
                await self._engine.terminate()
            # Wait for a thread that still starts ranks. At the interpreter's exit no thread can be started, so this raises RuntimeError.
            with contextlib.suppress(RuntimeError):
                await self._loop.shutdown_default_executor()
        finally:
            self._loop.call_soon(self._loop.stop)
