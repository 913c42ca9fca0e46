# SPDX-License-Identifier: Apache-2.0
"""A rank's answers to sleep and wake tasks: also to those that fail, and the same again to a repeated task that succeeded."""

import logging
from collections.abc import Callable

from diffusion_worker.errors import ErrorCode, Fault, RequestError
from diffusion_worker.messages import ErrorReport, SleepTask, TaskAck, TaskStatus, WakeTask
from diffusion_worker.runner.model_call.faults import classify, require_usable_rank

log = logging.getLogger(__name__)

# A task is repeated soon or never.
MOST_REMEMBERED = 64


class TaskAcks:
    """The answers of one rank to its tasks. The last `MOST_REMEMBERED` successes are kept, so that these tasks are not done twice.

    `resident_bytes` returns the memory that the rank holds. A failure calls `free_memory`.
    """

    def __init__(self, rank: int, *, resident_bytes: Callable[[], int], free_memory: Callable[[], None]) -> None:
        self._rank = rank
        self._resident_bytes = resident_bytes
        self._free_memory = free_memory
        self._done: dict[tuple[type, str], TaskAck] = {}

    def acknowledge(self, task: SleepTask | WakeTask, work: Callable[[], object]) -> TaskAck:
        """Run `work` for a task, and return its answer: SUCCESS with the freed bytes, or ERROR with the failure's code and message.

        If a task of this kind and id succeeded before, return its old answer and run nothing. A failed task is tried again.

        Raises:
            RankFault: the rank cannot go on.
        """
        key = type(task), task.task_id
        if key in self._done:
            return self._done[key]
        before = self._resident_bytes()
        failure = _failure_of(work)
        if failure is not None:
            self._free_memory()
            resident, message = self._resident_bytes(), failure.message
            return TaskAck(task.task_id, TaskStatus.ERROR, self._rank, 0, resident, error_code=failure.code, error_msg=message)
        resident = self._resident_bytes()
        ack = TaskAck(task.task_id, TaskStatus.SUCCESS, self._rank, max(0, before - resident), resident)
        self._remember(key, ack)
        return ack

    def _remember(self, key: tuple[type, str], ack: TaskAck) -> None:
        self._done[key] = ack
        if len(self._done) > MOST_REMEMBERED:
            del self._done[next(iter(self._done))]


def _failure_of(work: Callable[[], object]) -> ErrorReport | None:
    """Run the work and return its failure for the server, or None. Raises RankFault.

    The exception itself is not returned, because it would keep the failed objects alive.
    """
    try:
        work()
    except RequestError as error:
        return ErrorReport(error.code, error.message)
    except Exception as error:
        require_usable_rank(error)
        log.exception("a task of this rank failed unexpectedly")
        code = ErrorCode.INSUFFICIENT_MEMORY if classify(error) is Fault.OUT_OF_MEMORY else ErrorCode.RANK_FAILED
        return ErrorReport(code, f"{type(error).__name__}: {error}")
    return None
