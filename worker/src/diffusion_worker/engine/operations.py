# SPDX-License-Identifier: Apache-2.0
"""The sleep or wake in progress, known by the id its caller gave it, and how the last one ended."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Coroutine
from typing import Any

from diffusion_worker.engine.documents import Operation, OperationResult, Problem
from diffusion_worker.engine.durations import Durations
from diffusion_worker.engine.sleep_policy import read_desired as read_desired
from diffusion_worker.errors import ErrorCode, GroupFailed, RequestError

log = logging.getLogger(__name__)

OPERATION_KINDS = ("sleep", "wake")


class OperationsDone:
    """What became of the operations since the start: how long the successful ones took, and how many failed, by kind."""

    def __init__(self) -> None:
        self.durations = {kind: Durations() for kind in OPERATION_KINDS}
        self.failures = Counter[str]()


class Operations:
    """At most one operation at a time; a repeated id never starts a second one."""

    def __init__(self) -> None:
        self.done = OperationsDone()
        self.last: OperationResult | None = None
        self._current: tuple[str, str, float] | None = None
        self._task: asyncio.Task[None] | None = None

    def running(self) -> Operation | None:
        """The operation in progress."""
        if self._current is None:
            return None
        operation_id, kind, started = self._current
        return Operation(operation_id, kind, round(time.monotonic() - started, 3))

    def is_running(self, operation_id: str) -> bool:
        """Whether this very operation is in progress."""
        return self._current is not None and self._current[0] == operation_id

    def is_done(self, operation_id: str) -> bool:
        """Whether this very operation was the last to end."""
        return self.last is not None and self.last.operation_id == operation_id

    def require_idle(self, kind: str) -> None:
        """Raises RequestError (Conflict) that names the operation in progress."""
        if self._current is not None:
            operation_id, running, _ = self._current
            raise RequestError(
                ErrorCode.CONFLICT,
                f"{kind}: expected no operation in progress, found {running} {operation_id!r}",
                retry_after_s=1.0,
                details={"operationId": operation_id, "kind": running},
            )

    def start(self, operation_id: str, kind: str, work: Coroutine[Any, Any, None]) -> None:
        """Run an operation in the background; its outcome becomes `last`."""
        self._current = (operation_id, kind, time.monotonic())
        self._task = asyncio.create_task(self._run(operation_id, kind, work))

    async def _run(self, operation_id: str, kind: str, work: Coroutine[Any, Any, None]) -> None:
        problem = None
        started = time.monotonic()
        try:
            await work
        except RequestError as error:
            problem = Problem(error.code, error.message, error.retryable)
        except GroupFailed as error:
            problem = Problem(ErrorCode.ENGINE_FAILED, str(error), True)
        finally:
            self._current = None
        seconds = time.monotonic() - started
        self.last = OperationResult(operation_id, kind, problem, seconds=round(seconds, 4))
        if problem is None:
            self.done.durations[kind].observe(seconds)
        else:
            self.done.failures[kind] += 1
        log.info("%s operation=%s seconds=%.3f error=%s", kind, operation_id, seconds, problem)
