# SPDX-License-Identifier: Apache-2.0
"""A queue of keys, each reconciled by one task at a time: woken by events, by its requeue time, or after a failure with backoff.

Wakes that come in a burst are joined, a wake during a reconcile leads to another one after it, and the number that run at once is
bounded. The queue knows nothing of what a key is about.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
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
    """The object does not exist any more; it is forgotten unless it was woken meanwhile."""


OBJECT: ContextVar[Key | None] = ContextVar("OBJECT", default=None)
"""What the pass is about that runs, for its lines in the log."""


class _KeyState:
    """One key. At rest it is a timer, which costs a tenth of a task: there may be ten thousand."""

    __slots__ = ("due_at", "failures", "task", "timer", "woken")

    def __init__(self) -> None:
        self.woken = False
        self.failures = 0
        self.due_at: float | None = None
        """Since when it waits for its turn."""
        self.timer: asyncio.TimerHandle | None = None
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
        self._free = parallel
        self._random = random
        self._lines: dict[Key, _KeyState] = {}
        self._due: deque[Key] = deque()
        self._time: Callable[[], float] = time.monotonic  # until there is a loop, whose own it is then

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def waiting(self) -> int:
        """How many are due and wait for their turn."""
        return len(self._due)

    @property
    def oldest_s(self) -> float:
        """For how long the first of them waits; 0 where none does. Asked from the thread of the metrics server, too."""
        first = next(iter(tuple(self._due)), None)
        line = self._lines.get(first) if first is not None else None
        due_at = line.due_at if line is not None else None
        return self._time() - due_at if due_at is not None else 0.0

    def wake(self, key: Key) -> None:
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _KeyState()
        if not line.woken:
            line.woken = True
            if line.task is None and line.due_at is None:
                self._in(JOIN_S, key, line)

    async def close(self) -> None:
        lines, self._lines = self._lines, {}
        self._due.clear()
        for line in lines.values():
            if line.timer is not None:
                line.timer.cancel()
        tasks = [line.task for line in lines.values() if line.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _in(self, delay_s: float, key: Key, line: _KeyState) -> None:
        if line.timer is not None:
            line.timer.cancel()
        line.timer = asyncio.get_running_loop().call_later(delay_s, self._is_due, key, line)

    def _is_due(self, key: Key, line: _KeyState) -> None:
        self._time = asyncio.get_running_loop().time
        line.timer, line.due_at = None, self._time()
        self._due.append(key)
        self._begin()

    def _begin(self) -> None:
        while self._free and self._due:
            key = self._due.popleft()
            line = self._lines[key]
            self._free -= 1
            line.due_at, line.woken = None, False
            line.task = asyncio.create_task(self._pass(key, line), name=str(key))

    async def _pass(self, key: Key, line: _KeyState) -> None:
        try:
            result = await self._once(key)
        finally:
            line.task = None
            self._free += 1
        self._after(key, line, result)
        self._begin()

    def _after(self, key: Key, line: _KeyState, result: Result | None) -> None:
        if result is not None and result.gone and not line.woken:
            del self._lines[key]
            return
        line.failures = line.failures + 1 if result is None else 0
        if line.woken:
            self._in(JOIN_S, key, line)
            return
        delay_s = self._resync_s if result is None or result.requeue_after_s is None else result.requeue_after_s
        if result is None:
            delay_s = min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2 ** min(line.failures - 1, 20))
        self._in(delay_s * (1 + JITTER * (2 * self._random() - 1)), key, line)

    async def _once(self, key: Key) -> Result | None:
        """None after a failure: whatever goes wrong with one object must not end the others'."""
        OBJECT.set(key)
        try:
            return await self._reconcile(key)
        except OperatorError as error:
            log.warning("reconcile failed object=%s error=%s: %s", key, type(error).__name__, error)
        except Exception:
            log.exception("reconcile failed object=%s", key)
        return None
