# SPDX-License-Identifier: Apache-2.0
"""A queue of keys, each reconciled by one task of its own: woken by events, by its requeue time, or after a failure with backoff.

Wakes that come in a burst are joined, a wake during a reconcile leads to another one after it, and the number that run at once is
bounded. The queue knows nothing of what a key is about.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec

from diffusion_operator.errors import OperatorError

JOIN_S = 0.05
BACKOFF_FIRST_S = 1.0
BACKOFF_MAX_S = 300.0
JITTER = 0.1

log = logging.getLogger(__name__)


class Key(NamedTuple):
    kind: str
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


class Result(msgspec.Struct, frozen=True):
    requeue_after_s: float | None = None
    """None: at the next resync."""
    gone: bool = False
    """The object does not exist any more; its task ends unless it was woken meanwhile."""


class _Line:
    """One key's task and what wakes it."""

    def __init__(self) -> None:
        self.woken = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class KeyedQueue:
    def __init__(
        self,
        reconcile: Callable[[Key], Awaitable[Result]],
        *,
        resync_s: float,
        parallel: int,
        random: Callable[[], float],
    ) -> None:
        """`random` gives numbers in [0, 1)."""
        self._reconcile = reconcile
        self._resync_s = resync_s
        self._slots = asyncio.Semaphore(parallel)
        self._random = random
        self._lines: dict[Key, _Line] = {}

    def __len__(self) -> int:
        return len(self._lines)

    def wake(self, key: Key) -> None:
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line()
            line.task = asyncio.create_task(self._run(key, line), name=str(key))
        line.woken.set()

    async def close(self) -> None:
        tasks = [line.task for line in self._lines.values() if line.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._lines.clear()

    async def _run(self, key: Key, line: _Line) -> None:
        failures, delay_s = 0, self._resync_s
        while True:
            await self._wait(line, delay_s)
            result = await self._once(key)
            if result is None:
                failures += 1
                delay_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(failures - 1, 20))
                continue
            if result.gone and not line.woken.is_set():
                del self._lines[key]
                return
            failures = 0
            delay_s = self._resync_s if result.requeue_after_s is None else result.requeue_after_s

    async def _wait(self, line: _Line, delay_s: float) -> None:
        spread_s = delay_s * (1 + JITTER * (2 * self._random() - 1))
        try:
            await asyncio.wait_for(line.woken.wait(), spread_s)
        except TimeoutError:
            return
        await asyncio.sleep(JOIN_S)
        line.woken.clear()

    async def _once(self, key: Key) -> Result | None:
        """None after a failure: whatever goes wrong with one object must not end its task."""
        async with self._slots:
            try:
                return await self._reconcile(key)
            except OperatorError as error:
                log.warning("reconcile failed object=%s error=%s: %s", key, type(error).__name__, error)
            except Exception:
                log.exception("reconcile failed object=%s", key)
            return None
