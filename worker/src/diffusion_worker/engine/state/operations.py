# SPDX-License-Identifier: Apache-2.0
"""The sleep or wake in progress, known by its caller's id, and the results of the last ones."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from diffusion_worker.engine.state.histogram import Durations
from diffusion_worker.engine.state.state_document import Operation, OperationResult, ProblemReport
from diffusion_worker.errors import ErrorCode, GroupFailed, RequestError
from diffusion_worker.messages import SleepLevel, TaskAck

log = logging.getLogger(__name__)

OPERATION_KINDS = ("sleep", "wake")
# Ids that are remembered: a caller repeats one within minutes or never.
REMEMBERED = 64


class TaskOutcome(msgspec.Struct, frozen=True):
    """The ranks' acknowledgements, and the level of the sleep that began or ended."""

    acks: list[TaskAck]
    level: SleepLevel | None


class OperationsDone:
    """Counters of sleeps and wakes since the start: durations and failures by kind, cancelled ones left out, and bytes freed by sleeps."""

    def __init__(self) -> None:
        self.durations = {kind: Durations() for kind in OPERATION_KINDS}
        self.failures = Counter[str]()
        self.freed_bytes = 0


class _Running(msgspec.Struct, frozen=True):
    """The sleep or wake in progress, with the asyncio task that runs it. `began_s` is on the monotonic clock."""

    operation_id: str
    kind: str
    began_s: float
    task: "asyncio.Task[None]"


class Operations:
    """The sleep or wake in progress, and the results of the last ones by id.

    `start` checks nothing: callers ask `is_running`, `is_done` and `require_idle` first, so that at most one runs. `broken` gets the
    message of an unexpected exception in the work.
    """

    def __init__(self, broken: Callable[[str], None], *, on_end: Callable[[], None] = lambda: None) -> None:
        """Begin without an operation; `on_end` is called at the end of each."""
        self._broken = broken
        self._on_end = on_end
        self.done = OperationsDone()
        self.last: OperationResult | None = None
        # The ranks' acknowledgements of the operation that ended last.
        self.last_acks: list[TaskAck] = []
        self._running: _Running | None = None
        # Results by id. A call that joined another operation has that operation's id instead.
        self._results: dict[str, OperationResult | str] = {}

    def running(self) -> Operation | None:
        """Return id, kind and age in seconds of the sleep or wake that runs; None if there is none."""
        now = self._running
        return None if now is None else Operation(now.operation_id, now.kind, round(time.monotonic() - now.began_s, 3))

    def is_running(self, operation_id: str) -> bool:
        """Return whether this very operation, or the one it joined, is in progress."""
        return self._running is not None and self._running.operation_id == self._meant(operation_id)

    def is_done(self, operation_id: str) -> bool:
        """Return whether the operation with this id, or the one that this id joined, has ended; False for an unknown or forgotten id."""
        return operation_id in self._results and not self.is_running(operation_id)

    def join(self, operation_id: str) -> None:
        """Make an id stand for the operation in progress: `is_running` and `over` then answer for that one. No effect if none runs."""
        if self._running is not None:
            self._remember(operation_id, self._running.operation_id)

    def require_idle(self, kind: str) -> None:
        """Refuse a call of this kind while a sleep or wake runs, by RequestError (Conflict) with the id and kind of that in `details`."""
        if self._running is not None:
            operation_id, running = self._running.operation_id, self._running.kind
            raise RequestError(
                ErrorCode.CONFLICT,
                f"{kind}: expected no operation in progress, found {running} {operation_id!r}",
                retry_after_s=1.0,
                details={"operationId": operation_id, "kind": running},
            )

    def start(self, operation_id: str, kind: str, work: Coroutine[Any, Any, TaskOutcome]) -> None:
        """Make `work` the operation in progress, as an asyncio task, and return at once.

        When it ends, its result or error is kept as `last` and under the id. The caller has checked that no other operation runs.
        """
        task = asyncio.create_task(self._run(operation_id, kind, work))
        self._running = _Running(operation_id, kind, time.monotonic(), task)

    async def over(self, operation_id: str) -> OperationResult | None:
        """Wait for an operation and return its result; None for an id that is unknown or forgotten."""
        if self._running is not None and self.is_running(operation_id):
            await asyncio.wait({self._running.task})
        result = self._results.get(self._meant(operation_id))
        return result if isinstance(result, OperationResult) else None

    async def end(self) -> None:
        """Cancel the operation in progress, which then fails with code Terminating, and wait for its end; harmless if none runs."""
        if self._running is not None:
            self._running.task.cancel()
            await asyncio.wait({self._running.task})

    async def _run(self, operation_id: str, kind: str, work: Coroutine[Any, Any, TaskOutcome]) -> None:
        problem, outcome = None, TaskOutcome([], None)
        started = time.monotonic()
        try:
            outcome = await work
        except RequestError as error:
            problem = ProblemReport(error.code, error.message, error.retryable)
        except GroupFailed as error:
            problem = ProblemReport(ErrorCode.ENGINE_FAILED, str(error), True)
        except asyncio.CancelledError:
            problem = ProblemReport(ErrorCode.TERMINATING, f"the worker is shutting down, which ended this {kind}", True)
        except Exception as error:
            log.exception("the %s failed unexpectedly operation=%s", kind, operation_id)
            problem = ProblemReport(ErrorCode.ENGINE_FAILED, f"{kind} failed unexpectedly: {error!r}", True)
            self._broken(problem.message)
        finally:
            self._running = None
        seconds = time.monotonic() - started
        freed = sum(ack.freed_bytes for ack in outcome.acks) if kind == "sleep" and problem is None else None
        self.last = OperationResult(operation_id, kind, problem, round(seconds, 4), freed, outcome.level)
        self.last_acks = outcome.acks
        self._remember(operation_id, self.last)
        self.done.freed_bytes += freed or 0
        if problem is None:
            self.done.durations[kind].observe(seconds)
        elif problem.code != ErrorCode.CANCELLED:
            self.done.failures[kind] += 1
        log.info("%s operation=%s seconds=%.3f error=%s", kind, operation_id, seconds, problem)
        self._on_end()

    def _remember(self, operation_id: str, result: OperationResult | str) -> None:
        self._results[operation_id] = result
        while len(self._results) > REMEMBERED:
            del self._results[next(iter(self._results))]

    def _meant(self, operation_id: str) -> str:
        """Return the id of the operation that a call's id stands for."""
        found = self._results.get(operation_id)
        return found if isinstance(found, str) else operation_id
