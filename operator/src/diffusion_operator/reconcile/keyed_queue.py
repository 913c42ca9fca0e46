# SPDX-License-Identifier: Apache-2.0
"""A queue of keys, each reconciled by one task at a time: woken by events, by its requeue time, or after a failure with backoff.

Wakes in a burst are joined, a wake during a reconcile starts another one after it, and concurrency is bounded. There are two lanes: what a
user declared goes before what happened by itself, which still has every fourth turn. The queue knows nothing of what a key is about.
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
from diffusion_operator.pauses import Backoff

JOIN_S = 0.05
FAILED = Backoff(first_s=1.0, longest_s=300.0)
JITTER = 0.1
FIRST_IN_A_ROW = 3
"""Turns of the first lane, while keys of the other one wait. Half of the passes that may run at once are for the first lane alone."""

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
    failure: Exception | None = None
    """An error of a part of the pass. The next one comes with backoff, or at its time where that is sooner."""


OBJECT: ContextVar[Key | None] = ContextVar("OBJECT", default=None)
"""The key of the running pass, for its log lines."""


class _KeyState:
    """Progress of a key: a timer until it is due, then a place in a lane, then a running task.

    Ten thousand keys may be at rest, and a timer costs a tenth of a task.
    """

    __slots__ = ("due_at", "failures", "first", "task", "timer", "woken")

    def __init__(self) -> None:
        self.woken = False
        self.first = False
        """The next turn is in the first lane."""
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
        """Set the bounds of the queue: at most `parallel` passes at once, and `resync_s` until the next pass of a key that names no time.

        `random` returns floats from 0 to just below 1, by which the pauses vary.
        """
        self._reconcile = reconcile
        self._resync_s = resync_s
        self._free = parallel
        self._kept_free = parallel // 2
        self._closed = False
        self._random = random
        self._lines: dict[Key, _KeyState] = {}
        self._due: deque[Key] = deque()
        self._first_due: deque[Key] = deque()
        self._first_in_a_row = 0
        self._time: Callable[[], float] = time.monotonic  # until there is a loop, whose own it is then

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def waiting(self) -> int:
        """Number of keys that are due and wait for a slot."""
        return len(self._due) + len(self._first_due)

    @property
    def oldest_s(self) -> float:
        """Seconds that the key that is due for the longest has waited; 0 where none waits. The metrics server's thread asks, too."""
        ahead = [key for lane in (self._due, self._first_due) for key in tuple(lane)[:1]]
        lines = [line for key in ahead if (line := self._lines.get(key)) is not None]
        return max((self._time() - due_at for line in lines if (due_at := line.due_at) is not None), default=0.0)

    def wake(self, key: Key, *, first: bool = False) -> None:
        """Have a key reconciled soon, or once more after a pass that runs; wakes until then are joined. Do nothing after `close`.

        `first`: its next turn comes before those of keys that were woken without it.
        """
        if self._closed:
            return
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _KeyState()
        if first and not line.first:
            line.first = True
            if line.due_at is not None:
                self._due.remove(key)
                self._first_due.append(key)
        if not line.woken:
            line.woken = True
            if line.task is None and line.due_at is None:
                self._in(JOIN_S, key, line)

    async def close(self, *, patience_s: float = 0.0) -> None:
        """Begin no more passes. Those that run have `patience_s` to end; then they are cancelled and waited for."""
        self._closed = True
        lines, self._lines = self._lines, {}
        self._due.clear()
        self._first_due.clear()
        for line in lines.values():
            if line.timer is not None:
                line.timer.cancel()
        tasks = [line.task for line in lines.values() if line.task is not None]
        if tasks and patience_s:
            await asyncio.wait(tasks, timeout=patience_s)
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
        (self._first_due if line.first else self._due).append(key)
        self._begin()

    def _begin(self) -> None:
        while self._free and (self._first_due or (self._due and self._free > self._kept_free)):
            key = self._next()
            line = self._lines[key]
            self._free -= 1
            line.due_at, line.woken, line.first = None, False, False
            line.task = asyncio.create_task(self._pass(key, line), name=str(key))

    def _next(self) -> Key:
        """Take the key whose turn it is."""
        others = self._due and self._free > self._kept_free
        if self._first_due and not (others and self._first_in_a_row >= FIRST_IN_A_ROW):
            self._first_in_a_row += 1
            return self._first_due.popleft()
        self._first_in_a_row = 0
        return self._due.popleft()

    async def _pass(self, key: Key, line: _KeyState) -> None:
        try:
            result = await self._once(key)
        finally:
            line.task = None
            self._free += 1
        if not self._closed:
            self._after(key, line, result)
            self._begin()

    def _after(self, key: Key, line: _KeyState, result: Result | None) -> None:
        if result is not None and result.gone and not line.woken:
            del self._lines[key]
            return
        failed = result is None or result.failure is not None
        line.failures = line.failures + 1 if failed else 0
        if line.woken:
            self._in(JOIN_S, key, line)
            return
        delays_s = [result.requeue_after_s] if result is not None and result.requeue_after_s is not None else []
        if failed:
            delays_s.append(FAILED.after_s(line.failures))
        delay_s = min(delays_s, default=self._resync_s)
        self._in(delay_s * (1 + JITTER * (2 * self._random() - 1)), key, line)

    async def _once(self, key: Key) -> Result | None:
        """Run a pass and log its failure, whole or partial; return None if it raised.

        No `Exception` gets out, so the queue goes on for all other keys.
        """
        OBJECT.set(key)
        try:
            result = await self._reconcile(key)
        except Exception as error:
            _complain(key, error)
            return None
        if result.failure is not None:
            _complain(key, result.failure)
        return result


def _complain(key: Key, error: Exception) -> None:
    """Log one line, and the traceback of an error that nobody expected."""
    known = isinstance(error, OperatorError)
    level = logging.WARNING if known else logging.ERROR
    log.log(level, "reconcile failed object=%s error=%s: %s", key, type(error).__name__, error, exc_info=None if known else error)
